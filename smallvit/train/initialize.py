"""Initialization: the objective before its first step, with new weights, or weights from another run or from elsewhere."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.data import DataSpec
from smallvit.pretrained import Weights
from smallvit.rng import stream
from smallvit.run import Run, fingerprint
from smallvit.vit import initialize


def initial_objective(
    run: Run, spec: DataSpec, init: Path | None, teacher: Path | None
) -> tuple[nn.Module, dict | None, list[str]]:
    """Create the training objective of a run, which contains its model, with initial weights. Return it with a report on loaded
    weights and the hashes of their files. `spec` describes the data set. `init` is the folder of an earlier run whose weights
    the model gets. `teacher` is the folder of an earlier run whose model becomes the teacher.

    `init` and `teacher` are the folders of the runs in `run.init` and `run.teacher`. If a folder is None, no weights are loaded
    from it. The report is a dict from `load_from_run` or, for pretrained weights in `run.init`, from `Weights.load`. It is None
    if no weights were loaded into the model.
    """
    torch.manual_seed(stream(run.seed, "init"))
    model = run.model(spec.size, spec.channels, len(spec.classes))
    if hasattr(model, "reset_parameters"):  # initialized from named random streams; other models keep their own weights
        initialize(model, run.seed)
    loaded = None
    if isinstance(run.init, Weights):
        loaded = run.init.load(model, spec.mean, spec.std)
    elif isinstance(run.init, Run) and init is not None:
        loaded = load_from_run(model, init, fingerprint(run.init))
    hashes, models = [loaded["sha256"]] if loaded else [], {}
    if run.teacher is not None:
        models["teacher"] = run.teacher.model(spec.size, spec.channels, len(spec.classes))
        if teacher is not None:
            report = load_from_run(models["teacher"], teacher, fingerprint(run.teacher))
            if report["missing"]:
                raise ValueError(f"the teacher was trained on other classes; expected those of {spec.name}")
            hashes.append(report["sha256"])
    torch.manual_seed(stream(run.seed, "init", "objective"))
    return run.objective(model, **models), loaded, hashes


def load_from_run(model: nn.Module, folder: Path, run_hash: str) -> dict:
    """Load the weights of an earlier run, which has finished, into `model`. Return a report as a dict. `folder` is the folder
    of the earlier run. `run_hash` is the hash of the settings of the earlier run; its weights file must contain the same hash.

    Parts that the model does not share with the run, such as a token reduction, keep their new weights.

    The report says how many tensors were loaded, the names of those that were not, and the hash of the file. Raises ValueError
    for a missing file, for the file of another run, and for tensors that do not fit, by name.
    """
    state, expected = read_weights(folder, run_hash), model.state_dict()
    heads = [name for name in state if name.startswith("head.") and name in expected]
    new_head = [name for name in heads if state[name].shape != expected[name].shape]
    state = {name: tensor for name, tensor in state.items() if name not in new_head}
    missing = [name for name in expected if name not in state]
    wrong = [name for name in missing if ".reduction." not in name and name not in new_head]
    wrong += [name for name in state if name not in expected or state[name].shape != expected[name].shape]
    if wrong:
        raise ValueError(
            f"the weights of {folder} do not fit: {', '.join(wrong[:5])}; expected the same model, except for its reduction and"
            " for a head with another number of classes"
        )
    model.load_state_dict(state, strict=False)
    return {"loaded": len(state), "missing": missing, "sha256": records.file_sha256(folder / records.WEIGHTS)}


def read_weights(folder: Path, run_hash: str) -> dict[str, Tensor]:
    """Return the weights of an earlier run, which has finished, as a dict from name to tensor. `folder` is the folder of this
    run. `run_hash` is the hash of its settings, as text; the weights file must contain the same hash.

    Raises ValueError for a missing or damaged file, and for the weights of another run.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / records.WEIGHTS
    if not path.exists():
        raise ValueError(f"{folder} has no {path.name}; delete its {records.RECORD} and run the recipe again")
    try:
        with safe_open(path, "pt") as file:
            owner = json.loads((file.metadata() or {}).get("smallvit", "{}")).get("fingerprint")
            if owner != run_hash:
                raise ValueError(f"{path} holds the weights of run {owner}, not of {run_hash}; put the right file there")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete the folder and run the recipe again") from error
