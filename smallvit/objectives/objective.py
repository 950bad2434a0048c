"""The base class of all objectives."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from smallvit.augment import Augmentation, Batch, MultiCrop
from smallvit.components import function
from smallvit.evaluate import declaration

from .collapse import Observation

LearningRate = Callable[[float, float], float]


class Unlabelled(NamedTuple):
    """The unlabelled images that an objective needs in each training step, beside the labelled ones.

    ratio   number of unlabelled images for each labelled one
    views   the transforms that make each view of them. The views are then in `batch.views`, one tensor `b c h w` each
    """

    ratio: int
    views: tuple[Sequence[Augmentation], ...]


class Objective(nn.Module):
    """The base class of training objectives. An objective is a module that computes the loss of a model on a batch.

    A subclass implements `forward` and overrides the attributes and methods below where the defaults do not fit.

    model          the model that is averaged, saved and evaluated.
    needs_labels   False if the loss does not read the labels. Then no head is trained, so that accuracy cannot be evaluated,
                   and `observed` is checked for collapse.
    needs_views    True if the loss compares the views of an image that a `MultiCrop` augmentation makes.
    needs_init     True if the model must be initialized from another run.
    needs_teacher  True if the objective learns from the trained model of another run. The constructor is then called with
                   `(model, teacher)`.
    stackable      True if runs that differ only in seed, learning rate and number of labels can be trained together by `vmap`.
                   For this, a step may change only three things: parameters, by their gradients; buffers, in `forward`; and
                   `observed`. Random numbers are drawn in `prepare`. The default is False for a subclass that overrides
                   `before_step` or `after_step`, or that needs no labels.
    changes_weights  True if `after_step` changes weights that are trained, for example limits them.
    unlabelled     the unlabelled images that each step needs beside the labelled ones, as `Unlabelled`; None: no images. The
                   training loop then puts views of them into `batch.views`. Their labels cannot be read.
    second_pass    None, or False for an objective whose `forward` moves a teacher, or another average, before it computes the
                   targets. The optimizer `SAM` sets False to True in the second pass of a step. Then `forward` must not move
                   them: they are already moved, and both passes learn the same targets.
    observed       the features, and the targets of a teacher, of the last batch. An objective without labels sets it in
                   `forward`.
    """

    needs_labels = True
    needs_views = False
    needs_init = False
    needs_teacher = False
    stackable = True
    changes_weights = False
    unlabelled: Unlabelled | None = None
    second_pass: bool | None = None
    observed: Observation | None = None
    model: Any  # an nn.Module; methods such as features(x) depend on the model

    def __init__(self, model: nn.Module):
        check_model(type(self).__name__, model)
        super().__init__()
        self.model = model

    def __init_subclass__(cls, **options):
        """Decide whether runs with a new subclass can be trained together as one: set `stackable` to False if the subclass
        changes more than parameters in a step. A value that the subclass sets itself is kept.
        """
        super().__init_subclass__(**options)
        hooks = cls.before_step is not Objective.before_step or cls.after_step is not Objective.after_step
        if "stackable" not in vars(cls) and (hooks or not cls.needs_labels):
            cls.stackable = False

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch, a scalar tensor under the key "loss". `progress` is the finished fraction of
        the training run, from 0 to 1.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward(batch, progress)")

    def set_class_counts(self, counts: Tensor):
        """Receive the number of training images of each class, shape (classes). The training loop calls this method before the
        first step if the run trains on labels. By default nothing is done.
        """

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch of a training step, to which a subclass can add values such as the logits of a teacher. The training
        loop calls this method before each step. By default the batch is returned unchanged.

        The additional values get no gradient.

        Raises   ValueError if `batch` is not a `Batch`.
        """
        check_batch(type(self).__name__, batch)
        return batch

    def draws_for(self, owner: type["Objective"]) -> bool:
        """Return whether `prepare` of the class `owner` draws the random numbers of its `forward`. It does not if a subclass
        overrides `forward`, which may compute other images or draw again, and does not say that it is stackable.
        """
        return self.stackable or type(self).forward is owner.forward

    def phase(self, progress: float) -> Any:
        """Return what `forward` computes from `progress`, the finished fraction of the training run, or None if it does not
        read it. In steps with equal phases, `forward` must do the same with its tensors: on a GPU, such a step is recorded once
        and then repeated (a CUDA graph). By default None is returned, and steps that do read `progress` are not recorded.

        The phase is a number or a tuple of numbers. Steps of an objective of your own are never recorded.
        """

    def before_step(self, progress: float):
        """Change the gradients before the optimizer step, for example clip them. By default nothing is done. `progress` is the
        finished fraction of the training run, from 0 to 1.
        """

    def after_step(self, progress: float):
        """Update other values after the optimizer step, for example a teacher that is a moving average. By default nothing is
        done. `progress` is the finished fraction of the training run, from 0 to 1.
        """

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients `before_step` discards in the present step. `SAM`, which asks after `forward`,
        does not move them for its second pass. By default there are none.
        """
        return []

    def learning_rates(self) -> list[tuple[list[nn.Parameter], LearningRate]]:
        """Return a list of pairs: a group of parameters, and a function that computes the learning rate of this group.
        `function(progress, rate)` returns a fraction of the peak rate; `progress` is the finished fraction of the run, and
        `rate` is the value of the run's learning-rate schedule, a fraction of the peak rate too. By default there is one group
        of all parameters, which follows this schedule.
        """
        return [(list(self.parameters()), lambda progress, rate: rate)]

    def __call__(self, batch: Batch, progress: float) -> Any:
        """Set the progress of the modules that change during the run, and return the result of `forward`: a dict with the loss
        of the batch under the key "loss". `progress` is the finished fraction of the training run, from 0 to 1. Raise
        ValueError if `batch` is not a `Batch`.
        """
        check_batch(type(self).__name__, batch)
        self.set_progress(progress)
        return super().__call__(batch, progress)

    @property
    def trained_model(self) -> Any:
        """Return the model that the optimizer changes. By default this is the attribute `model`. In DINO, for example, `model`
        is a moving average of the trained model.
        """
        return self.model

    @cached_property
    def scheduled_modules(self) -> list[Any]:
        """Return a list of the modules in the trained model whose behavior changes during the training run, such as a layer
        that prunes more tokens later. Each of these modules has an attribute `progress`.
        """
        return [m for m in self.trained_model.modules() if isinstance(getattr(m, "progress", None), float)]

    def set_progress(self, progress: float):
        """Set the attribute `progress` of all modules whose behavior changes during the training run. `progress` is the
        finished fraction of the run, from 0 to 1. This happens each time the objective is called, before `forward`.
        """
        for module in self.scheduled_modules:
            module.progress = float(progress)  # an objective made later finds such modules by this type

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective, for example if the
        objective needs a teacher and the run has none. `run` is a `Run`, the settings of a training run.

        Checks `init`, `teacher`, `unlabelled`, `augment` and `evaluators`. `Run` calls this when it is created.
        """
        name, teacher = cls.__name__, run.teacher
        if cls.needs_init and "init" not in run.dependencies:
            raise ValueError(f"{name} teaches a trained model; give the run init=..., another run")
        if cls.needs_teacher and teacher is None:
            raise ValueError(f"teacher is None and {name} learns from one; give the run teacher=..., another run")
        guesses_labels = run.pseudo_labels is not None and run.init is None  # the teacher, before the first step
        if teacher is not None and not (cls.needs_teacher or guesses_labels):
            raise ValueError(f"the run has a teacher and {name} takes none; remove teacher, or use Distill")
        if teacher is not None and cls.needs_teacher and not (teacher.reads_labels and (teacher.steps or teacher.init)):
            raise ValueError("the teacher has a head that learned from no labels; expected a run that trains on labels")
        if run.unlabelled and cls.needs_labels and teacher is None and run.pseudo_labels is None:
            raise ValueError(f"unlabelled=True but {name} reads labels; use DINO, MAE, Distill with a teacher or pseudo_labels")
        if not cls.needs_views and any(isinstance(transform, MultiCrop) for transform in run.augment):
            raise ValueError(f"augment makes views and {name} reads none; remove MultiCrop from augment, or use DINO or LeJEPA")
        of_head = next((evaluator for evaluator in run.evaluators if declaration(evaluator).head), None)
        if not cls.needs_labels and of_head is not None:
            raise ValueError(
                f"{function(of_head).__name__} needs a trained head and {name} trains none; use evaluators=(knn, linear_probe)"
            )


def check_model(name: str, model: Any):
    """Raise ValueError unless the model of the objective with this `name` is a module, and not a class that makes one."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(f"the model of {name} is {given}; expected a finished nn.Module, such as ViT((28, 28), 1, 10)")


def check_batch(name: str, batch: Any):
    """Raise ValueError unless the objective with this `name` got a `Batch`, or an object with its attributes."""
    if not hasattr(batch, "images"):
        raise ValueError(
            f"{name} got {type(batch).__name__}; expected Batch(images, targets) from smallvit.augment, with a row of class "
            "probabilities for each image"
        )


def check_views(name: str, batch: Batch):
    """Raise ValueError unless the batch has views of its images for the objective with this `name`, in the form that
    `MultiCrop` gives them: two global views of each image in the first tensor, and whole sets of smaller views in the others.
    """
    if not batch.views:
        raise ValueError(f"{name} compares views and the batch has none; use augment=augment.digit_crops() or photo_crops()")
    images, counts = len(batch.images), [len(views) for views in batch.views]
    if not images or counts[0] != 2 * images or any(count % images for count in counts):
        raise ValueError(
            f"{name} got views in tensors of {counts} images for a batch of {images}; expected {2 * images} in the first one, "
            "two global views of each image, and a multiple of the batch in the others; torch.cat joins views of one size"
        )


def check_option_range(**options: tuple[float, float, float]):
    """Raise ValueError unless all given options are numbers in their range. Each keyword argument is the name of an option with
    (its value, the lowest allowed number, the highest allowed number).
    """
    for name, (value, low, high) in options.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; expected a number from {low} to {high}")


@contextmanager
def outputs_of(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Context manager that yields a list. Each time one of the `modules` is called inside it, its output is appended. PyTorch
    computes blocks that have hooks, so the native kernel does not hide these outputs.
    """
    outputs: list[Tensor] = []

    def append(module: nn.Module, inputs: tuple, output: Tensor):
        outputs.append(output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(append))
        yield outputs
