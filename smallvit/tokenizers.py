"""Tokenizers: from pixels to tokens.

Contract: `tokenizer(image, channels, dim)` makes a module `b c h w -> b n d`, tokens in reading order, one for each cell of
`tokenizer.grid((h, w)) -> (rows, columns)`. An image that the patches do not tile is a ValueError that names both numbers and
the nearest sizes that fit; any other size than `image` works too.
"""

from collections.abc import Callable
from math import ceil, floor, prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Image = tuple[int, int]


class PatchEmbed(nn.Module):
    """Cut the image into squares of `patch` pixels and map each linearly to a token.

    Paper    ViT, arXiv:2010.11929.

    `kernel` lets each token see beyond its square (a convolution of that size, zero padding, the same grid): with
    `kernel=patch + 2 * (patch // 2)` it sees what a shifted patch sees, which makes it the control for `ShiftedPatchEmbed`.
    `linear` computes the same function from the same weights as a matrix product over unfolded patches.

    Raises   ValueError for `linear` with overlapping kernels, or a kernel that cannot be centred on the patch.
    """

    def __init__(self, image: Image, channels: int, dim: int, *, patch: int, kernel: int | None = None, linear: bool = False):
        super().__init__()
        kernel = patch if kernel is None else kernel
        if kernel < patch or (kernel - patch) % 2:
            raise ValueError(
                f"kernel {kernel} around patch {patch}: expected the patch plus an even margin, {patch}, {patch + 2}, ..."
            )
        if linear and kernel != patch:
            raise ValueError(f"linear=True cuts the image without overlap; expected kernel={patch}, got {kernel}")
        self.patch, self.linear = patch, linear
        self.grid(image)
        self.proj = nn.Conv2d(channels, dim, kernel, stride=patch, padding=(kernel - patch) // 2)
        self.reset_parameters()

    def reset_parameters(self):
        reset_as_linear(self.proj)

    def grid(self, image: Image) -> tuple[int, int]:
        return tiles(image, self.patch)

    def forward(self, x: Tensor) -> Tensor:
        self.grid(x.shape[-2:])
        if self.linear:
            patches = rearrange(x, "b c (r p) (s q) -> b (r s) (c p q)", p=self.patch, q=self.patch)
            return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)
        return rearrange(self.proj(x), "b d r c -> b (r c) d")


class ShiftedPatchEmbed(nn.Module):
    """Shifted patch tokenization (SPT): each token sees its patch in the image and in four copies shifted by half a patch.

    Paper    Lee, Lee, Song 2021, arXiv:2112.13492, section 4.1: the image and its copies shifted to the four diagonals by
             half a patch, cut into patches, LayerNorm over all 5 c p p values, one linear map.
    Off      `shift="none", norm=False` equals `PatchEmbed`; `shift="none"` alone is the LayerNorm without the shift, and
             `norm=False` alone the shift without the LayerNorm (then a convolution of kernel 2p with tied weights): the two
             controls that the paper lacks, since its baseline has no LayerNorm before the projection.
    Departs  From the authors' code: any number of channels (theirs has 3 written in); patch 1 is refused, where half a patch is
             no shift and their slices are empty; values are stored channel first, (c p p), where they are channel last (the
             same function with the columns of the projection permuted). An odd patch shifts by floor(p / 2), as theirs.
             From vit-pytorch, whose `SPT` shifts by one pixel along the axes: `shift="1px cardinal"` is that variant.

    `pad` fills what a shift uncovers, in normalised units. The authors fill with 0. That is a black pixel where the data is
    normalised by scale alone, as this package does for digits; where the mean is subtracted 0 is grey, and black is -mean/std.

    Raises   ValueError for patch 1 with a half-patch shift, and for an unknown `shift`.
    """

    def __init__(
        self,
        image: Image,
        channels: int,
        dim: int,
        *,
        patch: int,
        shift: str = "half-patch diagonal",
        norm: bool = True,
        pad: float = 0.0,
    ):
        super().__init__()
        self.patch, self.pad = patch, pad
        self.offsets = shifts(shift, patch)
        self.grid(image)
        self.norm = nn.LayerNorm((1 + len(self.offsets)) * channels * patch**2) if norm else nn.Identity()
        self.proj = nn.Linear((1 + len(self.offsets)) * channels * patch**2, dim)

    def grid(self, image: Image) -> tuple[int, int]:
        return tiles(image, self.patch)

    def shifted(self, x: Tensor) -> Tensor:
        """b c h w -> b 5c h w: the image, then its copies moved down-right, down-left, up-right, up-left."""
        if not self.offsets:
            return x
        h, w = x.shape[-2:]
        s = max(abs(step) for offset in self.offsets for step in offset)
        wide = F.pad(x, (s, s, s, s), value=self.pad)
        return torch.cat([x] + [wide[..., s - dy : s - dy + h, s - dx : s - dx + w] for dy, dx in self.offsets], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        self.grid(x.shape[-2:])
        patches = rearrange(self.shifted(x), "b c (r p) (s q) -> b (r s) (c p q)", p=self.patch, q=self.patch)
        return self.proj(self.norm(patches))


class Resized(nn.Module):
    """Another tokenizer, shown the image resized to `size` x `size` pixels: what weights trained on large images expect.

    `interpolation` is that of the weights: "bicubic" or "bilinear", antialiased, so that shrinking is right too.

    Raises   ValueError for another interpolation, or a size that the tokenizer cannot tile.
    """

    def __init__(
        self, image: Image, channels: int, dim: int, *, tokenizer: Callable, size: int = 224, interpolation: str = "bicubic"
    ):
        super().__init__()
        if interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"interpolation is {interpolation!r}; expected 'bicubic' or 'bilinear'")
        if size < 1:
            raise ValueError(f"size is {size}; expected a side in pixels")
        self.size, self.interpolation = size, interpolation
        self.tokenizer = tokenizer((size, size), channels, dim)

    def grid(self, image: Image) -> tuple[int, int]:
        return self.tokenizer.grid((self.size, self.size))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.size, self.size):
            single = x.to(torch.promote_types(x.dtype, torch.float32))  # in half precision not on every device
            x = F.interpolate(single, (self.size, self.size), mode=self.interpolation, antialias=True).to(x.dtype)
        return self.tokenizer(x)


class ConvStem(nn.Module):
    """A small CNN in front of the transformer (hybrid): 3x3 convolutions of stride 2, each halving the image, `layers` of them.

    Paper    Xiao et al. 2021, Early Convolutions Help Transformers See Better, arXiv:2106.14881: widths double towards `dim`, a
             norm and ReLU after each, a 1x1 convolution last.
    Departs  GroupNorm with one group instead of BatchNorm: no running statistics, so weight averaging and batches of one are
             exact; each token depends on the whole image through it.

    An odd side is rounded up, as the padding does, so every image fits: 28 pixels become 14, 7, 4.

    Raises   ValueError for fewer than 1 layer.
    """

    def __init__(self, image: Image, channels: int, dim: int, *, layers: int = 3):
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers is {layers}; expected at least 1")
        widths = [channels] + [max(8, dim >> (layers - 1 - i)) for i in range(layers)]
        self.layers = nn.Sequential()
        for before, after in zip(widths[:-1], widths[1:]):
            self.layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False))
            self.layers.append(nn.GroupNorm(1, after))
            self.layers.append(nn.ReLU())
        self.proj = nn.Conv2d(widths[-1], dim, 1)
        self.reset_parameters()

    def reset_parameters(self):
        for layer in self.layers[::3]:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        reset_as_linear(self.proj)

    def grid(self, image: Image) -> tuple[int, int]:
        cell = 2 ** (len(self.layers) // 3)
        return -(-image[0] // cell), -(-image[1] // cell)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.proj(self.layers(x)), "b d r c -> b (r c) d")


class ConvTokenizer(nn.Module):
    """CCT's tokenizer: `layers` times a convolution that keeps the size, ReLU, and a max-pooling that halves it.

    Paper    Hassani et al. 2021 (CCT), arXiv:2104.05704, section 3.3; hidden width 64, no bias, kaiming-normal. `kernel=3,
             layers=1` is the 3x1 of its names. Goes with `SequencePool` and no class token; works with any pool.
    """

    def __init__(self, image: Image, channels: int, dim: int, *, kernel: int = 3, layers: int = 2, hidden: int = 64):
        super().__init__()
        if kernel < 1 or layers < 1:
            raise ValueError(f"kernel {kernel}, layers {layers}: expected both to be at least 1")
        self.stride = max(1, kernel // 2 - 1)
        self.kernel, self.padding = kernel, max(1, kernel // 2)
        widths = [channels] + [hidden] * (layers - 1) + [dim]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, kernel, self.stride, self.padding, bias=False)
            for before, after in zip(widths[:-1], widths[1:])
        )
        self.grid(image)
        self.reset_parameters()

    def reset_parameters(self):
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight)

    def grid(self, image: Image) -> tuple[int, int]:
        def side(length: int) -> int:
            for _ in self.convs:
                length = (length + 2 * self.padding - self.kernel) // self.stride + 1
                length = (length - 1) // 2 + 1
            return length

        rows, columns = side(image[0]), side(image[1])
        if rows < 1 or columns < 1:
            raise ValueError(
                f"image {image[0]} x {image[1]} leaves no token after {len(self.convs)} layers of kernel {self.kernel}"
            )
        return rows, columns

    def forward(self, x: Tensor) -> Tensor:
        self.grid(x.shape[-2:])
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), kernel_size=3, stride=2, padding=1)
        return rearrange(x, "b d r c -> b (r c) d")


def tiles(image: Image, patch: int) -> tuple[int, int]:
    """How many patches of `patch` pixels tile the image: (rows, columns)."""
    h, w = image
    if patch < 1 or h % patch or w % patch or not h * w:
        raise ValueError(f"patches of {patch} pixels do not tile an image of {h} x {w}; {what_fits(h, w, patch)}")
    return h // patch, w // patch


def what_fits(h: int, w: int, patch: int) -> str:
    """The patches that tile this image, and the nearest images that this patch tiles."""
    patches = [p for p in range(1, min(h, w) + 1) if h % p == 0 and w % p == 0]
    advice = f"patch sizes that fit this image: {', '.join(map(str, patches)) or 'none'}"
    if patch < 1:
        return advice
    smaller, larger = ([max(1, round(side / patch)) * patch for side in (h, w)] for round in (floor, ceil))
    images = dict.fromkeys(f"{rows} x {columns}" for rows, columns in (smaller, larger))
    return f"{advice}; images that fit this patch: {' or '.join(images)}"


def shifts(name: str, patch: int) -> list[tuple[int, int]]:
    """The (down, right) moves, in pixels, of the copies that go with the image."""
    half = patch // 2
    moves = {
        "half-patch diagonal": [(half, half), (half, -half), (-half, half), (-half, -half)],
        "1px cardinal": [(0, 1), (0, -1), (1, 0), (-1, 0)],
        "none": [],
    }
    if name not in moves:
        raise ValueError(f"shift is {name!r}; expected one of {', '.join(map(repr, moves))}")
    if name == "half-patch diagonal" and half == 0:
        raise ValueError(f"half of a patch of {patch} pixel is no shift; take patch >= 2, or shift='none'")
    return moves[name]


def reset_as_linear(conv: nn.Conv2d):
    """Xavier-uniform over the flattened kernel, as for the linear map that a patch embedding is."""
    bound = (6 / (prod(conv.weight.shape[1:]) + conv.weight.shape[0])) ** 0.5
    nn.init.uniform_(conv.weight, -bound, bound)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
