"""DINO: self-distillation without labels."""

from functools import partial
from math import cos, pi
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smallvit.attention import at_least_float32
from smallvit.augment import Batch, MultiCrop
from smallvit.components import options
from smallvit.flops import reduces
from smallvit.pooling import Projected
from smallvit.slot_checks import check_integers
from smallvit.vit import ViT

from .collapse import Observation
from .dino_parts import NeighborBank, PatchTerm, image_hashes, projection_head, student_and_teacher
from .mae import grid_and_patch
from .objective import check_option_range, check_views
from .teacher import TeacherObjective


class DINO(TeacherObjective):
    """The objective DINO, self-distillation without labels: a student learns to give the same output as its teacher for
    different views of an image. The teacher is an exponential moving average (EMA) of the student.

    The student sees all views, the teacher only the two global views. The teacher is `.model`, which is saved and evaluated.
    `batch.views` come from `augment.digit_crops()` or `augment.photo_crops()`. The model must have a method
    `features(x)`, which returns (batch, width), and a linear `head`, which is not trained.

    Head     lightly's `DINOProjectionHead`: a MLP `hidden` -> `hidden` -> `bottleneck`, normalized, then `prototypes`
             directions, which are frozen for the first fraction `freeze` of the run. Their length is 1, or is learned with
             `norm_last_layer=False`. `layers=1` leaves out the hidden layers, for a model that has them after its pool
             (`Projected`). Then `hidden` and `batch_norm` act on the head of `patches` only; they still change which random
             numbers are drawn. `copy.deepcopy` may fail with this head.
    Paper    Caron et al. 2021, arXiv:2104.14294. The teacher starts equal to the student and has no gradient, dropout or
             drop-path. Its EMA momentum rises from `momentum` to 1 in a cosine. Loss: lightly's `DINOLoss`, the cross-entropy
             over all pairs of a teacher's view and another view of the student, with temperature `student_temp` for the
             student. The teacher's temperature rises linearly from `warm_temp` to `teacher_temp` over the first fraction
             `warmup` of the run; its center follows the teacher's mean with momentum `center_momentum`. The gradient of each
             parameter is clipped to norm `clip` separately (0: no clipping), before the run's own `clip`, which is best set to
             0.
    Departs  Small: 1,024 prototypes, a head of width 256 and a bottleneck of 64, where ImageNet had 65,536, 2,048 and 256.
             `momentum` starts at 0.99, the paper's at 0.996, because runs are shorter. BatchNorm in the head, which the paper
             leaves out for ViTs: without it, a narrow ViT ends in the uniform collapse on digits, because its
             untrained features all point in nearly the same direction. Weight decay is the run's and does not rise. The teacher
             starts as a copy, which some public examples forget.
             `koleo` > 0 adds lightly's `KoLeoLoss` of the student's features, the mean over the two global views, with that
             weight. It spreads the features (Sablayrolles et al., arXiv:1806.03198, as in DINOv2).
             `neighbors=k` adds targets of similar images after the fraction `settle` of the run. An image's own target then
             has weight 1 - `share`, and the mean of the teacher's outputs for its k nearest images has weight `share`. Nearest
             means the largest cosine of the teacher's features of whole images among the last `bank` images, without the image
             itself. So images must not change: only `MultiCrop` may be in `augment`. For a model with `Projected`, features
             before the projection are used, because the projection is trained to give the same output for neighbors. From Van
             Gansbeke et al. 2020 (SCAN), arXiv:2005.12320, where neighbors come from an earlier training, and Dwibedi et al.
             2021 (NNCLR), arXiv:2104.14548. Deformations alone never show that two styles are one class; neighbors do, where
             they are of one class.
             `patches` > 0 adds the patch term of iBOT (Zhou et al. 2021, arXiv:2111.07832) with that weight (the paper: 1). In
             half of the student's global views, the share `patch_ratio` of the patches is hidden (iBOT draws a share from 0.1
             to 0.5 for each view): their tokens are replaced by one learned token. The student predicts what the teacher, which
             sees the whole view, gives for these patches. The loss is the cross-entropy, averaged over the hidden patches of a
             view and over all views, with 0 for a view without hidden patches. The teacher's temperature rises from `warm_temp`
             to `patch_temp` over `warmup`, and its center is that of all its patches. Patches have a head of their own, as in
             DINOv2. Hidden patches are drawn uniformly, not in blocks: on small grids, blocks hide the middle many times as
             often as the border. Hidden pixels are set to 0, so that tokens that see beyond their patch do not show them (see
             `MAE`).

    Raises   ValueError for a batch without views, for a model without features or a linear head, for options out of range, and
             for `patches` with a model that is not a `ViT` or reduces tokens.
    """

    needs_views = True
    added_options: ClassVar[dict[str, Any]] = {"patches": 0.0, "patch_ratio": 0.3, "patch_temp": 0.07}

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
        neighbors: int = 0,
        bank: int = 32_768,
        share: float = 0.8,
        settle: float = 0.25,
        patches: float = 0.0,
        patch_ratio: float = 0.3,
        patch_temp: float = 0.07,
    ):
        super().__init__(model)
        from lightly.loss import DINOLoss, KoLeoLoss

        check_option_range(
            freeze=(freeze, 0, 1), momentum=(momentum, 0, 1), warmup=(warmup, 0, 1), clip=(clip, 0, 1e9),
            center_momentum=(center_momentum, 0, 1), student_temp=(student_temp, 1e-3, 10),
            teacher_temp=(teacher_temp, 1e-3, 10), warm_temp=(warm_temp, 1e-3, 10), koleo=(koleo, 0, 1e3),
            neighbors=(neighbors, 0, bank), share=(share, 0, 1), settle=(settle, 0, 1), patches=(patches, 0, 1e3),
            patch_ratio=(patch_ratio, 0, 1), patch_temp=(patch_temp, 1e-3, 10),
        )  # fmt: skip
        widths = {"prototypes": prototypes, "hidden": hidden, "bottleneck": bottleneck}
        check_integers(**{name: (width, 1) for name, width in widths.items()}, bank=(bank, 0), neighbors=(neighbors, 0))
        if layers not in (1, 3):
            raise ValueError(f"layers is {layers}; expected 3, or 1 for a model that has the hidden layers itself")
        width = feature_width(model)

        make_head = partial(
            projection_head, hidden=hidden, bottleneck=bottleneck, prototypes=prototypes, batch_norm=batch_norm,
            norm_last_layer=norm_last_layer,
        )  # fmt: skip
        self.head, self.teacher_head = student_and_teacher(partial(make_head, width, layers))
        self.loss: Any = DINOLoss(prototypes, student_temp=student_temp, center_momentum=center_momentum)
        self.koleo_loss = KoLeoLoss()
        self.freeze, self.momentum, self.clip, self.koleo = freeze, momentum, clip, koleo
        self.temperatures, self.warmup = (warm_temp, teacher_temp), warmup
        self.settle, self.last_layer_is_frozen = settle, False
        before_projection = getattr(projected_pool(model), "dim", width)
        self.bank = NeighborBank(bank, before_projection, bottleneck, neighbors, share) if neighbors else None
        self.patches = patches
        self.patch_term: PatchTerm | None = None
        if patches:
            if not isinstance(model, ViT) or reduces(model):
                raise ValueError("patches needs a ViT with a token for each patch; use one with reduction=None, or patches=0")
            grid_and_patch(model, (model.image[0], model.image[1]))  # raises ValueError if patches are no equal parts
            tokens: int = model.prefix.shape[1]
            self.patch_term = PatchTerm(partial(make_head, tokens, 3), tokens, prototypes, patch_ratio, patch_temp)

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective: in addition to those that
        every objective refuses, other transforms than `MultiCrop` with `neighbors`. `run` is a `Run`.

        Neighbors are images of the batch. If a transform changes them, an image is its own nearest neighbor, unrecognized.
        """
        super().check_run(run)
        changed = [t for t in run.augment if not isinstance(t, MultiCrop) and not getattr(t, "off", False)]
        if changed and options(run.objective)["neighbors"].default:
            raise ValueError(
                f"with neighbors, DINO must see the same pixels of an image each time, and augment has {changed[0]!r} outside "
                "of MultiCrop; expected this transform among those of the views, or neighbors=0"
            )

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch and, with the patch term, which patches of the student's views are hidden. The training loop calls
        this method before each step.
        """
        batch = super().prepare(batch)
        if self.patch_term is None or not self.draws_for(DINO):
            return batch
        return batch._replace(draws=(self.draw_hidden(self.patch_term, batch),))

    def draw_hidden(self, patch_term: PatchTerm, batch: Batch) -> Tensor:
        """Return which patches of the student's global views are hidden, shape (views, patches); see `PatchTerm`. Raise
        ValueError if the batch does not have two global views of each image.
        """
        check_views("DINO", batch)
        return patch_term.draw_hidden(batch.views[0], self.student.tokenizer.grid(batch.views[0].shape[-2:]))

    @property
    def student_heads(self) -> list[Any]:
        """The projection heads of the student: that of whole images and, with the patch term, that of patches."""
        return [self.head, *([self.patch_term.head] if self.patch_term else [])]

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the self-distillation loss of a batch under the key "loss". `progress` is the finished fraction of
        the training run, from 0 to 1. Raise ValueError if the batch does not have two global views of each image.
        """
        check_views("DINO", batch)
        b = len(batch.images)
        self.last_layer_is_frozen = progress < self.freeze
        hidden = None
        if self.patch_term is not None:
            (hidden,) = batch.draws or (self.draw_hidden(self.patch_term, batch),)
        with torch.no_grad():
            teacher_feature, teacher_patches = self.features_and_patches(self.model, batch.views[0])
            teacher_logits = at_least_float32(self.teacher_head(teacher_feature))
        feature, patches = self.features_and_patches(self.student, batch.views[0], hidden)
        features = [feature, *(self.student.features(views) for views in batch.views[1:])]
        student_logits = at_least_float32(self.head(torch.cat(features)))
        temperature = self.temperature(progress)
        with torch.no_grad():
            place, center = self.loss.center.data, self.loss.center.clone()
            targets = ((teacher_logits - center[0]) / temperature).softmax(-1)
            self.observed = Observation(features[0].detach(), targets)
            logits = teacher_logits
            if self.bank is not None:
                logits = self.with_neighbors(self.bank, batch.images, teacher_logits, center[0], temperature, progress)
        with torch.autocast(batch.images.device.type, enabled=False):  # half precision would find other neighbors for KoLeo
            loss = self.loss(list(logits.split(b)), list(student_logits.split(b)), teacher_temp=temperature)
            if self.koleo:
                loss = loss + self.koleo * sum(self.koleo_loss(at_least_float32(x)) for x in features[0].split(b)) / 2
        if logits is not teacher_logits:  # the center follows the teacher's own outputs
            self.loss.center.copy_(center)
            self.loss.update_center(torch.stack(teacher_logits.split(b)))
        if place.dtype == self.loss.center.dtype:  # lightly has put it elsewhere, where a CUDA graph does not read it
            self.loss.center.data = place.copy_(self.loss.center)
        if self.patch_term is not None:
            temperatures = self.temperature(progress, self.patch_term.temperature), self.loss.student_temp
            term = self.patch_term.loss(teacher_patches, patches, hidden, *temperatures, self.loss.center_momentum)
            loss = loss + self.patches * term
        return {"loss": loss}

    def features_and_patches(self, model: Any, views: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the features of views, shape (views, width), and the tokens of their patches, shape (views, patches, width).
        The tokens are None without the patch term. `hidden` (views, patches) is True for patches that the model must not see.
        """
        return (model.features(views), None) if self.patch_term is None else self.patch_term.read(model, views, hidden)

    def with_neighbors(
        self, bank: NeighborBank, images: Tensor, logits: Tensor, center: Tensor, temperature: float, progress: float
    ) -> Tensor:
        """Return logits of mixed targets: the teacher's target for each image, averaged with its targets for similar images in
        the bank. A target is softmax((logits - center) / temperature); `logits`, shape (2 batch, prototypes), are the teacher's
        for two views of each image, and `center` is their moving mean. `progress` is the finished fraction of the run. Before
        `settle`, the logits are returned unchanged. The images are then put into the bank.
        """
        feature, projected = features_before_and_after_projection(self.model, images)
        projection = nn.functional.normalize(at_least_float32(self.teacher_head.layers(projected)), dim=-1)
        feature, ids, mixed = nn.functional.normalize(at_least_float32(feature), dim=-1), image_hashes(images), logits
        if progress >= self.settle and (found := bank.nearest(feature, ids)) is not None:
            projections, valid = found
            theirs = at_least_float32(self.teacher_head.last_layer(projections))
            mixed = bank.mix(logits, theirs, valid, center, temperature)
        bank.add(feature, projection, ids)
        return mixed

    def phase(self, progress: float) -> Any:
        """Return what `forward` computes from `progress`, the finished fraction of the run; see `Objective.phase`."""
        patches = self.patch_term and self.temperature(progress, self.patch_term.temperature)
        settled = self.bank is not None and progress >= self.settle
        return progress < self.freeze, settled, self.temperature(progress), patches

    def temperature(self, progress: float, end: float | None = None) -> float:
        """Return the softmax temperature of the teacher at one point of the training run. `progress` is the finished fraction
        of the run, from 0 to 1. `end` is the temperature after the warm-up; by default that of whole images.
        """
        start, end = self.temperatures[0], self.temperatures[1] if end is None else end
        return end if progress >= self.warmup else start + (end - start) * progress / self.warmup

    def before_step(self, progress: float):
        """Clip the gradient of each parameter separately, before the optimizer step. At the start of the run, also discard the
        gradient of the head's last layer. `progress` is the finished fraction of the run, from 0 to 1.

        The last layer is frozen at the start of the run.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self.clip and gradients:  # as clip_grad_norm_ of each parameter, without a hundred small calls
            norms = torch.stack(torch._foreach_norm(gradients))  # pyright: ignore
            torch._foreach_mul_(gradients, (self.clip / (norms + 1e-6)).clamp(max=1).unbind())  # pyright: ignore
        for head in self.student_heads:
            head.cancel_last_layer_gradients(0 if progress < self.freeze else 1)

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the last layers of the student's heads at the start of the run, when they are frozen, and an
        empty list later.
        """
        return [p for head in self.student_heads for p in head.last_layer.parameters()] if self.last_layer_is_frozen else []

    def student_weight(self, progress: float) -> float:
        """Return 1 - the momentum of the teacher, which rises to 1 in a cosine. `progress` is the finished fraction of the
        run, from 0 to 1.
        """
        return (1 - self.momentum) * (cos(pi * progress) + 1) / 2

    def teachers_and_students(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs of modules with the same architecture, a teacher and its student: the models and their heads."""
        teachers = [self.model, self.teacher_head, *([self.patch_term.teacher_head] if self.patch_term else [])]
        return [*zip(teachers, [self.student, *self.student_heads])]


def projected_pool(model: nn.Module) -> Projected | None:
    """Return the pooling layer of a model if its class is `Projected` (a pooling followed by a trained MLP), else None. DINO
    compares images by the features before this MLP.
    """
    pool = getattr(model, "pool", None)
    return pool if isinstance(pool, Projected) else None


def features_before_and_after_projection(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of features for the images `x`: before and after the MLP that follows the pooling. If the pooling
    layer of the model has no MLP, the two tensors are the same.

    Only the pooling layer `Projected` has an MLP.
    """
    projected = projected_pool(model)
    if projected is None:
        return (feature := model.features(x)), feature
    tokens, size = model.tokens(x)
    feature = projected.pool(tokens, size, len(model.prefix))
    return feature, projected.layers(feature)


def feature_width(model: nn.Module) -> int:
    """Return the number of features that enter the head of a model. Raise ValueError if the model has no method `features` or
    if its head is not a single linear layer, as in a `ViT` with 0 classes.
    """
    head = getattr(model, "head", None)
    if isinstance(model, ViT) and isinstance(head, nn.Identity):
        raise ValueError(
            "this ViT was built with 0 classes, so it has no head; build it with at least 1 class (in timm num_classes=1), "
            "although the head is not trained"
        )
    if not isinstance(head, nn.Linear) or not hasattr(model, "features"):
        raise ValueError(
            f"{type(model).__name__} has no features(x) followed by one linear head; give it a method features(x) that "
            "returns (batch, width), and an attribute head, an nn.Linear; or use a SmallCNN, or a ViT with any pool but "
            "DistilledTokens (from_timm makes a ViT of a timm model)"
        )
    return head.in_features
