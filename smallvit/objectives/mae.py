"""Masked autoencoder (MAE): self-supervised training by reconstruction of hidden patches."""

from collections.abc import Callable
from math import floor, prod
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from smallvit.attention import Attention, at_least_float32
from smallvit.augment import Batch, RandomErasing
from smallvit.augment.batch import upload
from smallvit.evaluate import frozen
from smallvit.flops import reduces
from smallvit.positions import SinCos2d
from smallvit.random_weights import initialize
from smallvit.reduction.context import expand_index, gather_tokens
from smallvit.slot_checks import check_integers
from smallvit.vit import Block, Blocks, ViT

from .collapse import Observation
from .objective import Objective

Grid = tuple[int, int]  # rows, columns
Image = tuple[int, int]  # height, width in pixels


class Reconstruction(NamedTuple):
    """The result of a reconstruction by a masked autoencoder: the input `image`, the input with hidden pixels set to 0
    (`masked`), the `mask` of hidden pixels, and two predicted images. `predicted` uses the visible patches alone. `helped` also
    uses the true mean and standard deviation of each hidden patch. Each tensor has the shape (batch, channels, height, width).

    Pixels are normalized as in the input.

    image      the input.
    masked     the input of the encoder; hidden pixels are 0.
    mask       True at hidden pixels.
    predicted  visible patches as in the input, hidden patches as predicted from visible pixels alone.
    helped     as `predicted`, but with the true mean and standard deviation of each hidden patch. Papers show this picture.

    A model trained with `normalize` predicts the pattern of a hidden patch, but neither its brightness nor its contrast. Then
    `predicted` uses the mean and standard deviation of all visible pixels of the image. `helped` gives away much of the answer:
    a flat patch looks right whatever the model predicts. Without `normalize` the two are equal.
    """

    image: Tensor
    masked: Tensor
    mask: Tensor
    predicted: Tensor
    helped: Tensor


class MAE(Objective):
    """The masked autoencoder (MAE), a self-supervised objective. Most patches of each image are hidden. An encoder processes
    the visible patches, and a small decoder predicts the pixels of the hidden patches.

    The encoder is `.model`. In evaluation it sees all patches. Its head, and what its pool learns (the scores of
    `SequencePool`, a norm after the pool), are not trained.

    ratio      the share of patches to hide; which ones is drawn for each image. The number of visible patches is rounded down.
    normalize  standardize the pixels of each target patch: mean 0, variance 1 (unbiased, plus 1e-6).
    decoder    width (`decoder_dim`), number of blocks (`decoder_depth`) and of heads (`decoder_heads`) of the decoder.

    Paper    He et al. 2021, arXiv:2111.06377. The encoder receives the prefix tokens and the visible patches with their
             positions. Decoder: a linear map to `decoder_dim`, one learned token in the place of each hidden patch, fixed 2-D
             sines and cosines, the blocks, LayerNorm, a linear map to pixels. Loss: the squared error, averaged over the pixels
             of hidden patches.
    Departs  Small: a decoder of 2 blocks of width 64, where ImageNet had 8 of 512. The encoder has the model's own positions;
             the paper uses `SinCos2d`. Hidden pixels are set to 0 before the tokenizer (black in digits; the mean where a mean
             is subtracted), because tokens that see beyond their patch would show hidden pixels to the encoder:
             `ShiftedPatchEmbed`, a kernel wider than the patch, `ConvStem`, `ConvTokenizer`. Such tokens show where patches are
             hidden, but not their content, and see zeros in training where they see pixels in evaluation. `PatchEmbed` without
             a wide kernel is not affected.

    Most patches of a digit are black. With `normalize` the target of a flat patch is 0 everywhere, which is easy to predict.
    But a single pixel one gray level above black then gives almost as large a target as a stroke. Without `normalize`, errors
    count as they look.

    Use images without augmentation (the paper only crops them). In trials with all digits and no labels, a linear probe with
    1,000 labels had an accuracy of 87 to 91% on validation digits, and at most 81% with `augment.digits()` in training. With
    `normalize=False` it was 91%, with `normalize=True` 88%.

    Raises   ValueError for a model that is not a `ViT` or reduces tokens, a grid of tokens that does not divide the image into
             equal patches, a ratio that leaves no visible patch, patches of one value with `normalize`, a decoder that
             cannot be built, and a run whose `augment` has `RandomErasing`.
    """

    needs_labels = False
    stackable = True

    def __init__(
        self,
        model: ViT,
        *,
        ratio: float = 0.75,
        decoder_dim: int = 64,
        decoder_depth: int = 2,
        decoder_heads: int = 4,
        normalize: bool = True,
    ):
        super().__init__(model)
        if not isinstance(model, ViT):
            raise ValueError(
                f"MAE hides patches from a ViT; got a {type(model).__name__}, expected model=partial(ViT, ...), or "
                "from_timm(model) for a timm model"
            )
        if reduces(model):
            reason = "masked patches need a token for each visible patch"
            raise ValueError(f"{reason}; got a model that reduces its tokens, expected reduction=None")
        if decoder_depth == 0:
            raise ValueError(f"decoder_depth is {decoder_depth}; expected at least 1, or hidden patches receive no information")
        check_integers(decoder_dim=(decoder_dim, 1), decoder_depth=(decoder_depth, 1), decoder_heads=(decoder_heads, 1))
        grid, patch = grid_and_patch(model, (model.image[0], model.image[1]))
        values = prod(patch) * model.channels
        if normalize and values < 2:
            raise ValueError("a patch of 1 pixel and 1 channel has no variance; expected normalize=False, or larger patches")
        count_visible(ratio, prod(grid))
        self.ratio, self.normalize, self.patch = ratio, normalize, patch
        self.decoder = Decoder(model.prefix.shape, grid, values, decoder_dim, decoder_depth, decoder_heads)
        initialize(self.decoder)

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective: in addition to those that
        every objective refuses, random erasing; see `check_targets`. `run` is a `Run`.
        """
        super().check_run(run)
        check_targets(cls.__name__, run)

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also holds the numbers of the visible and of the hidden patches of each image. The
        training loop calls this method before each step, for each run of a stack separately.
        """
        batch = super().prepare(batch)
        return batch._replace(draws=self.hide(batch.images)) if self.draws_for(MAE) else batch

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the reconstruction loss of a batch under the key "loss". Which patches are hidden is drawn if the
        batch does not say it. `progress` is not used.

        Also stores the pooled features of the visible patches in the attribute `observed`, which is checked for collapse.
        """
        images = batch.images
        visible, hidden = batch.draws or self.hide(images)
        tokens = self.encode(images, visible)
        with torch.no_grad():
            self.observed = Observation(self.model.pooled(tokens.detach(), None))
        return {"loss": self.error(self.decoder(tokens, visible, hidden, self.grid(images)), images, hidden)}

    def grid(self, images: Tensor) -> Grid:
        """Return the number of (rows, columns) of patches in images. Raise ValueError if the patches of these images have
        another size than the patches that the decoder predicts.
        """
        if not isinstance(images, Tensor):
            raise ValueError(
                f"got no tensor but {images!r:.40}; the model needs b {self.model.channels} h w, normalized floats"
            )
        if images.ndim != 4 or images.shape[1] != self.model.channels or not images.is_floating_point():
            raise ValueError(
                f"got images of shape {tuple(images.shape)} and {images.dtype}; the model needs b {self.model.channels} h w, "
                "normalized floats"
            )
        h, w = images.shape[2:]
        grid, patch = grid_and_patch(self.model, (h, w))
        if patch != self.patch:
            raise ValueError(
                f"images of {h} x {w} have patches of {patch[0]} x {patch[1]} pixels and the decoder makes {self.patch[0]} x "
                f"{self.patch[1]}; expected images of {self.model.image[0]} x {self.model.image[1]}, as in the model"
            )
        return grid

    def hide(self, images: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Choose at random which patches of each image are hidden. Return two tensors of patch indices: the visible patches,
        shape (batch, visible), and the hidden patches, shape (batch, hidden). `generator` is the random number generator.

        The indices of each image are sorted.

        Patches are drawn on the CPU, so that a seed gives the same patches on every device.
        """
        n = prod(self.grid(images))
        order = torch.rand(len(images), n, generator=generator, device="cpu").argsort(dim=1, stable=True)
        order, k = upload(order, images.device), count_visible(self.ratio, n)
        return order[:, :k].sort().values, order[:, k:].sort().values

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Return the tokens of the encoder, which is run on the visible patches only. `visible` (batch, visible) holds the
        indices of these patches. The prefix tokens (class token and registers) come first.
        """
        images = images.masked_fill(~patch_mask(visible, self.grid(images), (images.shape[2], images.shape[3])), 0.0)
        return self.model.tokens(images, keep=visible)[0]

    def error(self, predicted: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Return the mean squared error between the predicted and the true pixels of the hidden patches. `predicted` has the
        shape (batch, hidden, pixels), and `hidden` (batch, hidden) holds the indices of these patches in `images`.
        """
        targets = gather_tokens(patchify(images, self.grid(images)), hidden)
        targets = at_least_float32(targets)  # half precision has no exact mean of squares
        if self.normalize:
            mean, std = mean_and_std(targets)
            targets = (targets - mean) / std
        return (predicted.to(targets.dtype) - targets).square().mean()

    def reconstruct(self, images: Tensor, *, seed: int = 0) -> Reconstruction:
        """Hide random patches of images, predict their pixels, and return a `Reconstruction` (input, mask and predicted
        images), for example for a figure. `images` are normalized. The option `seed` decides which patches are hidden.

        The images have the shape (batch, channels, height, width). The model runs in evaluation mode.
        """
        grid, image = self.grid(images), (images.shape[2], images.shape[3])
        visible, hidden = self.hide(images, torch.Generator().manual_seed(seed))
        with frozen(self):
            patches = patchify(images, grid)
            predicted = self.decoder(self.encode(images, visible), visible, hidden, grid).to(images.dtype)
            versions = [predicted, predicted]
            if self.normalize:
                whole = mean_and_std(gather_tokens(patches, visible).flatten(1)[:, None])
                moments = whole, mean_and_std(gather_tokens(patches, hidden))
                versions = [predicted * std + mean for mean, std in moments]
            pictures = (unpatchify(patches.scatter(1, expand_index(hidden, x), x), grid, image) for x in versions)
            mask = ~patch_mask(visible, grid, image).expand_as(images)
            return Reconstruction(images, images.masked_fill(mask, 0.0), mask, *pictures)


class Decoder(nn.Module):
    """A small transformer that predicts the pixels of the hidden patches from the encoder's tokens of the visible patches. The
    decoder is used only in training and for figures.
    """

    def __init__(self, prefix: tuple[int, ...], grid: Grid, values: int, dim: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Linear(prefix[1], dim)
        self.unknown = nn.Parameter(torch.empty(dim))
        self.position = SinCos2d(dim, grid, prefix[0], temperature=10_000, centered=False, amplitude=1.0)
        self.blocks = Blocks(Block(dim, heads, Attention, None, 0.0) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, values)

    def reset_parameters(self):
        """Initialize the learned mask token of the decoder, which takes the place of each hidden patch."""
        nn.init.normal_(self.unknown, std=0.02)

    def forward(self, x: Tensor, visible: Tensor, hidden: Tensor, grid: Grid) -> Tensor:
        """Return the predicted pixels of the hidden patches, shape (batch, hidden, pixels). `x` holds the encoder's tokens.
        `visible` and `hidden` hold the indices of the visible and the hidden patches. `grid` is the number of (rows, columns)
        of patches.

        `x` has the prefix tokens (class token and registers) first, then the visible patches.
        """
        x = torch.cat([self.embed(x), self.unknown.expand(*hidden.shape, -1)], dim=1)
        prefix = x.shape[1] - prod(grid)
        order = torch.cat([visible, hidden], dim=1).argsort(dim=1)
        x = self.position(torch.cat([x[:, :prefix], gather_tokens(x[:, prefix:], order)], dim=1), grid)
        x, _ = self.blocks(x)
        return self.pixels(self.norm(gather_tokens(x[:, prefix:], hidden)))


def check_targets(objective: str, run: Any):
    """Raise ValueError if the transforms of a training run set parts of the images to black, because the decoder would have to
    predict these parts. `objective` is the name of the objective, and `run` a `Run`.
    """
    if any(isinstance(transform, RandomErasing) and not transform.off for transform in run.augment):
        raise ValueError(
            f"{objective} predicts the pixels after augmentation, so the black rectangles of RandomErasing would be targets; "
            "remove RandomErasing from augment, or use Supervised"
        )


def count_visible(ratio: float, patches: int) -> int:
    """Return the number of patches of an image that stay visible. `patches` is the number of all patches, and `ratio` is the
    fraction of patches to hide. Raise ValueError if all patches or none would be visible.
    """
    if not 0 < ratio < 1:
        raise ValueError(f"ratio is {ratio}; expected the share of patches to hide, above 0 and below 1")
    visible = floor(patches * (1 - ratio) + 1e-6)  # 10 * (1 - 0.9) is a little less than 1
    if not 0 < visible < patches:
        raise ValueError(
            f"ratio {ratio} of {patches} patches shows {visible} and hides {patches - visible}; expected at least one of each:"
            " use more patches or another ratio"
        )
    return visible


def grid_and_patch(model: ViT, image: Image) -> tuple[Grid, Image]:
    """Return two pairs: the number of (rows, columns) of patches in an image, and the (height, width) of a patch in pixels.
    `image` is the image size (height, width).

    Raises ValueError, with the nearest sizes that fit, if the tokens do not divide the image into equal patches.
    """
    grid = model.tokenizer.grid(image)
    if image[0] % grid[0] or image[1] % grid[1]:
        smaller, larger = (
            [nearest_divisible_size(model.tokenizer.grid, size, axis, direction) for axis, size in enumerate(image)]
            for direction in (-1, 1)
        )
        raise ValueError(
            f"the {grid[0]} x {grid[1]} tokens of {type(model.tokenizer).__name__} do not divide {image[0]} x {image[1]} pixels"
            f" into equal patches; images that fit: {smaller[0]} x {smaller[1]} or {larger[0]} x {larger[1]}"
        )
    return grid, (image[0] // grid[0], image[1] // grid[1])


def nearest_divisible_size(grid_of: Callable[[Image], Grid], size: int, axis: int, direction: int) -> int:
    """Return the image height (`axis` 0) or width (`axis` 1) nearest to `size` that equal patches can cover. `direction` is -1
    to search smaller sizes and 1 to search larger sizes. `grid_of` is the tokenizer's function from an image size (height,
    width) to the number of (rows, columns) of patches.

    Returns `size` if no other size up to four times as large is found.
    """
    for candidate in range(size, 0 if direction < 0 else 4 * size, direction):
        try:
            if candidate % grid_of((candidate, candidate))[axis] == 0:
                return candidate
        except ValueError:  # a size that the tokenizer refuses
            continue
    return size


def patch_mask(index: Tensor, grid: Grid, image: Image) -> Tensor:
    """Return a boolean mask of pixels, shape (batch, 1, height, width), that is True inside selected patches. `index` (batch,
    selected) holds the numbers of these patches. `grid` is the number of (rows, columns) of patches, and `image` is the image
    size.
    """
    mask = torch.zeros(len(index), prod(grid), dtype=torch.bool, device=index.device).scatter(1, index, True)
    return pixels_of_patches(mask, grid, image)


def pixels_of_patches(mask: Tensor, grid: Grid, image: Image) -> Tensor:
    """Return a mask of pixels, shape (batch, 1, height, width), from a mask of patches, shape (batch, patches). `grid` is the
    number of (rows, columns) of patches, and `image` is the image size.
    """
    mask = mask.unflatten(1, (1, *grid))
    return mask.repeat_interleave(image[0] // grid[0], dim=2).repeat_interleave(image[1] // grid[1], dim=3)


def mean_and_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of the tensor `x` along its last axis. This axis is kept with length 1."""
    var, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return mean, (var + 1e-6).sqrt()


def patchify(images: Tensor, grid: Grid) -> Tensor:
    """Return the patches of images as vectors of pixels, shape (batch, patches, pixels). `images` has the shape (batch,
    channels, height, width), and `grid` is the number of (rows, columns) of patches.

    The patches are in row-major order. A vector has patch height * patch width * channels numbers.

    Raises ValueError for a grid that does not divide the images into equal patches.
    """
    (h, w), (rows, columns) = images.shape[-2:], grid
    if h % rows or w % columns:
        raise ValueError(f"a grid of {rows} x {columns} does not divide images of {h} x {w} into equal patches; use divisors")
    patches = images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))  # b c r p s q
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: Grid, image: Image) -> Tensor:
    """Return images (batch, channels, height, width) that are put together from vectors of pixels, `patches` (batch, patches,
    pixels). `grid` is the number of (rows, columns) of patches, and `image` is the image size (height, width).

    This is the inverse of `patchify`.

    Raises ValueError for patches that do not fill images of this size.
    """
    (h, w), (rows, columns) = image, grid
    p, q = h // rows, w // columns
    if h % rows or w % columns or patches.shape[1] != rows * columns or patches.shape[2] % (p * q):
        raise ValueError(
            f"patches of shape {tuple(patches.shape)} do not fill images of {h} x {w}; expected b {rows * columns} ({p} {q} c)"
        )
    images = patches.unflatten(2, (p, q, -1)).unflatten(1, (rows, columns))  # b r s p q c
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
