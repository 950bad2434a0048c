"""Checkpoints: saving an unfinished training, and resuming it.

All random draws come from streams named by (seed, name, step). So a checkpoint needs no generator state: weights, optimizer,
curve and step determine the rest.

A file holds the state of one run, or of all runs that are trained together as one model (a stack): a kill never leaves them at
different steps. Its end names these runs and has a hash of the whole content, which is checked before anything is loaded.
"""

import hashlib
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smallvit.numerics import Numerics, check_numerics
from smallvit.run import fingerprint
from smallvit.shapes import shape_problem
from smallvit.storage import rename_damaged, write_atomic

from .own_numbers import KINDS, numbers_of, own_parts, replaces_others, restore_numbers

if TYPE_CHECKING:
    from .loop import Training

MAGIC = b"smallvit-check-1"  # the last bytes of a file
NAME = 16  # characters of a fingerprint
TAIL = 64 + 8 + len(MAGIC)  # the hash, the length of the names before it, and MAGIC
ROOM = 2**26  # bytes of a file beyond the tensors that are expected in it
PLAIN = {
    "origin": "text", "step": "count", "seconds": "amount", "in_a_row": "count", "stacked": "positive?",
    "curve": [["count", "number?", "number?"]], "health": [{"step": "count", ...: "number?"}],
    "trace": [["text"], ["number"]], "numerics": ["value"], "joins_parameters": "flag", ...: "any",
}  # fmt: skip


def save(members: Sequence["Training"], path: Path):
    """Save the state of an unfinished training to a checkpoint file, from which it can be continued later. `members` are the
    runs: one, or several that are trained together as one model. Then the file holds all of them.
    """
    states = [state_of(member) for member in members]
    if len(states) == 1 and members[0].stacked:  # its tensors are slices, and `torch.save` would write those of all runs
        states = tree_map_only(Tensor, torch.clone, states)
    names = ",".join(fingerprint(member.run) for member in members).encode()

    def write(new: Path):
        torch.save(states, new)
        digest = content_hash(new, os.path.getsize(new), names)
        with open(new, "ab") as file:
            file.write(names + digest + f"{len(names):08d}".encode() + MAGIC)

    write_atomic(path, write)


def state_of(training: "Training") -> dict[str, Any]:
    """Return everything that a training needs to be continued, as a dict of tensors, numbers and texts."""
    return {
        "origin": training.origin,
        "step": training.step,
        "seconds": training.seconds,
        "loss": training.loss,
        "curve": training.curve,
        "health": training.health,
        "in_a_row": training.monitor.in_a_row,
        "objective": training.objective.state_dict(),
        "optimizer": training.optimizer.state_dict()["state"],
        "ema": training.ema_model and training.ema_model.state_dict(),
        "best": training.best,
        "stacked": training.stacked,
        "trace": [training.trace.batches, training.trace.losses],
        "numerics": [*training.numerics],
        "joins_parameters": training.joins_parameters,
        "numbers": {name: numbers_of(part) for name, part in own_parts(training.objective, training.optimizer).items()},
    }


def resume(members: Sequence["Training"]) -> bool:
    """Load the checkpoints of `Training` objects that have not started. They then continue at the step of their checkpoint.
    `members` is one run, or several that are to be trained together as one model (a stack). Return whether they continue as
    this stack: then the checkpoint holds exactly these runs, and all of them were loaded.

    A run without a checkpoint starts at step 0. So does a run whose code or data have changed since, with a note. The runs of a
    stack can only be continued together, because their weights would round differently alone: if other runs are to be trained
    now, they start again, with a note. A damaged checkpoint is renamed to `*.damaged`, with a note, and its runs start again.

    Raises ValueError for the checkpoint of another run.
    """
    names = [fingerprint(member.run) for member in members]
    together = read(members[0]) if len(members) > 1 else None
    if together is not None and [*together] == names:
        return is_current(members, together) and restore_all(members, together, members[0].checkpoint_file)
    for member in members:
        found = read(member)
        if found is None:
            continue
        if len(found) > 1:
            text = f"{len(found)} runs were trained together until their checkpoint {member.checkpoint_file}"
            print(f"note: {text}; they are not trained together now, so they start again", file=sys.stderr)
        elif is_current([member], found):
            restore_all([member], found, member.checkpoint_file)
    return False


def is_current(members: Sequence["Training"], states: dict[str, dict]) -> bool:
    """Return whether the states in a checkpoint are of the code, the data and the initial weights that the `Training` objects
    `members` have now. If not, print a note. `states` is a dict from fingerprint to state.
    """
    if all(state["origin"] == member.origin for state, member in zip(states.values(), members)):
        return True
    text = f"smallvit, the data or the initial weights have changed since the checkpoint {members[0].checkpoint_file}"
    print(f"note: {text}; training starts again", file=sys.stderr)
    return False


def restore_all(members: Sequence["Training"], states: dict[str, dict], path: Path) -> bool:
    """Load the states in the checkpoint at `path` into the `Training` objects `members`, if all of them fit, and return
    whether they do. If not, the file is set aside and nothing is changed. `states` is a dict from fingerprint to state.
    """
    try:
        for member, state in zip(members, states.values()):
            check_state(state, member)
    except Exception:  # a state that somebody else has made can raise anything
        set_aside(path)
        return False
    for member, state in zip(members, states.values()):
        restore(member, state)
    return True


def read(training: "Training") -> dict[str, dict] | None:
    """Return the content of the checkpoint file of a run, as a dict from the fingerprint of each run in it to its state. Return
    None if there is no file, or if it is damaged: then it is set aside.

    Raises ValueError if this run is not in it.
    """
    path = training.checkpoint_file
    if not path.exists():
        return None
    try:
        names = runs_in(path)
        check_content(path, names, training)
        states = torch.load(path, map_location=training.device, weights_only=True)
        if len(states) != len(names) or any(shape_problem(state, PLAIN, "") for state in states):
            raise ValueError("states without their fields")
    except (OSError, MemoryError):
        raise
    except Exception:  # a damaged file can raise anything
        set_aside(path)
        return None
    own = fingerprint(training.run)
    if own not in names:
        raise ValueError(f"{path} belongs to run {', '.join(names[:3])}, not to {own}; use another folder")
    return dict(zip(names, states))


def runs_in(path: Path) -> list[str]:
    """Return the fingerprints of the runs in a checkpoint file, in their order. The list is empty if the end of the file is
    missing. Only this end is read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL, 0))
        tail = file.read(TAIL)
        length = tail[64:72]
        if len(tail) < TAIL or not tail.endswith(MAGIC) or not length.isdigit() or int(length) > size - TAIL:
            return []
        file.seek(size - TAIL - int(length))
        names = file.read(int(length)).decode("ascii", "replace").split(",")
    return names if all(len(name) == NAME for name in names) else []


def check_content(path: Path, names: Sequence[str], training: "Training"):
    """Raise ValueError if the content of a checkpoint file is not what was saved, or is too large for the runs in it. `names`
    are the fingerprints of these runs, and `training` is one of them. Nothing is loaded.
    """
    if not names:
        raise ValueError("the end of the file is missing")
    size, text = os.path.getsize(path), ",".join(names).encode()
    end = size - TAIL - len(text)
    with open(path, "rb") as file:
        file.seek(size - TAIL)
        expected = file.read(64)
    if content_hash(path, end, text) != expected:
        raise ValueError("its content has another hash")
    one = sum(tensor.nbytes for tensor in training.objective.state_dict().values())
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if size > ROOM + 8 * len(names) * one or unpacked > size or any(entry.compress_type for entry in entries):
        raise ValueError("it is larger than its runs need")


def content_hash(path: Path, end: int, names: bytes) -> bytes:
    """Return the SHA-256 hash of the first `end` bytes of a file and of `names`, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(end, 2**20))):
            digest.update(block)
            end -= len(block)
    digest.update(names)
    return digest.hexdigest().encode()


def set_aside(path: Path):
    """Rename a damaged checkpoint to `*.damaged`, and print a note."""
    rename_damaged(path)
    print(f"note: {path} is damaged; renamed to *.damaged, and training starts again", file=sys.stderr)


def check_state(state: dict[str, Any], training: "Training"):
    """Raise an error unless a state fits a `Training` object: the same tensors with the same shapes, and possible numbers."""
    check_tensors(state["objective"], training.objective)
    if training.ema_model is not None:
        check_tensors(state["ema"], training.ema_model)
    if state["best"] is not None:
        check_tensors(state["best"], training.model)
    places = [(group, place) for group in training.optimizer.param_groups for place in range(len(group["params"]))]
    for index, moments in state["optimizer"].items():
        expected = training.optimizer.initial_state(*places[index])
        if {name: t.shape for name, t in moments.items()} != {name: t.shape for name, t in expected.items()}:
            raise ValueError("the optimizer has other parameters")
    check_numerics(Numerics(*state["numerics"]))
    parts = own_parts(training.objective, training.optimizer)
    for name, numbers in state["numbers"].items():
        if name not in parts or any(type(value) not in KINDS for value in numbers.values()):
            raise ValueError("it has numbers of other objects than the run")
        if replaces_others(parts[name], numbers):
            raise ValueError("it has numbers in the place of other attributes")
    taken = max((int(moments["step"]) for moments in state["optimizer"].values() if "step" in moments), default=0)
    if not taken <= state["step"] <= training.run.steps or state["loss"].shape != () or not state["loss"].is_floating_point():
        raise ValueError("the step or the loss is impossible")


def check_tensors(state: dict[str, Tensor], module: nn.Module):
    """Raise ValueError unless the tensors in `state` have the names, shapes and types of those of a module."""
    expected = module.state_dict()
    if {name: (t.shape, t.dtype) for name, t in state.items()} != {name: (t.shape, t.dtype) for name, t in expected.items()}:
        raise ValueError("it has other tensors than the run")


def restore(training: "Training", state: dict[str, Any]):
    """Continue a `Training` object, which has not started, from a state that fits it."""
    training.step, training.seconds, training.loss = state["step"], state["seconds"], state["loss"]
    training.curve, training.best, training.stacked = state["curve"], state["best"], state["stacked"]
    training.trace.batches, training.trace.losses = state["trace"]
    training.health, training.monitor.in_a_row = state["health"], state["in_a_row"]
    training.use(Numerics(*state["numerics"]))  # as it began, whatever was asked for this time
    training.joins_parameters &= state["joins_parameters"]
    training.objective.load_state_dict(state["objective"])
    groups = training.optimizer.state_dict()["param_groups"]
    training.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
    if training.ema_model is not None:
        training.ema_model.load_state_dict(state["ema"])
    parts = own_parts(training.objective, training.optimizer)
    for name, numbers in state["numbers"].items():
        restore_numbers(parts[name], numbers)
