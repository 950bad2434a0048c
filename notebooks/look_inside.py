# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Look inside a trained model
#
# This notebook draws pictures of a trained Vision Transformer: what its tokens attend to, what it has learned about positions,
# what happens to its patches when tokens are merged, and what a masked autoencoder predicts for hidden patches.
#
# The model is trained here, on handwritten digits of 8 x 8 pixels with one token per pixel. To look at a run of your own in the
# first three parts, write its folder into `MINE`. All images are validation images.

# %%
# %matplotlib inline
import os
import tempfile
from functools import partial
from pathlib import Path

import torch

from smallvit import (
    MAE, Block, Merge, PatchEmbed, Run, Splits, ViT, accuracy, apply, attention_figure, attention_maps, augment, digits, fit,
    load, patch_attention, position_similarity, reconstruction_figure, rollout, token_map,
)

torch.set_num_threads(1)  # small models are not faster with more threads

MINE = None  # the folder of a finished run of yours, such as "runs/spt_lsa/1000/SPT/seed0-0123abcd"
RUNS = Path(tempfile.mkdtemp())  # the folder for the run below; use a folder of your own to keep the run
SHORT = bool(os.environ.get("SMALLVIT_SHORT"))  # the tests run this notebook with very few steps

# %%
supervised = Run(
    data=digits,
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=1), block=partial(Block, mlp_ratio=2.0), dim=48, depth=4, heads=4),
    augment=augment.digits(),
    steps=10 if SHORT else 600,
    batch=32,
    lr=2e-3,
)
if MINE is None:
    fit(supervised, RUNS / "supervised")
trained = load(MINE or RUNS / "supervised")
run, model = trained.run, trained.model

data = run.data().at_seed(run.seed)
subset = data.subset(labels=run.labels, val=run.val, seed=run.seed)
splits = Splits(subset.train, subset.val, subset.val)
images = subset.val.take(slice(4))
score = dict(accuracy(model, splits))["accuracy"]
print(f"{len(subset.train):,} labels, accuracy {score:.1%} on {len(subset.val)} validation images")

# %% [markdown]
# ## What does the class token attend to?
#
# Each row is an image and each column is a head; the last two columns are the mean over the heads and the attention roll-out.
# Every picture has its own color scale, from black (nothing) to yellow (its largest value). The largest value is written below,
# in percent of the attention of the class token. In the first block, head 3 attends to nearly the same places in all images,
# and the other heads attend to few places. The roll-out combines the attention of all blocks.

# %%
attention_figure(model, images, block=0)

# %%
attention_figure(model, images, block=-1)

# %% [markdown]
# Attention shows where a token reads from. It does not show how this changes the prediction, which also depends on the values,
# the other tokens and the MLPs. Use such a picture to find questions, not as an explanation.
#
# Any patch can be the query. The blue frame marks it.

# %%
attention_figure(model, images, block=1, query=(3, 3))

# %% [markdown]
# The numbers behind the pictures are available too: `attention_maps` returns one map per block, of shape (images, heads,
# tokens, tokens), however the model computes its attention. `patch_attention` returns the attention of one block to the patches, on the patch
# grid. `rollout` returns the roll-out on the same grid.

# %%
x = trained.preprocess(images.pixels())
print([tuple(weights.shape) for weights in attention_maps(model, x)])
print(tuple(patch_attention(model, x, block=-1).shape), tuple(rollout(model, x).shape))

# %% [markdown]
# ## What has it learned about positions?
#
# A token does not contain its position, so the model adds a position embedding to it, here a learned one. Each small map
# belongs to the patch at the same place. It shows how similar the position of this patch is to all other positions. The model
# was never told that the patches form a grid, so a similarity between neighbors would have been learned. After this short
# training there is none: the embeddings still look as random as at the start.

# %%
position_similarity(model)

# %% [markdown]
# ## What happens to merged tokens?
#
# `apply` adds a token reduction to the trained model, without any training. Here each block merges the 12 most similar pairs of
# patches. Patches that share a token are drawn in their mean color, with an orange outline. In the run that is committed here
# the patches of the strokes are merged first, and most of the black margin last. Similar means similar keys, and a key depends
# on the position of its patch, too. So patches with equal pixels need not be merged.

# %%
reduced = apply(model, partial(Merge, r=12))
token_map(reduced, images)

# %% [markdown]
# The next cells show the accuracy on the validation images without and with merging, and the attention of the merged model. A
# token that stands for several patches counts as several. Its attention is distributed over these patches, so the picture has
# the full size.

# %%
for name, other in [("all tokens", model), ("merged", reduced)]:
    print(f"{name:12} accuracy {dict(accuracy(other, splits))['accuracy']:.1%}")

# %%
attention_figure(reduced, images, block=-1)

# %% [markdown]
# ## What does a masked autoencoder predict?
#
# MAE hides a part of the patches of an image, here half, and learns to predict them from the visible ones. To pretrain with it, use
# `Run(objective=MAE, unlabelled=True, ...)`; this keeps only the encoder, which is what fine-tuning needs. To look at the
# predictions, you need the decoder as well. The next cell therefore trains the objective in its own short loop. Objectives,
# like all other parts, are ordinary PyTorch modules.

# %%
torch.manual_seed(0)
vit = ViT(data.spec.size, data.spec.channels, len(data.spec.classes), tokenizer=partial(PatchEmbed, patch=2), dim=48, depth=4)
mae = MAE(vit, ratio=0.5, normalize=False)
optimizer = torch.optim.AdamW(mae.parameters(), lr=2e-3)
steps = 10 if SHORT else 1_000
for step in range(steps):
    chosen = torch.randint(len(subset.train), (64,))
    batch = augment.Batch(trained.preprocess(subset.train.pixels(chosen)), subset.train.targets(chosen))
    loss = mae(batch, step / steps)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
variance = batch.images.var().item()
print(f"mean squared error of hidden pixels {loss.item():.3f}; predicting the mean of all pixels would give {variance:.3f}")

# %%
reconstruction_figure(mae, images)
