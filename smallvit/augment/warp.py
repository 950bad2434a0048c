"""Warp: all geometric transforms in one resampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, log, radians
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from .batch import (
    ON_CPU,
    Batch,
    Random,
    Transform,
    check_interval,
    check_range,
    concatenate,
    height_width,
    symmetric_uniform,
    upload,
)
from .kernels import KERNELS


class Crops(NamedTuple):
    """Where several crops lie in their images. All tensors have the shape (2, crops); the first axis is (x, y). The coordinates
    are those of torch's `grid_sample`: from -1 to 1 along each axis of the image.

    center    coordinates of the center
    extent    (width, height) as fractions of the image
    along_x   direction in the image of the axis x of the crop: how far (x, y) change per unit of length
    along_y   the same for the axis y of the crop
    shift     how far the content of the crop is moved to the right and down. The unit is half the shorter side.
    """

    center: Tensor
    extent: Tensor
    along_x: Tensor
    along_y: Tensor
    shift: Tensor


@dataclass(frozen=True, kw_only=True)
class Warp(Transform):
    """A transform that randomly rotates, zooms, shears, shifts, elastically deforms and crops each image. All of these changes
    are made in one bilinear resampling.

    One resampling instead of several keeps thin strokes sharp. For each image, each change is drawn uniformly from -value to
    +value. Angles are in degrees. Lengths are fractions of the shorter side of the image, so that 8 x 8 and 28 x 28 pixels are
    changed alike.

    rotate    angle of rotation
    scale     zoom: 0.15 is a factor from 1/1.15 to 1.15, uniform in its logarithm, drawn for width and height separately
    shear     angle by which vertical strokes become slanted
    shift     length, drawn for x and y separately
    elastic   length: root mean square of a smooth random displacement in x and in y
    smooth    length: standard deviation of the Gaussian that makes this displacement smooth, at least 0.02
    crop      interval of the crop's area, as a fraction of the image's; drawn uniformly. All lengths above are then relative
              to the crop, which is rotated about its own center
    aspect    the crop's width / height, relative to the image's, is drawn log-uniformly from 1/aspect to aspect; the range is
              narrower for a crop that would not fit into the image
    aim       position of the crop: "anywhere" inside the image, or "ink": centered on a pixel drawn with a probability
              proportional to its brightness. With "ink" no result is blank: if no pixel of the result is half as bright as
              the brightest pixel of the image, the crop is moved to that brightest pixel
    size      size of the result in pixels: one side, or (height, width); None keeps the size of the image
    fill      value of pixels outside the image: "black", or "edge" for the nearest pixel of the image
    force     True allows rotations of more than 30 degrees for digits

    Paper     Simard et al., ICDAR 2003: its elastic 34 and smooth 4 pixels are about 0.05 and 0.14 here. The crop is that of
              Szegedy et al. 2015 (arXiv:1409.4842), known as RandomResizedCrop.
    Off       rotate, scale, shear, shift and elastic at 0, crop at (1, 1) and size at None.
    Departs   Displacements are drawn at control points 1.5 `smooth` apart instead of at every pixel, and all pixels have the
              same variance. DINO's RandomResizedCrop is bicubic and antialiased. RandomResizedCrop draws again until a crop
              fits, so its largest crops are rarer than here.
    """

    rotate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    elastic: float = 0.0
    smooth: float = 0.14
    crop: tuple[float, float] = (1.0, 1.0)
    aspect: float = 4 / 3
    aim: Literal["anywhere", "ink"] = "anywhere"
    size: int | tuple[int, int] | None = None
    fill: Literal["black", "edge"] = "black"
    force: bool = False

    def __post_init__(self):
        check_range(self, rotate=(0, 180), scale=(0, 10), shear=(0, 80), shift=(0, 1), elastic=(0, 1), smooth=(0.02, 10))
        check_range(self, aspect=(1, 100))
        for name, allowed in (("fill", ("black", "edge")), ("aim", ("anywhere", "ink"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f'Warp({name}={getattr(self, name)!r}): expected "{allowed[0]}" or "{allowed[1]}"')
        check_interval(self, "crop", 1e-6, 1)
        if self.size is not None and height_width(self.size) is None:
            raise ValueError(f"Warp(size={self.size!r}): expected a side in pixels, (height, width), or None")

    @property
    def unsafe_for_digits(self) -> str | None:
        safe = self.rotate <= 30 or self.force
        return None if safe else f"Warp(rotate={self.rotate}) rotates digits by more than 30 degrees: a 6 can become a 9"

    @property
    def off(self) -> bool:
        """Return True if this transform leaves every image unchanged, because all options that change an image are turned off.
        """
        return not (self.moves or self.elastic) and self.crop == (1, 1) and self.size is None

    @property
    def moves(self) -> bool:
        """Return True if this transform rotates, zooms, shears or shifts images."""
        return bool(self.rotate or self.scale or self.shear or self.shift)

    @property
    def can_mirror(self) -> bool:
        """Return True if this transform can also mirror its results: see `crops`."""
        return not self.elastic and self.aim == "anywhere"

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        crops, _, h, w = shape
        random = {}
        if self.crop != (1, 1):
            smallest, largest = self.crop
            random["area"] = smallest + (largest - smallest) * torch.rand(crops, generator=generator, **ON_CPU)
            random["aspect"] = symmetric_uniform(crops, generator=generator)
            uniform = partial(torch.rand, **ON_CPU) if self.aim == "ink" else symmetric_uniform
            random["place"] = uniform(2, crops, generator=generator).T
        random["moves"] = symmetric_uniform(6, crops, generator=generator).T
        if self.elastic:
            rows, columns = (weights.shape[1] for weights in self.control_weights(h, w, torch.device("cpu")))
            random["control"] = torch.randn(crops, 2, rows, columns, generator=generator, **ON_CPU)
        return random

    def change(self, batch: Batch, random: Random) -> Batch:
        return batch._replace(images=self.sample(batch.images, self.crops(batch.images, random), random))

    def sample(self, images: Tensor, crops: Crops, random: Random) -> Tensor:
        """Return the pixels of the crops, shape (count b, c, height, width), deformed if `elastic` is set. b is the number of
        images and `count` is the number of crops of each. The first b crops are one of every image, the next b a second one,
        and so on.
        """
        grid = self.affine_grid(images, crops)
        if self.elastic:
            grid = self.add_elastic(grid, images, crops.extent, random["control"])
        views = self.resample(images, grid)
        return self.move_blank(views, images, grid) if self.aim == "ink" else views

    def resample(self, images: Tensor, grid: Tensor) -> Tensor:
        """Return crops of the images, sampled bilinearly at the points of the grid: see `Kernels`."""
        return KERNELS.get().sample(images, grid, "zeros" if self.fill == "black" else "border")

    def move_blank(self, views: Tensor, images: Tensor, grid: Tensor) -> Tensor:
        """Replace blank crops, which show nothing bright, by crops around the brightest pixel of their image, in place. Return
        all crops. `views` holds the crops of the `images`. `grid` (2, crops, height, width) holds the points (x, y) at which
        each crop was sampled. Those of a blank crop are moved, and the crop is sampled again.

        A view is blank if none of its pixels is half as bright as the brightest pixel of the image. The new crop keeps its size
        and deformation.
        """
        brightest = views.flatten(1).amax(1).view(-1, len(images))
        blank = (brightest < images.flatten(1).amax(1) / 2).flatten().nonzero()[:, 0]
        if len(blank):
            source, grid = images[blank % len(images)], grid[:, blank]
            target = _pixel_centers(*images.shape[2:], images.device)[:, source.amax(1).flatten(1).argmax(1)]
            offset = target - grid[:, :, grid.shape[2] // 2, grid.shape[3] // 2]
            views[blank] = self.resample(source, grid + offset[:, :, None, None])
        return views

    def output_size(self, h: int, w: int) -> tuple[int, int]:
        """Return the (height, width) in pixels of an image after this transform. `h` and `w` are the height and the width
        before the transform.
        """
        return height_width(self.size) or (h, w)

    def crops(self, images: Tensor, random: Random) -> Crops:
        """Return the crops that the random numbers describe, with their rotation, zoom, shear and shift. There may be several
        crops of each image; `sample` says in which order.

        The numbers may include "mirrored", which is True for crops that are to be mirrored left to right.
        """
        center, extent = self.place_crops(images, random)
        to_grid = _grid_scale(*images.shape[2:])
        if self.moves:
            zoom, length = log(1 + self.scale), 2 * self.shift
            ranges = torch.tensor([radians(self.rotate), radians(self.shear), zoom, zoom, length, length], **ON_CPU)
            moves = random["moves"].T * ranges[:, None]
            (angle, lean, zoom_x, zoom_y), shift = moves[:4], moves[4:]
            cos, sin, slant = angle.cos(), angle.sin(), lean.tan()
            along_x = torch.stack([cos, sin]) * zoom_x.exp() * to_grid
            along_y = torch.stack([cos * slant - sin, sin * slant + cos]) * zoom_y.exp() * to_grid
        else:
            along_x, along_y = torch.eye(2, **ON_CPU)[:, :, None] * to_grid.expand_as(extent)
            shift = torch.zeros_like(extent)
        if "mirrored" in random:
            sign = torch.where(random["mirrored"], -1.0, 1.0)
            along_x, shift = along_x * sign, torch.stack([shift[0] * sign, shift[1]])
        return Crops(center, extent, along_x, along_y, shift)

    def place_crops(self, images: Tensor, random: Random) -> tuple[Tensor, Tensor]:
        """Return the center and the extent of the crops that the random numbers describe: see `Crops`. The center is on the
        device of the images, the extent on the CPU.
        """
        if self.crop == (1, 1):
            crops = len(random["moves"])
            return images.new_zeros(2, crops), torch.ones(2, crops, **ON_CPU)
        area = random["area"]
        aspect = (random["aspect"] * area.log().neg_().clamp_(max=log(self.aspect))).exp_()
        extent = torch.stack([area * aspect, area / aspect]).sqrt_().clamp_(max=1)
        farthest = 1 - extent
        if self.aim == "anywhere":
            return (random["place"].T * farthest).to(images.device), extent
        place, farthest = random["place"][:, 0].to(images.device), farthest.to(images.device)
        return _draw_ink(images, place).clamp_(-farthest, farthest), extent

    def affine_grid(self, images: Tensor, crops: Crops) -> Tensor:
        """Return the points (x, y) at which the images are sampled, without elastic deformation, shape (2, crops, height,
        width).
        """
        h, w = images.shape[2:]
        rows, columns = self.output_size(h, w)
        x = _axis_positions(columns, columns * min(h, w) / w) - crops.shift[0, :, None]
        y = _axis_positions(rows, rows * min(h, w) / h) - crops.shift[1, :, None]
        # Sums of products instead of a matrix product, which may run in TF32 or bf16: too coarse for coordinates.
        from_x, from_y = crops.along_x[:, :, None] * x, crops.along_y[:, :, None] * y
        if self.crop != (1, 1):
            extent = crops.extent[:, :, None]
            from_x, from_y = from_x * extent, from_y * extent
        from_x, from_y = upload(from_x, images.device).add_(crops.center[:, :, None]), upload(from_y, images.device)
        return from_x[:, :, None, :] + from_y[:, :, :, None]

    def add_elastic(self, grid: Tensor, images: Tensor, extent: Tensor, control: Tensor) -> Tensor:
        """Add a smooth random displacement (elastic deformation) to sampling points, in place, and return the points. `grid`
        (2, crops, height, width) holds the points in `images`. `extent` is the (width, height) of each crop, as a fraction of
        its image. `control` holds the random numbers.

        Each point is displaced by a weighted sum of random displacements at control points; weights fall off with distance.
        """
        h, w = images.shape[2:]
        rows, columns = self.control_weights(h, w, images.device)
        control = control * (2 * self.elastic * _grid_scale(h, w)[:, :, None])
        if self.crop != (1, 1):
            control = control * extent.T[:, :, None, None]
        across = upload(control, grid.device).transpose(0, 1).flatten(0, 1) @ columns.T
        return grid.flatten(0, 1).baddbmm_(rows.expand(len(across), -1, -1), across).view_as(grid)

    def control_weights(self, h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the weights of the control points for the rows and for the columns of the result: see `_control_weights`."""
        (rows, columns), side = self.output_size(h, w), min(h, w)
        along_y = _control_weights(rows, side * rows / h, self.smooth, device)
        return along_y, _control_weights(columns, side * columns / w, self.smooth, device)


def warp_together(images: Tensor, warps: Sequence[Warp], draws: Sequence[Random]) -> list[Tensor]:
    """Return the crops that each Warp makes of the same images with its random numbers, one tensor for each Warp. If the Warps
    differ only in `crop` and `size`, the positions of all crops are computed at once, which is faster.
    """
    if _differ_only_in_crop_and_size(*warps) and len({*map(tuple, draws)}) == 1:  # and have the same kinds of random numbers
        positions = [{name: numbers for name, numbers in random.items() if name != "control"} for random in draws]
        counts = [len(random["moves"]) for random in draws]
        crops = map(Crops, *(tensor.split(counts, dim=1) for tensor in warps[0].crops(images, concatenate(positions))))
    else:
        crops = (warp.crops(images, random) for warp, random in zip(warps, draws))
    return [warp.sample(images, own, random) for warp, own, random in zip(warps, crops, draws)]


@lru_cache(maxsize=64)
def _differ_only_in_crop_and_size(*warps: Warp) -> bool:
    """Return True if the Warps are equal except for the options `crop` and `size`, and all of them crop the images."""
    crop, size = warps[0].crop, warps[0].size
    return all(replace(warp, crop=crop, size=size) == warps[0] and warp.crop != (1, 1) for warp in warps)


def _draw_ink(images: Tensor, uniform: Tensor) -> Tensor:
    """Draw random pixels of each image as centers of crops, with a probability proportional to their brightness, so that crops
    show something. Return the centers (x, y) of these pixels from -1 to 1, shape (2, pixels). `uniform` holds one random number
    from 0 to 1 for each pixel to draw: first one pixel of each of the `images`, then a second one of each, and so on.
    """
    h, w = images.shape[2:]
    exact = torch.float32 if images.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
    ink = (images.mean(1) if images.shape[1] > 1 else images[:, 0]).flatten(1).to(exact, copy=True).cumsum_(1)
    target = uniform.view(-1, len(images)).T * ink[:, -1:]
    index = torch.searchsorted(ink, target.contiguous(), right=True).clamp_(max=h * w - 1)
    return _pixel_centers(h, w, images.device).index_select(1, index.T.flatten())


@lru_cache(maxsize=64)
def _pixel_centers(h: int, w: int, device: torch.device) -> Tensor:
    """Return the centers (x, y) of the pixels of an image of `h` x `w` pixels, shape (2, pixels), in coordinates from -1 to 1,
    as in torch's `grid_sample`. The pixels are counted row by row.
    """
    y, x = (((2 * torch.arange(length, **ON_CPU) + 1 - length) / length) for length in (h, w))
    return torch.stack([x.repeat(h), y.repeat_interleave(w)]).to(device)


@lru_cache(maxsize=64)
def _grid_scale(h: int, w: int) -> Tensor:
    """Return two factors (x, y) for an image of `h` x `w` pixels, shape (2, 1). They convert a length to the coordinates of
    torch's `grid_sample`, which run from -1 to 1 along each axis. The length is given as a multiple of half the shorter side of
    the image.
    """
    return torch.tensor([[min(h, w) / w], [min(h, w) / h]], **ON_CPU)


@lru_cache(maxsize=64)
def _axis_positions(length: int, side: float) -> Tensor:
    """Return the coordinates of the centers of `length` pixels along one axis of an image, shape (length,). The middle of the
    axis is 0. `side` is the length of the shorter side of the image in the same pixels. Half of it is the unit, so that both
    axes have the same unit.
    """
    return (2 * torch.arange(length, **ON_CPU) + 1 - length) / side


@lru_cache(maxsize=64)
def _control_weights(length: int, side: float, smooth: float, device: torch.device) -> Tensor:
    """Return a matrix (length, n) of Gaussian weights for elastic deformation. It converts random displacements of n equally
    spaced control points to smooth displacements of `length` pixels along one axis of an image. The Gaussian has the standard
    deviation `smooth` times `side`, the shorter side of the image in pixels. The points are 1.5 standard deviations apart and
    cover the axis.

    `side` and `length` count the same pixels. The squares of each row sum to 1, so that all pixels have the same variance.
    """
    sigma, spacing = 2 * smooth, 3 * smooth
    n = ceil(2 * length / side / spacing) + 2
    points = spacing * (torch.arange(n, **ON_CPU) - (n - 1) / 2)
    weights = torch.exp(-((_axis_positions(length, side)[:, None] - points) ** 2) / (2 * sigma**2))
    return (weights / weights.norm(dim=1, keepdim=True)).to(device)
