"""Warp: all geometric transforms in one resampling."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, radians
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor

from .batch import Batch, check_interval, check_range, height_width


@dataclass(frozen=True, kw_only=True)
class Warp:
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
        moves = self.rotate or self.scale or self.shear or self.shift or self.elastic
        return not moves and self.crop == (1, 1) and self.size is None

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        return batch if self.off else batch._replace(images=self.views(batch.images, 1, generator))

    def views(self, images: Tensor, count: int, generator: Generator) -> Tensor:
        """Return several random versions of each image, shape (count b, c, h, w). `count` is the number of versions and b is
        the number of images. The first b results are one version of every image, the next b a second version, and so on.
        """
        if self.off:
            return images.repeat(count, 1, 1, 1)
        center, extent = self.draw_crops(images, count, generator)
        grid = self.affine_grid(images, center, extent, generator)
        if self.elastic:
            grid = self.add_elastic(grid, images, extent, generator)
        views = [self.resample(images, one) for one in grid.chunk(count)]
        result = torch.cat(views) if count > 1 else views[0]
        return self.move_blank(result, images, grid) if self.aim == "ink" else result

    def resample(self, images: Tensor, grid: Tensor) -> Tensor:
        """Return images (batch, channels, height, width) that are sampled bilinearly from `images` at given points. `grid`
        (batch, 2, height, width) holds the point (x, y) for each new pixel. The coordinates run from -1 to 1, as in torch's
        `grid_sample`.
        """
        padding = "zeros" if self.fill == "black" else "border"
        return F.grid_sample(images, rearrange(grid, "b xy h w -> b h w xy"), padding_mode=padding, align_corners=False)

    def move_blank(self, views: Tensor, images: Tensor, grid: Tensor) -> Tensor:
        """Replace blank crops, which show nothing bright, by crops around the brightest pixel of their image, in place. Return
        all crops. `views` holds the crops of the `images`. `grid` (crops, 2, height, width) holds the points (x, y) at which
        each crop was sampled. Those of a blank crop are moved, and the crop is sampled again.

        A view is blank if none of its pixels is half as bright as the brightest pixel of the image. The new crop keeps its size
        and deformation.
        """
        brightest = images.flatten(1).amax(1).repeat(len(views) // len(images))
        blank = (views.flatten(1).amax(1) < brightest / 2).nonzero()[:, 0]
        if len(blank):
            source, grid = images[blank % len(images)], grid[blank]
            target = _pixel_center(source.amax(1).flatten(1).argmax(1), source).T
            offset = target - grid[:, :, grid.shape[2] // 2, grid.shape[3] // 2]
            views[blank] = self.resample(source, grid + offset[:, :, None, None])
        return views

    def output_size(self, h: int, w: int) -> tuple[int, int]:
        """Return the (height, width) in pixels of an image after this transform. `h` and `w` are the height and the width
        before the transform.
        """
        return height_width(self.size) or (h, w)

    def draw_crops(self, images: Tensor, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw random crops of each image. Return two tensors of shape (2, crops): the centers (x, y), in coordinates from -1
        to 1, and the sizes (width, height), as fractions of the image. `count` is the number of crops for each image, and
        `generator` is the random number generator.

        The crops are in the order (count b): first one crop of each of the b images, and so on.

        The coordinates of the centers are those of `F.grid_sample`.
        """
        b = count * len(images)
        if self.crop == (1, 1):
            return images.new_zeros(2, b), images.new_ones(2, b)
        size, shape, place_x, place_y = torch.rand(4, b, generator=generator).to(images.device)
        area = self.crop[0] + (self.crop[1] - self.crop[0]) * size
        aspect = ((2 * shape - 1) * (-area.log()).clamp(max=log(self.aspect))).exp()
        extent = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()]).clamp(max=1)
        if self.aim == "ink":
            center = _draw_ink(images, place_x)
        else:
            center = torch.stack([2 * place_x - 1, 2 * place_y - 1]) * (1 - extent)
        return center.clamp(extent - 1, 1 - extent), extent

    def affine_grid(self, images: Tensor, center: Tensor, extent: Tensor, generator: Generator) -> Tensor:
        """Draw a random rotation, zoom, shear and shift for each crop. Return the points (x, y) at which the image is sampled,
        shape (crops, 2, height, width). `center` is the position (x, y) of each crop, from -1 to 1, and `extent` is its size
        (width, height), as fractions of the image. `generator` is the random number generator.

        The content of the image moves by the drawn shift.
        """
        h, w = images.shape[2:]
        rows, columns = self.output_size(h, w)
        side, to_grid = min(h, w), _grid_scale(h, w)
        zoom, shift = log(1 + self.scale), 2 * self.shift  # the unit of length is half the shorter side
        ranges = torch.tensor([radians(self.rotate), radians(self.shear), zoom, zoom, shift, shift])[:, None]
        angle, lean, zoom_x, zoom_y, right, down = ranges * (2 * torch.rand(6, extent.shape[1], generator=generator) - 1)
        cos, sin, slant = angle.cos(), angle.sin(), lean.tan()
        along_x = torch.stack([cos, sin], dim=1) * zoom_x.exp()[:, None] * to_grid
        along_y = torch.stack([cos * slant - sin, sin * slant + cos], dim=1) * zoom_y.exp()[:, None] * to_grid
        x = _axis_positions(columns, columns * side / w) - right[:, None]
        y = _axis_positions(rows, rows * side / h) - down[:, None]
        # Sums of products instead of a matrix product, which may run in TF32 or bf16: too coarse for coordinates.
        from_x, from_y = ((along[:, :, None] * p[:, None]).to(images.device) for along, p in ((along_x, x), (along_y, y)))
        if self.crop != (1, 1):
            from_x, from_y = from_x * extent.T[:, :, None] + center.T[:, :, None], from_y * extent.T[:, :, None]
        return from_x[:, :, None, :] + from_y[:, :, :, None]

    def add_elastic(self, grid: Tensor, images: Tensor, extent: Tensor, generator: Generator) -> Tensor:
        """Add a smooth random displacement (elastic deformation) to sampling points, in place, and return the points. `grid`
        (batch, 2, height, width) holds the points in `images`. `extent` is the (width, height) of each crop, as a fraction of
        its image.

        Each point is displaced by a weighted sum of random displacements at control points; weights fall off with distance.
        """
        h, w = images.shape[2:]
        lengths = [(length, min(h, w) * length / side) for length, side in zip(grid.shape[2:], (h, w))]
        rows, columns = (_control_weights(length, side, self.smooth, grid.device) for length, side in lengths)
        control = torch.randn(len(grid), 2, rows.shape[1], columns.shape[1], generator=generator)
        control = (control * (2 * self.elastic * _grid_scale(h, w)[:, None, None])).to(grid.device)
        if self.crop != (1, 1):
            control = control * extent.T[:, :, None, None]
        across = (control @ columns.T).flatten(0, 1)
        return grid.flatten(0, 1).baddbmm_(rows.expand(len(across), -1, -1), across).view_as(grid)


def _draw_ink(images: Tensor, uniform: Tensor) -> Tensor:
    """Draw random pixels of each image as centers of crops, with a probability proportional to their brightness, so that crops
    show something. Return the centers (x, y) of these pixels from -1 to 1, shape (2, pixels). `uniform` holds one random number
    from 0 to 1 for each pixel to draw: first one pixel of each of the `images`, then a second one of each, and so on.
    """
    ink = images.mean(1).flatten(1).double().cumsum(1)
    uniform = rearrange(uniform, "(count b) -> b count", b=len(images)).double()
    index = torch.searchsorted(ink, (uniform * ink[:, -1:]).contiguous(), right=True).clamp(max=ink.shape[1] - 1)
    return _pixel_center(rearrange(index, "b count -> (count b)"), images)


def _pixel_center(index: Tensor, images: Tensor) -> Tensor:
    """Return the centers (x, y) of pixels, shape (2, pixels), in coordinates from -1 to 1, as in torch's `grid_sample`. `index`
    holds the number of each pixel: from 0, counted row by row. `images` gives the height and width, and the type and device of
    the result.
    """
    h, w = images.shape[2:]
    x, y = index % w, index // w
    return torch.stack([(2 * x + 1 - w) / w, (2 * y + 1 - h) / h]).to(images)


def _grid_scale(h: int, w: int) -> Tensor:
    """Return two factors (x, y) for an image of `h` x `w` pixels. They convert a length to the coordinates of torch's
    `grid_sample`, which run from -1 to 1 along each axis. The length is given as a multiple of half the shorter side of the
    image.
    """
    return torch.tensor([min(h, w) / w, min(h, w) / h])


def _axis_positions(length: int, side: float) -> Tensor:
    """Return the coordinates of the centers of `length` pixels along one axis of an image, shape (length,). The middle of the
    axis is 0. `side` is the length of the shorter side of the image in the same pixels. Half of it is the unit, so that both
    axes have the same unit.
    """
    return (2 * torch.arange(length) + 1 - length) / side


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
    points = spacing * (torch.arange(n) - (n - 1) / 2)
    weights = torch.exp(-((_axis_positions(length, side)[:, None] - points) ** 2) / (2 * sigma**2))
    return (weights / weights.norm(dim=1, keepdim=True)).to(device)
