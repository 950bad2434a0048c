"""Positions inside attention: what tells the queries and keys where their tokens are.

Contract: `position(heads, head_dim, grid, prefix)` makes a module that is called `(q, k, places) -> (q, k, bias)`. Attention
uses the new queries and keys, and adds `bias` to its logits. It is an option of attention, to which a `ViT` gives `grid` (rows,
columns) and `prefix`, the number of prefix tokens: `ViT(attention=partial(Attention, position=Rotary))`.

- `q` and `k` are (b, h, n, e), prefix tokens first, for any number of tokens n. No parameter depends on n.
- `places` is a `Places`. Merged tokens have the mean place of their patches.
- `bias`, broadcastable to (b, h, n, n), or None.

Letters in shapes: b images, h heads, n tokens, p patch tokens, e width of one head.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]


class Places(NamedTuple):
    """Where the patch tokens of images are: the row and the column of each token, in patches, and the grid of the images.

    at     rows and columns from 0 at the top left, float32. Shape (p, 2) if they are the same for all images and whole numbers,
           as long as no token is merged or dropped; else (b, p, 2). A merged token is at the mean place of its patches.
    grid   the number of (rows, columns) of patches in the images. It differs from that of the model for images of another size.
    """

    at: Tensor
    grid: Grid

    @property
    def whole(self) -> bool:
        """Return True if the patch tokens are all patches of each image, in reading order, so that they form the grid. It is
        False if some are hidden, merged or dropped.
        """
        return self.at.ndim == 2


def places_of(grid: Grid, device: torch.device) -> Places:
    """Return the `Places` of all patches of an image with `grid` (rows, columns) of patches, in reading order."""
    rows, columns = (torch.arange(side, device=device, dtype=torch.float32) for side in grid)
    return Places(torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1), (grid[0], grid[1]))


class RelativeBias(nn.Module):
    """Relative position bias, a module inside attention: each head learns a number for each offset (rows, columns) between
    query and key, and adds it to the logit of the pair.

    Prefix tokens have learned numbers of their own: one for each prefix token as a query (`from_prefix`), as a key
    (`to_prefix`), and for each pair of them (`among`). Offsets beyond those of the table take its nearest number. Merged tokens
    are between the places of the grid: their bias is interpolated (bilinear).

    `std` is the standard deviation of the initial values. With `hidden`, the table is computed by a small network from the
    logarithms of the offsets, with so many hidden units; then it has any size.

    Paper    Table: Swin, Liu et al. 2021, arXiv:2103.14030. Class token: BEiT, arXiv:2106.08254, as in timm's `RelPosBias`.
             `hidden=512`: Swin v2, Liu et al. 2021, arXiv:2111.09883: 16 sigmoid(network), offsets divided by those of the
             constructor's grid.
    Off      A bias of 0, as with `std=0` before training, equals attention without positions.
    Departs  On a larger grid than the constructor's, the table is extended by its border; timm resamples it. Several prefix
             tokens: each has numbers of its own; timm has one class token, and none beside the network. From the network,
             8 is subtracted, so that patches start without an advantage over prefix tokens. The cosine attention of Swin v2 is
             not part of it.
    """

    def __init__(
        self, heads: int, head_dim: int, grid: Grid, prefix: int, *, std: float = 0.02, hidden: int | None = None
    ):
        super().__init__()
        self.grid, self.std = (grid[0], grid[1]), std
        if hidden is None:
            self.table = nn.Parameter(torch.empty(heads, 2 * grid[0] - 1, 2 * grid[1] - 1))
        else:
            self.table = None
            self.weight1, self.bias1 = nn.Parameter(torch.empty(hidden, 2)), nn.Parameter(torch.empty(hidden))
            self.weight2 = nn.Parameter(torch.empty(heads, hidden))
        self.from_prefix = nn.Parameter(torch.empty(heads, prefix))
        self.to_prefix = nn.Parameter(torch.empty(heads, prefix))
        self.among = nn.Parameter(torch.empty(heads, prefix, prefix))
        self.no_weight_decay = tuple(name for name, _ in self.named_parameters())
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.parameters():
            if self.std == 0 or parameter is getattr(self, "bias1", None):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=self.std, a=-2 * self.std, b=2 * self.std)

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        patches = look_up(self.table_for(places.grid), places.at)
        shape, m = patches.shape[:-2], patches.shape[-1]
        of_prefix = torch.cat([self.among, self.from_prefix[..., None].expand(-1, -1, m)], dim=-1)
        to_prefix = self.to_prefix[:, None].expand(*shape, m, -1)
        of_patches = torch.cat([to_prefix, patches.to(to_prefix.dtype)], dim=-1)
        bias = torch.cat([of_prefix.expand(*shape, -1, -1), of_patches], dim=-2)
        return q, k, bias.reshape(-1, *bias.shape[-3:])

    def table_for(self, grid: Grid) -> Tensor:
        """Return a table with the bias of each offset, shape (h, 2 rows - 1, 2 columns - 1). The offset 0 is in its middle. A
        learned table has the size for the grid of the constructor, a computed one for `grid`, which has (rows, columns).
        """
        if self.table is not None:
            return self.table
        axes = [
            [math.copysign(math.log2(1 + abs(8 * offset / max(own - 1, 1))) / 3, offset) for offset in range(1 - side, side)]
            for side, own in zip(grid, self.grid)
        ]
        scaled = torch.cartesian_prod(*(self.weight1.new_tensor(axis) for axis in axes)).unflatten(0, [len(a) for a in axes])
        hidden = F.linear(scaled, self.weight1, self.bias1).relu()
        return (16 * F.linear(hidden, self.weight2).sigmoid() - 8).permute(2, 0, 1)


def look_up(table: Tensor, at: Tensor) -> Tensor:
    """Return the values of a table for all pairs of tokens, from the offset between them: query minus key. `table` has the
    shape (h, 2 rows - 1, 2 columns - 1), with offset 0 in the middle. `at` is the row and column of each token, as in `Places`:
    for (p, 2), whole numbers, the result has the shape (h, p, p); for (b, p, 2) it is interpolated, shape (b, h, p, p).
    """
    most_rows, most_columns = table.shape[1] // 2, table.shape[2] // 2
    rows, columns = (at[..., :, None, :] - at[..., None, :, :]).unbind(-1)
    if at.ndim == 2:
        rows, columns = rows.clamp(-most_rows, most_rows), columns.clamp(-most_columns, most_columns)
        index = (rows + most_rows) * table.shape[2] + columns + most_columns
        return table.flatten(1)[:, index.long()]
    dtype = torch.promote_types(table.dtype, at.dtype)
    offsets = torch.stack([columns / max(most_columns, 1), rows / max(most_rows, 1)], dim=-1).to(dtype)
    image = table.to(dtype).expand(at.shape[0], -1, -1, -1)
    return F.grid_sample(image, offsets, mode="bilinear", padding_mode="border", align_corners=True)


class Rotary(nn.Module):
    """Rotary position embeddings in two dimensions (RoPE), a module inside attention: pairs of channels of the queries and keys
    are turned by an angle that grows with the row and column of the token. So the logit of two patches depends on how far they
    are from each other, not on where they are. Values are not turned.

    One half of the pairs turns with the column, the other with the row, with frequencies temperature^(-4k/e). With `mixed`,
    each head has learned frequencies for the row and the column of each pair; at the start, the two halves point in random
    directions at a right angle.

    Prefix tokens are not turned, as if they were at the `origin`: "corner", the top-left patch, or "center", the middle of the
    image. Only logits between prefix tokens and patches depend on it.

    `temperature` is the base of the frequencies, or "grid": the base at which the slowest wave turns by 1 over the larger side
    of the grid.

    Paper    Heo et al. 2024, arXiv:2403.13298 (RoPE-ViT, axial and mixed); Su et al. 2021, arXiv:2104.09864 (RoPE).
    Off      Frequencies of 0 equal attention without positions.
    Departs  The published temperature of the axial form is 100, of the mixed form 10. 10 is the default of both, because grids
             are small here. Merged tokens are turned by the mean place of their patches.
    Raises   ValueError if the width of a head is not divisible by 4, for a temperature below 1, and for an unknown `origin`.
    """

    no_weight_decay = ("frequencies",)

    def __init__(
        self, heads: int, head_dim: int, grid: Grid, prefix: int, *,
        mixed: bool = False, temperature: float | str = 10.0, origin: str = "corner",
    ):  # fmt: skip
        super().__init__()
        if head_dim % 4:
            nearest = head_dim + -head_dim % 4
            raise ValueError(f"heads have a width of {head_dim}; expected a width divisible by 4, such as {nearest}")
        if origin not in ("corner", "center"):
            raise ValueError(f"origin is {origin!r}; expected 'corner' or 'center'")
        if temperature != "grid" and (isinstance(temperature, str) or not temperature >= 1):
            raise ValueError(f"temperature is {temperature!r}; expected 1 or more, or 'grid'")
        count = head_dim // 4
        last = max(*grid, 2) - 1.0
        base = last ** (count / max(count - 1, 1)) if isinstance(temperature, str) else temperature
        self.origin, self.waves = origin, [base ** (-k / count) for k in range(count)]
        if mixed:
            self.frequencies = nn.Parameter(torch.empty(2, heads, 2 * count))
            self.reset_parameters()
        else:
            zeros = [0.0] * count
            axial = torch.tensor([[self.waves + zeros], [zeros + self.waves]])
            self.register_buffer("frequencies", axial, persistent=False)

    @torch.no_grad()
    def reset_parameters(self):
        if isinstance(self.frequencies, nn.Parameter):
            direction = 2 * math.pi * torch.rand(self.frequencies.shape[1], 1)
            both = torch.cat([direction, direction + math.pi / 2], dim=1).repeat_interleave(len(self.waves), dim=1)
            waves = torch.tensor(self.waves).repeat(2)
            self.frequencies.copy_(torch.stack([waves * both.cos(), waves * both.sin()]))

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor, None]:
        at = places.at
        if self.origin == "center":
            at = at - at.new_tensor([(side - 1) / 2 for side in places.grid])
        at = F.pad(at, (0, 0, q.shape[-2] - at.shape[-2], 0))[..., None, :, :]  # prefix tokens are at the origin
        columns, rows = self.frequencies
        angle = at[..., 1:] * columns[:, None] + at[..., :1] * rows[:, None]  # in float32, also where q has half precision
        cos, sin = angle.cos(), angle.sin()
        return turn(q, cos, sin), turn(k, cos, sin), None


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys `x` (b, h, n, e) with each pair of channels 2i and 2i + 1 turned by an angle. `cos` and `sin` are
    those of the angles, shape (h, n, e / 2) or (b, h, n, e / 2), where h may be 1.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).to(x.dtype)
