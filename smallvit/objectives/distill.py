"""Knowledge distillation: training with labels and with the logits of a trained teacher."""

import copy
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import at_least_float32
from smallvit.augment import Batch
from smallvit.components import options

from .objective import Objective
from .supervised import cross_entropy

TEMPERATURE = 3.0  # of DeiT's soft distillation


class Distill(Objective):
    """Knowledge distillation, an objective: a model (student) learns from labels and from the logits of a trained teacher. The
    loss is a weighted sum of the cross-entropy with the labels and a distillation loss.

    kind         "soft" compares the softened probabilities of student and teacher; "hard" uses the teacher's first choice as a
                 label.
    weight       the weight of the distillation loss; the labels have weight 1 - weight.
    temperature  divides the logits of both for "soft".
    token        with `pool=DistilledTokens`, the class token's head learns from the labels, and the distillation token's head
                 from the teacher (DeiT, section 4). Without it a model with two heads learns by the mean of both.

    Paper    "soft": Hinton et al. 2015, arXiv:1503.02531, section 2, as DeiT writes it: (1 - weight) CE(labels) + weight T^2
             KL(teacher || student), both softened by the `temperature` T. "hard": Touvron et al. 2021 (DeiT), arXiv:2012.12877,
             equation 3, with weight 1/2: (1 - weight) CE(labels) + weight CE(first choice of the teacher).
    Off      `weight=0` equals `Supervised`, bit for bit. With `token=True` the second head then learns nothing.
    Departs  The divergence is summed over the classes and averaged over the batch, as in timm and vit-pytorch. DeiT's own loss,
             as EViT and DynamicViT use it, divides by batch times classes. Its divergence is smaller by the number of classes,
             so its weights (0.1) mean something else. timm's `LogitDistillationTask` and `TokenDistillationTask` equal this
             class with `task_loss_weight=1 - weight` and no other change.
             The teacher receives the same images as the student, also mixed ones; its first choice for these is one class.

    On images without labels, `Run(unlabelled=True)`, targets are 0 and only the teacher counts. With `weight=1` this is the
    last stage of SimCLR v2 (Chen et al. 2020, arXiv:2006.10029, section 2): a model that was fine-tuned on few labels teaches a
    student on all images.

    `teacher` gives logits for images that are normalized as the student's. The objective keeps a copy in evaluation mode,
    without gradients, which is not among its parameters and not in its state.

    Raises   ValueError for a weight, temperature or kind out of range, a temperature for hard targets, `token=True` with a
             model that does not have two heads, or a teacher with other classes than the targets.
    """

    needs_teacher = True

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        *,
        kind: str = "soft",
        weight: float = 0.5,
        temperature: float = TEMPERATURE,
        token: bool = False,
    ):
        super().__init__(model)
        if not isinstance(teacher, nn.Module):
            raise ValueError(f"teacher is {teacher!r}; expected a trained model, such as load(folder).model")
        if kind not in ("soft", "hard"):
            raise ValueError(f"kind is {kind!r}; expected 'soft' (all logits of the teacher) or 'hard' (its first choice)")
        if not 0 <= weight <= 1:
            raise ValueError(f"weight is {weight}; expected the teacher's share of the loss, from 0 to 1")
        if not (temperature > 0 and isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; expected a number above 0")
        if kind == "hard" and temperature != TEMPERATURE:
            raise ValueError(f"temperature is {temperature}, but hard targets have none; use kind='soft', or no temperature")
        if token and not hasattr(getattr(model, "head", None), "apart"):
            raise ValueError(
                f"token=True trains two heads and this {type(model).__name__} does not have them; expected pool=DistilledTokens"
            )
        self.kind, self.weight, self.temperature, self.token = kind, weight, temperature, token
        self.teachers = [copy.deepcopy(teacher).eval().requires_grad_(False)]  # a list hides its weights from nn.Module

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective: in addition to those that
        every objective refuses, `token=True` if the head that learns from labels would get none. `run` is a `Run`.
        """
        super().check_run(run)
        chosen = {name: option.default for name, option in options(run.objective).items()}
        if chosen["token"] and (chosen["weight"] == 1 or (run.unlabelled and run.pseudo_labels is None)):
            reason = "weight=1" if chosen["weight"] == 1 else "unlabelled=True"
            raise ValueError(
                f"with token=True one of the two heads learns from labels only, and {reason} gives it none; its random logits "
                "would count in each prediction. Use token=False, or train it with labels"
            )

    @property
    def teacher(self) -> nn.Module:
        """Return the copy of the trained teacher model that computes the teacher's logits. Its weights are frozen."""
        return self.teachers[0]

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss". The teacher is only run if the batch does not contain
        its logits. `progress` is the finished fraction of the training run, from 0 to 1.
        """
        if self.token:
            logits, distilled = self.model.head.apart(self.model.features(batch.images))
        else:
            logits = distilled = self.model(batch.images)
        loss = cross_entropy(logits, batch.targets)
        if self.weight:
            (targets,) = batch.teacher_logits or (self.teacher_logits(batch),)
            loss = (1 - self.weight) * loss + self.weight * self.distillation_loss(at_least_float32(distilled), targets)
        return {"loss": loss}

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also contains the teacher's logits. The training loop calls this method before each
        step.

        Runs that are trained together as one model then each use their own teacher.
        """
        batch = super().prepare(batch)
        return batch._replace(teacher_logits=(self.teacher_logits(batch),)) if self.weight else batch

    @torch.no_grad()
    def teacher_logits(self, batch: Batch) -> Tensor:
        """Return the logits of the teacher for the images of a batch, shape (batch, classes). Raise ValueError if the teacher
        has another number of classes than the targets of the batch.
        """
        # objective.to(device) does not move the teacher, which is not a submodule
        weight = next(self.teacher.parameters(), batch.images)
        if (weight.device, weight.dtype) != (batch.images.device, batch.images.dtype):
            self.teacher.to(batch.images)
        logits = at_least_float32(self.teacher(batch.images))
        if logits.shape != batch.targets.shape:
            raise ValueError(
                f"the teacher gives logits of shape {tuple(logits.shape)}; expected {tuple(batch.targets.shape)} as the targets"
            )
        return logits

    def distillation_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the distillation loss, a scalar tensor that measures how far the student's `logits` are from `teacher_logits`.
        The logits have the shape (batch, classes). The option `kind` of the objective selects soft or hard distillation.
        """
        if self.kind == "hard":
            return F.cross_entropy(logits, teacher_logits.argmax(-1))
        student, teacher = ((z / self.temperature).log_softmax(-1) for z in (logits, teacher_logits))
        return self.temperature**2 * (teacher.exp() * (teacher - student)).sum(-1).mean()
