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
# # Advice on a folder of images
#
# You have a folder with one subfolder for each class, and want to know which technique helps on these images. The command
# `smallvit advise` compares techniques for the time that you give it, tests the best combination on images that no trial has
# used, and writes an answer and a trained model. This notebook runs it and shows the results.
#
# The notebook draws its own images. To use your own folder, skip the cell that draws them. The export at the end needs
# `pip install 'smallvit[export]'`.

# %%
# %matplotlib inline
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from IPython.display import Markdown
from PIL import Image

from smallvit import compare, confusion_figure, export, folder, gallery, load, load_recipe, markdown, read_records

torch.set_num_threads(1)
os.chdir(tempfile.mkdtemp())  # the images and the advice are written here; use a folder of your own to keep them
SHORT = "SMALLVIT_SHORT" in os.environ  # the tests run this notebook with very little time
MINUTES = 2 if SHORT else 5

# %% [markdown]
# ## Draw a folder
#
# Gray pictures as from a microscope: round cells, long cells, and cells with a bright core. There are 80 of each. Place, size,
# direction and brightness are random, and the background has noise and an uneven light.

# %%
generator = np.random.default_rng(0)
y, x = np.mgrid[:28, :28]
for number in range(240):
    kind = ["core", "long", "round"][number % 3]
    row, column = generator.uniform(10, 18, 2)
    radius, angle, light = generator.uniform(5, 7), generator.uniform(0, np.pi), generator.uniform(60, 100)
    u = (x - column) * np.cos(angle) + (y - row) * np.sin(angle)
    v = (y - row) * np.cos(angle) - (x - column) * np.sin(angle)
    long, wide = (1.5, 0.65) if kind == "long" else (1.05, 0.95)
    distance = np.hypot(u / (radius * long), v / (radius * wide))
    pixels = 70 + light / (1 + np.exp(6 * (distance - 1))) + generator.uniform(-1, 1) * (x - 14)
    if kind == "core":
        pixels += 50 * np.exp(-((distance / 0.4) ** 2))
    pixels += generator.normal(0, 10, pixels.shape)
    Path("cells", kind).mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(f"cells/{kind}/{number:03d}.png")

cells = folder("cells", size=28, channels=1, test=0.2)
print(f"{len(cells.train)} images for training, {cells.test.count} for testing, classes {cells.spec.classes}")
gallery(cells.train.take(torch.arange(0, 96, 8)), columns=6)

# %% [markdown]
# ## Run the command
#
# Expected, before any run: mirrored and shifted training images help most, because the cells have any direction. A
# convolutional stem helps too, because a cell looks the same at every place. The small CNN is at least as accurate as every ViT.
#
# The command prints what it found in the folder, its plan, and the score of every option on validation images. `--photos` says
# that the images may be mirrored. If you stop the command, run it again to continue.

# %%
# !{sys.executable} -m smallvit advise cells --minutes {MINUTES} --photos --no-imagenet 2>&1 | cat

# %% [markdown]
# ## Which options were best
#
# Every decision is in `advice/plan.json`. Options are compared in groups. The best one of a group is kept for the next group.

# %%
plan = json.loads(Path("advice/plan.json").read_text())
for group, options in plan["trials"].items():
    print(f"{group}: " + ", ".join(f"{name} {100 * (score or 0):.1f}%" for name, score, seeds in options))
    print(f"    chosen: {plan['chosen'][group]}")

# %% [markdown]
# The validation score of the best option is too high, because it is the best of several trials. So the chosen ViT was tested on
# other images.
#
# ## Is the choice better?
#
# The comparison is a recipe. It tests on images that no trial has used. `compare` gives the same verdicts as the page. `advice`
# is the chosen ViT; the verdict of the small CNN is that against `advice`.
#
# Found, in the run that is committed here: mirrored and shifted images gained most in the trials, as expected. As the first
# layer, shifted patches had a higher score than the convolutional stem. The CNN classifies all test images correctly. Its
# verdict is inconclusive, because there are too few test images for a difference of a few points.

# %%
runs = load_recipe("advice/recipe.py").RUNS
results = read_records("advice/runs/recipe")
for row in compare(results).rows:
    if row.labels is None:
        print(f"{row.arm:28} {row.mean:.1%}   {row.verdict or row.role}")

# %%
Markdown(markdown(results, title="cells", doc=load_recipe("advice/recipe.py").__doc__))

# %% [markdown]
# ## The model
#
# The model in `advice/model` was trained with all images, so there are no test images left for it. The accuracy to expect is
# that of the comparison above. Draw three new cells, and predict them:

# %%
Path("new").mkdir(exist_ok=True)
y, x = np.mgrid[:56, :56]
for name, long, wide, core in (("core", 1.0, 1.0, 50), ("long", 1.5, 0.65, 0), ("round", 1.0, 1.0, 0)):
    distance = np.hypot((x - 30) / (12 * long), (y - 26) / (12 * wide))
    pixels = 70 + 80 / (1 + np.exp(6 * (distance - 1))) + core * np.exp(-((distance / 0.4) ** 2))
    Image.fromarray((pixels + generator.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)).save(f"new/{name}.png")

model = load("advice/model")
print(model.predict(["new/core.png", "new/long.png", "new/round.png"]))

# %% [markdown]
# The same from the command line:

# %%
# !{sys.executable} -m smallvit predict advice/model new 2>&1 | cat

# %% [markdown]
# As a file for other programs, with resizing and normalization inside:

# %%
print(f"largest difference from PyTorch: {export(model, 'cells.onnx'):.0e}")

# %% [markdown]
# ## Which classes are confused
#
# The predictions of one model for its test fold. It was not trained on these images.

# %%
arm = "advice" if Path("advice/runs/recipe/all/advice").exists() else "plain ViT"
one_model = load(next(Path("advice/runs/recipe/all", arm).glob("seed0-*")))
entry = next(entry for entry in runs if entry.arm == arm and entry.labels is None)
test = entry.run.data().at_seed(0).test.open()  # seed 0 is the first fold of the first pass
guesses = one_model.predict_proba(test.images.permute(0, 2, 3, 1).numpy()).argmax(1)
confusion_figure(guesses.tolist(), test.labels.tolist(), one_model.classes)

# %% [markdown]
# ## Next steps
#
# - `advice/report.html` is the page to read: the answer, the evidence, what would help most, and images whose labels may be wrong.
# - `advice/recipe.py` is the comparison. Copy it to `my_recipe.py`, add techniques to the copy, and run
#   `smallvit run my_recipe.py`.
# - More time: `--minutes 60` trains longer and compares more options.
# - Without `--no-imagenet`, a ViT-S with weights from ImageNet is compared too.
