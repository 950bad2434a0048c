"""DINO: self-distillation without labels."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, pi, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.flops import reduces
from smallvit.optim import ema_update, module_pairs, tensors_in
from smallvit.pooling import Projected
from smallvit.vit import ViT, check_integers

from .collapse import Observation
from .mae import grid_and_patch, pixels_of_patches
from .objective import Objective, as_float32, check_option_range

MASKED_VIEWS = 0.5  # of the global views of the student, for the patch term


class DINO(Objective):
    """The objective DINO, self-distillation without labels: a student learns to give the same output as its teacher for
    different views of an image. The teacher is an exponential moving average (EMA) of the student.

    The student sees all views, the teacher only the two global views. The teacher is `.model`, which is saved and evaluated.
    `batch.views` come from `augment.digit_crops()` or `augment.photo_crops()`. The model must have a method
    `features(x)`, which returns (batch, width), and a linear `head`, which is not trained.

    Head     lightly's `DINOProjectionHead`: a MLP `hidden` -> `hidden` -> `bottleneck`, normalized, then `prototypes`
             directions, which are frozen for the first fraction `freeze` of the run. Their length is 1, or is learned with
             `norm_last_layer=False`. `layers=1` leaves out the hidden layers, for a model that has them after its pool
             (`Projected`). Then `hidden` and `batch_norm` act on the head of `patches` only; they still change which random
             numbers are drawn. `copy.deepcopy` does not work with this head.
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
             `neighbours=k` adds targets of similar images after the fraction `settle` of the run. An image's own target then
             has weight 1 - `share`, and the mean of the teacher's outputs for its k nearest images has weight `share`. Nearest
             means the largest cosine of the teacher's features of whole images among the last `bank` images, without the image
             itself. For a model with `Projected`, features before the projection are used, because the projection is trained to
             give the same output for neighbors. From Van Gansbeke et al. 2020 (SCAN), arXiv:2005.12320, where neighbors come
             from an earlier training, and Dwibedi et al. 2021 (NNCLR), arXiv:2104.14548. Deformations alone never show that two
             styles are one class; neighbors do, where they are of one class.
             `patches` > 0 adds the patch term of iBOT (Zhou et al. 2021, arXiv:2111.07832) with that weight (the paper: 1). In
             half of the student's global views, the share `patch_ratio` of the patches is hidden: their tokens are replaced by
             one learned token. The student predicts what the teacher, which sees the whole view, gives for these patches. The
             loss is the cross-entropy, averaged over the hidden patches of a view and over all views, with 0 for a view without
             hidden patches. The teacher's temperature rises from `warm_temp` to `patch_temp` over `warmup`, and its center is
             that of all its patches. Patches have a head of their own, as in DINOv2. Hidden patches are drawn uniformly, not in
             blocks: on small grids, blocks hide the middle many times as often as the border. Hidden pixels are set to 0, so
             that tokens that see beyond their patch do not show them (see `MAE`). In an earlier trial on digits, hiding up to
             half of the 16 tokens of every other digit gave no difference that two seeds could show and cost a fifth more time.
             On validation images: kNN 98.4 instead of 98.7, few-shot probe (16 images of each class) 96.8 instead of 96.8,
             fine-tuned on 100 labels 96.4 instead of 96.1.

    Raises   ValueError for a batch without views, for a model without features or a linear head, for options out of range, and
             for `patches` with a model that is not a `ViT` or reduces tokens.
    """

    needs_labels = False
    needs_views = True
    bank_features: Tensor
    bank_projections: Tensor
    bank_ids: Tensor
    bank_count: Tensor
    patch_center: Tensor
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
        neighbours: int = 0,
        bank: int = 32_768,
        share: float = 0.8,
        settle: float = 0.25,
        patches: float = 0.0,
        patch_ratio: float = 0.3,
        patch_temp: float = 0.07,
    ):
        super().__init__(copy.deepcopy(model).requires_grad_(False))
        from lightly.loss import DINOLoss, KoLeoLoss
        from lightly.models.modules import DINOProjectionHead

        check_option_range(
            freeze=(freeze, 0, 1), momentum=(momentum, 0, 1), warmup=(warmup, 0, 1), clip=(clip, 0, 1e9),
            center_momentum=(center_momentum, 0, 1), student_temp=(student_temp, 1e-3, 10),
            teacher_temp=(teacher_temp, 1e-3, 10), warm_temp=(warm_temp, 1e-3, 10), koleo=(koleo, 0, 1e3),
            neighbours=(neighbours, 0, bank), share=(share, 0, 1), settle=(settle, 0, 1), patches=(patches, 0, 1e3),
            patch_ratio=(patch_ratio, 0, 1), patch_temp=(patch_temp, 1e-3, 10),
        )  # fmt: skip
        widths = {"prototypes": prototypes, "hidden": hidden, "bottleneck": bottleneck}
        check_integers(**{name: (width, 1) for name, width in widths.items()}, bank=(bank, 0), neighbours=(neighbours, 0))
        if layers not in (1, 3):
            raise ValueError(f"layers is {layers}; expected 3, or 1 for a model that has the hidden layers itself")
        self.student: Any = model
        width = feature_width(model)

        def make_head(inputs: int, layers: int) -> Any:
            """Return a new projection head (a module) for DINO. `inputs` is the width of the features, and `layers` is the
            number of linear layers before the prototypes, 1 or 3.

            It is built twice, for student and teacher, because a head with weight norm cannot be deep-copied.
            """
            with warnings.catch_warnings():  # lightly calls a function of torch that will be removed, which no user can change
                warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
                head: Any = DINOProjectionHead(
                    inputs, hidden, bottleneck, prototypes, batch_norm, freeze_last_layer=1, norm_last_layer=norm_last_layer
                )
            if layers == 1:
                linear = nn.Linear(inputs, bottleneck)
                head.layers = nn.Sequential(linear)
                nn.init.trunc_normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
            return head

        self.head, self.teacher_head = make_head(width, layers), make_head(width, layers).requires_grad_(False)
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.loss: Any = DINOLoss(prototypes, student_temp=student_temp, center_momentum=center_momentum)
        self.koleo_loss = KoLeoLoss()
        self.freeze, self.momentum, self.clip, self.koleo = freeze, momentum, clip, koleo
        self.temperatures, self.warmup = (warm_temp, teacher_temp), warmup
        self.neighbours, self.share, self.settle = neighbours, share, settle
        if neighbours:  # the teacher's features of the last images and their projections in its head, both of length 1
            self.register_buffer("bank_features", torch.zeros(bank, getattr(projected_pool(model), "dim", width)))
            self.register_buffer("bank_projections", torch.zeros(bank, bottleneck))
            self.register_buffer("bank_ids", torch.zeros(bank, dtype=torch.int64))
            self.register_buffer("bank_count", torch.zeros((), dtype=torch.int64))
        self.patches, self.patch_ratio, self.patch_temp = patches, patch_ratio, patch_temp
        if patches:
            if not isinstance(model, ViT) or reduces(model):
                raise ValueError("patches needs a ViT with a token for each patch; use one with reduction=None, or patches=0")
            grid_and_patch(model, (model.image[0], model.image[1]))  # raises ValueError if patches are no equal parts
            tokens: int = model.prefix.shape[1]
            self.patch_head, self.patch_teacher_head = make_head(tokens, 3), make_head(tokens, 3).requires_grad_(False)
            self.patch_teacher_head.load_state_dict(self.patch_head.state_dict())
            self.hidden_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(tokens), std=0.02))
            self.register_buffer("patch_center", torch.zeros(prototypes))
        self.pairs: list[tuple[nn.Module, nn.Module]] = []  # of the teacher and the student
        set_teacher_mode(self.model, self.training)

    @property
    def student_heads(self) -> list[Any]:
        """The projection heads of the student: that of whole images and, with the patch term, that of patches."""
        return [self.head, *([self.patch_head] if self.patches else [])]

    @property
    def trained_model(self) -> Any:
        """Return the student, the model that the optimizer changes. The teacher is a moving average of the student."""
        return self.student

    def train(self, mode: bool = True):
        """Switch the student and its head to training mode (`mode` True) or evaluation mode. The teacher stays in evaluation
        mode, except for its BatchNorm layers: these get the same mode as the student, so that both normalize by the batch in
        training.

        The objective itself is returned.
        """
        super().train(mode)
        set_teacher_mode(self.model, mode)
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the self-distillation loss of a batch under the key "loss". `progress` is the finished fraction of
        the training run, from 0 to 1. Raise ValueError if the batch has no augmented views of its images.
        """
        if not batch.views:
            raise ValueError("DINO compares views and the batch has none; use augment=augment.digit_crops() or photo_crops()")
        b = len(batch.images)
        hidden = self.draw_hidden(batch.views[0]) if self.patches else None  # the first random draw of a step
        with torch.no_grad():
            teacher_feature, teacher_patches = self.features_and_patches(self.model, batch.views[0])
            teacher_logits = as_float32(self.teacher_head(teacher_feature))
        feature, patches = self.features_and_patches(self.student, batch.views[0], hidden)
        features = [feature, *(self.student.features(views) for views in batch.views[1:])]
        student_logits = as_float32(self.head(torch.cat(features)))
        temperature = self.temperature(progress)
        with torch.no_grad():
            center = self.loss.center.clone()
            targets = ((teacher_logits - center[0]) / temperature).softmax(-1)
            self.observed = Observation(features[0].detach(), targets)
            logits = teacher_logits
            if self.neighbours:
                logits = self.add_neighbours(batch.images, teacher_logits, center[0], temperature, progress)
        with torch.autocast(batch.images.device.type, enabled=False):
            loss = self.loss(list(logits.split(b)), list(student_logits.split(b)), teacher_temp=temperature)
        if logits is not teacher_logits:  # the center follows the teacher's own outputs
            self.loss.center.copy_(center)
            self.loss.update_center(torch.stack(teacher_logits.split(b)))
        if self.koleo:
            with torch.autocast(batch.images.device.type, enabled=False):  # half precision would find other neighbors
                loss = loss + self.koleo * sum(self.koleo_loss(as_float32(x)) for x in features[0].split(b)) / 2
        if hidden is not None:
            loss = loss + self.patches * self.patch_loss(teacher_patches, patches, hidden, progress)
        return {"loss": loss}

    def draw_hidden(self, views: Tensor) -> Tensor:
        """Return which patches of the student's global views are hidden, a boolean tensor of shape (views, patches). About half
        of the views have hidden patches, and in each of them the share `patch_ratio` of its patches is hidden, rounded, at
        least one patch.

        Patches are drawn on the CPU, so that a seed gives the same patches on every device.
        """
        n = prod(self.student.tokenizer.grid(views.shape[-2:]))
        count = max(round(self.patch_ratio * n), 1)
        order = torch.rand(len(views), n, device="cpu").argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        masked = torch.rand(len(views), 1, device="cpu") < MASKED_VIEWS
        return ((order < count) & masked).to(views.device)

    def features_and_patches(self, model: Any, views: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the features of views, shape (views, width), and the tokens of their patches, shape (views, patches, width).
        The tokens are None without the patch term. `hidden` (views, patches) is True for patches that the model must not see.
        """
        if not self.patches:
            return model.features(views), None
        with self.hidden_tokens(model, hidden):
            if hidden is not None:
                grid, image = model.tokenizer.grid(views.shape[-2:]), (views.shape[2], views.shape[3])
                views = views.masked_fill(pixels_of_patches(hidden, grid, image), 0.0)
            tokens, size = model.tokens(views)
        return model.pooled(tokens, size), tokens[:, len(model.prefix) :]

    @contextmanager
    def hidden_tokens(self, model: Any, hidden: Tensor | None) -> Iterator[None]:
        """Context manager inside which the tokenizer of `model` gives a learned token for each patch where `hidden` (views,
        patches) is True. None changes nothing.
        """
        if hidden is None:
            yield
            return

        def replace(module: nn.Module, inputs: tuple, tokens: Tensor) -> Tensor:
            """Return the tokens of the tokenizer, with the learned token in the place of hidden ones."""
            return torch.where(hidden[..., None], self.hidden_token.to(tokens.dtype), tokens)

        hook = model.tokenizer.register_forward_hook(replace)
        try:
            yield
        finally:
            hook.remove()

    def patch_loss(self, teacher_patches: Tensor, patches: Tensor, hidden: Tensor, progress: float) -> Tensor:
        """Return the patch term: the cross-entropy between the teacher's and the student's outputs for hidden patches, averaged
        over the hidden patches of each view and over all views. `teacher_patches` and `patches` are the tokens of teacher and
        student, shape (views, patches, width). `hidden` (views, patches) is True for hidden patches. `progress` is the finished
        fraction of the run.

        Then the center of the teacher's patches is updated.
        """
        temperature = self.temperature(progress, self.patch_temp)
        with torch.no_grad():
            targets = as_float32(self.patch_teacher_head(teacher_patches.flatten(0, 1)))
            probabilities = ((targets - self.patch_center) / temperature).softmax(-1)
        logits = as_float32(self.patch_head(patches.flatten(0, 1)))
        each = -(probabilities * (logits / self.loss.student_temp).log_softmax(-1)).sum(-1).view_as(hidden)
        with torch.no_grad():
            self.patch_center.lerp_(targets.mean(0).to(self.patch_center), 1 - self.loss.center_momentum)
        return ((each * hidden).sum(1) / hidden.sum(1).clamp_min(1)).mean()

    def add_neighbours(self, images: Tensor, logits: Tensor, center: Tensor, temperature: float, progress: float) -> Tensor:
        """Return logits of mixed targets: the teacher's target for each image, averaged with its targets for similar recent
        images. A memory bank stores features of recent `images`. A target is softmax((logits - center) / temperature); `logits`
        are the teacher's and `center` is their moving mean. `progress` is the finished fraction of the run; early in the run,
        `logits` are returned unchanged.

        Similar images are recent images whose features are nearest. `logits`, shape (2 batch, k), are those of two views of
        each image; they are returned unchanged until the run has settled and the bank has enough images. The images are then
        put into the bank.
        """
        feature, projected = features_before_and_after_projection(self.model, images)
        projection = nn.functional.normalize(as_float32(self.teacher_head.layers(projected)), dim=-1)
        feature = nn.functional.normalize(as_float32(feature), dim=-1)
        ids, size = image_hashes(images), len(self.bank_features)
        if len(images) > size:
            raise ValueError(f"the bank holds {size} images and a batch has {len(images)}; expected a larger bank")
        mixed, filled = logits, min(int(self.bank_count), size)
        if progress >= self.settle and filled >= self.neighbours:
            with torch.autocast(images.device.type, enabled=False):  # half precision would find other neighbors
                similarity = feature @ self.bank_features[:filled].to(feature).T
            similarity.masked_fill_(ids[:, None] == self.bank_ids[:filled], -torch.inf)  # no image is its own neighbor
            values, nearest = similarity.topk(self.neighbours, dim=1)
            valid = values.isfinite()
            if bool(valid.any()):
                mixed = self.mix_targets(logits, self.bank_projections[nearest], valid, center, temperature)
        index = (self.bank_count + torch.arange(len(images), device=images.device)) % size
        self.bank_features[index] = feature.to(self.bank_features)
        self.bank_projections[index] = projection.to(self.bank_projections)
        self.bank_ids[index] = ids
        self.bank_count += len(images)
        return mixed

    def mix_targets(self, logits: Tensor, projections: Tensor, valid: Tensor, center: Tensor, temperature: float) -> Tensor:
        """Average the teacher's target for each image with its mean target for similar images (neighbors). A target is
        softmax((logits - center) / temperature); the mean is converted back to logits, which are returned. `logits` belong to
        the images. `projections` (batch, neighbors, width) are features of the neighbors, from which the teacher's last layer
        computes their logits. `valid` (batch, neighbors) is False for neighbors to ignore.

        The neighbors have the weight `share`, an option of DINO. An image without valid neighbors keeps its own target.
        """
        neighbour_logits = as_float32(self.teacher_head.last_layer(projections))
        own, others = (((z - center) / temperature).softmax(-1) for z in (logits, neighbour_logits))
        count = valid.sum(1, keepdim=True)
        others = (others * valid[..., None]).sum(1) / count.clamp_min(1)
        share = (self.share * (count > 0)).repeat(2, 1)
        target = (1 - share) * own + share * others.repeat(2, 1)
        return center + temperature * target.clamp_min(torch.finfo(target.dtype).tiny).log()

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

    def after_step(self, progress: float):
        """Update the teacher after the optimizer step. Its weights are an exponential moving average of the student's weights.
        `progress` is the finished fraction of the run, from 0 to 1, and determines the momentum of the average.
        """
        if not self.pairs:
            teachers = [self.model, self.teacher_head, *([self.patch_teacher_head] if self.patches else [])]
            for teacher, student in zip(teachers, [self.student, *self.student_heads]):
                self.pairs += module_pairs(teacher, student)
        ema_update(tensors_in(self.pairs), (1 - self.momentum) * (cos(pi * progress) + 1) / 2)


def set_teacher_mode(teacher: nn.Module, mode: bool):
    """Switch a teacher to evaluation mode, except for its BatchNorm layers: these get the `mode` of the student (True in
    training), so that both normalize by the batch.
    """
    teacher.eval()
    for module in teacher.modules():
        module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)


def image_hashes(images: Tensor) -> Tensor:
    """Return one integer for each image, computed from its pixels, shape (batch,). Equal images get equal integers. By these
    numbers DINO recognizes an image in its memory bank of recent images, so that no image is its own neighbor.
    """
    flat = images.flatten(1).double()
    sums = (flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device).sin()).sum(1)
    return sums.view(torch.int64)  # the same bits; a model in half precision keeps integers as they are


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
    if its head is not a single linear layer.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) or not hasattr(model, "features"):
        raise ValueError(
            f"{type(model).__name__} has no features(x) followed by one linear head; use a SmallCNN, or a ViT with at least "
            "one class and any pool but DistilledTokens (from_timm makes a ViT of a timm model)"
        )
    return head.in_features
