"""Semi-supervised training: labelled and unlabelled images in each step."""

import copy
from collections.abc import Sequence
from functools import cached_property
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.augment import Augmentation, Batch
from smallvit.augment.check import check_pixel_transforms
from smallvit.optim import module_pairs, tensors_in

from .objective import Objective, Unlabelled, check_option_range
from .supervised import cross_entropy

ALIGNMENT_MOMENTUM = 0.999  # of the mean prediction for distribution alignment
SMALL = 1e-6  # added to both distributions that are aligned


class SemiSupervised(Objective):
    """The objective of semi-supervised training: the cross-entropy of the labelled images, and a second term for unlabelled
    images. For the second term, a target is predicted from a weakly augmented view of each unlabelled image (the weak view).
    The model learns to predict this target from a strongly augmented view of the same image (the strong view).

    weak         transforms that make the weak view, such as `augment.digits(0.3)`; () leaves the images unchanged.
    strong       transforms that make the strong view, such as `augment.strong_digits()`. None: the model learns from the weak
                 view (pseudo-labels).
    ratio        number of unlabelled images in a step for each labelled image.
    weight       the weight of the second term; the cross-entropy of the labelled images has the weight 1.
    ramp         fraction of the run in which the weight rises, as weight * exp(-5 (1 - progress / ramp)^2); 0: it is constant.
    threshold    targets whose largest probability is smaller have a loss of 0. They are still counted in the mean.
    hard         mixes hard and soft targets: `hard` times the one-hot predicted class plus 1 - `hard` times the probabilities.
    temperature  divides the logits of the soft targets; values below 1 make them sharper.
    align        True: distribution alignment. Before the threshold, the probability of each class is multiplied by its share
                 among the labelled images, and divided by its mean prediction, a moving average over the steps.
    momentum     > 0: an exponential moving average of the model (EMA teacher) with this momentum predicts the targets. 0: the
                 model itself predicts them.
    loss         "cross_entropy", or "squared": the squared difference of the probabilities, summed over the classes.

    The defaults are those of FixMatch. Other methods are other options:

        partial(SemiSupervised, weak=w, strong=s)                                                       FixMatch
        partial(SemiSupervised, weak=w, strong=s, align=True)                                           and alignment
        partial(SemiSupervised, weak=w, ramp=0.4)                                                       pseudo-labels
        partial(SemiSupervised, weak=w, strong=w, momentum=0.99, threshold=0.0, hard=0.0, loss="squared", weight=8.0, ramp=0.4)
                                                                                                        mean teacher
        partial(SemiSupervised, weak=w, strong=s, threshold=0.8, hard=0.0, temperature=0.4)             UDA

    The unlabelled images are all training images except the validation images, including the labelled ones, as in the papers.
    Their labels are never read. Their order and each of their views have their own random streams. With `Run(ema=...)` > 0, the
    evaluated model is the EMA of the trained weights, as in every run. It is not the teacher.

    Paper    FixMatch: Sohn et al. 2020, arXiv:2001.07685. Pseudo-labels: Lee 2013, ICML workshop, with the threshold of later
             work. Mean teacher: Tarvainen and Valpola 2017, arXiv:1703.01780; its teacher starts as a copy, and its momentum in
             step n is at most 1 - 1/n. Distribution alignment: Berthelot et al. 2020 (ReMixMatch), arXiv:1911.09785. UDA: Xie
             et al. 2020, arXiv:1904.12848. EMA teacher with a threshold: Cai et al. 2022 (Semi-ViT), arXiv:2208.05688.
    Off      `weight=0` equals `Supervised`, bit for bit, and reads no unlabelled images.
    Departs  The weak view has a separate forward pass without gradient; FixMatch's code has one pass for all images. This
             makes a difference for BatchNorm only, which normalizes the weak views separately. The ramp of Lee is linear. The
             mean prediction is the plain mean during the first 1,000 steps, then a moving average with momentum 0.999;
             ReMixMatch uses the mean of 128 batches. The teacher is in evaluation mode, so dropout is off, and BatchNorm uses
             its running statistics.
    Raises   ValueError for a batch without views or with views of another size, for options out of range, for transforms that
             change targets or make several views, for distribution alignment without class counts, and for options with which
             the second term has no gradient, because the target is the model's own prediction for the same view.
    """

    second_pass = False
    stackable = True  # `forward` changes only buffers and the teacher, and a stack keeps those of each run
    count: Tensor
    class_shares: Tensor
    mean_prediction: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        weak: tuple[Augmentation, ...],
        strong: tuple[Augmentation, ...] | None = None,
        ratio: int = 7,
        weight: float = 1.0,
        ramp: float = 0.0,
        threshold: float = 0.95,
        hard: float = 1.0,
        temperature: float = 1.0,
        align: bool = False,
        momentum: float = 0.0,
        loss: str = "cross_entropy",
    ):
        super().__init__(model)
        check_option_range(
            weight=(weight, 0, 1e6), ramp=(ramp, 0, 1), threshold=(threshold, 0, 1), hard=(hard, 0, 1),
            temperature=(temperature, 1e-3, 10), momentum=(momentum, 0, 1),
        )  # fmt: skip
        if type(ratio) is not int or not 1 <= ratio <= 1_000:
            raise ValueError(f"ratio is {ratio!r}; expected the number of unlabelled images for each labelled one, 1 to 1000")
        if loss not in ("cross_entropy", "squared"):
            raise ValueError(f"loss is {loss!r}; expected 'cross_entropy' or 'squared'")
        if not isinstance(align, bool):
            raise ValueError(f"align is {align!r}; expected True for distribution alignment, or False")
        check_pixel_transforms("weak", weak)
        if strong is not None:
            check_pixel_transforms("strong", strong)
        elif weight and not (hard or momentum or align or temperature != 1):
            raise ValueError(
                "with strong=None and hard=0 the model learns its own prediction for the same view, which has no gradient; set "
                "strong to the transforms of another view, or hard=1.0 for pseudo-labels"
            )
        if weight and getattr(model, "divides_batches", False):
            raise ValueError(
                f"a {type(model).__name__} divides a batch among its members, and {type(self).__name__} has labelled and "
                "unlabelled images in one batch; expected a single model"
            )
        if weight:
            self.unlabelled = Unlabelled(ratio, (weak,) if strong is None else (weak, strong))
        self.weight, self.ramp, self.threshold, self.hard = weight, ramp, threshold, hard
        self.temperature, self.align, self.momentum, self.squared = temperature, align, momentum, loss == "squared"
        self.teacher: Any = copy.deepcopy(model).requires_grad_(False).eval() if weight and momentum else None
        self.pairs: list[tuple[nn.Module, nn.Module]] = []  # of the teacher and the model
        if weight and (momentum or align):
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # of the steps that were taken

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective; see `Objective`. `run` is
        a `Run`, the settings of a training run.
        """
        if run.unlabelled and run.pseudo_labels is None:
            raise ValueError(
                f"unlabelled=True hides all labels and {cls.__name__} reads those of the labelled images; remove "
                f"unlabelled=True: {cls.__name__} always uses the unlabelled images too"
            )
        super().check_run(run)

    def set_class_counts(self, counts: Tensor):
        """Create the buffers for distribution alignment, if it is used: the share of each class, and the mean prediction.
        `counts` is the number of labelled images of each class, shape (classes). The training loop calls this method before the
        first step.
        """
        if self.weight and self.align:
            self.register_buffer("class_shares", counts.float() / counts.sum(), persistent=False)
            self.register_buffer("mean_prediction", torch.zeros_like(self.class_shares))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        """Load the tensors of this module. Raise ValueError for those of distribution alignment before they are created."""
        needed = self.weight and self.align and not hasattr(self, "mean_prediction")
        if needed and f"{prefix}mean_prediction" in state_dict:
            raise ValueError("the state has a mean prediction (align=True); call set_class_counts(counts) before you load it")
        super()._load_from_state_dict(state_dict, prefix, *others)

    @cached_property
    def scheduled_modules(self) -> list[Any]:
        """Return a list of the modules of the model and of the teacher whose behavior changes during the training run."""
        return [module for module in self.modules() if isinstance(getattr(module, "progress", None), float)]

    def train(self, mode: bool = True):
        """Switch the model to training mode (`mode` True) or evaluation mode. The teacher stays in evaluation mode.

        The objective itself is returned.
        """
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss", and the share of the targets that passed the threshold
        under the key "accepted". `progress` is the finished fraction of the training run, from 0 to 1.

        `batch.views` are the weak view and the strong view of the unlabelled images, or the weak view only.
        """
        if not self.weight:
            return {"loss": cross_entropy(self.model(batch.images), batch.targets)}
        if self.unlabelled is None or len(batch.views) != len(self.unlabelled.views):
            raise ValueError(
                f"SemiSupervised learns from views of unlabelled images and the batch has {len(batch.views)}; train it with "
                "smallvit.fit, which makes them, or put them into batch.views"
            )
        view = batch.views[-1]
        if view.shape[1:] != batch.images.shape[1:]:
            raise ValueError(
                f"the labelled images are {tuple(batch.images.shape[1:])} and the views {tuple(view.shape[1:])}; expected the "
                "same channels, height and width: remove Warp(size=...), or use it for both"
            )
        # The pass with gradients comes first: autocast would keep weights of half precision from a pass without.
        logits, prediction = self.model(torch.cat([batch.images, view])).split([len(batch.images), len(view)])
        with torch.no_grad():
            target, accepted = self.targets(self.predict(batch.views, prediction))
        if self.squared:
            each = (prediction.softmax(-1, dtype=target.dtype) - target).square().sum(-1)
        else:
            each = -(target * prediction.log_softmax(-1, dtype=target.dtype)).sum(-1)
        weight = self.weight
        if self.ramp and progress < self.ramp:
            weight *= exp(-5 * (1 - progress / self.ramp) ** 2)
        return {"loss": cross_entropy(logits, batch.targets) + weight * (accepted * each).mean(), "accepted": accepted.mean()}

    def predict(self, views: Sequence[Tensor], prediction: Tensor) -> Tensor:
        """Return the logits for the weak view (the first one of `views`), from which the targets are computed. `prediction` are
        the logits of the model for the last one of `views`, which it learns from. If there is a teacher, it is updated first,
        but not in the second pass of a step of `SAM`.
        """
        if (self.momentum or self.align) and not self.second_pass:
            self.count += 1
        if self.teacher is not None:
            self.pairs = self.pairs or module_pairs(self.teacher, self.model)
            for average, now in () if self.second_pass else tensors_in(self.pairs):
                if average.is_floating_point():
                    average += (now - average) * self.newest_share(self.momentum, average.dtype)
            return self.teacher(views[0])
        return self.model(views[0]) if len(views) > 1 else prediction.detach()

    def newest_share(self, momentum: float, dtype: torch.dtype) -> Tensor:
        """Return the weight of the newest value in a moving average: 1 / n in step n, but at least 1 - `momentum`. It has the
        data type of the average, but at least float32.
        """
        return (1 / self.count.to(torch.promote_types(dtype, torch.float32))).clamp_min(1 - momentum)

    def targets(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets for unlabelled images, shape (batch, classes), and for each of them 1 if it passes the threshold,
        otherwise 0. `logits` are the predictions from which the targets are computed.
        """
        q = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if self.align:
            q = self.aligned(q)
        largest, predicted = q.max(-1, keepdim=True)
        if self.temperature != 1:
            q = (q.clamp_min(torch.finfo(q.dtype).tiny).log() / self.temperature).softmax(-1)
        target = torch.lerp(q, torch.zeros_like(q).scatter(-1, predicted, 1.0), self.hard)
        return target, (largest.squeeze(-1) >= self.threshold).to(q.dtype)

    def aligned(self, q: Tensor) -> Tensor:
        """Return probabilities, shape (batch, classes), after distribution alignment: multiplied by the share of each class
        among the labelled images, divided by its mean prediction, and normalized. The mean prediction is updated first, but not
        in the second pass of a step of `SAM`.
        """
        if not hasattr(self, "class_shares"):
            raise ValueError("align=True needs the class sizes; call set_class_counts(counts) before forward")
        if not self.second_pass:
            self.mean_prediction += (q.mean(0) - self.mean_prediction) * self.newest_share(ALIGNMENT_MOMENTUM, q.dtype)
        q = q * ((self.class_shares + SMALL) / (self.mean_prediction + SMALL))
        return q / q.sum(-1, keepdim=True)
