"""Initialization: the objective before its first step, with new weights, or weights from another run or from elsewhere."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.data import DataSpec
from smallvit.pretrained import Weights
from smallvit.random_weights import initialize
from smallvit.rng import stream
from smallvit.run import Run, fingerprint
from smallvit.shapes import printable
from smallvit.storage import file_sha256, parse_json

HEAD = re.compile(r"(members\.\d+\.)?head\.")  # names of weights of the head, also of a member of an ensemble


def initial_objective(
    run: Run, spec: DataSpec, init: Path | None, teacher: Path | None
) -> tuple[nn.Module, nn.Module | None, dict | None, list[str]]:
    """Create the training objective of a run, which contains its model, with initial weights. Return it with the teacher, a
    report on loaded weights, and the hashes of their files. `spec` describes the data set. `init` is the folder of an earlier
    run whose weights the model gets. `teacher` is the folder of an earlier run whose model becomes the teacher.

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
    hashes, teacher_model = [loaded["sha256"]] if loaded else [], None
    if run.teacher is not None:
        teacher_model = run.teacher.model(spec.size, spec.channels, len(spec.classes))
        if teacher is not None:
            report = load_from_run(teacher_model, teacher, fingerprint(run.teacher))
            if report["missing"] and run.learns_from_teacher:
                raise ValueError(f"the teacher was trained on other classes; expected those of {spec.name}")
            hashes.append(report["sha256"])
    torch.manual_seed(stream(run.seed, "init", "objective"))
    models = {"teacher": teacher_model} if run.learns_from_teacher else {}
    return run.objective(model, **models), teacher_model, loaded, hashes


def load_from_run(model: nn.Module, folder: Path, run_hash: str) -> dict:
    """Load the weights of an earlier run, which has finished, into `model`. Return a report as a dict. `folder` is the folder
    of the earlier run. `run_hash` is the hash of the settings of the earlier run; its weights file must contain the same hash.

    Parts that the model does not share with the run, such as a token reduction, keep their new weights.

    The report says how many tensors were loaded, the names of those that were not, and the hash of the file. Raises ValueError
    for a missing or damaged file, for the file of another run, and for tensors that do not fit, by name.
    """
    file, expected = WeightsFile(folder, run_hash), shapes_of(model)
    found = file.shapes
    heads = [name for name in found if HEAD.match(name) and name in expected]
    new_head = [name for name in heads if found[name] != expected[name]]
    found = {name: shape for name, shape in found.items() if name not in new_head}
    missing = [name for name in expected if name not in found]
    wrong = [name for name in missing if ".reduction." not in name and name not in new_head]
    wrong += [name for name in found if found[name] != expected.get(name)]
    if wrong:
        raise ValueError(
            f"the weights of {folder} do not fit: {', '.join(wrong[:5])}; expected the same model, except for its reduction and"
            " for a head with another number of classes"
        )
    model.load_state_dict(file.read(found), strict=False)
    return {"loaded": len(found), "missing": missing, "sha256": file_sha256(file.path)}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights of a model, as a dict from name to shape."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class WeightsFile:
    """The weights file of an earlier run, which has finished. `folder` is the folder of this run, and `run_hash` is the hash of
    its settings, as text. `path` is the path of the file, and `shapes` are the shapes of its weights, from name to shape. The
    weights are only read by the method `read`, so a file with wrong shapes takes no memory.

    The file must have the hash that the record in the folder says, and hold the hash of the settings.

    Raises ValueError, with the name of the file, if it is missing or damaged, and for the weights of another run.
    """

    def __init__(self, folder: Path, run_hash: str):
        from safetensors import safe_open

        self.path = Path(folder) / records.WEIGHTS
        record = records.read_record(folder)
        if record is not None and (problem := records.damaged_weights(folder, record)):
            raise ValueError(f"{problem}; delete the folder and run the recipe again")
        if not self.path.exists():
            raise ValueError(f"{folder} has no {self.path.name}; delete its {records.RECORD} and run the recipe again")
        with self.damage_named():
            self.file: Any = safe_open(self.path, "pt")
            metadata = self.file.metadata()
            self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118
        if (owner := owner_of(metadata)) != run_hash:
            raise ValueError(f"{self.path} holds the weights of run {owner}, not of {run_hash}; put the right file there")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights with these names, as a dict from name to tensor."""
        with self.damage_named():
            return {name: self.file.get_tensor(name) for name in names}

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Context manager in which the file is read. An error of safetensors becomes a ValueError with the name of the file."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # safetensors, and torch for a type that it does not know, raise their own errors
            if isinstance(error, OSError) and error.errno is not None:  # such as too many open files
                raise
            reason = printable(str(error))
            raise ValueError(f"{self.path} is damaged ({reason:.200}); delete the folder and run the recipe again") from error


def owner_of(metadata: dict[str, str] | None) -> str:
    """Return the hash of the settings of the run to which a weights file belongs, as text. `metadata` are those of the file.
    The text is empty if they do not say it.
    """
    try:
        description = parse_json((metadata or {}).get("smallvit", "{}"))
    except ValueError:
        return ""
    owner = description.get("fingerprint") if isinstance(description, dict) else None
    return printable(owner) if isinstance(owner, str) else ""
