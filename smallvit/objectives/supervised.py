"""Supervised: learning from labels."""

from torch import Tensor, nn

from smallvit.augment import Batch

from .objective import Objective


class Supervised(Objective):
    """Cross-entropy between the model's softmax and the targets, which may be mixed or smoothed; the mean over the batch.

    `softmax_first=True` is a mistake, here to be measured: a softmax at the end of the model, before a loss that has one of its
    own. Probabilities between 0 and 1 are then taken for logits. Certainty about the right one of k classes still costs
    log(e + k - 1) - 1, which is 1.46 for ten classes where 2.30 is chance, and the gradients shrink by the first softmax's
    derivative, to nothing where the model is sure, also where it is wrong. The largest logit stays the largest, so accuracy
    can be compared; likelihoods are those of the model's logits, which this loss does not ask for.

    Off      `softmax_first` `None` or `False`.
    Raises   ValueError for a `softmax_first` that is neither.
    """

    def __init__(self, model: nn.Module, *, softmax_first: bool | None = None):
        super().__init__(model)
        if softmax_first not in (None, False, True):
            raise ValueError(f"softmax_first is {softmax_first!r}; expected True for the mistake, False for none")
        self.softmax_first = softmax_first

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        self.set_progress(progress)
        logits = self.model(batch.images)
        if self.softmax_first:
            logits = logits.float().softmax(-1)
        return {"loss": cross_entropy(logits, batch.targets)}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()
