"""DINO: a model learns to say of every view of an image what a slow copy of it says of the whole image."""

import copy
from math import cos, pi

import torch
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.optim import ema_update, tensors
from smallvit.pooling import Projected

from .collapse import Observation
from .objective import Objective


class DINO(Objective):
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
             `layers=1` leaves the head's hidden layers out, `hidden` and `batch_norm` with them, for a model that keeps them
             behind its pool, `Projected`.
             `neighbours=k` makes views agree with other images too, once the fraction `settle` of the run is over: what the
             teacher says of an image weighs 1 - `share`, and `share` the mean of what it says of the k images that are nearest
             to it, itself left out, by the cosine of its features of whole images, among the last `bank`; features before the
             projection that the model keeps, if it does: behind it, who is near is told the same already. From Van Gansbeke
             et al. 2020 (SCAN), arXiv:2005.12320, whose neighbours come from an earlier training, and Dwibedi et al. 2021
             (NNCLR), arXiv:2104.14548. Deformations alone never show that two styles are one class; neighbours do, where
             they are of one class.
             There is no patch-level term (iBOT, arXiv:2111.07832). Hiding up to half of the 16 tokens of every other digit,
             with a head of its own, brought nothing that two seeds could show, and cost a fifth more time: on validation
             images kNN 98.4 for 98.7, 16 of each class 96.8 for 96.8, fine-tuned on 100 labels 96.4 for 96.1.

    `batch.views` are made by an augmentation, `augment.digit_crops()` or `augment.photo_crops()`. `model` has `features`, b d,
    and a `head`, which stays as it is. What is saved and evaluated is the teacher.

    Raises   ValueError for a batch without views, or momentum, temperatures or fractions out of range.
    """

    needs_labels = False
    needs_views = True

    def __init__(
        self,
        model: nn.Module,
        *,
        prototypes: int = 1024,
        hidden: int = 256,
        bottleneck: int = 64,
        layers: int = 3,
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
        neighbours: int = 0,
        bank: int = 32_768,
        share: float = 0.8,
        settle: float = 0.25,
    ):
        super().__init__(copy.deepcopy(model).requires_grad_(False))
        self.student = model
        from lightly.loss import DINOLoss, KoLeoLoss
        from lightly.models.modules import DINOProjectionHead

        for name, value, low, high in (
            ("freeze", freeze, 0, 1), ("momentum", momentum, 0, 1), ("warmup", warmup, 0, 1), ("clip", clip, 0, 1e9),
            ("center_momentum", center_momentum, 0, 1), ("student_temp", student_temp, 1e-3, 10),
            ("teacher_temp", teacher_temp, 1e-3, 10), ("warm_temp", warm_temp, 1e-3, 10), ("koleo", koleo, 0, 1e3),
            ("neighbours", neighbours, 0, bank), ("share", share, 0, 1), ("settle", settle, 0, 1),
        ):  # fmt: skip
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected a number from {low} to {high}")
        if layers not in (1, 3):
            raise ValueError(f"layers is {layers}; expected 3, or 1 for a model that keeps the hidden ones")

        def head() -> nn.Module:  # twice: what a norm of weights has computed cannot be copied
            made = DINOProjectionHead(
                width(model), hidden, bottleneck, prototypes, batch_norm, freeze_last_layer=1, norm_last_layer=norm_last_layer
            )
            if layers == 1:
                made.layers = nn.Sequential(nn.Linear(width(model), bottleneck))
                nn.init.trunc_normal_(made.layers[0].weight, std=0.02)
                nn.init.zeros_(made.layers[0].bias)
            return made

        self.head, self.teacher_head = head(), head().requires_grad_(False)
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.loss = DINOLoss(prototypes, student_temp=student_temp, center_momentum=center_momentum)
        self.koleo_loss = KoLeoLoss()
        self.freeze, self.momentum, self.clip, self.koleo = freeze, momentum, clip, koleo
        self.temperatures, self.warmup = (warm_temp, teacher_temp), warmup
        self.neighbours, self.share, self.settle = neighbours, share, settle
        if neighbours:  # what the teacher made of the last images: its features, and where its head puts them, both of length 1
            self.register_buffer("bank_features", torch.zeros(bank, getattr(kept(model), "dim", width(model))))
            self.register_buffer("bank_places", torch.zeros(bank, bottleneck))
            self.register_buffer("bank_images", torch.zeros(bank, dtype=torch.float64))  # a number for each
            self.register_buffer("banked", torch.zeros((), dtype=torch.int64))
        self.pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def trained_model(self) -> nn.Module:
        """The student."""
        return self.student

    def train(self, mode: bool = True):
        super().train(mode)
        self.model.eval()
        for module in self.model.modules():  # the teacher has no dropout, but its BatchNorm goes by the batch as the student's
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        if not batch.views:
            raise ValueError(
                "DINO compares views and the batch has none; expected augment=augment.digit_crops() or photo_crops()"
            )
        self.set_progress(progress)
        b = len(batch.images)
        whole = batch.views[0]
        with torch.no_grad():
            wanted = exact(self.teacher_head(self.model.features(whole)))
        found = [self.student.features(views) for views in batch.views]
        said = exact(self.head(torch.cat(found)))
        temperature = self.temperature(progress)
        with torch.no_grad():
            center = self.loss.center.clone()
            self.observed = Observation(found[0].detach(), ((wanted - center[0]) / temperature).softmax(-1))
            shared = self.with_neighbours(batch.images, wanted, center[0], temperature, progress) if self.neighbours else wanted
        loss = self.loss(list(shared.split(b)), list(said.split(b)), teacher_temp=temperature)
        if shared is not wanted:  # the centre is that of what the teacher itself said
            self.loss.center.copy_(center)
            self.loss.update_center(torch.stack(wanted.split(b)))
        if self.koleo:
            loss = loss + self.koleo * sum(self.koleo_loss(exact(x)) for x in found[0].split(b)) / 2
        return {"loss": loss}

    def with_neighbours(self, images: Tensor, wanted: Tensor, center: Tensor, temperature: float, progress: float) -> Tensor:
        """Logits whose softmax is the teacher's target, its neighbours' share included, (2 b) k; and banks these images."""
        feature, behind = before_and_behind(self.model, images)
        place = nn.functional.normalize(exact(self.teacher_head.layers(behind)), dim=-1)
        feature = nn.functional.normalize(exact(feature), dim=-1)
        number = numbered(images)
        if len(images) > len(self.bank_features):
            raise ValueError(
                f"the bank holds {len(self.bank_features)} images and a batch {len(images)}; expected it to be larger"
            )
        target, full = wanted, min(int(self.banked), len(self.bank_features))
        if progress >= self.settle and full >= self.neighbours:
            with torch.autocast(images.device.type, enabled=False):  # half precision takes others for the nearest
                likeness = feature @ self.bank_features[:full].T
            likeness.masked_fill_(number[:, None] == self.bank_images[:full], -torch.inf)  # no image is its own
            alike, near = likeness.topk(self.neighbours, dim=1)
            theirs = alike.isfinite()
            if bool(theirs.any()):
                target = self.mixed(wanted, self.bank_places[near], theirs, center, temperature)
        at = (self.banked + torch.arange(len(images), device=images.device)) % len(self.bank_features)
        self.bank_features[at], self.bank_places[at], self.bank_images[at] = feature, place, number
        self.banked += len(images)
        return target

    def mixed(self, wanted: Tensor, places: Tensor, counts: Tensor, center: Tensor, temperature: float) -> Tensor:
        """Logits of the target in which the images at these places of the head, b k p, have their share, those that count, b k.

        An image with none keeps its own.
        """
        theirs = exact(self.teacher_head.last_layer(places))
        own, others = (((logits - center) / temperature).softmax(-1) for logits in (wanted, theirs))
        number = counts.sum(1, keepdim=True)
        others = (others * counts[..., None]).sum(1) / number.clamp_min(1)
        share = (self.share * (number > 0)).repeat(2, 1)
        target = (1 - share) * own + share * others.repeat(2, 1)
        return center + temperature * target.clamp_min(torch.finfo(target.dtype).tiny).log()

    def temperature(self, progress: float) -> float:
        """The teacher's, at that progress."""
        start, end = self.temperatures
        return end if progress >= self.warmup else start + (end - start) * progress / self.warmup

    def before_step(self, progress: float):
        """Cut every gradient to its norm, and leave the last layer alone at first."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self.clip and gradients:  # as clip_grad_norm_ of each, which takes a hundred small calls longer
            norms = torch.stack(torch._foreach_norm(gradients))
            torch._foreach_mul_(gradients, (self.clip / (norms + 1e-6)).clamp(max=1).unbind())
        self.head.cancel_last_layer_gradients(0 if progress < self.freeze else 1)

    def after_step(self, progress: float):
        """Move the teacher."""
        if not self.pairs:
            self.pairs = tensors(self.model, self.student) + tensors(self.teacher_head, self.head)
        ema_update(self.pairs, (1 - self.momentum) * (cos(pi * progress) + 1) / 2)


def exact(x: Tensor) -> Tensor:
    """At least float32, whatever the precision of the model: differences of logits are small."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def numbered(images: Tensor) -> Tensor:
    """A number for each image, b, that the same image has whenever it comes."""
    flat = images.flatten(1).double()
    return (flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device).sin()).sum(1)


def kept(model: nn.Module) -> Projected | None:
    """What the model keeps of a projection, if it does."""
    pool = getattr(model, "pool", None)
    return pool if isinstance(pool, Projected) else None


def before_and_behind(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features before and behind the projection that a model keeps, both b d; twice the same where it keeps none."""
    projected = kept(model)
    if projected is None:
        return (feature := model.features(x)), feature
    tokens, size = model.tokens(x)
    feature = projected.pool(tokens, size, len(model.prefix))
    return feature, projected.layers(feature)


def width(model: nn.Module) -> int:
    """How wide the features of a model are. Raises ValueError for a model that does not say."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) or not hasattr(model, "features"):
        raise ValueError(
            f"{type(model).__name__} has no features(x) with one linear head behind them; take a ViT with any pool but"
            " DistilledTokens, or a SmallCNN"
        )
    return head.in_features
