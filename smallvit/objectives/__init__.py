"""Objectives: from a model and a batch to a loss.

supervised.py  Supervised: from labels
distill.py     Distill: from labels and a trained teacher
reduce.py      LearnToPrune, LearnThresholds: teach a trained model to do with fewer tokens
dino.py        DINO: from views of images, held to a slow copy of itself
mae.py         MAE: from images with most patches hidden
collapse.py    what features and targets look like when they have collapsed, and stopping then

Contract: `objective(model)` makes a module that is called `(batch, progress) -> {"loss": scalar, ...}`; `batch` holds
normalised images b c h w, targets b k whose rows sum to 1 and, where an augmentation made them, views; `progress` rises from 0
to 1 over the run, so that no objective knows about epochs or steps. `.model` is what is averaged, saved and evaluated. What
comes to a batch before the step and learns nothing (the word of a teacher) `prepare(batch)` puts into it. What is to be done
to the gradients before the optimizer's step is done in `before_step(progress)`, and what moves after it (a teacher) in
`after_step(progress)`. One whose parameters do not all learn at the run's pace has `paces()`: groups of parameters, each with
a function `(progress, pace) -> fraction of the peak rate`. One that needs a trained model says `needs_init`; one that learns
from another trained model says `needs_teacher`, and is made `objective(model, teacher)`. One that reads no label says
`needs_labels = False` and keeps in `seen` what `collapse` looks at; one that compares views says `reads_views = True`.
"""

from .dino import DINO
from .distill import Distill
from .mae import MAE
from .objective import Objective
from .reduce import LearnThresholds, LearnToPrune
from .supervised import Supervised

__all__ = ["DINO", "MAE", "Distill", "LearnThresholds", "LearnToPrune", "Objective", "Supervised"]
