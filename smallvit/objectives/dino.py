"""DINO: a model learns to say of every view of an image what a slow copy of it says of the whole image."""

import copy
from math import cos, pi

import torch
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.objectives.collapse import Seen
from smallvit.optimise import average, tensors


class DINO(nn.Module):
    """Self-distillation without labels: a student sees all views, its teacher the two global ones, and they shall agree.

    Paper    Caron et al. 2021, arXiv:2104.14294. Teacher: starts equal to the student, has no gradient and neither dropout nor
             drop-path, follows with a momentum that rises from `momentum` to 1 in a cosine, after each step. Head: lightly's
             `DINOProjectionHead`, `hidden` -> `hidden` -> `bottleneck`, normalised, then `prototypes` directions of length 1
             that rest for the first `freeze` of the run. Loss: lightly's `DINOLoss`, cross-entropy over all pairs of a
             teacher's and another student's view, at `student_temp`, and at a temperature of the teacher's that rises in a
             line from `warm_temp` to `teacher_temp` over the first `warmup` of the run; its centre follows the teacher's mean.
             Each parameter's gradient is cut to norm `clip` on its own (0: not), before the run's own `clip`, best set to 0.
    Departs  Small: 1,024 prototypes and a head of width 256, where ImageNet had 65,536 and 2,048. BatchNorm in the head, which
             the paper leaves out for ViTs: without it a narrow ViT, whose untrained features all point nearly the same way,
             ends in the uniform collapse on digits. Weight decay is the run's, and does not rise. The teacher starts as a
             copy, which some public examples forget.
             `koleo` > 0 adds that weight times lightly's `KoLeoLoss` of the student's features of each global view, which
             spreads them (Sablayrolles et al., arXiv:1806.03198, as in DINOv2).

    `batch.views` are made by an augmentation, `augment.digit_views()` or `augment.photo_views()`. `model` has `features`, b d,
    and a `head`, which stays as it is. What is saved and evaluated is the teacher.

    Raises   ValueError for a batch without views, or momentum, temperatures or fractions out of range.
    """

    needs_labels = False

    def __init__(
        self,
        model: nn.Module,
        *,
        prototypes: int = 1024,
        hidden: int = 256,
        bottleneck: int = 64,
        batch_norm: bool = True,
        norm_last_layer: bool = True,
        freeze: float = 0.02,
        momentum: float = 0.99,
        student_temp: float = 0.1,
        teacher_temp: float = 0.04,
        warm_temp: float = 0.04,
        warmup: float = 0.3,
        center_momentum: float = 0.9,
        clip: float = 3.0,
        koleo: float = 0.0,
    ):
        super().__init__()
        from lightly.loss import DINOLoss, KoLeoLoss
        from lightly.models.modules import DINOProjectionHead

        for name, value, low, high in (
            ("freeze", freeze, 0, 1), ("momentum", momentum, 0, 1), ("warmup", warmup, 0, 1), ("clip", clip, 0, 1e9),
            ("center_momentum", center_momentum, 0, 1), ("student_temp", student_temp, 1e-3, 10),
            ("teacher_temp", teacher_temp, 1e-3, 10), ("warm_temp", warm_temp, 1e-3, 10), ("koleo", koleo, 0, 1e3),
        ):  # fmt: skip
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected a number from {low} to {high}")
        self.student, self.model = model, copy.deepcopy(model).requires_grad_(False)

        def head() -> nn.Module:  # twice: what a norm of weights has computed cannot be copied
            return DINOProjectionHead(
                width(model), hidden, bottleneck, prototypes, batch_norm, freeze_last_layer=1, norm_last_layer=norm_last_layer
            )

        self.head, self.teacher_head = head(), head().requires_grad_(False)
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.loss = DINOLoss(prototypes, student_temp=student_temp, center_momentum=center_momentum)
        self.koleo_loss = KoLeoLoss()
        self.freeze, self.momentum, self.clip, self.koleo = freeze, momentum, clip, koleo
        self.temperatures, self.warmup = (warm_temp, teacher_temp), warmup
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.seen: Seen | None = None  # of the last batch

    def train(self, mode: bool = True):
        super().train(mode)
        self.model.eval()
        for module in self.model.modules():  # the teacher has no dropout, but its BatchNorm goes by the batch as the student's
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        if not batch.views:
            raise ValueError(
                "DINO compares views and the batch has none; expected augment=augment.digit_views() or photo_views()"
            )
        b = len(batch.images)
        whole = batch.views[0]
        with torch.no_grad():
            wanted = exact(self.teacher_head(self.model.features(whole)))
        found = [self.student.features(views) for views in batch.views]
        said = exact(self.head(torch.cat(found)))
        temperature = self.temperature(progress)
        with torch.no_grad():
            self.seen = Seen(found[0].detach(), ((wanted - self.loss.center[0]) / temperature).softmax(-1))
        loss = self.loss(list(wanted.split(b)), list(said.split(b)), teacher_temp=temperature)
        if self.koleo:
            loss = loss + self.koleo * sum(self.koleo_loss(exact(x)) for x in found[0].split(b)) / 2
        return {"loss": loss}

    def temperature(self, progress: float) -> float:
        """The teacher's, at that progress."""
        start, end = self.temperatures
        return end if progress >= self.warmup else start + (end - start) * progress / self.warmup

    def before_step(self, progress: float):
        """Cut every gradient to its norm, and leave the last layer alone at first."""
        for p in self.parameters():
            if self.clip and p.grad is not None:
                nn.utils.clip_grad_norm_(p, self.clip)
        self.head.cancel_last_layer_gradients(0 if progress < self.freeze else 1)

    def after_step(self, progress: float):
        """Move the teacher."""
        if not self.pairs:
            self.pairs = tensors(self.model, self.student) + tensors(self.teacher_head, self.head)
        average(self.pairs, (1 - self.momentum) * (cos(pi * progress) + 1) / 2)


def exact(x: Tensor) -> Tensor:
    """At least float32, whatever the precision of the model: differences of logits are small."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def width(model: nn.Module) -> int:
    """How wide the features of a model are. Raises ValueError for a model that does not say."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) or not hasattr(model, "features"):
        raise ValueError(f"{type(model).__name__} has no features(x) with a linear head behind them; take a ViT or a SmallCNN")
    return head.in_features
