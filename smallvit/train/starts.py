"""Starts: the weights that one run left, for another to begin with."""

import hashlib
from pathlib import Path

from torch import Tensor, nn

from smallvit import record as records


def start_from(model: nn.Module, folder: Path, run: str) -> dict:
    """Load the weights that the run of that fingerprint left in `folder`; new are a reduction, and a head for other classes.

    Returns what was loaded, for the record. Raises ValueError for a file that is not there or of another run, and for a weight
    that is missing, left over or of another shape, naming it.
    """
    state, own = weights(folder, run), model.state_dict()
    other = [name for name in state if name.startswith("head.") and name in own and state[name].shape != own[name].shape]
    state = {name: weight for name, weight in state.items() if name not in other}  # a head for other classes starts anew
    missing = [name for name in own if name not in state]
    strange = [name for name in missing if ".reduction." not in name and name not in other]
    strange += [name for name in state if name not in own or state[name].shape != own[name].shape]
    if strange:
        raise ValueError(
            f"the weights of {folder} do not fit: {', '.join(strange[:5])}; expected the same model but for its reduction, "
            "and for its head where the classes are others"
        )
    model.load_state_dict(state, strict=False)
    sha256 = hashlib.sha256((folder / records.WEIGHTS).read_bytes()).hexdigest()
    return {"loaded": len(state), "missing": missing, "sha256": sha256}


def weights(folder: Path, run: str) -> dict[str, Tensor]:
    """What the run of that fingerprint left in `folder`. Raises ValueError for no file, or one of another run."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = folder / records.WEIGHTS
    if not path.exists():
        raise ValueError(f"{folder} has no {path.name} to start from; delete its {records.RECORD} and it is trained again")
    with safe_open(path, "pt") as file:
        of = (file.metadata() or {}).get("fingerprint")
    if of != run:
        raise ValueError(f"{path} is of run {of}, not of {run}, whose weights are asked for; put the right file there")
    return load_file(path)
