"""DrLoc: supervised training with a second task: predict the distance between two patches from their tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.flops import reduces
from smallvit.reduction.context import gather_tokens
from smallvit.slot_checks import check_integers
from smallvit.vit import ViT

from .objective import check_option_range
from .supervised import Supervised


class DrLoc(Supervised):
    """The objective DrLoc (dense relative localization), a supervised objective with a second task. From the output tokens of
    two random patches of an image, a small network predicts how many rows and columns the patches are apart.

    weight        the weight of the second task; the cross-entropy has the weight 1.
    pairs         the number of pairs of patches for each image, drawn with replacement; a patch may be paired with itself.
    hidden        the width of the two hidden layers of the small network.
    class_weight  see `Supervised`.

    Paper    Liu et al. 2021, arXiv:2106.03746, equations 2 to 4: the mean over images, pairs and both axes of |d' - d|. The
             target d is the distance in rows divided by the number of rows, and the same for columns; d' is the prediction
             of a network with two hidden layers from the two tokens of the last block, before the last LayerNorm.
    Off      `weight=0` equals `Supervised`, bit for bit; no pairs are drawn then.
    Departs  `weight` is the lambda of the paper's equations, for distances from 0 to 1. The authors' code predicts distances in
             tokens and averages over the two axes, as here; equation 4 has the L1 norm, which is their sum. To use its lambda
             here, multiply it by the number of rows: 0.5 for 7 x 7 tokens is 3.5 here. `weight` is constant; the authors' code
             changes it during training. 32 pairs and a network of width 128; the authors use 64 and 512, which would take
             longer than a small ViT.

    If the model adds position embeddings to its tokens, the task is easy: the tokens only have to keep their positions.

    Raises   ValueError for a model that is not a `ViT` or that reduces tokens, and for options out of range.
    """

    def __init__(
        self, model: ViT, *, weight: float = 1.0, pairs: int = 32, hidden: int = 128, class_weight: str | None = None
    ):
        super().__init__(model, class_weight=class_weight)
        check_option_range(weight=(weight, 0, 1e6))
        check_integers(pairs=(pairs, 1), hidden=(hidden, 1))
        if not isinstance(model, ViT):
            raise ValueError(f"DrLoc compares patches of a ViT, not of a {type(model).__name__}; use model=partial(ViT, ...)")
        if reduces(model):
            raise ValueError("DrLoc needs a token of each patch; got a model that reduces its tokens, expected reduction=None")
        self.weight, self.pairs = weight, pairs
        widths = (2 * model.prefix.shape[1], hidden, hidden)
        layers = [layer for n, m in zip(widths, widths[1:]) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.distance = nn.Sequential(*layers, nn.Linear(hidden, 2))

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also holds the pairs of patches whose distances are predicted. The training loop
        calls this method before each step, for each run of a stack separately.
        """
        batch = super().prepare(batch)
        return batch._replace(draws=(self.draw_pairs(batch.images),)) if self.weight else batch

    def draw_pairs(self, images: Tensor) -> Tensor:
        """Return random pairs of patches of each image, shape (batch, 2, pairs), as the numbers of the patches in row-major
        order. They are drawn on the CPU, so that a seed gives the same pairs on every device.
        """
        patches = prod(self.model.tokenizer.grid(images.shape[-2:]))
        return torch.randint(patches, (len(images), 2, self.pairs), device="cpu").to(images.device)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss" and, if the weight is not 0, the mean error of the
        predicted distances under the key "distance". `progress` is the finished fraction of the training run, from 0 to 1.
        """
        if not self.weight:
            return super().forward(batch, progress)
        (pairs,) = batch.draws or (self.draw_pairs(batch.images),)
        with last_tokens(self.model) as found:
            loss = super().forward(batch, progress)["loss"]
        patches = found[0][:, len(self.model.prefix) :]
        tokens = [gather_tokens(patches, index) for index in pairs.unbind(1)]
        predicted = self.distance(torch.cat(tokens, dim=-1))
        error = (predicted - relative_distances(pairs, self.model.tokenizer.grid(batch.images.shape[-2:]))).abs().mean()
        return {"loss": loss + self.weight * error, "distance": error.detach()}


def relative_distances(pairs: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the distances between the patches of each pair, shape (batch, pairs, 2): in rows and in columns, divided by the
    number of rows or columns in `grid`. `pairs` (batch, 2, pairs) are the numbers of the patches in row-major order.
    """
    rows, columns = grid
    row, column = pairs // columns, pairs % columns
    return torch.stack([(row[:, 0] - row[:, 1]).abs() / rows, (column[:, 0] - column[:, 1]).abs() / columns], dim=-1)


@contextmanager
def last_tokens(model: ViT) -> Iterator[list[Tensor]]:
    """Context manager that yields a list. Each time the model is called inside it, its tokens after the last block, before the
    last LayerNorm, are appended.
    """
    found: list[Tensor] = []
    module = model.pool if model.norm_after_pool else model.norm  # the first module after the blocks
    with module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])):
        yield found
