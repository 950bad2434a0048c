"""Supervised: learning from labels."""

from torch import Tensor, nn

from smallvit.augment import Batch


class Supervised(nn.Module):
    """Cross-entropy between the model's softmax and the targets, which may be mixed or smoothed; the mean over the batch.

    Paper    `label_smoothing`: Szegedy et al. 2016, arXiv:1512.00567, section 7: that share of every target goes to all classes
             alike. The augmentation `SmoothLabels` does the same.
    Off      `None` or 0, and `softmax_first` `None` or `False`.

    `softmax_first=True` is a mistake, here to be measured: a softmax at the end of the model, before a loss that has one of its
    own. Probabilities between 0 and 1 are then taken for logits. Certainty about the right one of k classes still costs
    log(e + k - 1) - 1, which is 1.46 for ten classes where 2.30 is chance, and the gradients shrink by the first softmax's
    derivative, to nothing where the model is sure, also where it is wrong. The largest logit stays the largest, so accuracy
    can be compared; likelihoods are those of the model's logits, which this loss does not ask for.

    Raises   ValueError for a share that is no fraction, or a `softmax_first` that is neither.
    """

    def __init__(self, model: nn.Module, *, label_smoothing: float | None = None, softmax_first: bool | None = None):
        super().__init__()
        if not isinstance(label_smoothing, int | float | None) or not 0 <= (label_smoothing or 0) < 1:
            raise ValueError(
                f"label_smoothing is {label_smoothing!r}; expected the share of a target to spread, from 0 to below 1"
            )
        if softmax_first not in (None, False, True):
            raise ValueError(f"softmax_first is {softmax_first!r}; expected True for the mistake, False for none")
        self.model, self.label_smoothing, self.softmax_first = model, label_smoothing, softmax_first
        self.paced = [module for module in model.modules() if isinstance(getattr(module, "progress", None), float)]

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        for module in self.paced:
            module.progress = progress
        logits, targets = self.model(batch.images), batch.targets
        if self.softmax_first:
            logits = logits.float().softmax(-1)
        if self.label_smoothing:
            targets = (1 - self.label_smoothing) * targets + self.label_smoothing / targets.shape[-1]
        return {"loss": cross_entropy(logits, targets)}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()
