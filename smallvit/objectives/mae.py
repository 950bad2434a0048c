"""MAE: a model learns to see by guessing the patches of an image that it was not shown."""

from collections.abc import Callable
from math import floor, prod
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from smallvit.attention import Attention
from smallvit.augment import Batch
from smallvit.evaluate import frozen
from smallvit.flops import reduces
from smallvit.positions import SinCos2d
from smallvit.reduction.context import take, wide
from smallvit.vit import Block, ViT, initialize

from .collapse import Observation
from .objective import Objective

Grid = tuple[int, int]
Image = tuple[int, int]


class Reconstruction(NamedTuple):
    """What a masked autoencoder made of images, all b c h w and normalised as they were.

    `image` is as given, `mask` is True where a pixel was hidden, `masked` is what the encoder got: hidden pixels are 0.
    `predicted` has the visible patches as given and the hidden ones as guessed, from visible pixels alone. `helped` is the
    picture that papers show, with true numbers in it. A model that learned with `normalise` guesses how a hidden patch looks
    but not how bright it is, nor how strong its contrast: `predicted` takes mean and standard deviation of all visible pixels
    of the image, `helped` those of the hidden patch itself, which gives much of the answer away: a flat patch comes out right
    whatever the model guessed. Without `normalise` the two are equal.
    """

    image: Tensor
    masked: Tensor
    mask: Tensor
    predicted: Tensor
    helped: Tensor


class MAE(Objective):
    """Masked autoencoder: the model sees few patches of each image, and a small decoder guesses the pixels of the others.

    Paper    He et al. 2021, arXiv:2111.06377. A share `ratio` of the patches is hidden, drawn for each image on its own; the
             number of visible ones is rounded down. The encoder, `.model`, works on its prefix tokens and the visible patches
             alone, which have their positions already. Decoder: a linear map to width `decoder_dim`, one learned token wherever
             a patch is hidden, fixed 2-D sines and cosines, `decoder_depth` blocks, LayerNorm, a linear map to pixels. Loss:
             the squared error, its mean over the pixels of hidden patches. `normalise` first brings the pixels of each patch
             to be guessed to mean 0 and variance 1 (unbiased, plus 1e-6).
    Departs  Small: a decoder of 2 blocks of width 64, where ImageNet had 8 of 512. Positions of the encoder are the model's
             own; the paper's are `SinCos2d`. Hidden pixels are set to 0 before the tokenizer sees the image (black in digits;
             the mean where a mean is subtracted): tokens that look beyond their patch, as of `ShiftedPatchEmbed`, a wide
             kernel, `ConvStem` and `ConvTokenizer`, would show the encoder what it has to guess. They can tell from the
             zeros where patches are hidden, but nothing of what is in them; and they meet zeros beside them in training where
             they meet pixels when evaluated. `PatchEmbed` without a wide kernel notices nothing.

    Most patches of a digit are black. With `normalise` the target of a flat patch is 0 everywhere, which is easy, but one pixel
    one grey level above black makes almost as large a target as a stroke. Without it errors count as they look.

    It wants images as they are (the paper crops them, and no more): in trials on all unlabelled digits a linear probe with
    1,000 labels knew 87 to 91% of validation digits, and no more than 81% where they were bent by `augment.digits()` while it
    learned. Pixels as they are came to 91%, normalised ones to 88%.

    When evaluated the model sees all tokens. What only its head and its pool have (the scores of `SequencePool`, a norm behind
    the pool) learns nothing here. After each forward `observed` has the pooled features of the visible tokens.

    Raises   ValueError for a model that is no `ViT` or reduces tokens, a grid of tokens that does not cut the image into equal
             patches, a ratio that shows none, patches of one value with `normalise`, and a decoder that cannot be built.
    """

    needs_labels = False

    def __init__(
        self,
        model: ViT,
        *,
        ratio: float = 0.75,
        decoder_dim: int = 64,
        decoder_depth: int = 2,
        decoder_heads: int = 4,
        normalise: bool = True,
    ):
        super().__init__(model)
        if not isinstance(model, ViT):
            raise ValueError(f"MAE hides patches from a ViT; got a {type(model).__name__}, expected model=partial(ViT, ...)")
        if reduces(model):
            raise ValueError(
                "MAE guesses from every visible patch; got a model that reduces its tokens, expected reduction=None"
            )
        if decoder_depth < 1:
            raise ValueError(f"decoder_depth is {decoder_depth}; expected at least 1, or nothing is told to hidden patches")
        grid, patch = cut(model, model.image)
        values = prod(patch) * model.channels
        if normalise and values < 2:
            raise ValueError("a patch of 1 pixel and 1 channel has no variance; expected normalise=False, or larger patches")
        visible(ratio, prod(grid))
        self.ratio, self.normalise, self.patch = ratio, normalise, patch
        self.decoder = Decoder(model.prefix.shape, grid, values, decoder_dim, decoder_depth, decoder_heads)
        initialize(self.decoder)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        images = batch.images
        shown, hidden = self.hide(images)  # the first draw of a step, so that no dropout moves it
        tokens = self.encode(images, shown)
        with torch.no_grad():
            self.observed = Observation(self.model.pooled(tokens.detach(), None))
        return {"loss": self.error(self.decoder(tokens, shown, hidden, self.grid(images)), images, hidden)}

    def grid(self, images: Tensor) -> Grid:
        """Rows and columns of the patches of these images, which must be of the size that the decoder makes."""
        if images.ndim != 4 or images.shape[1] != self.model.channels:
            raise ValueError(
                f"got images of shape {tuple(images.shape)}; expected b {self.model.channels} h w, as the model was built for"
            )
        (h, w), (p, q) = images.shape[-2:], self.patch
        grid, patch = cut(self.model, (h, w))
        if patch != self.patch:
            raise ValueError(
                f"images of {h} x {w} have patches of {patch[0]} x {patch[1]} pixels and the decoder makes {p} x {q}; expected "
                f"images of {self.model.image[0]} x {self.model.image[1]}, as the model was built for"
            )
        return grid

    def hide(self, images: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Which patches of each image are shown, b k, and which are hidden, b m, both in reading order.

        Drawn on the CPU, whatever the device of the images, so that a seed hides the same patches everywhere.
        """
        n = prod(self.grid(images))
        order = torch.rand(len(images), n, generator=generator, device="cpu").argsort(dim=1, stable=True)
        k = visible(self.ratio, n)
        return order[:, :k].sort().values.to(images.device), order[:, k:].sort().values.to(images.device)

    def encode(self, images: Tensor, shown: Tensor) -> Tensor:
        """The encoder's tokens, b (prefix + k) d, of the prefix and the patches shown, b k; no other pixel is in them."""
        images = images.masked_fill(~pixels(shown, self.grid(images), images.shape[-2:]), 0.0)
        return self.model.tokens(images, keep=shown)[0]

    def error(self, guessed: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """The mean squared error of what was guessed, b m (p q c), for the hidden patches, b m."""
        wanted = take(patchify(images, self.grid(images)), hidden)
        if self.normalise:
            mean, std = moments(wanted)
            wanted = (wanted - mean) / std
        return (guessed - wanted).square().mean()

    def reconstruct(self, images: Tensor, *, seed: int = 0) -> Reconstruction:
        """Hide patches of normalised images, b c h w, and guess them, in evaluation mode; the same ones for a seed."""
        grid, image = self.grid(images), images.shape[-2:]
        shown, hidden = self.hide(images, torch.Generator().manual_seed(seed))
        with frozen(self):
            patches = patchify(images, grid)
            guessed = self.decoder(self.encode(images, shown), shown, hidden, grid).to(images.dtype)
            guesses = [guessed, guessed]
            if self.normalise:
                around, own = moments(take(patches, shown).flatten(1)[:, None]), moments(take(patches, hidden))
                guesses = [guessed * std + mean for mean, std in (around, own)]
            pictures = (unpatchify(patches.scatter(1, wide(hidden, guess), guess), grid, image) for guess in guesses)
            mask = ~pixels(shown, grid, image).expand_as(images)
            return Reconstruction(images, images.masked_fill(mask, 0.0), mask, *pictures)


class Decoder(nn.Module):
    """From the encoder's tokens, b (prefix + k) d, to the pixels of the hidden patches, b m (p q c).

    `shown`, b k, says which patches the tokens stand for, `hidden`, b m, which are to be guessed; together they are the grid.
    """

    def __init__(self, prefix: tuple[int, int], grid: Grid, values: int, dim: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Linear(prefix[1], dim)
        self.unknown = nn.Parameter(torch.empty(dim))
        self.position = SinCos2d(dim, grid, prefix[0])
        self.blocks = nn.ModuleList(Block(dim, heads, Attention, None, 0.0) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, values)

    def reset_parameters(self):
        nn.init.normal_(self.unknown, std=0.02)

    def forward(self, x: Tensor, shown: Tensor, hidden: Tensor, grid: Grid) -> Tensor:
        x = torch.cat([self.embed(x), self.unknown.expand(*hidden.shape, -1)], dim=1)
        prefix = x.shape[1] - prod(grid)
        places = torch.cat([shown, hidden], dim=1).argsort(dim=1)
        x = self.position(torch.cat([x[:, :prefix], take(x[:, prefix:], places)], dim=1), grid)
        for block in self.blocks:
            x, _ = block(x)
        return self.pixels(self.norm(take(x[:, prefix:], hidden)))


def visible(ratio: float, n: int) -> int:
    """How many of n patches are shown. Raises ValueError unless at least one is, and at least one is not."""
    if not 0 < ratio < 1:
        raise ValueError(f"ratio is {ratio}; expected the share of patches to hide, above 0 and below 1")
    shown = floor(n * (1 - ratio) + 1e-6)  # 10 * (1 - 0.9) is a little less than 1
    if not 0 < shown < n:
        raise ValueError(
            f"ratio {ratio} of {n} patches shows {shown} and hides {n - shown}; expected one of each, as of more patches"
        )
    return shown


def cut(model: ViT, image: Image) -> tuple[Grid, Image]:
    """Rows and columns of the tokens of an image, and the height and width in pixels of the patch that each stands for."""
    grid = model.tokenizer.grid(image)
    if image[0] % grid[0] or image[1] % grid[1]:
        smaller, larger = (
            tuple(nearest(model.tokenizer.grid, side, axis, way) for axis, side in enumerate(image)) for way in (-1, 1)
        )
        raise ValueError(
            f"the {grid[0]} x {grid[1]} tokens of {type(model.tokenizer).__name__} do not cut {image[0]} x {image[1]} pixels "
            f"into equal patches; images that fit: {smaller[0]} x {smaller[1]} or {larger[0]} x {larger[1]}"
        )
    return grid, (image[0] // grid[0], image[1] // grid[1])


def nearest(grid: Callable[[Image], Grid], side: int, axis: int, way: int) -> int:
    """The nearest side that the tokens cut into equal parts: this one, or a smaller (way -1) or larger one (way 1)."""
    for near in range(side, 0 if way < 0 else 4 * side, way):
        try:
            if near % grid((near, near))[axis] == 0:
                return near
        except ValueError:  # a size that the tokenizer refuses
            continue
    return side


def pixels(shown: Tensor, grid: Grid, image: Image) -> Tensor:
    """b 1 h w, True at the pixels of the patches shown, b k."""
    here = torch.zeros(len(shown), prod(grid), dtype=torch.bool, device=shown.device).scatter(1, shown, True)
    here = here.unflatten(1, (1, *grid))
    return here.repeat_interleave(image[0] // grid[0], dim=2).repeat_interleave(image[1] // grid[1], dim=3)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation along the last axis, which stays."""
    var, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return mean, (var + 1e-6).sqrt()


def patchify(images: Tensor, grid: Grid) -> Tensor:
    """b c h w -> b n (p q c): the pixels of rows times columns equal patches, in reading order.

    Raises ValueError for a grid that does not cut the images into equal patches.
    """
    (h, w), (rows, columns) = images.shape[-2:], grid
    if h % rows or w % columns:
        raise ValueError(f"a grid of {rows} x {columns} does not cut images of {h} x {w} into equal patches; expected divisors")
    patches = images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))  # b c r p s q
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: Grid, image: Image) -> Tensor:
    """b n (p q c) -> b c h w: the images that `patchify` cut.

    Raises ValueError for patches that do not fill such images.
    """
    (h, w), (rows, columns) = image, grid
    p, q = h // rows, w // columns
    if h % rows or w % columns or patches.shape[1] != rows * columns or patches.shape[2] % (p * q):
        raise ValueError(
            f"patches of shape {tuple(patches.shape)} do not fill images of {h} x {w}; expected b {rows * columns} ({p} {q} c)"
        )
    images = patches.unflatten(2, (p, q, -1)).unflatten(1, (rows, columns))  # b r s p q c
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
