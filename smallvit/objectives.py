"""Objectives: from a model and a batch to a loss.

Contract: `objective(model)` makes a module that is called `(batch, progress) -> {"loss": scalar, ...}`; `batch` holds
normalised images b c h w and targets b k whose rows sum to 1, `progress` rises from 0 to 1 over the run, so that no objective
knows about epochs or steps. `.model` is what is averaged, saved and evaluated. An objective that keeps a teacher moves it in
`after_step(progress)`.
"""

from torch import Tensor, nn

from smallvit.augment import Batch


class Supervised(nn.Module):
    """Cross-entropy between the model's softmax and the targets, which may be mixed or smoothed; the mean over the batch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        log_likelihood = self.model(batch.images).float().log_softmax(-1)
        return {"loss": -(batch.targets * log_likelihood).sum(-1).mean()}
