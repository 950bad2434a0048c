"""A deep ensemble: several models of one kind, trained side by side, whose predictions are averaged."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from smallvit.vit import check_slots


class DeepEnsemble(nn.Module):
    """Several models of one kind as one model. Its class probabilities are the mean of those of its members. It is called like
    a ViT, `DeepEnsemble(image, channels, classes, of=..., count=...)`.

    of     the model of which there are several, such as `partial(ViT, ...)` or `SmallCNN`
    count  the number of members

    Each member has its own initial weights, and learns from its own part of each training batch: with `count=4`, a run with
    `batch=128` trains four models with 32 images each. So the members learn from other images, in another order and with other
    augmentation, as if they had been trained one after another. Only the limit of the gradient's norm (`Run.clip`) is common.
    The cost is that of `count` models.

    In evaluation, each member sees all images. The logits are the logarithms of the mean probabilities. The features are those
    of all members, side by side.

    Paper    Lakshminarayanan et al. 2017, arXiv:1612.01474, without adversarial training.
    Off      `count=1`: the probabilities are those of the model.
    Raises   ValueError for a `count` below 1, and for a training batch that cannot be divided among the members.
    """

    def __init__(
        self, image: tuple[int, int], channels: int, classes: int, *, of: Callable[..., nn.Module], count: int = 4
    ):
        super().__init__()
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count of the ensemble is {count!r}; expected a whole number, at least 1")
        check_slots(of=of)
        self.members = nn.ModuleList(of(image, channels, classes) for _ in range(count))

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the images (batch, channels, height, width) that each member sees: in training its part of the batch, and in
        evaluation all images.
        """
        count = len(self.members)
        if not self.training:
            return [x] * count
        if len(x) % count:
            raise ValueError(
                f"a batch of {len(x)} images cannot be divided among {count} members; expected a multiple, such as "
                f"batch={count * max(len(x) // count, 1)}"
            )
        return list(x.chunk(count))

    def features(self, x: Tensor) -> Tensor:
        features = [member.features(part) for member, part in zip(self.members, self.parts(x))]  # pyright: ignore[reportCallIssue]
        return torch.cat(features, dim=0 if self.training else 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = [member(part) for member, part in zip(self.members, self.parts(x))]
        if self.training:
            return torch.cat(logits)
        return torch.stack(logits).log_softmax(-1).logsumexp(0) - math.log(len(logits))
