"""Read files of pretrained weights and compare them with the timm model of their name. No code in a file is executed."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smallvit.shapes import printable

from .convert import VIT_S, timm_on_meta

HEADS = ("head.", "fc.", "pre_logits.", "head_dist.")


def read_weights(path: Path, name: str) -> tuple[dict[str, Tensor], tuple[float, ...], tuple[float, ...]]:
    """Read pretrained weights of the timm model `name` from the file `path`. Return a state dict with timm's names of weights,
    and the mean and the standard deviation that normalize the input images.

    The weights are float32. A head of any size is accepted, and also none. Early files store the patch kernel as a matrix,
    (dim, 3 * patch * patch).

    Raises   ValueError for a file that is damaged, or whose weights do not have the names and shapes of this model; the error
             names the file.
    """
    expected = {key: tuple(tensor.shape) for key, tensor in timm_on_meta(name).state_dict().items()}
    state = read_npz(path, name) if path.suffix == ".npz" else find_state_dict(load_checkpoint(path), path)
    wrong = [f"{key} is missing" for key in expected if key not in state and not key.startswith("head.")]
    wrong += [f"{key} is unknown" for key in state if key not in expected and not key.startswith(HEADS)]
    wrong += [f"{key} is not finite" for key in expected if key in state and not state[key].isfinite().all()]
    for key, shape in expected.items():
        found = tuple(state[key].shape) if key in state else shape
        if key == "pos_embed":  # the number of positions may differ
            same = len(found) == 3 and (found[0], found[2]) == (shape[0], shape[2])
        elif key == "patch_embed.proj.weight" and len(found) == 2:
            same = found[0] == shape[0] and found[1] == 3 * math.isqrt(found[1] // 3) ** 2 > 0
        else:
            same = found == shape or key.startswith(HEADS)
        wrong += [] if same else [f"{key} is {found}, expected {shape}"]
    if wrong:
        raise ValueError(f"{path.name} is not {name}: {printable(list_some(wrong))}; expected its weights under timm's names")
    config = timm_config(name)
    return {key: state[key].float() for key in expected if key in state}, tuple(config.mean), tuple(config.std)


def list_some(items: list[str]) -> str:
    """Return a text for an error message that lists the first five of the `items` and says how many more there are."""
    return ", ".join(items[:5]) + f" and {len(items) - 5} more" * (len(items) > 5)


def timm_config(name: str) -> Any:
    """Return timm's configuration object for the pretrained weights `name`, with the size and normalization of the images.
    Raise ValueError if timm does not know the name.
    """
    from timm.models import get_pretrained_cfg

    try:
        return get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise ValueError(f"timm has no weights {name!r} ({error}); expected a name with its tag, such as {VIT_S!r}") from error


def load_checkpoint(path: Path) -> Any:
    """Return the content of a .safetensors file or a checkpoint of torch. No code in the file is executed. Raise ValueError if
    the file cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # checkpoints of DINO store their options in one
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); expected a file of weights") from error


def find_state_dict(state: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict that is stored inside a loaded checkpoint, for example under the key "model". Prefixes such as
    "module." and "_orig_mod." are removed from the names of weights. `path` is the file for error messages.

    The key may be "teacher" (DINO), "state_dict_ema" (timm's training script), "model_ema", "state_dict" or "model". If a file
    has several of them, the first in this order is used: a moving average of the weights (EMA) before the weights themselves.

    Integers of a head and of BatchNorm (`num_batches_tracked`) are left out, because they are never used.

    Raises   ValueError if there are no tensors, if two names become equal, and for tensors that are not dense or not floating
             point.
    """
    for key in ("teacher", "state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds a {type(state).__name__} without tensors; expected a state dict, or one under 'model'")
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        shown = printable(str(name))
        bare = re.sub(r"^(module\.|_orig_mod\.|backbone\.|model\.|encoder\.)+", "", str(name))
        if not tensor.is_floating_point() and (bare.startswith(HEADS) or bare.endswith("num_batches_tracked")):
            continue
        if bare in weights:
            raise ValueError(f"{path} has two weights called {printable(bare)}, one of them as {shown}; expected one of each")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"{shown} in {path} is not stored as plain numbers; expected dense tensors")
        if not tensor.is_floating_point():
            raise ValueError(f"{shown} in {path} is {tensor.dtype}; expected floating-point weights")
        weights[bare] = tensor
    return weights


def read_npz(path: Path, name: str) -> dict[str, Tensor]:
    """Read pretrained weights of the timm model `name` from an .npz file of Google's original release. Return a state dict with
    timm's names of weights.

    Raises   ValueError for a damaged file, and for the weights of another model; the error names the file.
    """
    import numpy
    import timm

    with torch.device("cpu"):
        model: Any = timm.create_model(name.partition(".")[0])
    expected = tuple(model.patch_embed.proj.weight.permute(2, 3, 1, 0).shape)
    try:
        with numpy.load(path) as arrays:
            kernel, bias = arrays["embedding/kernel"].shape, arrays.get("head/bias")
        if kernel == expected:
            model.load_pretrained(str(path))
    except KeyError as error:
        raise ValueError(f"{path.name} is not {name}: {error.args[0]}") from error
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); expected the original .npz") from error
    if kernel != expected:
        raise ValueError(f"{path.name} is not {name}: embedding/kernel is {kernel}, expected {expected}")
    loaded_head = bias is not None and bias.shape == tuple(model.head.bias.shape)  # timm does not load a head of another size
    return {key: tensor for key, tensor in model.state_dict().items() if loaded_head or not key.startswith("head.")}
