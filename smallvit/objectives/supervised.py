"""Supervised: learning from labels."""

from torch import Tensor, nn

from smallvit.augment import Batch


class Supervised(nn.Module):
    """Cross-entropy between the model's softmax and the targets, which may be mixed or smoothed; the mean over the batch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.paced = [module for module in model.modules() if isinstance(getattr(module, "progress", None), float)]

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        for module in self.paced:
            module.progress = progress
        return {"loss": cross_entropy(self.model(batch.images), batch.targets)}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()
