"""Supervised training: cross-entropy with the labels, which can give each class the same weight."""

from torch import Tensor, nn

from smallvit.attention import at_least_float32
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

    `class_weight="balanced"` gives each class the same total weight, for classes of different sizes. The loss of an image of
    class c is multiplied by n / (k n_c), where n_c of the n training images belong to class c and k is the number of classes.
    These are the weights of scikit-learn's `compute_class_weight`. Their mean over the training images is 1, so the learning
    rate keeps its meaning. If the target of an image is a mixture of classes, its weight is the same mixture of their weights.

    Off      `softmax_first` `None` or `False`; `class_weight` `None`.
    Departs  PyTorch's `CrossEntropyLoss(weight=...)` divides by the sum of the weights in the batch; this class divides by the
             number of images in the batch, so that an image has the same weight in every batch.
    Raises   ValueError for another value of `softmax_first` or `class_weight`.
    """

    class_weights: Tensor  # one for each class, if class_weight="balanced"

    def __init__(self, model: nn.Module, *, softmax_first: bool | None = None, class_weight: str | None = None):
        super().__init__(model)
        if softmax_first not in (None, False, True):
            raise ValueError(f"softmax_first is {softmax_first!r}; expected True for the mistake, False for none")
        if class_weight not in (None, "balanced"):
            raise ValueError(f"class_weight is {class_weight!r}; expected 'balanced', or None for equal weights of all images")
        self.softmax_first, self.class_weight = softmax_first, class_weight

    def set_class_counts(self, counts: Tensor):
        """Compute the weights of the classes if the option `class_weight` is "balanced". `counts` is the number of training
        images of each class, shape (classes). The training loop calls this method before the first step.

        The weights are a buffer that no checkpoint contains, so that runs in a stack each use their own.
        """
        if self.class_weight == "balanced":
            weights = (counts > 0) * counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
            self.register_buffer("class_weights", weights.float(), persistent=False)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the cross-entropy loss of a batch under the key "loss". `progress` is the finished fraction of the
        training run, from 0 to 1.
        """
        logits = self.model(batch.images)
        if self.softmax_first:
            logits = at_least_float32(logits).softmax(-1)
        if self.class_weight is None:
            return {"loss": cross_entropy(logits, batch.targets)}
        if not hasattr(self, "class_weights"):
            raise ValueError("class_weight='balanced' needs the class sizes; call set_class_counts(counts) before forward")
        weights = (batch.targets * self.class_weights).sum(-1)
        return {"loss": cross_entropy(logits, batch.targets, weights)}


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the cross-entropy between `logits` and target probabilities `targets`, averaged over the batch. These tensors have
    the shape (batch, classes). The cross-entropy of each image is first multiplied by its number in `weights`, shape (batch).

    Raises ValueError if the shapes differ, as with integer labels.
    """
    if not isinstance(logits, Tensor):
        raise ValueError(f"the model gave a {type(logits).__name__}; expected a tensor of logits, shape (batch, classes)")
    if logits.shape != targets.shape:
        got = f"targets of shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}"
        raise ValueError(f"got {got}; expected a probability for each class, such as F.one_hot(labels, classes).float()")
    each = -(targets * at_least_float32(logits).log_softmax(-1)).sum(-1)
    return (each if weights is None else weights * each).mean()
