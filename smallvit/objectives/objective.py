"""The base class of every objective: what it may declare about itself, and hooks that do nothing unless they are overridden."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from smallvit.augment import Batch, MultiCrop
from smallvit.evaluate import accuracy

from .collapse import Observation

LearningRate = Callable[[float, float], float]


class Objective(nn.Module):
    """Base class of every objective: a module that computes a loss from a model, a batch and the progress of the run.

    A subclass implements `forward(batch, progress)`, which returns a dict with the scalar "loss". It overrides the attributes and
    methods below where the defaults do not fit. `progress` rises from 0 to 1 over the run.

    Attributes
        model: the model that is averaged, saved and evaluated.
        needs_labels: whether the loss reads `batch.targets`. Without labels, accuracy cannot be an evaluator, since no head is
            trained, and the training loop watches `observed` for collapse.
        needs_views: whether the loss compares `batch.views`, which a `MultiCrop` augmentation makes.
        needs_init: whether the model must be initialized from another run.
        needs_teacher: whether the objective learns from a trained teacher; the constructor is then called `(model, teacher)`.
        stackable: whether runs that differ only in their seed can be trained together as one model by `torch.func.vmap`. This
            requires that a step changes nothing but what the gradient changes. A subclass that overrides `before_step` or
            `after_step`, or reads no labels, is not stackable unless it sets `stackable = True` itself.
        observed: features (and teacher targets) of the last batch, for the collapse monitor. An objective without labels sets
            this in `forward`.
    """

    needs_labels = True
    needs_views = False
    needs_init = False
    needs_teacher = False
    stackable = True
    observed: Observation | None = None

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def __init_subclass__(cls, **options):
        """Set `stackable` to False where a subclass changes state outside the gradient step and does not declare it."""
        super().__init_subclass__(**options)
        changed = cls.before_step is not Objective.before_step or cls.after_step is not Objective.after_step
        if "stackable" not in vars(cls) and (changed or not cls.needs_labels):
            cls.stackable = False

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the scalar "loss" of a batch; other entries are ignored. Subclasses implement this."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(batch, progress)")

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with what must be computed before the step and without gradients, such as teacher logits."""
        return batch

    def before_step(self, progress: float):
        """Change the gradients after the backward pass and before the optimizer step, for example clip them."""

    def after_step(self, progress: float):
        """Change state after the optimizer step, for example move an EMA teacher towards its student."""

    def learning_rates(self) -> list[tuple[list[nn.Parameter], LearningRate]]:
        """Return groups of parameters, each with its own learning-rate schedule.

        A schedule is a function `(progress, rate) -> fraction of the peak learning rate`, where `rate` is the fraction that the
        schedule of the run gives. By default all parameters are one group that follows the run.
        """
        return [(list(self.parameters()), lambda progress, rate: rate)]

    @property
    def trained_model(self) -> nn.Module:
        """The model that the optimizer changes: `model`, except where `model` is an EMA teacher."""
        return self.model

    @cached_property
    def scheduled_modules(self) -> list[nn.Module]:
        """The parts of the trained model with a float attribute `progress`, such as a reduction that prunes more over time."""
        return [m for m in self.trained_model.modules() if isinstance(getattr(m, "progress", None), float)]

    def set_progress(self, progress: float):
        """Set `progress` on every part of the trained model that has such an attribute; call this first in `forward`."""
        for module in self.scheduled_modules:
            module.progress = progress

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if a `Run` with this objective lacks something that it needs, or has something that it cannot use.

        Checks `init`, `teacher`, `unlabelled`, `augment` and `evaluators` of the run. A subclass may add checks of its own.
        """
        name = cls.__name__
        if cls.needs_init and not isinstance(run.init, type(run)):
            raise ValueError(f"{name} teaches a trained model; give the run init=..., another run")
        if cls.needs_teacher and run.teacher is None:
            raise ValueError(f"teacher is None and {name} learns from one; give the run teacher=..., another run")
        if run.teacher is not None and not cls.needs_teacher:
            raise ValueError(f"the run has a teacher and {name} takes none; remove teacher, or use Distill")
        if run.teacher is not None and not (run.teacher.reads_labels and (run.teacher.steps or run.teacher.init)):
            raise ValueError(
                "the head of the teacher was not trained with labels; expected a teacher run that trains on labels"
            )
        if run.unlabelled and cls.needs_labels and run.teacher is None and run.pseudo_labels is None:
            raise ValueError(
                f"unlabelled=True but {name} reads labels; use DINO or MAE, Distill with a teacher, or pseudo_labels"
            )
        if not cls.needs_views and any(isinstance(step, MultiCrop) for step in run.augment):
            raise ValueError(f"augment makes views and {name} reads none; remove MultiCrop from augment, or use DINO")
        if not cls.needs_labels and accuracy in run.evaluators:
            raise ValueError(f"accuracy needs a trained head and {name} trains none; use evaluators=(knn, linear_probe)")
