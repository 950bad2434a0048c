"""A deep ensemble: several models of one kind, trained side by side, whose predictions are averaged."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from smallvit.slot_checks import check_integers, check_slots


class DeepEnsemble(nn.Module):
    """Several models of one kind as one model. Its class probabilities are the mean of those of its members. It is called like
    a ViT, `DeepEnsemble(image, channels, classes, of=..., count=...)`.

    of     the model of which there are several, such as `partial(ViT, ...)` or `SmallCNN`
    count  the number of members

    Each member has its own initial weights, and learns from its own part of each training batch: with `count=4`, a run with
    `batch=128` trains four models with 32 images each. So the members see other images, in another order and with other
    augmentation. The cost is that of `count` models.

    In evaluation, each member sees all images. The logits are the logarithms of the mean probabilities. The features are those
    of all members, side by side.

    Paper    Lakshminarayanan et al. 2017, arXiv:1612.01474, without adversarial training.
    Off      `count=1`: the probabilities are those of the model.
    Departs  The members are not entirely independent. The limit of the gradient's norm (`Run.clip`), the step of `SAM`, early
             stopping and the partners of `Mixup` and `CutMix` are common to them. The loss is a mean over the batch, so the
             gradient of a member is smaller by the factor `count`, which matters only for `clip` and `SAM`.
    Raises   ValueError for a `count` below 1, for members that are ensembles themselves, and for a training batch that cannot
             be divided among the members.
    """

    divides_batches = True  # in training, each image is seen by one member only

    def __init__(
        self, image: tuple[int, int], channels: int, classes: int, *, of: Callable[..., nn.Module], count: int = 4
    ):
        super().__init__()
        check_integers(count=(count, 1))
        check_slots(of=of)
        self.members = nn.ModuleList(of(image, channels, classes) for _ in range(count))
        if getattr(self.members[0], "divides_batches", False):
            kind = type(self.members[0]).__name__
            raise ValueError(f"of makes a {kind}, which has members itself; expected a single model, and a larger count")

    def check_batch(self, size: int):
        """Raise ValueError if a training batch of `size` images cannot be divided among the members."""
        count = len(self.members)
        if size % count:
            raise ValueError(
                f"a batch of {size} images cannot be divided among {count} members; expected a multiple of {count}, such as "
                f"batch={count * max(size // count, 1)}"
            )

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the images (batch, channels, height, width) that each member sees: in training its part of the batch, and in
        evaluation all images.
        """
        if not self.training:
            return [x] * len(self.members)
        self.check_batch(len(x))
        return list(x.chunk(len(self.members)))

    def features(self, x: Tensor) -> Tensor:
        features = [member.features(part) for member, part in zip(self.members, self.parts(x))]  # pyright: ignore[reportCallIssue]
        return torch.cat(features, dim=0 if self.training else 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = [member(part) for member, part in zip(self.members, self.parts(x))]
        if self.training:
            return torch.cat(logits)
        return torch.stack(logits).log_softmax(-1).logsumexp(0) - math.log(len(logits))
