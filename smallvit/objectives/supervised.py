"""Supervised training: cross-entropy with the labels."""

from torch import Tensor, nn

from smallvit.augment import Batch

from .objective import Objective


class Supervised(Objective):
    """The objective of supervised training: the mean cross-entropy between the logits of the model and the target
    probabilities. The targets may be mixed or smoothed by augmentation.

    `softmax_first=True` reproduces a common mistake, to measure its cost: a softmax at the end of the model, before a loss that
    applies a softmax itself. The loss then takes probabilities between 0 and 1 for logits. A model that is certain and right
    among k classes still has a loss of log(e + k - 1) - 1, which is 1.46 for ten classes, where chance is 2.30. Gradients are
    multiplied by the derivative of the first softmax, so they vanish where the model is certain, even where it is wrong. The
    largest logit stays the largest, so accuracies can be compared. The evaluators see logits without the additional softmax.

    Off      `softmax_first` `None` or `False`.
    Raises   ValueError for another value of `softmax_first`.
    """

    def __init__(self, model: nn.Module, *, softmax_first: bool | None = None):
        super().__init__(model)
        if softmax_first not in (None, False, True):
            raise ValueError(f"softmax_first is {softmax_first!r}; expected True for the mistake, False for none")
        self.softmax_first = softmax_first

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the cross-entropy loss of a batch under the key "loss". `progress` is the finished fraction of the
        training run, from 0 to 1.
        """
        self.set_progress(progress)
        logits = self.model(batch.images)
        if self.softmax_first:
            logits = logits.float().softmax(-1)
        return {"loss": cross_entropy(logits, batch.targets)}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy between `logits` and target probabilities `targets`, averaged over the batch. These tensors have
    the shape (batch, classes).
    """
    return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()
