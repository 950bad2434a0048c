"""Starts: what a run begins with, weights of its own or those that another left."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.data import DataSpec
from smallvit.pretrained import Weights
from smallvit.rng import stream
from smallvit.run import Run, fingerprint
from smallvit.vit import initialize


def begin(run: Run, spec: DataSpec, start: Path | None, teacher: Path | None) -> tuple[nn.Module, dict | None, list[str]]:
    """The objective of a run before its first step, what its model was given from elsewhere, and the hashes of such files.

    `start` and `teacher` are the folders of the runs that it starts from and is taught by; without them they are as untrained.
    """
    torch.manual_seed(stream(run.seed, "init"))
    model = run.model(spec.size, spec.channels, len(spec.classes))
    if hasattr(model, "reset_parameters"):  # a model that lets its weights come from named streams; others keep their own
        initialize(model, run.seed)
    given = None
    if isinstance(run.init, Weights):
        given = run.init.load(model, spec.mean, spec.std)
    elif start is not None:
        given = start_from(model, start, fingerprint(run.init))
    hashes, taught = [given["sha256"]] if given else [], {}
    if run.teacher is not None:
        taught["teacher"] = run.teacher.model(spec.size, spec.channels, len(spec.classes))
    if teacher is not None:
        told = start_from(taught["teacher"], teacher, fingerprint(run.teacher))
        if told["missing"]:
            raise ValueError(f"the teacher {run.teacher.arm!r} was trained on other classes; expected those of {spec.name}")
        hashes.append(told["sha256"])
    torch.manual_seed(stream(run.seed, "init", "objective"))
    return run.objective(model, **taught), given, hashes


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
