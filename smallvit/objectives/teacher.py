"""The base class of objectives without labels in which a student learns from a moving average of itself."""

import copy
from typing import Any

from torch import nn

from smallvit.optim import ema_update, module_pairs, tensors_in

from .objective import Objective, check_model


class TeacherObjective(Objective):
    """The base class of objectives without labels in which a student learns from its teacher. The teacher is an exponential
    moving average (EMA) of the student: it starts as a copy, has no gradient, and moves towards the student after each step.

    The optimizer changes `.student`. The teacher is `.model`, which is saved and evaluated. A subclass implements `forward` and
    `student_weight`.
    """

    needs_labels = False

    def __init__(self, model: nn.Module):
        check_model(type(self).__name__, model)
        super().__init__(copy.deepcopy(model).requires_grad_(False))
        self.student: Any = model
        self.pairs: list[tuple[nn.Module, nn.Module]] = []  # of the teacher and the student
        set_teacher_mode(self.model, self.training)

    @property
    def trained_model(self) -> Any:
        """Return the student, the model that the optimizer changes. The teacher is a moving average of the student."""
        return self.student

    def train(self, mode: bool = True):
        """Switch the student to training mode (`mode` True) or evaluation mode, and return the objective. The teacher stays in
        evaluation mode, except for its BatchNorm layers: these get the same mode as the student, so that both normalize by the
        batch in training.
        """
        super().train(mode)
        set_teacher_mode(self.model, mode)
        return self

    def student_weight(self, progress: float) -> float:
        """Return the weight of the student when the teacher is updated: 1 - the momentum of the average. `progress` is the
        finished fraction of the run, from 0 to 1.
        """
        raise NotImplementedError(f"{type(self).__name__} has no student_weight(progress)")

    def teachers_and_students(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs of modules with the same architecture: a teacher, and its student. By default one pair, the models."""
        return [(self.model, self.student)]

    def after_step(self, progress: float):
        """Update the teacher after the optimizer step. `progress` is the finished fraction of the run, from 0 to 1."""
        if not self.pairs:
            self.pairs = [pair for models in self.teachers_and_students() for pair in module_pairs(*models)]
        ema_update(tensors_in(self.pairs), self.student_weight(progress))


def set_teacher_mode(teacher: nn.Module, mode: bool):
    """Switch a teacher to evaluation mode, except for its BatchNorm layers: these get the `mode` of the student (True in
    training), so that both normalize by the batch.
    """
    teacher.eval()
    for module in teacher.modules():
        module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
