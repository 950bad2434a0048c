"""Distillation: a model learns from labels, and from what a trained model says of the same images."""

import copy
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.augment import Batch

from .objective import Objective
from .supervised import cross_entropy

TEMPERATURE = 3.0  # of DeiT's soft distillation


class Distill(Objective):
    """Knowledge distillation: learn what the labels say, and what a trained teacher says of the same images.

    Paper    "soft": Hinton et al. 2015, arXiv:1503.02531, section 2, as DeiT writes it: (1 - weight) CE(labels)
             + weight T^2 KL(teacher || student), both softened by the `temperature` T. "hard": Touvron et al. 2021 (DeiT),
             arXiv:2012.12877, equation 3, where the weight is a half: (1 - weight) CE(labels) + weight CE(the teacher's first
             choice). `token=True`, for a model with `pool=DistilledTokens`: the class token's head learns from the labels and
             the distillation token's from the teacher (DeiT, section 4).
    Off      `weight=0` equals `Supervised`, bit for bit. With `token=True` the second head then learns nothing.
    Departs  The divergence is summed over the classes, then its mean taken over the batch, as in timm and vit-pytorch. DeiT's
             own loss, as EViT and DynamicViT ship it, divides by batch times classes: there the divergence counts for less by
             the number of classes, and its weights (0.1) mean something else. timm's `LogitDistillationTask` and
             `TokenDistillationTask` equal this with `task_loss_weight=1 - weight` and nothing else.
             The teacher sees what the student sees, mixed images too; its first choice of those is one class.

    On images without labels, `Run(unlabelled=True)`, targets are 0 and the teacher alone is heard: with `weight=1` that is the
    last stage of SimCLR v2 (Chen et al. 2020, arXiv:2006.10029, section 2), which teaches what was fine-tuned on few labels
    to a model that sees all images.

    `teacher` is a model that gives logits for images normalised as the student's. A copy of it is kept in evaluation mode,
    without gradients, and outside the parameters and the state of this objective. Without `token=True` a model with two heads
    learns by the mean of both.

    Raises   ValueError for a weight, temperature or kind out of range, a temperature for hard targets, `token=True` with a
             model that has not got two heads, or a teacher with other classes than the targets.
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
        if kind not in ("soft", "hard"):
            raise ValueError(f"kind is {kind!r}; expected 'soft' (all that the teacher says) or 'hard' (its first choice)")
        if not 0 <= weight <= 1:
            raise ValueError(f"weight is {weight}; expected the teacher's share of the loss, from 0 to 1")
        if not (temperature > 0 and isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; expected a number above 0")
        if kind == "hard" and temperature != TEMPERATURE:
            raise ValueError(
                f"temperature is {temperature} and hard targets have none; expected kind='soft', or no temperature"
            )
        if token and not hasattr(getattr(model, "head", None), "apart"):
            raise ValueError(
                f"token=True trains two heads and this {type(model).__name__} has not got them; expected pool=DistilledTokens"
            )
        self.kind, self.weight, self.temperature, self.token = kind, weight, temperature, token
        self.beside = [copy.deepcopy(teacher).eval().requires_grad_(False)]  # in a list, so that no module finds its weights

    @property
    def teacher(self) -> nn.Module:
        return self.beside[0]

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        self.set_progress(progress)
        if self.token:
            logits, taught = self.model.head.apart(self.model.features(batch.images))
        else:
            logits = taught = self.model(batch.images)
        loss = cross_entropy(logits, batch.targets)
        if self.weight:
            (wanted,) = batch.teacher_logits or (self.ask_teacher(batch),)
            loss = (1 - self.weight) * loss + self.weight * self.gap(taught.float(), wanted)
        return {"loss": loss}

    def prepare(self, batch: Batch) -> Batch:
        """The batch with what the teacher says of it: asked before the step, each run of a stack hears its own."""
        return batch._replace(teacher_logits=(self.ask_teacher(batch),)) if self.weight else batch

    @torch.no_grad()
    def ask_teacher(self, batch: Batch) -> Tensor:
        """What the teacher says of these images: logits b k."""
        here = next(self.teacher.parameters(), batch.images)
        if (here.device, here.dtype) != (batch.images.device, batch.images.dtype):  # what moves the objective leaves it alone
            self.teacher.to(batch.images)
        said = self.teacher(batch.images).float()
        if said.shape != batch.targets.shape:
            raise ValueError(
                f"the teacher gives logits of shape {tuple(said.shape)}; expected {tuple(batch.targets.shape)} as the targets"
            )
        return said

    def gap(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """How far the student is from the teacher, both logits b k; the mean over the batch."""
        if self.kind == "hard":
            return F.cross_entropy(logits, wanted.argmax(-1))
        soft, aim = ((z / self.temperature).log_softmax(-1) for z in (logits, wanted))
        return self.temperature**2 * (aim.exp() * (aim - soft)).sum(-1).mean()
