"""Positions inside attention: modules that give the queries and keys information about the positions of their tokens.

Contract: `position(heads, head_dim, grid, prefix)` makes a module that is called `(q, k, places) -> (q, k, bias)`. Attention
uses the new queries and keys, and adds `bias` to its logits. It is an option of attention, to which a `ViT` gives `grid` (rows,
columns) and `prefix`, the number of prefix tokens: `ViT(attention=partial(Attention, position=Rotary))`.

- `q` and `k` are (b, h, n, e), prefix tokens first, for any number of tokens n. No parameter depends on n.
- `places` is a `Places`. A merged token is at the mean position of its patches.
- `bias`, broadcastable to (b, h, n, n), or None.

Letters in shapes: b images, h heads, n tokens, p patch tokens, e width of one head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]


class Places(NamedTuple):
    """The positions of the patch tokens of images: row and column of each token, in patches, and the grid of the images.

    at     rows and columns from 0 at the top left, float32. The shape is (p, 2) if no token was merged or removed: then the
           positions are whole numbers and the same for all images. Otherwise (b, p, 2). A merged token is at the mean position
           of its patches.
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
    """Relative position bias, a module inside attention: each head learns a bias for each offset (rows, columns) between query
    and key, and adds it to the logit of the pair.

    Prefix tokens have their own learned biases: one for each prefix token as a query (`from_prefix`), as a key (`to_prefix`),
    and for each pair of prefix tokens (`among`). Offsets outside the table take the nearest value in it. Merged tokens lie
    between the positions of the grid, so their bias is interpolated (bilinear).

    `std` is the standard deviation of the initial biases. With `hidden`, a small network with this number of hidden units
    computes the table from the logarithms of the offsets, so the table can have any size.

    Paper    Table: Swin, Liu et al. 2021, arXiv:2103.14030. Class token: BEiT, arXiv:2106.08254, as in timm's `RelPosBias`.
             `hidden=512`: Swin v2, Liu et al. 2021, arXiv:2111.09883: 16 sigmoid(network), offsets divided by those of the
             constructor's grid.
    Off      A bias of 0 equals attention without positions. With `std=0`, all biases are 0 before training.
    Departs  On a grid larger than the constructor's, the table is extended by its border; timm resamples it. Each prefix token
             has its own biases; timm supports one class token, and none together with the network. From the output of the
             network, 8 is subtracted, so that the logits of patches do not start above those of prefix tokens. The cosine
             attention of Swin v2 is left out.
    Raises   ValueError, when it is called, if the places are not those of all tokens but the prefix tokens.
    """

    def __init__(
        self, heads: int, head_dim: int, grid: Grid, prefix: int, *, std: float = 0.02, hidden: int | None = None
    ):
        super().__init__()
        self.grid, self.prefix, self.std = (grid[0], grid[1]), prefix, std
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
            std = self.std or 0.02 * (parameter is getattr(self, "weight1", None))  # with two layers of zeros, none would learn
            if std == 0 or parameter is getattr(self, "bias1", None):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        check_places(q.shape[-2], places, self.prefix)
        patches = look_up(self.table_for(places.grid), places.at)
        shape, m = patches.shape[:-2], patches.shape[-1]
        of_prefix = torch.cat([self.among, self.from_prefix[..., None].expand(-1, -1, m)], dim=-1)
        to_prefix = self.to_prefix[:, None].expand(*shape, m, -1)
        of_patches = torch.cat([to_prefix, patches.to(to_prefix.dtype)], dim=-1)
        bias = torch.cat([of_prefix.expand(*shape, -1, -1), of_patches], dim=-2)
        return q, k, bias.reshape(-1, *bias.shape[-3:])

    def macs(self, grid: Grid) -> int:
        """Return the number of multiply-adds (MACs) of the network for a grid of (rows, columns) patches. A learned table needs
        none. The network runs once for a whole batch.
        """
        if self.table is not None:
            return 0
        return (2 * grid[0] - 1) * (2 * grid[1] - 1) * (self.weight1.numel() + self.weight2.numel())

    def table_for(self, grid: Grid) -> Tensor:
        """Return a table with the bias of each offset, shape (h, 2 rows - 1, 2 columns - 1), with offset 0 in the middle. The
        size of a learned table is that of the constructor's grid; a computed table has the size of `grid` (rows, columns).
        """
        if self.table is not None:
            return self.table
        axes = []
        for side, own in zip(grid, self.grid):  # as tensors, because a trace or an export keeps no other numbers variable
            offset = torch.arange(1 - side, side, dtype=torch.float64, device="cpu")
            axes.append((((8 * offset / max(own - 1, 1)).abs() + 1).log2() / 3 * offset.sign()).to(self.weight1))
        scaled = torch.stack(torch.meshgrid(axes, indexing="ij"), dim=-1)
        hidden = F.linear(scaled, self.weight1, self.bias1).relu()
        return (16 * F.linear(hidden, self.weight2).sigmoid() - 8).permute(2, 0, 1)


def check_places(tokens: int, places: Places, prefix: int):
    """Raise ValueError unless the places are those of all tokens but `prefix`, the number of prefix tokens."""
    if tokens - places.at.shape[-2] != prefix:
        raise ValueError(
            f"got {tokens} tokens and the places of {places.at.shape[-2]} patches, for {prefix} prefix tokens; expected "
            "places_of(grid, device) with the grid of these images"
        )


def look_up(table: Tensor, at: Tensor) -> Tensor:
    """Return the values of a table for all pairs of tokens, at the offset between them: query minus key. `table` has the shape
    (h, 2 rows - 1, 2 columns - 1), with offset 0 in the middle. `at` is the row and column of each token, as in `Places`. If it
    has the shape (p, 2), the result has the shape (h, p, p). If it has the shape (b, p, 2), values are interpolated, and the
    result has the shape (b, h, p, p).
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
    are rotated by an angle that grows with the row and column of the token. So the logit of two patches depends on the offset
    between them, not on their absolute positions. Values are not rotated.

    One half of the pairs rotates with the column, the other half with the row, with frequencies temperature^(-4k / head_dim).
    With `mixed`, each head learns the frequencies for the row and the column of each pair. They are initialized so that each
    head has a random direction for one half of the pairs, and the direction at a right angle for the other half.

    Prefix tokens are not rotated, as if they were at the `origin`: "corner", the top-left patch, or "center", the middle of the
    image. Only the logits between prefix tokens and patches depend on `origin`.

    `temperature` is the base of the frequencies. With "grid", the base is chosen so that the lowest frequency rotates by 1
    radian over the larger side of the grid. (Heads of width 4 have a single frequency, of 1 radian for each patch.)

    Paper    Heo et al. 2024, arXiv:2403.13298 (RoPE-ViT, axial and mixed); Su et al. 2021, arXiv:2104.09864 (RoPE).
    Off      Frequencies of 0 equal attention without positions.
    Departs  The paper uses the temperature 100 for the axial form and 10 for the mixed form. Here 10 is the default of both,
             because grids are small. The angle of a merged token is that of the mean position of its patches.

    Outside of a `ViT`, an attention gets it by `Attention(dim, heads, position=partial(Rotary, grid=(r, c), prefix=p))`, and is
    called with `places=places_of((r, c), device)`. The same holds for `RelativeBias`. Fixed frequencies are not saved with the
    weights: after `to_empty`, call `initialize(model)` before `load_state_dict`.

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
        self.origin, self.prefix, self.waves = origin, prefix, [base ** (-k / count) for k in range(count)]
        if mixed:
            self.frequencies = nn.Parameter(torch.empty(2, heads, 2 * count))
        else:
            at_least_float32 = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.register_buffer("frequencies", torch.empty(2, 1, 2 * count, dtype=at_least_float32), persistent=False)
        self.reset_parameters()

    def _apply(self, fn: Callable, recurse: bool = True) -> "Rotary":
        """Move or convert the module. Fixed frequencies stay at least float32, also after `model.bfloat16()`."""
        fixed = None if isinstance(self.frequencies, nn.Parameter) else self.frequencies
        super()._apply(fn, recurse)
        if fixed is not None and self.frequencies.dtype in (torch.bfloat16, torch.float16):
            self.frequencies = fixed.to(self.frequencies.device)
        return self

    @torch.no_grad()
    def reset_parameters(self):
        if isinstance(self.frequencies, nn.Parameter):
            direction = 2 * math.pi * torch.rand(self.frequencies.shape[1], 1)
            both = torch.cat([direction, direction + math.pi / 2], dim=1).repeat_interleave(len(self.waves), dim=1)
            waves = torch.tensor(self.waves).repeat(2)
            self.frequencies.copy_(torch.stack([waves * both.cos(), waves * both.sin()]))
        else:
            zeros = [0.0] * len(self.waves)
            self.frequencies.copy_(torch.tensor([[self.waves + zeros], [zeros + self.waves]], dtype=self.frequencies.dtype))

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor, None]:
        check_places(q.shape[-2], places, self.prefix)
        at = places.at
        if self.origin == "center":
            at = at - at.new_tensor([(side - 1) / 2 for side in places.grid])
        at = F.pad(at, (0, 0, q.shape[-2] - at.shape[-2], 0))[..., None, :, :]  # prefix tokens are at the origin
        columns, rows = self.frequencies
        angle = at[..., 1:] * columns[:, None] + at[..., :1] * rows[:, None]  # in float32, also where q has half precision
        cos, sin = angle.cos(), angle.sin()
        return turn(q, cos, sin), turn(k, cos, sin), None


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys `x` (b, h, n, e) with each pair of channels 2i and 2i + 1 rotated by an angle. `cos` and `sin` are
    the cosines and sines of the angles, shape (h, n, e / 2) or (b, h, n, e / 2), where h may be 1.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).to(x.dtype)
