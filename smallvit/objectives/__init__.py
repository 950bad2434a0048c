"""Objectives: modules that compute the loss of a model on a batch.

objective.py   Objective: the base class
teacher.py     TeacherObjective: the base class of DINO and Data2Vec
each_member.py  EachMember: training without labels for each member of a deep ensemble
supervised.py  Supervised: cross-entropy with labels
distill.py     Distill: labels and a trained teacher
reduce.py      LearnToPrune, LearnThresholds: train a token reduction in a trained model
dino.py        DINO: self-distillation between views of unlabelled images
dino_parts.py  its projection head, its bank of similar images, and the patch term of iBOT
mae.py         MAE: reconstruction of hidden patches of unlabelled images
data2vec.py    Data2Vec: prediction of a teacher's features of hidden patches
semi_supervised.py   SemiSupervised: labelled and unlabelled images in each step (FixMatch, pseudo-labels, mean teacher)
lejepa.py      LeJEPA: views that agree, and features like a Gaussian, of unlabelled images
ssat.py        SSAT: labels and reconstruction of hidden patches
drloc.py       DrLoc: labels and distances between patches
collapse.py    detects the collapse of training without labels

An objective is a subclass of `Objective`. This one adds a confidence penalty (arXiv:1701.06548) to the cross-entropy:

    from smallvit.objectives import Objective

    class ConfidencePenalty(Objective):
        def __init__(self, model, *, weight=0.1):
            super().__init__(model)
            self.weight = weight

        def forward(self, batch, progress):
            log_p = self.model(batch.images).float().log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).mean()
            return {"loss": -(batch.targets * log_p).sum(-1).mean() - self.weight * entropy}

    Run(..., objective=partial(ConfidencePenalty, weight=0.2))

Contract of `objective = Class(model, **options)` and `objective(batch, progress)`:

- Options are keyword-only and set by `functools.partial`.
- `batch` has normalized images, b c h w; targets, b k, rows with sum 1 (all 0 for unlabelled images); and `views` if an
  augmentation makes them, or if the objective asks for unlabelled images beside the labelled ones (`unlabelled`).
  `progress` rises from 0 to 1 over the run, so no objective depends on epochs or steps.
- `forward` returns a dict with the scalar "loss".
- `.model` is averaged, saved and evaluated. Parameters with `requires_grad` are trained; a teacher shares no storage with them.
- A step calls in this order: `prepare(batch)`, `forward`, the backward pass, `before_step(progress)`, the optimizer,
  `after_step(progress)`. The three hooks do nothing by default. An objective whose runs can be trained
  together (`stackable`) draws random numbers in `prepare`, into `draws` of the batch, and not in `forward`.
- `learning_rates()` may give groups of parameters their own learning-rate schedules.
- The attributes `needs_labels`, `needs_views`, `needs_init`, `needs_teacher`, `unlabelled` and `stackable` declare what the
  objective needs; see `Objective`. `check_run` refuses a `Run` that does not have it.
- An objective without labels sets `observed` in `forward`, which is checked for collapse.
"""

from .collapse import Observation
from .data2vec import Data2Vec
from .dino import DINO
from .distill import Distill
from .drloc import DrLoc
from .each_member import EachMember
from .lejepa import LeJEPA
from .mae import MAE
from .objective import Objective, Unlabelled
from .reduce import LearnThresholds, LearnToPrune
from .semi_supervised import SemiSupervised
from .ssat import SSAT
from .supervised import Supervised

__all__ = [
    "DINO", "MAE", "SSAT", "Data2Vec", "Distill", "DrLoc", "EachMember", "LeJEPA", "LearnThresholds", "LearnToPrune",
    "Objective", "Observation", "SemiSupervised", "Supervised", "Unlabelled",
]  # fmt: skip
