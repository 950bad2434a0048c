"""Files of weights: what is in them, under timm's names and held against timm's model, and nothing in them executed."""

import argparse
import re
from pathlib import Path
from zipfile import BadZipFile

import torch
from torch import Tensor

from .convert import VIT_S, skeleton

HEADS = ("head.", "fc.", "pre_logits.", "head_dist.")


def read(path: Path, name: str) -> tuple[dict[str, Tensor], tuple[float, ...], tuple[float, ...]]:
    """The weights in a file under timm's names, held against timm's model of that name; and its mean and standard deviation.

    A head of any size, and none, will do.
    """
    native = skeleton(name)
    state = from_npz(path, name) if path.suffix == ".npz" else unwrapped(from_file(path))
    wanted = {key: tuple(tensor.shape) for key, tensor in native.state_dict().items()}
    strange = [f"{key} is missing" for key in wanted if key not in state and not key.startswith("head.")]
    strange += [f"{key} is unknown" for key in state if key not in wanted and not key.startswith(HEADS)]
    flat = state.get("patch_embed.proj.weight", torch.empty(0)).ndim == 2  # as early files have it: its patch is not to be seen
    free = ("pos_embed", *HEADS, *(["patch_embed.proj.weight"] if flat else []))
    strange += [f"{key} is not finite" for key in wanted if key in state and not state[key].isfinite().all()]
    strange += [
        f"{key} is {tuple(state[key].shape)}, expected {shape}"
        for key, shape in wanted.items()
        if key in state and tuple(state[key].shape) != shape and not key.startswith(free)
    ]
    if strange:
        raise ValueError(f"{path.name} is not {name}: {several(strange)}; expected its weights under timm's names")
    cfg = config(name)
    return {key: state[key].float() for key in wanted if key in state}, tuple(cfg.mean), tuple(cfg.std)


def several(found: list[str]) -> str:
    return ", ".join(found[:5]) + f" and {len(found) - 5} more" * (len(found) > 5)


def config(name: str):
    """What timm says of the weights of that name. Raises ValueError for a name or a tag that it does not have."""
    from timm.models import get_pretrained_cfg

    try:
        return get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise ValueError(f"timm has no weights {name!r} ({error}); expected a name with its tag, such as {VIT_S!r}") from error


def from_file(path: Path) -> dict:
    """What a file of torch's or safetensors holds; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # DINO's own checkpoints hold their options in one
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes of either
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); expected a file of weights") from error


def unwrapped(state: object) -> dict[str, Tensor]:
    """The state dict itself, out of its wrapping: `{"model": ...}`, a DINO checkpoint's teacher, `module.` and `backbone.`."""
    for key in ("teacher", "model_ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"found a {type(state).__name__} without tensors; expected a state dict, or one under 'model'")
    found = {}
    for name, tensor in state.items():
        bare = re.sub(r"^(module\.|backbone\.|model\.|encoder\.)+", "", name)
        if not isinstance(tensor, Tensor):
            continue
        if bare in found:
            raise ValueError(f"two weights of the file are called {bare}, as {name} is; expected one of each")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; expected real numbers, as weights are trained")
        found[bare] = tensor
    return found


def from_npz(path: Path, name: str) -> dict[str, Tensor]:
    """The original weights of Google's, by timm's reader of them."""
    import numpy
    import timm

    with torch.device("cpu"):
        model = timm.create_model(name.partition(".")[0])
    try:
        with numpy.load(path) as arrays:
            kernel, bias = arrays["embedding/kernel"].shape, arrays.get("head/bias")
            heads = None if bias is None else bias.shape
        wanted = tuple(model.patch_embed.proj.weight.permute(2, 3, 1, 0).shape)
        if kernel != wanted:
            raise ValueError(f"{path.name} is not {name}: embedding/kernel is {kernel}, expected {wanted}")
        model.load_pretrained(str(path))
    except KeyError as error:
        raise ValueError(f"{path.name} is not {name}: {error.args[0]}") from error
    except (OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); expected the original .npz") from error
    random = ("head.",) if heads != tuple(model.head.bias.shape) else ("-",)  # timm leaves a head of another size as it was
    return {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(random)}
