"""Pretrained weights as the initialization of a run: find the file, compare it with the model, and adapt it to the images."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.positions import Learned, resample
from smallvit.storage import file_sha256
from smallvit.tokenizers import PatchEmbed, Resized, ShiftedPatchEmbed
from smallvit.vit import ViT

from .convert import VIT_S, rename, timm_on_meta
from .files import list_some, read_weights, timm_config

FOLDER = "SMALLVIT_WEIGHTS"
HUB_FILE = "model.safetensors"
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
PROJ = "tokenizer.proj"


class Unavailable(ValueError):
    """An error for pretrained weights that are not on this machine and cannot be downloaded. Only the runs that need these
    weights fail.
    """


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Pretrained weights of a timm model, with which the model of a training run is initialized. The weights are read from a
    file or downloaded. The option `name` is the name of the weights in timm.

    For example: `Run(model=like(name), init=Weights(name=name))`.

    name     timm's name with its tag, such as "vit_small_patch16_224.augreg_in21k_ft_in1k". It sets the architecture, the
             training data, and the mean and standard deviation of the pixels that the weights expect.
    file     path of a .safetensors file, of a .pth checkpoint (a state dict, {"model": ...} or DINO, whose teacher is used) or
             of an original .npz of Google. If a checkpoint has a moving average of the weights too ("state_dict_ema",
             "model_ema"), the moving average is used. None: `$SMALLVIT_WEIGHTS/<name>.<suffix>` if it exists, else timm's hub.
    new      parts of the model that are initialized anew, or parts of the file that are ignored, by our names: "tokenizer",
             "attention.scale", "blocks.11". All other weights must fit.

    Names and shapes are compared with timm's model and then with ours. A missing weight, an unused one or another shape is an
    error, except for the head and the parts in `new`. A token reduction is always initialized anew. The head is loaded if it
    has as many classes; `new=("head",)` initializes it anew.

    The weights are then adapted to the data. A patch kernel of another size is resized by the pseudo-inverse of FlexiViT
    (arXiv:2212.08013, timm's code), and positions by timm's bicubic rule. For one channel, the three channels of the kernel are
    summed. Mean and standard deviation of the data replace those of the weights inside the patch embedding, so that the model
    gives the same output as the original model with its own normalization. With `ShiftedPatchEmbed` the kernel of the shifted
    copies is 0; the model equals the pretrained one only without its LayerNorm (`norm=False`).

    Raises   Unavailable if there is no file and the hub cannot be reached. ValueError for a `file` that does not exist, is
             damaged or does not fit (the error names it), and for a part in `new` that has no effect.
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
        if not isinstance(self.new, tuple | list) or not all(isinstance(part, str) for part in self.new):
            raise ValueError(f"new is {self.new!r}; expected names of parts, such as ('tokenizer.norm',)")
        object.__setattr__(self, "new", tuple(self.new))

    @property
    def own_file(self) -> Path | None:
        """The path of the given `file`, where `~` is the home folder of the user, or None."""
        return None if self.file is None else Path(self.file).expanduser()

    def path(self) -> Path:
        """Return the path of the file with the weights. The file is downloaded if it is not on this machine. Raise
        `Unavailable` if the download fails.
        """
        return self.local_path() or self.download()

    def local_path(self) -> Path | None:
        """Return the path of the file with the weights, or None if the file is not on this machine.

        The search covers the given `file`, a folder of weights, and earlier downloads.

        Raises   ValueError if `file` is given and does not exist.
        """
        if self.own_file is not None:
            if not self.own_file.is_file():
                raise ValueError(f"there is no file {self.file} with the weights {self.name}")
            return self.own_file
        if folder := os.environ.get(FOLDER):
            for suffix in SUFFIXES:
                if (path := Path(folder).expanduser() / f"{self.name}{suffix}").is_file():
                    return path
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(self.hub(), HUB_FILE)
        return Path(cached) if isinstance(cached, str) else None

    def sha256(self) -> str | None:
        """Return the SHA-256 hash of the file with the weights, or None if the file is not on this machine."""
        try:
            path = self.local_path()
        except ValueError:  # `file` does not exist
            return None
        return None if path is None else file_sha256(path)

    def hub(self) -> str:
        """Return the name of the repository on the Hugging Face hub that has these weights, as text. Raise ValueError if timm
        knows no such repository.
        """
        if not (hub := timm_config(self.name).hf_hub_id):
            raise ValueError(f"timm's hub has no weights {self.name!r}; expected a name with its tag, such as {VIT_S!r}")
        return hub

    def download(self) -> Path:
        """Download the weights from the Hugging Face hub and return the path of the file. Raise `Unavailable` if the download
        fails.
        """
        import huggingface_hub

        hub = self.hub()
        try:
            url = huggingface_hub.hf_hub_url(hub, HUB_FILE)
            huggingface_hub.get_hf_file_metadata(url, timeout=10)  # hf_hub_download alone would retry for a long time
            return Path(huggingface_hub.hf_hub_download(hub, HUB_FILE))
        except Exception as error:  # network, proxy or hub: each library raises its own class
            raise Unavailable(
                f"{self.name} is neither in a file nor to be had from the hub ({type(error).__name__}); put"
                f" {self.name}.safetensors into a folder and set {FOLDER} to it"
            ) from error

    def load(self, model: nn.Module, mean: Sequence[float] | float, std: Sequence[float] | float) -> dict[str, Any]:
        """Load the pretrained weights into `model`. Return a dict that reports what was loaded or changed. `mean` and `std` are
        the values by which the images of the data set are normalized; the weights are adapted if pretraining used other values.

        `mean` and `std` have one number per channel, or one for all channels. The report holds the name, the file, its sha256
        and the number of loaded weights, and lists what was resized, adapted, initialized anew or left over.

        Raises   Unavailable or ValueError, as described in the class.
        """
        if not isinstance(model, ViT):
            raise ValueError(
                f"{type(model).__name__} cannot start from {self.name}; expected a ViT, such as like({self.name!r})"
            )
        path = self.path()
        timm_state, own_mean, own_std = read_weights(path, self.name)
        state, target = rename(timm_state), model.state_dict()
        report: dict[str, Any] = {
            "name": self.name, "file": path.name, "sha256": file_sha256(path), "mean": own_mean,
            "std": own_std, "resized": [], "adapted": [], "loaded": 0, "new": [], "left_over": [],
        }  # fmt: skip
        adapt_patch_embedding(state, model, (own_mean, own_std), (mean, std), report, self.new)
        if not belongs_to_any(self.new, "position.table"):
            adapt_positions(state, model, report)
        ignored = [name for name in state if name in target and belongs_to_any(self.new, name)]
        head = target.get("head.weight")
        if head is None or ("head.weight" in state and state["head.weight"].shape != head.shape):
            ignored += [name for name in state if name.startswith("head.")]
        state = {name: weight for name, weight in state.items() if name not in ignored}
        report["new"], report["left_over"], wrong = compare_weights(state, target, self.new)
        if wrong:
            raise ValueError(
                f"{path.name} does not fit the model: {list_some(wrong)}; expected the shape of like({self.name!r}), or the "
                "parts named in new=(...)"
            )
        changed = (*report["new"], *report["left_over"])
        if idle := [part for part in self.new if not any(belongs_to_any([part], name) for name in changed)]:
            raise ValueError(f"new={self.new} names {list_some(idle)}, where nothing is new or left over; take it out")
        fitting = {name: weight for name, weight in state.items() if name in target and name not in report["new"]}
        if not fitting:
            raise ValueError(f"nothing of {path.name} was loaded, all of it being named in new={self.new}; expected some of it")
        model.load_state_dict(fitting, strict=False)
        return report | {"loaded": len(fitting)}


def compare_weights(
    state: dict[str, Tensor], target: dict[str, Tensor], new: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Compare the weights in a file (`state`) with the weights of a model (`target`), by name and shape. Return three lists:
    names that only the model has, names that only the file has, and errors. `new` lists parts of the model that may differ from
    the file; they give no errors.

    A name of which the two shapes differ is in both lists of names. Every name in these lists is an error, except those of the
    head, of token reductions and of the parts in `new`.
    """
    absent = [name for name in target if name not in state or state[name].shape != target[name].shape]
    left_over = [name for name in state if name not in target or state[name].shape != target[name].shape]

    def describe_shapes(name: str) -> str:
        """Return a text for an error message: the name of a weight, its shape in the file and its shape in the model."""
        in_file, in_model = (tuple(weights[name].shape) if name in weights else None for weights in (state, target))
        return f"{name} ({in_file} in the file, {in_model} in the model)"

    wrong = [name for name in [*absent, *left_over] if ".reduction." not in name and not belongs_to_any(("head", *new), name)]
    return absent, left_over, [describe_shapes(name) for name in dict.fromkeys(wrong)]


def belongs_to_any(parts: Iterable[str], name: str) -> bool:
    """Return True if the weight `name` belongs to one of the `parts` of a model, else False. A part is given by its name, such
    as "tokenizer" or "blocks.11".

    A part is the start of a name ("tokenizer", "blocks.11") or, if it has a dot, any piece of it: "attention.scale" means that
    of every block.
    """
    return any(f"{name}.".startswith(f"{part}.") or ("." in part and f".{part}." in f".{name}.") for part in parts)


def enlarged(name: str) -> Callable:
    """Return a tokenizer class for images that are smaller than those in pretraining. It first resizes an image to the image
    size of the pretrained timm model `name`, and then cuts it into patches of that model's patch size.

    The class is a `functools.partial`. The interpolation is that of the pretrained model too.
    """
    timm_model: Any = timm_on_meta(name)
    config, tokenizer = timm_config(name), partial(PatchEmbed, patch=timm_model.patch_embed.patch_size[0])
    return partial(Resized, tokenizer=tokenizer, size=config.input_size[-1], interpolation=config.interpolation)


def adapt_patch_embedding(
    state: dict[str, Tensor],
    model: ViT,
    weight_stats: tuple,
    data_stats: tuple,
    report: dict[str, Any],
    new: Sequence[str] = (),
):
    """Adapt pretrained weights of the patch embedding to `model`: to its patch size, its number of channels, and the
    normalization of its images. The weights are in the state dict `state`, which is changed in place. `weight_stats` and
    `data_stats` are the (mean, std) of the pixels in pretraining and in the new data. Changes are listed in the dict `report`.

    If the patch embedding belongs to the parts `new`, which are initialized anew, its weights only get the names of `model`.

    Raises   ValueError if the images have neither one channel nor as many as the weights.
    """
    from timm.layers.patch_embed import resample_patch_embed

    outer = model.tokenizer
    tokenizer, prefix = (outer.tokenizer, "tokenizer.tokenizer.proj") if isinstance(outer, Resized) else (outer, PROJ)
    if not isinstance(tokenizer, PatchEmbed | ShiftedPatchEmbed):
        return
    kernel, bias = state.pop(f"{PROJ}.weight"), state.pop(f"{PROJ}.bias")
    if belongs_to_any(new, f"{prefix}.weight"):
        state |= {f"{prefix}.weight": kernel, f"{prefix}.bias": bias}
        return
    patch, channels = tokenizer.patch, model.channels
    if kernel.ndim == 2:  # early files store a matrix over flattened patches
        kernel = kernel.unflatten(1, (3, math.isqrt(kernel.shape[1] // 3), -1))
    if kernel.shape[-1] != patch:
        report["resized"].append(f"{PROJ}: patch {kernel.shape[-1]} to {patch}")
        kernel = resample_patch_embed(kernel, [patch, patch])
    if channels not in (1, kernel.shape[1]):
        raise ValueError(f"the images have {channels} channels, the weights {kernel.shape[1]}; expected as many, or 1")
    mean, std = (per_channel(value, kernel.shape[1]) for value in weight_stats)
    data_mean, data_std = (per_channel(value, kernel.shape[1]) for value in data_stats)
    if not torch.equal(mean, data_mean) or not torch.equal(std, data_std):
        report["adapted"].append(f"{PROJ}: the data's mean and standard deviation for the weights' own")
        bias = bias + torch.einsum("dcpq,c->d", kernel.double(), (data_mean - mean) / std).float()
        kernel = (kernel * (data_std / std)[:, None, None]).float()
    if channels == 1 < kernel.shape[1]:
        report["adapted"].append(f"{PROJ}: {kernel.shape[1]} channels summed to 1")
        kernel = kernel.sum(1, keepdim=True)
    if isinstance(tokenizer, ShiftedPatchEmbed):
        report["adapted"].append(f"{PROJ}: shifted copies start at 0")
        flat = kernel.flatten(1)
        kernel = torch.cat([flat, flat.new_zeros(len(flat), flat.shape[1] * len(tokenizer.offsets))], dim=1)
    state |= {f"{prefix}.weight": kernel, f"{prefix}.bias": bias}


def per_channel(value: Sequence[float] | float, channels: int) -> Tensor:
    """Return a float64 tensor with one number for each channel. If `value` is a single number, it is repeated for each channel.
    """
    numbers = torch.as_tensor(value, dtype=torch.float64).flatten()
    return numbers.expand(channels) if len(numbers) == 1 else numbers


def adapt_positions(state: dict[str, Tensor], model: ViT, report: dict[str, Any]):
    """Resize pretrained position embeddings to the patch grid of `model`, and adapt those of prefix tokens (class token and
    registers). They are in the state dict `state`, which is changed in place. A line of text for each change is added to the
    dict `report`.

    A position of a prefix token that the file does not have keeps the model's initial value. If the model has positions for the
    patches only, the positions of the file's prefix tokens are added to these tokens. A table whose length fits a square grid
    is taken as square, even if the model has as many positions in a grid of another shape.
    """
    if "position.table" not in state or not isinstance(model.position, Learned):
        return
    table, (rows, columns) = state["position.table"], model.position.grid
    own, count = model.position.table, len(table)
    if own.shape[1] != table.shape[1]:
        return
    extra = next((p for p in (len(state["prefix"]), 0) if math.isqrt(count - p) ** 2 == count - p), None)
    if extra is None:
        return  # no square grid; compare_weights reports it
    side, own_extra = math.isqrt(count - extra), len(own) - rows * columns
    if (side, side, extra) == (rows, columns, own_extra):
        return
    if (side, side) != (rows, columns):
        report["resized"].append(f"position.table: {side} x {side} to {rows} x {columns}")
    prefix, grid = table[: min(extra, own_extra)], resample(table[extra:], (side, side), (rows, columns))
    if own_extra > extra:
        report["adapted"].append(f"position.table: {own_extra - extra} prefix tokens with new positions")
    if own_extra < extra:
        report["adapted"].append(f"prefix: {extra - own_extra} tokens with their positions added")
        moved = state["prefix"][own_extra:] + table[own_extra:extra]
        state["prefix"] = torch.cat([state["prefix"][:own_extra], moved])
    state["position.table"] = torch.cat([prefix, own.detach()[extra:own_extra].to(table), grid])
