"""Training without labels for each member of a deep ensemble."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.components import function, options

from .collapse import Observation
from .objective import LearningRate, Objective, check_batch, check_model, check_views


class EachMember(Objective):
    """The objective of a `DeepEnsemble` whose members learn without labels, each for itself and from its part of each batch.

    of   the objective of one member: one without labels, such as `partial(DINO, ...)` or `MAE`

        Run(model=partial(DeepEnsemble, of=vit, count=2), objective=partial(EachMember, of=DINO), batch=2 * 64, ...)

    The members start from different weights and see different images, so their mistakes may differ. The features of the
    ensemble are those of its members, side by side. The ensemble costs as much as its members together.

    The loss is the sum of the losses of the members, so each member gets the gradient that it would get alone.

    Off      `count=1` of the ensemble: the loss and the gradients are those of `of`.
    Departs  The members are independent, except for the limit of the gradient's norm (`Run.clip`), the step of `SAM`, and the
             partners of `Mixup` and `CutMix`, which they share. If the features of one member collapse, the whole run stops.
    Raises   ValueError for a model that is not an ensemble, for an objective that needs labels, another run or other images,
             and for a batch that cannot be divided among the members.
    """

    needs_labels = False
    needs_views = True  # if that of a member does, which `check_run` asks
    stackable = False

    def __init__(self, model: nn.Module, *, of: Callable[..., Any]):
        check_objective_of_member(of)
        check_model(type(self).__name__, model)
        if not getattr(model, "divides_batches", False):
            raise ValueError(
                f"EachMember trains the members of an ensemble, and the model is a {type(model).__name__}; use DeepEnsemble"
            )
        ensemble: Any = model
        parts = [of(member) for member in ensemble.members]
        if parts[0].unlabelled is not None:
            raise ValueError(f"{type(parts[0]).__name__} needs images beside the batch; expected an objective without them")
        evaluated = ensemble
        if any(part.model is not member for part, member in zip(parts, ensemble.members)):  # as DINO evaluates its teacher
            evaluated = copy.deepcopy(ensemble)
            evaluated.members = nn.ModuleList(part.model for part in parts)
        super().__init__(evaluated)
        self.parts: Any = nn.ModuleList(parts)
        self.trained = [ensemble]  # a list hides the weights from nn.Module: they are also those of the parts
        self.needs_views, self.second_pass = parts[0].needs_views, parts[0].second_pass

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with the objective of the members. `run` is a
        `Run`.
        """
        of = options(run.objective)["of"].default
        check_objective_of_member(of)
        replace(run, objective=of)  # a run checks itself

    @property
    def trained_model(self) -> Any:
        """Return the ensemble whose members the optimizer changes."""
        return self.trained[0]

    def divide(self, batch: Batch) -> list[Batch]:
        """Return the part of the batch that each member sees. Raise ValueError if the batch cannot be divided."""
        check_batch(type(self).__name__, batch)
        images, count = len(batch.images), len(self.parts)
        self.model.check_batch(images)
        if self.needs_views:
            check_views(type(self).__name__, batch)
        views = [torch.stack(each.split(images)).chunk(count, dim=1) for each in batch.views]  # views, images, ...
        parts = zip(batch.images.chunk(count), batch.targets.chunk(count))
        return [Batch(*own, tuple(view[index].flatten(0, 1) for view in views)) for index, own in enumerate(parts)]

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its parts in `draws`, each with what the objective of its member adds. The training loop calls
        this method before each step.
        """
        prepared: Any = tuple(part.prepare(own) for part, own in zip(self.parts, self.divide(batch)))
        return batch._replace(draws=prepared)

    def phase(self, progress: float) -> Any:
        """Return what the members compute from `progress`, the finished fraction of the run; see `Objective.phase`."""
        phases = tuple(part.phase(progress) for part in self.parts)
        return None if phases[0] is None else phases

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the sum of the losses of the members under the key "loss". `progress` is the finished fraction of
        the training run, from 0 to 1. Raise ValueError for a batch that cannot be divided among the members.
        """
        losses = []
        for part, own in zip(self.parts, batch.draws or self.divide(batch)):
            part.second_pass = self.second_pass
            losses.append(part(own, progress)["loss"])
        if all(part.observed for part in self.parts):
            features, targets = zip(*(part.observed for part in self.parts))
            self.observed = Observation(torch.stack(features), None if targets[0] is None else torch.stack(targets))
        return {"loss": torch.stack(losses).sum()}

    def before_step(self, progress: float):
        """Change the gradients before the optimizer step as each member's objective does. `progress` is the finished fraction
        of the training run, from 0 to 1.
        """
        for part in self.parts:
            part.before_step(progress)

    def after_step(self, progress: float):
        """Update other values after the optimizer step, such as the teacher of each member. `progress` is the finished fraction
        of the training run, from 0 to 1.
        """
        for part in self.parts:
            part.after_step(progress)

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all members whose gradients `before_step` discards in the present step."""
        return [parameter for part in self.parts for parameter in part.frozen_parameters()]

    def learning_rates(self) -> list[tuple[list[nn.Parameter], LearningRate]]:
        """Return the groups of parameters of all members, each with the function of its learning rate; see `Objective`."""
        return [group for part in self.parts for group in part.learning_rates()]


def check_objective_of_member(of: Any):
    """Raise ValueError unless `of` is the class of an objective without labels, or a `partial` of one."""
    kind = function(of) if callable(of) else of
    fits = isinstance(kind, type) and issubclass(kind, Objective) and not issubclass(kind, EachMember)
    if not fits or kind.needs_labels or kind.needs_init or kind.needs_teacher:
        name = getattr(kind, "__name__", repr(kind))
        raise ValueError(
            f"of is {name}; expected an objective that needs no labels and no other run, such as partial(DINO, ...) or MAE"
        )
