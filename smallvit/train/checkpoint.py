"""Checkpoints: saving an unfinished training, and resuming it.

All random draws come from streams named by (seed, name, step). So a checkpoint needs no generator state: weights, optimizer,
curve and step determine the rest.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smallvit import record as records
from smallvit.numerics import Numerics
from smallvit.run import fingerprint

if TYPE_CHECKING:
    from .loop import Training


def save(training: "Training", path: Path):
    """Save the state of an unfinished training run to a checkpoint file, from which it can be continued later."""
    state = {
        "fingerprint": fingerprint(training.run),
        "origin": training.origin,
        "step": training.step,
        "seconds": training.seconds,
        "loss": training.loss,
        "curve": training.curve,
        "health": training.health,
        "in_a_row": training.monitor.in_a_row,
        "objective": training.objective.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "ema": training.ema_model and training.ema_model.state_dict(),
        "best": training.best,
        "stacked": training.stacked,
        "trace": [training.trace.batches, training.trace.losses],
        "numerics": [*training.numerics],
    }
    state = with_own_storage(state) if training.stacked else state
    records.write_atomic(path, lambda new: torch.save(state, new))


def resume(training: "Training", path: Path):
    """Load a checkpoint file into a `Training` object that has not started. The training then continues at the step of the
    checkpoint.

    Does nothing if there is no file, or if the code or the data have changed since (`training.origin`): the training then
    starts at step 0. Raises ValueError if the checkpoint cannot be read or belongs to another run.
    """
    if not path.exists():
        return
    try:
        state = torch.load(path, map_location=training.device, weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} cannot be read ({type(error).__name__}); delete it to start this run again") from error
    if state.get("fingerprint") != fingerprint(training.run):
        raise ValueError(
            f"{path} belongs to run {state.get('fingerprint')}, not to {fingerprint(training.run)}; use another folder"
        )
    if state.get("origin") != training.origin:
        return
    training.step, training.seconds, training.loss = state["step"], state["seconds"], state["loss"]
    training.curve, training.best, training.stacked = state["curve"], state["best"], state["stacked"]
    training.trace.batches, training.trace.losses = state["trace"]
    training.health, training.monitor.in_a_row = state["health"], state["in_a_row"]
    training.numerics = Numerics(*state["numerics"])  # as it began, whatever was asked for this time
    training.objective.load_state_dict(state["objective"])
    training.optimizer.load_state_dict(state["optimizer"])
    if training.ema_model is not None:
        training.ema_model.load_state_dict(state["ema"])


def with_own_storage(state: Any) -> Any:
    """Return a copy of `state` (nested dicts and lists with tensors) in which each tensor has its own memory. Several runs that
    are trained as one model share large tensors, and the tensors of each run are slices of them. Without copies, `torch.save`
    would write these large tensors as a whole.

    Runs that are trained together share such large tensors.
    """
    if isinstance(state, dict):
        return {name: with_own_storage(part) for name, part in state.items()}
    if isinstance(state, list):
        return [with_own_storage(part) for part in state]
    return state.clone() if isinstance(state, Tensor) else state
