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
# # What is going on in there?
#
# Pictures of a trained Vision Transformer: what its tokens look at, what it knows of places, what becomes of its patches when
# tokens are merged, and what a masked autoencoder makes of the patches that it was not shown.
#
# The model is trained here, on handwritten digits of 8 x 8 pixels with one token for each pixel. Name the folder of a finished run
# of yours in `MINE` and the first three parts are about that one. The images are validation images.

# %%
# %matplotlib inline
import os
import tempfile
from functools import partial
from pathlib import Path

import torch

from smallvit import (
    MAE, Block, Merge, PatchEmbed, Run, Splits, ViT, accuracy, apply, attention_figure, attention_maps, augment, digits, fit,
    initialize, load, patch_attention, position_similarity, reconstruction_figure, rollout, token_map,
)

torch.set_num_threads(1)  # small models are no faster with more

MINE = None  # the folder of a finished run of yours, such as "runs/spt_lsa/1000/SPT/seed0-0123abcd"
RUNS = Path(tempfile.mkdtemp())  # where the run below is left; in a folder of yours it is kept, and not trained again
SHORT = bool(os.environ.get("SMALLVIT_SHORT"))  # the tests ask whether all of this runs, not what comes of it

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
run, model = load(MINE or RUNS / "supervised")

data = run.data()
subset = data.subset(labels=run.labels, val=run.val, seed=run.seed)
splits = Splits(subset.train, subset.val, subset.val)
images = subset.val.take(slice(4))
print(f"{len(subset.train):,} labels, accuracy {dict(accuracy(model, splits))['accuracy']:.1%} on {len(subset.val)} validation images")

# %% [markdown]
# ## What does the class token look at?
#
# One row for each image, one column for each head. The pictures have colours of their own, from black for nothing to yellow for
# the most; how much that is stands below, in percent of all the attention that the class token pays. In the first block heads look at
# fixed places or follow the ink; the last column, roll-out, follows attention back through all blocks.

# %%
attention_figure(model, images, block=0)

# %%
attention_figure(model, images, block=-1)

# %% [markdown]
# Attention is where a token looks, not what it makes of that: values, the other tokens and the MLP have their say too. Take such a picture
# as a question to ask, not as an explanation.
#
# Any patch can be the one that asks. The blue frame is its place.

# %%
attention_figure(model, images, block=1, query=(3, 3))

# %% [markdown]
# The numbers behind the pictures: a map for each block, images x heads x tokens x tokens, whatever kernel made the output; the attention
# of one block to patches, on the grid; and roll-out.

# %%
x = data.spec.normalise(images.pixels())
print([tuple(weights.shape) for weights in attention_maps(model, x)])
print(tuple(patch_attention(model, x, block=-1).shape), tuple(rollout(model, x).shape))

# %% [markdown]
# ## What does it know of places?
#
# A token does not know where it is, so a position is added to it, here a learned one. Each small map stands where its patch stands and says
# how alike its position is to all others. Nobody told the model that the patches are a grid: what there is of neighbourhood in it, it
# has learned.

# %%
position_similarity(model)

# %% [markdown]
# ## What becomes of merged tokens?
#
# `apply` puts a reduction into the finished model, without any training. Here each block merges the 12 pairs of patches that are most alike.
# Patches that share a token have its mean colour and an orange line round them. The black margin goes first, since one black pixel is like
# another; the strokes keep tokens of their own for longest.

# %%
fewer = apply(model, partial(Merge, r=12))
token_map(fewer, images)

# %% [markdown]
# What that costs, on the validation images; and attention in the model that has merged. A token that stands for many patches counts as
# many, and its attention is shared out over them, so the picture has its full size.

# %%
for name, one in [("all tokens", model), ("merged", fewer)]:
    print(f"{name:12} accuracy {dict(accuracy(one, splits))['accuracy']:.1%}")

# %%
attention_figure(fewer, images, block=-1)

# %% [markdown]
# ## What does a masked autoencoder see?
#
# MAE hides most patches of an image and learns to guess them from the others. `Run(objective=MAE, unlabelled=True, ...)` is how to pretrain
# with it: that keeps the encoder, which one goes on with. To look at the guesses one needs the decoder as well, so here is the objective
# in a loop of one's own. Objectives, like all parts, are ordinary modules.

# %%
torch.manual_seed(0)
vit = ViT(data.spec.size, data.spec.channels, len(data.spec.classes), tokenizer=partial(PatchEmbed, patch=2), dim=48, depth=4)
mae = MAE(vit, ratio=0.5, normalise=False)
optimizer = torch.optim.AdamW(mae.parameters(), lr=2e-3)
steps = 10 if SHORT else 1_000
for step in range(steps):
    chosen = torch.randint(len(subset.train), (64,))
    batch = augment.Batch(data.spec.normalise(subset.train.pixels(chosen)), subset.train.targets(chosen))
    loss = mae(batch, step / steps)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"mean squared error of hidden pixels {loss.item():.3f}; with the mean for all of them it is {batch.images.var().item():.3f}")

# %%
reconstruction_figure(mae, images)
