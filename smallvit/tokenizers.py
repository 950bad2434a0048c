"""Tokenizers: the pixels of an image become tokens.

Contract: `tokenizer(image, channels, dim)` makes a module that maps (b, channels, h, w) to (b, n, dim), one token for each cell
of `tokenizer.grid((h, w)) -> (rows, columns)`, in row-major order. Images of another size than `image` work too. If the patches
do not tile an image, ValueError names the patch size, the image size and the nearest sizes that fit. The tokenizers of this
file also refuse images of another shape or data type than (b, channels, h, w) in floats.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor, inf, prod
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from smallvit.convolution import Conv2d, MaxPool2d

Image = Sequence[int]  # height and width in pixels


class PatchEmbed(nn.Module):
    """The patch embedding of ViT, a module that converts images to tokens. It cuts each image into square patches and maps each
    patch linearly to a token. The option `patch` is the side of a patch in pixels.

    `kernel` is the side of the square that a token sees, by default `patch`. A larger kernel is a convolution with zero padding
    on the same grid; `kernel=patch + 2 * (patch // 2)` sees the pixels of a shifted patch, as a control for
    `ShiftedPatchEmbed`. `linear=True` computes the same function with the same weights by a matrix product.

    Paper    ViT, arXiv:2010.11929.
    Departs  An image that the patches do not tile is refused; timm's `dynamic_img_pad` pads it.
    Raises   ValueError for patches that do not tile the image, `linear` with a kernel other than the patch, a kernel that
             cannot be centered on the patch, and images that are not normalized floats (b, channels, h, w).
    """

    def __init__(self, image: Image, channels: int, dim: int, *, patch: int, kernel: int | None = None, linear: bool = False):
        super().__init__()
        check_side(patch)
        kernel = patch if kernel is None else kernel
        if kernel < patch or (kernel - patch) % 2:
            raise ValueError(f"kernel is {kernel}; expected the patch plus an even margin: {patch}, {patch + 2}, ...")
        if linear and kernel != patch:
            raise ValueError(f"linear=True cuts the image without overlap; expected kernel={patch}, got {kernel}")
        self.channels, self.patch, self.linear, self.can_be_linear = channels, patch, linear, kernel == patch
        self.grid(image)
        self.proj = nn.Conv2d(channels, dim, kernel, stride=patch, padding=(kernel - patch) // 2)
        self.reset_parameters()

    def reset_parameters(self):
        reset_as_linear(self.proj)

    def grid(self, image: Image) -> tuple[int, int]:
        return patch_grid(image, self.patch)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.channels, self.proj.weight.dtype)
        self.grid(x.shape[-2:])
        if self.linear and not (self.proj._forward_hooks or self.proj._forward_pre_hooks):
            patches = rearrange(x, "b c (r p) (s q) -> b (r s) (c p q)", p=self.patch, q=self.patch)
            return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)
        return rearrange(self.proj(x), "b d r c -> b (r c) d")


class ShiftedPatchEmbed(nn.Module):
    """Shifted patch tokenization (SPT), a module that converts images to tokens. Each token is computed from a patch of the
    image and from the same patch in four copies of the image. The copies are shifted diagonally by half a patch.

    `image` is the (height, width) of the images in pixels, `channels` the number of their channels, `dim` the width of a token,
    and `patch` the side of a square patch in pixels, which divides height and width. The module maps normalized images
    (b, channels, h, w) to tokens (b, n, dim), one for each of the n = h / patch * w / patch patches, row by row.

    `shift` is "half-patch diagonal" (the paper), "1px cardinal" (one pixel along the axes) or "none". `norm=False` leaves out
    the LayerNorm before the projection. `pad` is the value, in normalized units, of the pixels that a shift uncovers. The
    authors use 0. This is black if pixels are only scaled, as this package does for digits, and gray if a mean is subtracted
    (black is then -mean/std).

    Paper    Lee, Lee, Song 2021, arXiv:2112.13492, section 4.1: the image and its copies shifted to the four diagonals by
             half a patch, cut into patches, LayerNorm over all 5 c p p values, one linear map.
    Off      `shift="none", norm=False` equals `PatchEmbed`. `shift="none"` alone is the LayerNorm without the shift;
             `norm=False` alone is the shift without the LayerNorm (a convolution of kernel 2p with tied weights). The paper
             lacks these two controls, since its baseline has no LayerNorm before the projection.
    Departs  From the authors' code: any number of channels (theirs is fixed to 3); patch 1 is refused, where half a patch is no
             shift and their slices are empty; values are ordered channel first, (c p p), theirs channel last (the same function
             with permuted columns of the projection). An odd patch shifts by floor(p / 2), as theirs. From vit-pytorch, whose
             `SPT` shifts by one pixel along the axes: `shift="1px cardinal"` is that variant.
    Raises   ValueError for patch 1 with a half-patch shift, an unknown `shift`, patches that do not tile the image, and images
             that are not normalized floats (b, channels, h, w).
    """

    def __init__(
        self, image: Image, channels: int, dim: int, *,
        patch: int, shift: str = "half-patch diagonal", norm: bool = True, pad: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        check_side(patch)
        self.channels, self.patch, self.pad = channels, patch, pad
        self.offsets = shift_offsets(shift, patch)
        self.grid(image)
        values = (1 + len(self.offsets)) * channels * patch**2
        self.norm = nn.LayerNorm(values) if norm else nn.Identity()
        self.proj = nn.Linear(values, dim)

    def grid(self, image: Image) -> tuple[int, int]:
        return patch_grid(image, self.patch)

    def shifted(self, x: Tensor) -> Tensor:
        """Return the images `x` (batch, channels, height, width) and their shifted copies, concatenated along the channel axis.
        With four copies the shape is (batch, 5 * channels, height, width). Without copies, `x` is returned unchanged.

        With half-patch shifts, the copies follow the image in the order down-right, down-left, up-right, up-left.
        """
        if not self.offsets:
            return x
        h, w = x.shape[-2:]
        s = max(abs(step) for offset in self.offsets for step in offset)
        padded = F.pad(x, (s, s, s, s), value=self.pad)
        return torch.cat([x] + [padded[..., s - dy : s - dy + h, s - dx : s - dx + w] for dy, dx in self.offsets], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.proj.weight
        check_images(x, self.channels, weight.dtype if isinstance(weight, Tensor) else x.dtype)  # a method in quantized layers
        self.grid(x.shape[-2:])
        patches = rearrange(self.shifted(x), "b c (r p) (s q) -> b (r s) (c p q)", p=self.patch, q=self.patch)
        return self.proj(self.norm(patches))


class Resized(nn.Module):
    """A module that resizes each image to a fixed size and then converts it to tokens with another tokenizer. The option `size`
    is the side of the resized image in pixels (default 224).

    With this module, weights that were pretrained on large images can be used for small images.

    `tokenizer` makes that tokenizer. `interpolation` is "bicubic" or "bilinear", as the weights were trained with; both are
    antialiased, so that shrinking is correct too.

    Raises   ValueError for another interpolation, or a size that the tokenizer cannot tile.
    """

    def __init__(
        self, image: Image, channels: int, dim: int, *, tokenizer: Callable, size: int = 224, interpolation: str = "bicubic"
    ):
        super().__init__()
        if interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"interpolation is {interpolation!r}; expected 'bicubic' or 'bilinear'")
        if not is_whole_number(size):
            raise ValueError(f"size is {size!r}; expected a side in pixels, a whole number of at least 1")
        self.channels, self.size, self.interpolation = channels, size, interpolation
        self.tokenizer = tokenizer((size, size), channels, dim)

    def grid(self, image: Image) -> tuple[int, int]:
        return self.tokenizer.grid((self.size, self.size))

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.channels, x.dtype)
        if x.shape[-2:] != (self.size, self.size):
            single = x.to(torch.promote_types(x.dtype, torch.float32))  # not every device interpolates in half precision
            x = F.interpolate(single, (self.size, self.size), mode=self.interpolation, antialias=True).to(x.dtype)
        return self.tokenizer(x)


class ConvStem(nn.Module):
    """A small convolutional network (CNN) that converts images to tokens, as in hybrid ViTs. Each position of the final feature
    map is one token.

    `layers` (at least 1) is the number of 3x3 convolutions that halve height and width. So a token covers 2^layers x 2^layers
    pixels: 8 x 8 by default, 4 x 4 with `layers=2`. Their widths double from layer to layer up to `dim`, with at least 8
    channels, and each is followed by GroupNorm and ReLU. A final 1x1 convolution gives the width of the model. An odd side is
    rounded up, so every image size fits: 28 pixels become 14, 7, 4.

    Paper    Xiao et al. 2021, Early Convolutions Help Transformers See Better, arXiv:2106.14881.
    Departs  GroupNorm with one group instead of BatchNorm: it has no running statistics, so weight averaging and batches of one
             image are exact; each token depends on the whole image through it.
    Raises   ValueError for fewer than 1 layer.
    """

    def __init__(self, image: Image, channels: int, dim: int, *, layers: int = 3):
        super().__init__()
        if not is_whole_number(layers):
            raise ValueError(f"layers is {layers!r}; expected a whole number of at least 1")
        self.channels = channels
        widths = [channels] + [max(8, dim >> (layers - 1 - i)) for i in range(layers)]
        self.layers = nn.Sequential()
        for inputs, outputs in zip(widths[:-1], widths[1:]):
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            self.layers.extend([convolution, nn.GroupNorm(1, outputs), nn.ReLU()])
        self.proj = nn.Conv2d(widths[-1], dim, 1)
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.layers.parameters():
            if parameter.ndim > 1:  # the convolutions
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
        reset_as_linear(self.proj)

    def grid(self, image: Image) -> tuple[int, int]:
        cell = 2 ** (len(self.layers) // 3)
        return -(-image[0] // cell), -(-image[1] // cell)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.channels, self.proj.weight.dtype)
        return rearrange(self.proj(self.layers(x)), "b d r c -> b (r c) d")


class ConvTokenizer(nn.Module):
    """The convolutional tokenizer of CCT (Compact Convolutional Transformer), a module that converts images to tokens. Each
    layer has a convolution, a ReLU and a max-pooling. Each position of the final feature map is one token.

    `layers` is the number of layers. Each max-pooling halves height and width.

    `kernel` is the side of the convolutions; their stride is max(1, kernel // 2 - 1), 1 up to kernel 5. `hidden` is the width
    of all layers but the last. CCT uses it with `SequencePool` and no class token; any pool works.

    Paper    Hassani et al. 2021 (CCT), arXiv:2104.05704, section 3.3; hidden width 64, no bias, Kaiming-normal weights.
             `kernel=3, layers=1` is the 3x1 of its model names.
    Raises   ValueError for a `kernel` or `layers` below 1, and for an image that leaves no token.
    """

    def __init__(self, image: Image, channels: int, dim: int, *, kernel: int = 3, layers: int = 2, hidden: int = 64):
        super().__init__()
        if not (is_whole_number(kernel) and is_whole_number(layers)):
            raise ValueError(f"kernel {kernel!r}, layers {layers!r}: expected both to be at least 1, as whole numbers")
        self.channels, self.stride = channels, max(1, kernel // 2 - 1)
        self.kernel, self.padding = kernel, max(1, kernel // 2)
        widths = [channels] + [hidden] * (layers - 1) + [dim]
        self.convs = nn.ModuleList(
            Conv2d(inputs, outputs, kernel, self.stride, self.padding, bias=False)
            for inputs, outputs in zip(widths[:-1], widths[1:])
        )
        self.pool = MaxPool2d(3, stride=2, padding=1)
        self.grid(image)
        self.reset_parameters()

    def reset_parameters(self):
        for weight in self.convs.parameters():
            nn.init.kaiming_normal_(weight)

    def grid(self, image: Image) -> tuple[int, int]:
        rows, columns = image
        for _ in self.convs:
            rows, columns = ((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in (rows, columns))
            rows, columns = (rows - 1) // 2 + 1, (columns - 1) // 2 + 1
        if rows < 1 or columns < 1:
            layers = f"{len(self.convs)} layers of kernel {self.kernel}"
            raise ValueError(f"image {image[0]} x {image[1]} leaves no token after {layers}; use larger images or fewer layers")
        return rows, columns

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.convs[0]
        check_images(x, self.channels, first.weight.dtype)
        self.grid(x.shape[-2:])
        for conv in self.convs:
            x = F.relu(self.pool(conv(x)))  # as max-pooling of the ReLU, which has more values to compute
        return rearrange(x, "b d r c -> b (r c) d")


def check_images(x: Tensor, channels: int, dtype: torch.dtype):
    """Raise ValueError unless `x` holds images (batch, channels, height, width) in floats that fit weights of data type
    `dtype`: both in float64 or neither, because autocast changes between all others.
    """
    fits = x.is_floating_point() and (x.dtype == torch.float64) == (dtype == torch.float64)
    if x.ndim != 4 or x.shape[1] != channels or not fits:
        wanted = dtype if dtype.is_floating_point else torch.float32
        got, expected = (str(each).removeprefix("torch.") for each in (x.dtype, wanted))
        raise ValueError(
            f"got {got} images of shape {tuple(x.shape)}; expected normalized {expected} pixels of shape (b, {channels}, h, w)"
            f": use .to({wanted}) for the data type, and .permute(0, 3, 1, 2) if the channels are last"
        )


def check_pair(image: Any) -> Image:
    """Return the size of an image unchanged, or raise ValueError if it is not a pair (height, width)."""
    if not isinstance(image, tuple | list) or len(image) != 2:
        raise ValueError(f"image is {image!r}; expected (height, width) in pixels, such as (28, 28)")
    return image


def is_whole_number(value: Any, least: float = 1) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_side(patch: Any):
    """Raise ValueError if the side of a patch is not a whole number of pixels."""
    if not is_whole_number(patch, -inf):
        raise ValueError(f"patch is {patch!r}; expected the side of a square patch in pixels, such as 4")


def patch_grid(image: Image, patch: int) -> tuple[int, int]:
    """Return the number of rows and columns of square patches in an image. `image` is the (height, width) of the image and
    `patch` is the side of a patch, in pixels. Raise ValueError if the patches do not cover the image exactly, or if `image` is
    no pair.
    """
    h, w = check_pair(image)
    if patch < 1 or h % patch or w % patch or not h * w:
        raise ValueError(f"patches of {patch} pixels do not tile an image of {h} x {w}; {sizes_that_fit(h, w, patch)}")
    return h // patch, w // patch


def sizes_that_fit(h: int, w: int, patch: int) -> str:
    """Return a text for an error message about sizes. The text lists the patch sizes that divide an image of `h` x `w` pixels
    exactly, and the nearest image sizes that can be divided into patches of side `patch`.
    """
    patches = [p for p in range(1, min(h, w) + 1) if h % p == 0 and w % p == 0]
    hint = f"patch sizes that fit this image: {', '.join(map(str, patches)) or 'none'}"
    if patch < 1:
        return hint
    smaller, larger = ([max(1, round(side / patch)) * patch for side in (h, w)] for round in (floor, ceil))
    images = dict.fromkeys(f"{rows} x {columns}" for rows, columns in (smaller, larger))
    return f"{hint}; images that fit this patch: {' or '.join(images)}"


def shift_offsets(shift: str, patch: int) -> list[tuple[int, int]]:
    """Return how far each shifted copy of an image is moved, as a list of (down, right) in pixels. The image itself is not in
    the list. `shift` is "half-patch diagonal" (four copies), "1px cardinal" (four copies, one pixel along the axes) or "none"
    (no copies). `patch` is the side of a patch in pixels.
    """
    half = patch // 2
    offsets = {
        "half-patch diagonal": [(half, half), (half, -half), (-half, half), (-half, -half)],
        "1px cardinal": [(0, 1), (0, -1), (1, 0), (-1, 0)],
        "none": [],
    }
    if shift not in offsets:
        raise ValueError(f"shift is {shift!r}; expected one of {', '.join(map(repr, offsets))}")
    if shift == "half-patch diagonal" and half == 0:
        raise ValueError(f"half of a patch of {patch} pixel is no shift; use patch >= 2, or shift='none'")
    return offsets[shift]


def reset_as_linear(conv: nn.Conv2d):
    """Initialize the convolution `conv` like a linear layer, in place: Xavier-uniform weights and zero bias.

    The fan-in is input channels x kernel height x kernel width; the fan-out is the number of output channels.
    """
    bound = (6 / (prod(conv.weight.shape[1:]) + conv.weight.shape[0])) ** 0.5
    nn.init.uniform_(conv.weight, -bound, bound)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
