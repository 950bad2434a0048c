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
from .objective import LearningRate, Objective, check_batch, check_views


class EachMember(Objective):
    """The objective of a `DeepEnsemble` whose members learn without labels, each for itself and from its part of each batch.

    of   the objective of one member: one without labels, such as `partial(DINO, ...)` or `MAE`

        Run(model=partial(DeepEnsemble, of=vit, count=2), objective=partial(EachMember, of=DINO), batch=2 * 64, ...)

    Members that start from other weights and see other images make other mistakes. The features of the ensemble are those of
    its members, side by side. On digits, labels that are spread by these features (`label_spreading`) are right more often than
    by the features of one member. The ensemble costs as much as its members together.

    The loss is the sum of the losses of the members, so each member gets the gradient that it would get alone.

    Off      `count=1` of the ensemble: the loss and the gradients are those of `of`.
    Departs  The members are independent, except for the limit of the gradient's norm (`Run.clip`) and the step of `SAM`, which
             they share. If the features of one member collapse, the whole run stops.
    Raises   ValueError for a model that is not an ensemble, for an objective that needs labels or another run, and for a batch
             that cannot be divided among the members.
    """

    needs_labels = False
    needs_views = True  # if that of a member does, which `check_run` asks
    stackable = False

    def __init__(self, model: nn.Module, *, of: Callable[..., Any]):
        check_objective_of_member(of)
        if not getattr(model, "divides_batches", False):
            raise ValueError(
                f"EachMember trains the members of an ensemble, and the model is a {type(model).__name__}; use DeepEnsemble"
            )
        ensemble: Any = model
        parts = [of(member) for member in ensemble.members]
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
        draws: Any = batch.draws or [()] * count  # of each member, as `prepare` puts them there
        parts = zip(batch.images.chunk(count), batch.targets.chunk(count), draws)
        return [
            Batch(own, targets, tuple(view[index].flatten(0, 1) for view in views), draws=drawn)
            for index, (own, targets, drawn) in enumerate(parts)
        ]

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with what each member draws for the step. The training loop calls this method before each step."""
        drawn: Any = tuple(part.prepare(own).draws for part, own in zip(self.parts, self.divide(batch)))
        return batch._replace(draws=drawn)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the sum of the losses of the members under the key "loss". `progress` is the finished fraction of
        the training run, from 0 to 1. Raise ValueError for a batch that cannot be divided among the members.
        """
        losses = []
        for part, own in zip(self.parts, self.divide(batch)):
            part.second_pass = self.second_pass
            losses.append(part(own, progress)["loss"])
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
    if not (isinstance(kind, type) and issubclass(kind, Objective)) or kind.needs_labels or issubclass(kind, EachMember):
        name = getattr(kind, "__name__", repr(kind))
        raise ValueError(f"of is {name}; expected an objective without labels, such as partial(DINO, ...) or MAE")
