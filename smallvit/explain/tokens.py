"""Where the patches of an image go when tokens are merged and pruned, and a picture of it.

Three steps, each of use alone: `trace` asks the model, `plain` writes down what a picture needs as what JSON holds, `draw`
draws that, with neither torch nor the model. `token_map` is all three.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from .sheet import GONE, SIDE, coloured, images_with_spec, sheet

AT_ONCE = 2**24  # numbers that follow the patches of a batch: 64 MB
HATCH = "#7f9fce"  # on what is gone
ALONE, SHARED = "#7d7d7d", "#ff9d2e"  # lines between tokens, and round those that more than one patch shares


class Trace(NamedTuple):
    """Which patches share a token behind each block, and the grid, rows x columns, on which patches stand, row by row.

    `groups`, int64, images x blocks x patches: patches of one token have the same number, the smallest of their places; -1 is a
    patch that no token stands for any more. On the CPU.
    """

    groups: "torch.Tensor"  # noqa: F821
    grid: tuple[int, int]


def trace(model: "torch.nn.Module", images: "torch.Tensor") -> Trace:  # noqa: F821
    """Where every patch of these images goes, block by block, in a `ViT` in evaluation mode; the model is left as it was.

    `images` are what the model sees, normalised pixels b c h w, of any size that it takes. Works for every reduction that keeps
    its contract: what stands behind the channels of a token moves along with it, so each patch sends a mark along, and is
    counted to the token that carries most of its mark.

    Raises   ValueError for another kind of model, for no images, or for a reduction that breaks the contract.
    """
    import torch

    from smallvit.evaluate import frozen
    from smallvit.vit import ViT

    if not isinstance(model, ViT):
        raise ValueError(f"got a {type(model).__name__}; expected a ViT: take from_timm(model) for a model of timm")
    if not len(images):
        raise ValueError("there are no images to trace; expected at least one")
    grid = model.tokenizer.grid(images.shape[-2:])
    patches = grid[0] * grid[1]
    with frozen(model):
        batches = images.split(max(1, AT_ONCE // patches**2))
        parts = [torch.stack(follow(model, x.to(model.prefix), patches, grouped), dim=1) for x in batches]
    return Trace(torch.cat(parts).cpu(), grid)


def follow(model, x, patches: int, keep: Callable) -> list:
    """What `keep` makes, behind each block, of how much of each patch each token carries, b n patches.

    The model runs as it is, and each of its reductions moves the marks as it moved the tokens.
    """
    import torch
    import torch.nn.functional as F

    prefix, kept = len(model.prefix), []
    marks = F.pad(torch.eye(patches).to(x), (0, 0, prefix, 0)).expand(len(x), -1, -1)  # b n patches

    def move(reduction, given, result):
        nonlocal marks
        tokens, *facts = given
        width = tokens.shape[-1]
        try:
            again, _ = reduction.forward(torch.cat([tokens, marks], dim=-1), *facts)
        except Exception as error:  # whatever a reduction from elsewhere makes of tokens wider than it is used to
            raise ValueError(f"{type(reduction).__name__} cannot be followed ({type(error).__name__}: {error})") from error
        same = again.shape == (*result[0].shape[:2], width + patches)
        if not same or (again[..., :width] - result[0]).abs().max() > 0.01 * result[0].abs().max():
            raise ValueError(
                f"{type(reduction).__name__} does otherwise when channels stand behind the {width} of a token; it should move "
                "them along, and decide by the first place.dim channels alone"
            )
        marks = again[..., width:]

    def note(block, given, result):
        tokens, size = result
        if tokens.shape[1] != marks.shape[1]:
            raise ValueError(
                f"{type(block).__name__} gave {tokens.shape[1]} tokens where its attribute `reduction` left {marks.shape[1]}; "
                "expected that only this one changes how many there are"
            )
        kept.append(keep(marks if size is None else marks * size[..., None]))

    with ExitStack() as hooks:
        for block in model.blocks:
            if getattr(block, "reduction", None) is not None:
                hooks.enter_context(block.reduction.register_forward_hook(move))
            hooks.enter_context(block.register_forward_hook(note))
        model.tokens(x)
    return kept


def grouped(shares):
    """How much of each patch each token carries, b n patches -> the group of each patch, b patches."""
    import torch

    patches = shares.shape[2]
    most, token = shares.abs().max(dim=1)
    place = torch.where(most > 0, torch.arange(patches, device=shares.device), patches)
    first = torch.full(shares.shape[:2], patches, device=shares.device).scatter_reduce(1, token, place, "amin")
    return torch.where(most > 0, first.gather(1, token), -1)


def plain(model: "torch.nn.Module", images: "Images", *, blocks: Sequence[int] | None = None) -> dict:  # noqa: F821
    """What `draw` needs of these images and these blocks, from 0, by default all of them; as little as JSON can hold it in.

    `shape` n h w c of the `pixels` (bytes, packed by zlib, in base64), the `grid` of patches, the numbers of the `blocks`, and
    `groups[image][block][patch]` as in `Trace`.

    Raises   ValueError as `trace` does, for a block that is not there, and for pixels without a `spec`.
    """
    import base64
    import zlib

    groups, grid = trace(model, images_with_spec(images).spec.normalise(images.pixels()))
    depth = groups.shape[1]
    blocks = list(range(depth) if blocks is None else blocks)
    if not blocks or not all(0 <= block < depth for block in blocks):
        raise ValueError(f"blocks is {blocks}; expected some of this model, from 0 to {depth - 1}")
    pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
    return {
        "shape": list(pixels.shape),
        "pixels": base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode("ascii"),
        "grid": list(grid),
        "blocks": blocks,
        "groups": groups[:, blocks].tolist(),
    }


def draw(picture: dict) -> "matplotlib.figure.Figure":  # noqa: F821
    """One row for each image: itself, then what each block leaves of it. `picture` is what `plain` wrote.

    A patch with a token of its own looks as it is; patches that share one have the mean colour of them all and an orange line
    round them; patches that are gone are hatched. The titles count the tokens that stand for patches, from the least to the
    most where the images differ.

    Raises   ValueError for images with neither one nor three channels.
    """
    import base64
    import zlib

    import numpy as np

    n, h, w, c = picture["shape"]
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(picture["pixels"])), np.uint8).reshape(n, h, w, c)
    pixels = coloured(pixels.transpose(0, 3, 1, 2))
    groups = np.array(picture["groups"]).reshape(n, len(picture["blocks"]), *picture["grid"])
    titles = [f"image\n{groups[0, 0].size} patches"]
    titles += [f"block {block}\n{left(groups[:, i])} tokens" for i, block in enumerate(picture["blocks"])]

    figure, axes = sheet(n, titles, h / w)
    for image, layers, row in zip(pixels, groups, axes):
        row[0].imshow(image, interpolation="none")
        for layer, ax in zip(layers, row[1:]):
            paint(ax, image, layer)
    return figure


def token_map(model: "torch.nn.Module", images: "Images", *, blocks: Sequence[int] | None = None):  # noqa: F821
    """What merging and pruning leave of these images, block by block: a matplotlib `Figure` (see `draw` and `plain`).

    token_map(model, mnist().train.take(slice(6)), blocks=(0, 2, 5)).savefig("tokens.png", dpi=200)
    """
    return draw(plain(model, images, blocks=blocks))


def left(groups) -> str:
    """How many tokens stand for the patches of these images."""
    counts = [len(set(image.flat) - {-1}) for image in groups]
    least, most = min(counts), max(counts)
    return f"{most}" if least == most else f"{least}–{most}"


def paint(ax, image, groups):
    """The image h w 3 as the tokens of these groups, rows x columns, hold it."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (h, w, _), (rows, columns) = image.shape, groups.shape
    of_pixel = groups[np.arange(h)[:, None] * rows // h, np.arange(w) * columns // w]
    numbers, counts = np.unique(groups[groups >= 0], return_counts=True)
    shared = numbers[counts > 1]
    painted = image.copy()
    for group in shared:
        painted[of_pixel == group] = image[of_pixel == group].mean(axis=0)
    ax.imshow(painted, interpolation="none")

    def outline(corners, each: int, **look):
        """Closed shapes or open lines of so many corners each, x and y in patches."""
        codes = [Path.MOVETO] + [Path.LINETO] * (each - 1)
        if len(corners):
            path = Path(corners * (w / columns, h / rows) - 0.5, codes * (len(corners) // each))
            ax.add_patch(PathPatch(path, **look))

    gone = np.argwhere(groups < 0)[:, None, ::-1] + [(0, 0), (1, 0), (1, 1), (0, 1)]
    outline(gone.reshape(-1, 2), 4, facecolor=GONE, edgecolor=HATCH, hatch="/////", linewidth=0)
    thickness = min(0.05 * 72 * SIDE / columns, 0.8)
    outline(borders(groups), 2, edgecolor=ALONE, linewidth=thickness)
    outline(borders(np.where(np.isin(groups, shared), groups, -1)), 2, edgecolor=SHARED, linewidth=thickness)


def borders(groups):
    """The ends of the lines between different groups, x and y in patches, two rows for each line; long lines are one."""
    import numpy as np

    ends = []
    for between, turn in ((groups[1:] != groups[:-1], 1), ((groups[:, 1:] != groups[:, :-1]).T, -1)):
        steps = np.diff(np.pad(between.astype(int), ((0, 0), (1, 1))), axis=1)
        (at, start), (_, stop) = np.nonzero(steps > 0), np.nonzero(steps < 0)
        lines = np.stack([start, at + 1, stop, at + 1], axis=1).reshape(-1, 2)
        ends.append(lines[:, ::turn])
    return np.concatenate(ends).astype(float)
