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
# # What do the features contain?
#
# A model that was trained without labels has no classifier, so it has no accuracy. Its features are evaluated by probes: simple
# classifiers that are trained on the frozen features. This notebook starts from the folder of a finished run and ends with
# numbers and pictures that you can trust.
#
# It first trains a small model with DINO on 1,038 handwritten digits of 8 x 8 pixels, without labels and without a download. To
# evaluate a run of your own instead, write its folder into `MINE`.
#
# All numbers are for validation images. The test images are used only in the last cell, when everything has been chosen.

# %%
# %matplotlib inline
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from smallvit import (
    DINO, Block, FeatureExtractor, PatchEmbed, Pixels, Run, Splits, ViT, augment, confusion_figure, digits, feature_view,
    features, few_shot, fit, gallery, initialize, knn, linear_probe, load,
)

torch.set_num_threads(1)  # as the command line does, so that the same run gives the same numbers

MINE = None  # the folder of a finished run of yours, such as "runs/dino/100/DINO-on-all-digits-frozen/seed0-0123abcd"
RUNS = Path(tempfile.mkdtemp())  # the folder for the run below; use a folder of your own to keep the run
STEPS = 20 if os.environ.get("SMALLVIT_SHORT") else 800  # the tests run this notebook with very few steps

# %% [markdown]
# ## A run without labels
#
# The objective uses no labels. With `unlabelled=True` it sees all images that are not for validation. The 200 labels are only
# for the probes. The evaluators are part of the run, so its record already contains their numbers; this notebook computes the
# same numbers again.

# %% tags=["run"]
pretrained = Run(
    data=digits,
    labels=200,
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=48, depth=4, heads=4),
    objective=partial(DINO, koleo=0.1),
    augment=augment.digit_crops(local=0),
    unlabelled=True,
    steps=STEPS,
    batch=64,
    lr=3e-3,
    weight_decay=0.04,
    clip=0.0,
    ema=0.0,
    evaluators=(linear_probe, knn),
)

# %%
if MINE is None:
    fit(pretrained, RUNS / "dino")
trained = load(MINE or RUNS / "dino")
run, model, record = trained.run, trained.model, trained.record
print(f"{record.steps:,} steps of {run.batch} images, {record.params:,} parameters")

# %% [markdown]
# Self-supervised training can collapse: the model gives the same output for every image, although its loss looks fine. Every
# run without labels is therefore checked during training. `spread` is 1 if the features point in all directions and 0 if they
# are all equal. `rank` is the number of directions that the features use. `knn_1` is the accuracy of the nearest labelled
# image. All three should rise, as they do here, with small steps back. A run that collapses is stopped with an error that says
# so.

# %%
for check in record.health or []:
    print("step {step:5}   spread {spread:.2f}   rank {rank:4.1f}   knn_1 {knn_1:.1%}".format(**check))

# %% [markdown]
# ## The probes
#
# `Splits` has three parts: a probe is trained on the first, makes its choices on the second and is scored on the third. Here
# the third part is the validation images too.

# %%
data = run.data().at_seed(run.seed)
spec = data.spec
subset = data.subset(labels=run.labels, val=run.val, seed=run.seed)
splits = Splits(subset.train, subset.val, subset.val)
print(f"{spec.name}: {len(subset.train)} labelled images, {len(subset.val)} for validation")

# %% [markdown]
# `linear_probe` is a logistic regression on standardized features. Its regularization strength, `linear_probe_c`, is chosen on
# the validation images. `linear_probe_edge` is 1 if the chosen value is at the edge of the grid; then a value outside of the
# grid may be better. `knn_5` is a vote of the five nearest labelled images, by cosine similarity. The right column shows the
# numbers of the record: the same functions on the same images.

# %% tags=["validation"]
numbers = dict(linear_probe(model, splits)) | dict(knn(model, splits))
for name, number in numbers.items():
    print(f"{name:25} {number:.6f}   {record.val.get(name, np.nan):.6f}")

# %% [markdown]
# ## Is that good?
#
# A number alone does not say. Compare it with two references: the same model before any training, which is better than most
# people expect, and the raw pixels, which are hard to beat on small digits. `few_shot` is a logistic regression on 16 labelled
# images per class, drawn five times from all training images; the number is the mean.

# %%
untrained = initialize(run.model(spec.size, spec.channels, len(spec.classes)), run.seed)
pixels = Pixels(spec.size, spec.channels, len(spec.classes))
all_labels = Splits(data.subset(labels=None, val=run.val, seed=run.seed).train, subset.val, subset.val)

print(f"{'':25} knn_1   knn_5   linear_probe   few_shot")
references = [("this run", model, True), ("random initialization", untrained, True), ("raw pixels", pixels, False)]
for name, other, scaled in references:
    row = dict(linear_probe(other, splits, standardize=scaled)) | dict(knn(other, splits)) | dict(few_shot(other, all_labels))
    print(f"{name:25} {row['knn_1']:.1%}   {row['knn_5']:.1%}   {row['linear_probe']:.1%}          {row['few_shot']:.1%}")

# %% [markdown]
# In the run that is committed here, training gains a lot over random weights in every column. It gains less over raw pixels,
# and that gain is less certain: with 259 images the standard error is about one and a half points, and this is only one seed.
# To be certain, write a recipe with several seeds and read its verdict. The guide
# "Probe the features of a model" lists what probes reach on MNIST after longer pretraining.
#
# ## Which part of the model?
#
# Features can be read at different places: from the class token or from the mean of the patches, and from the last block alone
# or from the last blocks side by side. The head of this model reads the class token of the last block, and DINO trained exactly
# that. Compare whole rows instead of single numbers: among so many numbers one is large by chance.

# %%
depth = len(model.blocks)
places = ("class token", "mean", "both") if model.pool.class_tokens else ("mean",)
print(f"{'last blocks':15}", *(f"{layers:6}" for layers in range(1, depth + 1)))
for of in places:
    scores = [dict(linear_probe(model, splits, of=of, layers=layers))["linear_probe"] for layers in range(1, depth + 1)]
    print(f"{of:15}", *(f"{score:6.1%}" for score in scores))

# %% [markdown]
# Which block has the best features? `features` with `layers=depth` returns the features of all blocks side by side, in the
# order of depth, so they can be split again. The next cell trains a logistic regression on the mean of the patches after each
# block. The last block need not be the best: DINO trained its class token, and not its patches.

# %%
train_features = np.split(features(model, subset.train, of="mean", layers=depth), depth, axis=1)
val_features = np.split(features(model, subset.val, of="mean", layers=depth), depth, axis=1)
for block in range(depth):
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=5_000))
    probe.fit(train_features[block], subset.train.labels)
    print(f"block {block}   {probe.score(val_features[block], subset.val.labels):.1%}")

# %% [markdown]
# ## With scikit-learn
#
# `FeatureExtractor` is a scikit-learn transformer, so it can be a step of a `Pipeline`, and its options can be searched like
# any others. It takes arrays of pixels if it gets the `spec` of their data set. Here cross-validation within the labelled
# images chooses the features and the regularization strength. The validation images have chosen nothing this time, so their
# score is not too optimistic.

# %%
probe = GridSearchCV(
    make_pipeline(FeatureExtractor(model, spec=spec), StandardScaler(), LogisticRegression(max_iter=5_000)),
    {"featureextractor__of": places, "logisticregression__C": [0.01, 0.1, 1.0]},
    cv=5,
)
probe.fit(subset.train.images.numpy(), subset.train.labels.numpy())
predictions = probe.predict(subset.val.images.numpy())
print(probe.best_params_)
correct = predictions == subset.val.labels.numpy()
print(f"cross-validated {probe.best_score_:.1%}, on the validation images {correct.mean():.1%}")

# %% [markdown]
# ## The errors
#
# The confusion matrix shows which classes are confused: rows are true classes, columns are predictions. Errors are orange, and
# the most frequent error is the darkest.

# %%
confusion_figure(predictions, subset.val.labels, spec.classes)

# %% [markdown]
# Look at the images as well, because numbers do not show which mistakes are understandable. In the run that is committed here
# the most frequent error is a one with a flag that is predicted to be a nine. A few more labelled images of this handwriting
# may help more than a better probe.

# %%
wrong = (~correct).nonzero()[0][:30]
titles = [f"{spec.classes[subset.val.labels[i]]} predicted as {spec.classes[predictions[i]]}" for i in wrong]
gallery(subset.val.take(wrong), titles)

# %% [markdown]
# ## The features in two dimensions
#
# The first picture shows all validation images along the two directions in which their features vary most (PCA). Two of 48
# directions show only part of the variance, as the axes say. Digits that overlap here may be well separated in the other
# directions.

# %%
feature_view(features(model, subset.val), subset.val.labels, classes=spec.classes)

# %% [markdown]
# t-SNE keeps neighbors together and nothing else. Islands mean that images of one digit are close to each other; the distance
# between two islands means nothing. The second t-SNE picture is of the model before training, in which most islands are
# missing.

# %%
feature_view(features(model, subset.val), subset.val.labels, classes=spec.classes, method="tsne")

# %%
feature_view(features(untrained, subset.val), subset.val.labels, classes=spec.classes, method="tsne")

# %% [markdown]
# ## The test images
#
# Use the test images once, at the end. From here on nothing may be chosen any more. The record has contained these numbers
# since the run ended.

# %% tags=["test"]
final = Splits(subset.train, subset.val, data.test.open())
numbers = dict(linear_probe(model, final)) | dict(knn(model, final))
for name, number in numbers.items():
    print(f"{name:25} {number:.6f}   {record.test.get(name, np.nan):.6f}")
