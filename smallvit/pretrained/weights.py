"""Weights from elsewhere: found, read, held against the model name by name, and fitted to other images."""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from smallvit.positions import Learned, resample
from smallvit.tokenizers import PatchEmbed, Resized, ShiftedPatchEmbed
from smallvit.vit import ViT

from .convert import VIT_S, rename, skeleton
from .files import config, read, several

FOLDER = "SMALLVIT_WEIGHTS"
HUB_FILE = "model.safetensors"
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")


class Unavailable(ValueError):
    """Weights that are neither in a file nor to be had from the hub: a run that starts from them cannot be, the others can."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Trained elsewhere, for `Run(init=Weights(...))` with a `ViT` of that shape, `like(name)`.

    name     timm's name with its tag, such as "vit_small_patch16_224.augreg_in21k_ft_in1k": which data it was trained on, and
             the mean and standard deviation of the pixels that it expects
    file     a .safetensors, a .pth (also {"model": ...}, also a DINO checkpoint, of which the teacher is taken) or the original
             .npz of Google's; None: `$SMALLVIT_WEIGHTS/<name>.<any of these>`, else timm's hub
    new      the parts of the model that start anew, or of the file that may be left over, by their names here: "tokenizer",
             "attention.scale", "blocks.11"

    One path from every source. Names are held against timm's model, then against ours: all that is missing, left over or of
    another shape is an error, but for the head and the parts named in `new`; a reduction always starts anew. The head is
    taken where it is for as many classes; `new=("head",)` leaves it where those are others. Then the weights
    are fitted to the data: a patch kernel of another size by timm's pseudo-inverse resize (FlexiViT, arXiv:2212.08013),
    positions by timm's bicubic rule, three channels summed to one, and the data's mean and standard deviation exchanged for
    the weights' own inside the first linear map, so that the model computes of our pixels what it would of its own.
    With `ShiftedPatchEmbed` the shifted copies start at 0; only without its LayerNorm is that the pretrained function.

    Raises   Unavailable where the folder has no such file and the hub is out of reach; ValueError for a `file` that is not
             there, that cannot be read or does not fit, naming the weights, and for a part in `new` that excuses nothing.
    """

    name: str
    file: str | None = None
    new: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name is {self.name!r}; expected timm's name of the weights, such as {VIT_S!r}")
        if not isinstance(self.file, str | None):
            raise ValueError(f"file is {self.file!r}; expected its path as a text, so that a record can hold it")
        if self.file is not None and Path(self.file).suffix not in SUFFIXES:
            raise ValueError(f"file is {self.file!r}; expected one that ends in {', '.join(SUFFIXES)}")
        if isinstance(self.new, str) or not all(isinstance(part, str) for part in self.new):
            raise ValueError(f"new is {self.new!r}; expected names of parts, such as ('tokenizer.norm',)")
        object.__setattr__(self, "new", tuple(self.new))

    def path(self) -> Path:
        """The file, downloaded if it has to be. Raises Unavailable."""
        return self.at_hand() or self.download()

    def at_hand(self) -> Path | None:
        """The file, if it is on this machine: `file`, one in the folder, or one that was downloaded before."""
        if self.file is not None:
            if not Path(self.file).is_file():
                raise ValueError(f"there is no file {self.file} with the weights {self.name}")
            return Path(self.file)
        here = os.environ.get(FOLDER)
        found = [path for suffix in SUFFIXES if here and (path := Path(here) / f"{self.name}{suffix}").is_file()]
        if found:
            return found[0]
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(self.hub(), HUB_FILE)
        return Path(cached) if isinstance(cached, str) else None

    def hub(self) -> str:
        """Where timm's hub has it. Raises ValueError if it does not."""
        if not (hub := config(self.name).hf_hub_id):
            raise ValueError(f"timm's hub has no weights {self.name!r}; expected a name with its tag, such as {VIT_S!r}")
        return hub

    def download(self) -> Path:
        """The file of timm's hub, new. Raises Unavailable."""
        import huggingface_hub

        hub = self.hub()
        try:
            huggingface_hub.get_hf_file_metadata(
                huggingface_hub.hf_hub_url(hub, HUB_FILE), timeout=10
            )  # the rest tries for long
            return Path(huggingface_hub.hf_hub_download(hub, HUB_FILE))
        except Exception as error:  # no network, a proxy, a hub that is down: each library below has its own
            raise Unavailable(
                f"{self.name} is neither in a file nor to be had from the hub ({type(error).__name__}); put"
                f" {self.name}.safetensors into a folder and set {FOLDER} to it"
            ) from error

    def load(self, model: nn.Module, mean: Sequence[float] | float, std: Sequence[float] | float) -> dict:
        """Put them into `model`, whose pixels come with that mean and standard deviation subtracted and divided; for each
        channel, or one for all.

        Returns the report: file, its sha256, how many were loaded, which were resized, adapted, new or left over.
        """
        if not isinstance(model, ViT):
            raise ValueError(
                f"{type(model).__name__} cannot start from {self.name}; expected a ViT, such as like({self.name!r})"
            )
        path = self.path()
        theirs, own_mean, own_std = read(path, self.name)
        state, own = rename(theirs), model.state_dict()
        report = {"name": self.name, "file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        report |= {"mean": own_mean, "std": own_std, "resized": [], "adapted": [], "loaded": 0, "new": [], "left_over": []}
        stem(state, model, (own_mean, own_std), (mean, std), report)
        places(state, model, report)
        anew = [name for name in state if name in own and any(excuses(part, name) for part in self.new)]
        if "head.weight" not in own or state.get("head.weight", own["head.weight"]).shape != own["head.weight"].shape:
            anew += [name for name in state if name.startswith("head.")]
        state = {name: weight for name, weight in state.items() if name not in anew}
        report["new"], report["left_over"], wrong = misfits(state, own, self.new)
        if wrong:
            raise ValueError(
                f"{path.name} does not fit the model: {several(wrong)}; expected the shape of like({self.name!r}), or the parts"
                " named in new=(...)"
            )
        idle = [part for part in self.new if not any(excuses(part, name) for name in (*report["new"], *report["left_over"]))]
        if idle:
            raise ValueError(f"new={self.new} names {several(idle)}, where nothing is new or left over; take it out")
        fitting = {name: weight for name, weight in state.items() if name in own and name not in report["new"]}
        if not fitting:
            raise ValueError(f"nothing of {path.name} was loaded, all of it being named in new={self.new}; expected some of it")
        model.load_state_dict(fitting, strict=False)
        return report | {"loaded": len(fitting)}


def misfits(state: dict[str, Tensor], own: dict[str, Tensor], new: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The weights that only the model has, those that only the file has, and in words those of either that nobody excused."""
    absent = [name for name in own if name not in state or state[name].shape != own[name].shape]
    left_over = [name for name in state if name not in own or state[name].shape != own[name].shape]
    wrong = []
    for name in dict.fromkeys([*absent, *left_over]):
        if ".reduction." not in name and not any(excuses(part, name) for part in ("head", *new)):
            sides = ((state, "in the file"), (own, "in the model"))
            wrong.append(f"{name} ({', '.join(f'{tuple(of[name].shape) if name in of else None} {at}' for of, at in sides)})")
    return absent, left_over, wrong


def excuses(part: str, name: str) -> bool:
    """Whether the part of that name has the weight: "tokenizer" what lies in it, "attention.scale" that of every block."""
    return f"{name}.".startswith(f"{part}.") or ("." in part and f".{part}." in f".{name}.")


def enlarged(name: str) -> Callable:
    """The tokenizer that shows the model of that name any image at the size, and resized by the rule, of its weights."""
    cfg, patch = config(name), skeleton(name).patch_embed.patch_size[0]
    tokenizer = partial(PatchEmbed, patch=patch)
    return partial(Resized, tokenizer=tokenizer, size=cfg.input_size[-1], interpolation=cfg.interpolation)


def stem(state: dict[str, Tensor], model: ViT, own: tuple, given: tuple, report: dict):
    """Fit the first linear map, `tokenizer.proj`, to the model's patches, channels and pixels, in place."""
    from timm.layers import resample_patch_embed

    outer = model.tokenizer
    tokenizer, inside = (outer.tokenizer, "tokenizer.") if isinstance(outer, Resized) else (outer, "")
    kernel, bias = state.pop("tokenizer.proj.weight"), state.pop("tokenizer.proj.bias")
    if not isinstance(tokenizer, PatchEmbed | ShiftedPatchEmbed):
        state |= {"tokenizer.proj.weight": kernel, "tokenizer.proj.bias": bias}
        return
    patch, channels = tokenizer.patch, model.channels
    if kernel.ndim == 2:  # a linear map over flattened patches, as early files have it
        kernel = kernel.unflatten(1, (3, math.isqrt(kernel.shape[1] // 3), -1))
    if kernel.shape[-1] != patch:
        report["resized"].append(f"tokenizer.proj: patch {kernel.shape[-1]} to {patch}")
        kernel = resample_patch_embed(kernel, [patch, patch])
    if channels not in (1, kernel.shape[1]):
        raise ValueError(f"the images have {channels} channels, the weights {kernel.shape[1]}; expected as many, or 1")
    (mean, std), (data_mean, data_std) = ((as_channels(v, kernel.shape[1]) for v in pair) for pair in (own, given))
    if not torch.equal(mean, data_mean) or not torch.equal(std, data_std):
        report["adapted"].append("tokenizer.proj: the data's mean and standard deviation for the weights' own")
        bias = bias + torch.einsum("dcpq,c->d", kernel.double(), (data_mean - mean) / std).float()
        kernel = (kernel * (data_std / std)[:, None, None]).float()
    if channels == 1 < kernel.shape[1]:
        report["adapted"].append(f"tokenizer.proj: {kernel.shape[1]} channels summed to 1")
        kernel = kernel.sum(1, keepdim=True)
    if isinstance(tokenizer, ShiftedPatchEmbed):
        report["adapted"].append("tokenizer.proj: shifted copies start at 0")
        flat = kernel.flatten(1)
        kernel = torch.cat([flat, flat.new_zeros(len(flat), flat.shape[1] * len(tokenizer.offsets))], dim=1)
    state |= {f"tokenizer.{inside}proj.weight": kernel, f"tokenizer.{inside}proj.bias": bias}


def as_channels(value: Sequence[float] | float, channels: int) -> Tensor:
    """One number for each channel of the weights, exactly; one that is given alone is for all."""
    numbers = torch.as_tensor(value, dtype=torch.float64).flatten()
    return numbers.expand(channels) if len(numbers) == 1 else numbers


def places(state: dict[str, Tensor], model: ViT, report: dict):
    """Fit the positions to the model's grid and its prefix tokens, in place; a prefix token that only it has keeps its own.

    Where the model has positions for patches alone, those of the file's prefix tokens are added to the tokens. A table that
    can be one of a square grid is taken for it, also where the model's, of another shape, has as many places.
    """
    if "position.table" not in state or not isinstance(model.position, Learned):
        return
    table, (rows, columns) = state["position.table"], model.position.grid
    own, count = model.position.table, len(table)
    if own.shape[1] != table.shape[1]:
        return
    extra = next((p for p in (len(state["prefix"]), 0) if math.isqrt(count - p) ** 2 == count - p), None)
    if extra is None:
        return  # of another kind; what does not fit is said with all else
    side, mine = math.isqrt(count - extra), len(own) - rows * columns
    if (side, side, extra) == (rows, columns, mine):
        return
    if (side, side) != (rows, columns):
        report["resized"].append(f"position.table: {side} x {side} to {rows} x {columns}")
    prefix, grid = table[: min(extra, mine)], resample(table[extra:], (side, side), (rows, columns))
    if mine > extra:
        report["adapted"].append(f"position.table: {mine - extra} prefix tokens with new positions")
    if mine < extra:
        report["adapted"].append(f"prefix: {extra - mine} tokens with their positions added")
        state["prefix"] = torch.cat([state["prefix"][:mine], state["prefix"][mine:] + table[mine:extra]])
    state["position.table"] = torch.cat([prefix, own.detach()[extra:mine].to(table), grid])
