"""Which patches of an image are merged or pruned, block by block, and a figure of this.

`trace` computes it from a model, `token_map_data` stores the result and the pixels as JSON, and `draw_token_map` draws that
JSON without torch and without the model. `token_map` does all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from .sheet import GONE, SIDE, check_spec, image_grid, to_rgb

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from smallvit.data import Images
    from smallvit.vit import ViT

MAX_ELEMENTS = 2**24  # largest tensor of patch marks in one batch: 64 MB
HATCH = "#7f9fce"  # color of the hatching on pruned patches
ALONE, SHARED = "#7d7d7d", "#ff9d2e"  # colors of the lines between tokens, and around tokens with more than one patch


class Trace(NamedTuple):
    """The result of `trace`: after each block of a model, which patches of an image were merged into the same token, and which
    patches were pruned.

    groups   int64 on the CPU, shape (images, blocks, patches). Patches in one token have the same number, which is the
             smallest index of these patches; -1 marks a pruned patch.
    grid     rows and columns of the patches; patches are numbered row by row
    """

    groups: Tensor
    grid: tuple[int, int]


def trace(model: nn.Module, images: Tensor) -> Trace:
    """Return a `Trace`, which says which patches of each image a `ViT` has merged or pruned after each of its blocks. `images`
    are normalized pixels of shape (batch, channels, height, width), of any size that the model accepts.

    The model runs in evaluation mode and is left unchanged. Each patch gets a mark in extra channels behind the channels of its
    token. The reductions move these channels with the tokens. A patch belongs to the token that holds most of its mark.

    Raises   ValueError for a model that is not a `ViT`, for no images, and for a reduction that does not move extra channels
             along with a token.
    """
    import torch

    from smallvit.evaluate import frozen
    from smallvit.vit import ViT

    if not isinstance(model, ViT):
        raise ValueError(f"got a {type(model).__name__}; expected a ViT: take from_timm(model) for a model of timm")
    require_tensor(images)
    grid: tuple[int, int] = model.tokenizer.grid(images.shape[-2:])
    patches = grid[0] * grid[1]
    with frozen(model):
        batches = images.split(max(1, MAX_ELEMENTS // patches**2))
        groups = [torch.stack(track_patches(model, x.to(model.prefix), patches, group_patches), dim=1) for x in batches]
    return Trace(torch.cat(groups).cpu(), grid)


def require_tensor(images: Any):
    """Raise ValueError unless `images` is a tensor of floats (batch, channels, height, width) with at least one image."""
    import torch

    if not isinstance(images, torch.Tensor):
        raise ValueError(
            f"got {type(images).__name__}; expected a tensor of normalized pixels, b c h w. For Images it is "
            "images.spec.normalize(images.pixels())"
        )
    if not images.is_floating_point():
        raise ValueError(
            f"got pixels of type {images.dtype}; expected normalized floats, b c h w: divide bytes by 255 and normalize them "
            "as in training"
        )
    if images.ndim != 4:
        raise ValueError(f"got pixels of shape {tuple(images.shape)}; expected b c h w: images[None] for a single image c h w")
    if not len(images):
        raise ValueError("there are no images to look at; expected at least one, b c h w")


def track_patches(model: ViT, x: Tensor, patches: int, convert: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run a model on images `x` and follow the patches through merging and pruning. After each block, a tensor (batch, tokens,
    patches) says how much of each patch is in each token. Return a list with `convert(tensor)` for each block; the function
    `convert` computes what is needed from it. `patches` is the number of patches of an image.

    Each reduction runs a second time, on tokens with extra channels that mark the patches.

    Raises   ValueError if a reduction fails on, or decides by, the extra channels, or if a block changes the number of tokens
             outside of its `reduction`.
    """
    import torch
    import torch.nn.functional as F

    converted = []
    marks = F.pad(torch.eye(patches).to(x), (0, 0, len(model.prefix), 0)).expand(len(x), -1, -1)

    def move_marks(reduction, inputs, output):
        nonlocal marks
        tokens, *others = inputs
        width = tokens.shape[-1]
        try:
            again, _ = reduction.forward(torch.cat([tokens, marks], dim=-1), *others)
        except Exception as error:  # a reduction of the user may raise anything here
            raise ValueError(f"{type(reduction).__name__} cannot be followed ({type(error).__name__}: {error})") from error
        same = again.shape == (*output[0].shape[:2], width + patches)
        if not same or (again[..., :width] - output[0]).abs().max() > 0.01 * output[0].abs().max():
            raise ValueError(
                f"{type(reduction).__name__} gives other tokens when {patches} channels are added behind the {width} of each "
                "token; expected it to move added channels with the token and to use only the first context.dim channels"
            )
        marks = again[..., width:]

    def save_contents(block, inputs, output):
        tokens, size = output[:2]
        if tokens.shape[1] != marks.shape[1]:
            raise ValueError(
                f"{type(block).__name__} gave {tokens.shape[1]} tokens where its attribute `reduction` left {marks.shape[1]}; "
                "expected that only `reduction` changes the number of tokens"
            )
        converted.append(convert(marks if size is None else marks * size[..., None]))

    with ExitStack() as hooks:
        for block in dict.fromkeys(model.blocks):  # a block may serve several layers
            if isinstance(reduction := getattr(block, "reduction", None), torch.nn.Module):
                hooks.enter_context(reduction.register_forward_hook(move_marks))
            hooks.enter_context(block.register_forward_hook(save_contents))
        model.tokens(x)
    return converted


def group_patches(contents: Tensor) -> Tensor:
    """Return a group number for each patch, shape (batch, patches). Patches that were merged into the same token have equal
    numbers. Pruned patches have -1. `contents` says how much of each patch is in each token, shape (batch, tokens, patches).
    """
    import torch

    patches = contents.shape[2]
    largest, token = contents.abs().max(dim=1)
    index = torch.where(largest > 0, torch.arange(patches, device=contents.device), patches)
    first = torch.full(contents.shape[:2], patches, device=contents.device).scatter_reduce(1, token, index, "amin")
    return torch.where(largest > 0, first.gather(1, token), -1)


def token_map_data(model: nn.Module, images: Images, *, blocks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the data for a figure of merged and pruned patches, as a dict that can be saved as JSON: the pixels of the images,
    and for each block and patch the number of the group of merged patches to which the patch belongs. `blocks` holds the
    numbers of the blocks to show, from 0; None shows all.

    The function `draw_token_map` draws the figure from these data, without the model.

    The dict has these keys: `shape`, (images, height, width, channels) of the pixels; `pixels`, bytes compressed by zlib and
    written in base64; `grid`, rows and columns of patches; `blocks`; and `groups[image][block][patch]` as in `Trace`. Pixels
    that are floats become bytes. Where some lie outside of [0, 1], the smallest value becomes 0 and the largest one 255.

    Raises   ValueError as `trace` does, for a block number that the model does not have, for pixels without a `spec`, and for
             images with neither 1 nor 3 channels.
    """
    import base64
    import zlib

    import numpy as np

    check_spec(images)
    if images.spec.channels not in (1, 3):
        raise ValueError(f"the images have {images.spec.channels} channels; only images with 1 or 3 can be drawn")
    groups, grid = trace(model, images.spec.normalize(images.pixels()))
    depth = groups.shape[1]
    blocks = list(range(depth) if blocks is None else blocks)
    if not blocks or not all(0 <= block < depth for block in blocks):
        raise ValueError(f"blocks is {blocks}; expected some of this model, from 0 to {depth - 1}")
    pixels = (255 * to_rgb(images.images)[..., : images.spec.channels]).round().astype(np.uint8)
    return {
        "shape": list(pixels.shape),
        "pixels": base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode("ascii"),
        "grid": list(grid),
        "blocks": blocks,
        "groups": groups[:, blocks].tolist(),
    }


def draw_token_map(data: dict[str, Any]) -> Figure:
    """Return a matplotlib figure that shows which patches were merged or pruned. Each image gets a row: the image, and one
    picture for each block. `data` is the dict that `token_map_data` returns.

    A patch that is alone in its token is drawn unchanged. Patches that share a token have their mean color and an orange
    outline. Pruned patches are hatched. The title of a column is the number of tokens that contain patches, or the range of
    this number where images differ.

    Raises   ValueError for images with neither 1 nor 3 channels.
    """
    import base64
    import zlib

    import numpy as np

    n, h, w, c = data["shape"]
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(data["pixels"])), np.uint8).reshape(n, h, w, c)
    pixels = to_rgb(pixels.transpose(0, 3, 1, 2))
    groups = np.array(data["groups"]).reshape(n, len(data["blocks"]), *data["grid"])
    titles = [f"image\n{groups[0, 0].size} patches"]
    titles += [f"block {block}\n{count_tokens(groups[:, i])} tokens" for i, block in enumerate(data["blocks"])]

    figure, axes = image_grid(n, titles, h / w)
    for image, image_groups, row in zip(pixels, groups, axes):
        row[0].imshow(image, interpolation="none")
        for block_groups, ax in zip(image_groups, row[1:]):
            draw_tokens(ax, image, block_groups)
    return figure


def token_map(model: nn.Module, images: Images, *, blocks: Sequence[int] | None = None) -> Figure:
    """Return a matplotlib figure that shows which patches of images a `ViT` has merged or pruned. Each image gets a row, with
    one picture for each block. `blocks` are the numbers of the blocks to show, from 0; None shows all.

    A patch that is alone in its token is drawn unchanged. Patches that share a token have their mean color and an orange
    outline. Pruned patches are hatched. The title of a column is the number of tokens that contain patches, or its range where
    images differ.

    token_map(model, mnist().train.take(slice(6)), blocks=(0, 2, 5)).savefig("tokens.png", dpi=200)

    Raises   ValueError as `token_map_data` and `draw_token_map` do.
    """
    return draw_token_map(token_map_data(model, images, blocks=blocks))


def count_tokens(groups: np.ndarray) -> str:
    """Return the number of patch tokens that are left after merging and pruning, as text: "12", or a range such as "10–12" if
    the number differs between images. `groups` holds a number for each patch, equal for merged patches, with images along the
    first axis.
    """
    counts = [len(set(image.flat) - {-1}) for image in groups]
    low, high = min(counts), max(counts)
    return f"{high}" if low == high else f"{low}–{high}"


def draw_tokens(ax: Axes, image: np.ndarray, groups: np.ndarray):
    """Draw an image on the matplotlib axes `ax`. Merged patches get their mean color and an outline, and pruned patches are
    hatched. The image has the shape (height, width, 3). `groups`, shape (rows, columns), holds a number for each patch, equal
    for merged patches and -1 for a pruned one.
    """
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (h, w, _), (rows, columns) = image.shape, groups.shape
    pixel_groups = groups[np.arange(h)[:, None] * rows // h, np.arange(w) * columns // w]
    numbers, counts = np.unique(groups[groups >= 0], return_counts=True)
    shared = numbers[counts > 1]
    painted = image.copy()
    for group in shared:
        painted[pixel_groups == group] = image[pixel_groups == group].mean(axis=0)
    ax.imshow(painted, interpolation="none")

    def add_shapes(corners: np.ndarray, per_shape: int, **style: Any):
        """Draw several shapes, such as lines or squares, over the image in the figure. `corners` holds the corner points (x, y)
        of all shapes, in units of patches. Each shape has `per_shape` corners. `style` holds options of matplotlib, such as the
        color.
        """
        codes = [Path.MOVETO] + [Path.LINETO] * (per_shape - 1)
        if len(corners):
            path = Path(corners * (w / columns, h / rows) - 0.5, codes * (len(corners) // per_shape))
            ax.add_patch(PathPatch(path, **style))

    pruned = np.argwhere(groups < 0)[:, None, ::-1] + [(0, 0), (1, 0), (1, 1), (0, 1)]
    add_shapes(pruned.reshape(-1, 2), 4, facecolor=GONE, edgecolor=HATCH, hatch="/////", linewidth=0)
    thickness = min(0.05 * 72 * SIDE / columns, 0.8)
    add_shapes(token_borders(groups), 2, edgecolor=ALONE, linewidth=thickness)
    add_shapes(token_borders(np.where(np.isin(groups, shared), groups, -1)), 2, edgecolor=SHARED, linewidth=thickness)


def token_borders(groups: np.ndarray) -> np.ndarray:
    """Return the borders between groups of merged patches, as an array of points (x, y) in units of patches. The first two
    points are the ends of the first line, the next two those of the second line, and so on. `groups` (rows, columns) holds a
    number for each patch, equal for merged patches.

    Adjacent pieces are joined into one long line.
    """
    import numpy as np

    ends = []
    for differs, order in ((groups[1:] != groups[:-1], 1), ((groups[:, 1:] != groups[:, :-1]).T, -1)):
        steps = np.diff(np.pad(differs.astype(int), ((0, 0), (1, 1))), axis=1).astype(int)
        (line, start), (_, stop) = np.nonzero(steps > 0), np.nonzero(steps < 0)
        lines = np.stack([start, line + 1, stop, line + 1], axis=1).reshape(-1, 2)
        ends.append(lines[:, ::order])
    return np.concatenate(ends).astype(float)
