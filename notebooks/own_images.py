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
# # From a folder of images to a comparison, a model and a prediction
#
# You have a folder with one subfolder for each class, a few hundred images, and no test set. This notebook compares
# techniques on it, predicts the classes of new images, and writes an ONNX file for another program.
#
# To run anywhere, it draws its own images first. To use your own folder, leave out the two cells that draw, and change the
# path and the options of `folder`.

# %%
# %matplotlib inline
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from IPython.display import Markdown
from PIL import Image

from smallvit import compare, confusion_figure, export, folder, gallery, load, load_all, load_recipe, markdown, read_records

torch.set_num_threads(1)
os.chdir(tempfile.mkdtemp())  # the images, the recipe and its runs are written here; use a folder of your own to keep them
SHORT = "SMALLVIT_SHORT" in os.environ  # the tests run this notebook with very few steps
LENGTH, OUT = ("--smoke", "runs/smoke") if SHORT else ("", "runs")

# %% [markdown]
# ## Draw a folder
#
# Three classes of fabrics: stripes, checks and dots. There are 24 pieces of each, and each piece is photographed three times:
# `007_2.png` is photo 2 of piece 7. Color and width of the pattern belong to the piece. Each photo is turned and shifted at
# random, and has noise.
#
# Real folders are not clean, so this one also has a damaged file and a text file.

# %%
generator = np.random.default_rng(0)
y, x = np.mgrid[:36, :36]
for number in range(72):
    kind, period, color = ["stripes", "checks", "dots"][number // 24], generator.uniform(6, 10), generator.uniform(60, 200, 3)
    Path("fabrics", kind).mkdir(parents=True, exist_ok=True)
    for photo in range(3):
        turn, shift = generator.uniform(0, 2 * np.pi), generator.uniform(0, 9, 2)
        u = np.sin(2 * np.pi / period * (x * np.cos(turn) + y * np.sin(turn) + shift[0]))
        v = np.sin(2 * np.pi / period * (y * np.cos(turn) - x * np.sin(turn) + shift[1]))
        pattern = {"stripes": u > 0, "checks": u * v > 0, "dots": u + v > 0.8}[kind]
        pixels = color * (1 - 0.5 * pattern[..., None]) + generator.normal(0, 10, (36, 36, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(f"fabrics/{kind}/{number:03d}_{photo}.png")

Path("fabrics/checks/999_0.png").write_bytes(b"this is no image")
print(Path("fabrics/notes.txt").write_text("photographed in May"), "bytes of notes")

# %% [markdown]
# ## Load it
#
# `folder` needs to know how to test. There is no test set, so `folds=3` asks for cross-validation: the images are divided into
# 3 parts, 3 models are trained, and each part is the test set of one of them. So every image is a test image once. (5 is the
# usual number; 3 makes this notebook faster.)
#
# Photos of the same piece must not be on both sides of a split. Otherwise the model is tested on pieces that it has seen, and
# the accuracy is too high. `group_by` finds the piece in the name of the file: it is the part in parentheses.
#
# A file that cannot be read is an error that names it:

# %%
options = {"path": "fabrics", "size": 32, "folds": 3, "group_by": r"(\d+)_\d"}
try:
    folder(**options)
except ValueError as error:
    print(str(error).replace(os.getcwd(), "..."))

# %% [markdown]
# `skip_broken=True` goes on without these files, and every result says how many there were.

# %%
data = folder(**options, skip_broken=True)
first = data.at_seed(0)  # the first of the three folds
print(f"{len(data.train)} images, classes {data.spec.classes}, {data.skipped} file left out")
print(f"fold 0: {len(first.train)} images for training, {first.test.count} for testing")
gallery(data.train.take(torch.arange(0, 216, 18)), columns=6)

# %% [markdown]
# ## Compare
#
# The comparison is a list of runs in a recipe file. The first arm is the baseline, and each other arm differs from it in what
# its name says. Two simple classifiers on raw pixels and a small CNN are added as references.
#
# `seeds=range(6)` are six passes. Each pass divides the images into three folds anew and trains three models for each arm. Six
# passes are the fewest with which smallvit gives its usual verdict.
#
# Expected, before any run: turned and mirrored training images help, because the fabrics are turned at random. Shifted patches
# help a little, because they see more of the pattern.

# %%
# %%writefile fabrics.py
"""Do turned and mirrored images, or shifted patches, help to tell fabrics apart with 216 photos?

Setup     Data: 72 drawn fabrics with stripes, checks or dots, three photos of each; cross-validation with 3 folds, 6 passes.

Expected  Turned and mirrored images help most. Shifted patches help a little. Written before the runs.
"""

from functools import partial

from smallvit import PatchEmbed, Run, ShiftedPatchEmbed, ViT, ablate, accuracy, augment, folder, macro_f1

scratch = Run(
    data=partial(folder, path="fabrics", size=32, folds=3, group_by=r"(\d+)_\d", skip_broken=True),
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=8), dim=48, depth=4, heads=4),
    evaluators=(accuracy, macro_f1),
    steps=300,
    batch=32,
    lr=1e-3,
)

RUNS = ablate(
    {
        "scratch": scratch,
        "+rotation": scratch.vary(augment=(augment.Warp(rotate=180, fill="edge"), augment.Flip())),
        "+SPT": scratch.vary(tokenizer=partial(ShiftedPatchEmbed, patch=8)),
    },
    labels=[None],  # all images outside of the test fold, except those for validation
    seeds=range(6),
)

# %% [markdown]
# The next cell trains all runs with the Python of this notebook. It takes some minutes on two cores. If you stop it, the next
# start continues from there.

# %%
# !{sys.executable} -m smallvit run fabrics.py --stack 6 {LENGTH} 2>&1 | tail -16

# %% [markdown]
# ## Read the result
#
# `compare` pools the three folds of each pass, so a row has one accuracy for each pass, over all 216 photos. The test knows that
# the photos of a piece belong together, and that all models were trained on the same images.

# %%
results = read_records(OUT)
for row in compare(results).rows:
    print(f"{row.arm:28} {row.mean:.1%}   {row.verdict or row.role}")

# %% [markdown]
# Found: neither technique was shown to help, against the expectation. With 72 pieces only large differences can be shown: the
# report says which difference would have been found with 80% probability. The small CNN has a higher mean than every ViT, which
# is usual with so few images. So the next idea to try would be a convolutional stem, `ConvStem`.
#
# The whole report, with the confusion matrices:

# %%
Markdown(markdown(results, title="fabrics", doc=load_recipe("fabrics.py").__doc__))

# %% [markdown]
# ## Predict
#
# `load` returns the trained model of one run, together with its preprocessing. It takes files of any size and returns the names
# of classes and their probabilities. `load_all` returns the models of all folds and passes of an arm, whose probabilities are averaged.
#
# Draw three new fabrics, larger than the others:

# %%
Path("new").mkdir()
y, x = np.mgrid[:90, :90]
u, v = np.sin((2 * x + y) / 9), np.sin((2 * y - x) / 9)
for file, pattern in {"a.png": u > 0, "b.png": u * v > 0, "c.png": u + v > 0.8}.items():
    pixels = np.array([90, 150, 190]) * (1 - 0.5 * pattern[..., None])
    Image.fromarray(pixels.astype(np.uint8)).save(Path("new", file))

run = min(Path(OUT).rglob("+rotation/seed0-*"))
one = load(run)
all_models = load_all(next(Path(OUT).rglob("+rotation")))
print("one model: ", one.predict(["new/a.png", "new/b.png", "new/c.png"]))
print("all models:", all_models.predict(["new/a.png", "new/b.png", "new/c.png"]))

# %% [markdown]
# In the run that is committed here, the checks (`b.png`) are taken for stripes. The table below shows that one model does so
# with a probability of 98%. So do not trust a high probability of a model with a low accuracy.
#
# The same from the command line, as a table. `smallvit predict fabrics.py:+rotation new --ensemble` uses all models.

# %%
# !{sys.executable} -m smallvit predict {run} new 2>&1 | cat

# %% [markdown]
# What does one model get wrong? Its test images are those of its fold. They were not used for training.

# %%
test = data.at_seed(0).test.open()
guesses = one.predict_proba(test.images.permute(0, 2, 3, 1).numpy()).argmax(1)
wrong = (guesses != test.labels).nonzero()[:, 0]
confusion_figure(guesses.tolist(), test.labels.tolist(), one.classes)

# %% [markdown]
# ## Export
#
# An ONNX file runs without Python and without PyTorch, for example in a phone or a browser. It takes pixels as bytes, of any
# height and width: resizing and normalization are inside, and so are the softmax and the names of the classes.

# %%
export(one, "fabrics.onnx")
session = onnxruntime.InferenceSession("fabrics.onnx", providers=["CPUExecutionProvider"])
pixels = np.array(Image.open("new/a.png"))[None]  # (images, height, width, channels)
(probabilities,) = session.run(None, {session.get_inputs()[0].name: pixels})
print("ONNX Runtime:", probabilities[0].round(4))
print("smallvit:    ", one.predict_proba(["new/a.png"])[0].numpy().round(4))

# %% [markdown]
# ## Your own folder
#
# - `smallvit new --data FOLDER` looks at your images and writes a recipe with a patch size that fits and all techniques.
# - `groups="patients.csv"` instead of `group_by` reads the groups from a file with lines `file,group`.
# - `test=0.2` instead of `folds=5` holds out a fixed fifth of the images. Do this with some thousand images.
# - `Run(evaluators=(macro_f1, accuracy))` judges the runs by macro F1, and `Supervised(class_weight="balanced")` gives rare
#   classes more weight.
