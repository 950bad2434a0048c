"""One training run on several GPUs or processes: each of them computes the gradient of its part of every batch.

Start a Python script that calls `fit_parallel` with `torchrun`. All processes draw the whole batch of a step from the random
streams of the run, and each keeps an equal part of it. Then the mean of their gradients and losses is computed (`all_reduce`),
and all processes take the same optimizer step. So augmentation, also one that mixes images, is that of a single process, and
the weights agree with those of `fit` up to rounding. The first process (rank 0) alone measures the model, and alone writes
checkpoints, curve, weights and record.

This needs two operations of `torch.distributed`. `DistributedDataParallel` and Lightning Fabric would wrap the model, its
checkpoints and its devices. Their gain, gradients that are sent while others are still computed, is small for small models.
"""

import io
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from smallvit.augment import Batch
from smallvit.components import function
from smallvit.data import sealed_test_images
from smallvit.numerics import DEFAULT, Numerics, check_numerics, full_float32
from smallvit.objectives import Supervised
from smallvit.record import Record
from smallvit.run import Run
from smallvit.storage import locked

from . import checkpoint
from .fit import (
    NO_TAGS,
    Tags,
    dependency_folders,
    finished_record,
    fit,
    load_data,
    prepare_training,
    train_earlier_runs,
    training_allowed,
)
from .loop import Training, Watch, train
from .own_numbers import changed_number, numbers_of, own_parts

PATIENCE = timedelta(days=30)  # other processes wait while the first one trains an earlier run, or measures the model
IMAGES = 16  # of the first batch, on which the model is checked
TOLERANCE = 1e-4  # of the largest output, between images in a whole batch and in half of it


def fit_parallel(
    run: Run,
    folder: str | Path,
    *,
    tags: Tags = NO_TAGS,
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    init: str | Path | None = None,
    teacher: str | Path | None = None,
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
) -> Record:
    """Train and evaluate one run with all processes that `torchrun` has started, and return its record (results) in each of
    them. `folder` and the other parameters are those of `fit`. All processes must see the folder.

    The weights agree with those of `fit` up to rounding. A run that was interrupted continues from its checkpoint. With the
    same number of processes, it ends with bitwise the same weights as an uninterrupted one. An earlier run that the run needs
    is trained by the first process alone; to train it in parallel too, train it first, and give its folder as `init` or
    `teacher`. In a script that was started without `torchrun`, this function does the same as `fit`.

    device     "cpu", "cuda" (one GPU for each process on a machine) or "auto"
    watch      called in the first process only

    Raises     ValueError for a run whose result would depend on how a batch is divided: another objective than `Supervised`,
               optimizers with two passes such as `SAM`, random draws inside the model such as dropout, and models in which
               the images of a batch affect each other, such as batch normalization. Also for early stopping, for `steps=0`, and
               for a batch that cannot be divided equally. See `fit` for other errors.
    """
    check_numerics(numerics)
    folder, options = Path(folder), {"numerics": numerics, "validation_only": validation_only, "reads": reads}
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes == 1:
        return fit(run, folder, tags=tags, device=device, watch=watch, init=init, teacher=teacher, **options)
    check_divisible(run, processes)
    own_device, places = device_of_this_process(device), dependency_folders(run, folder, {"init": init, "teacher": teacher})
    if not dist.is_initialized() and os.environ.get("RANK") == "0":  # before the processes are connected: see `joined`
        with locked(folder / ".lock"):
            if finished_record(run, folder, validation_only) is None:
                train_earlier_runs(run, places, tags, device=own_device, **options)
    with joined(own_device), training_allowed():
        if dist.get_rank():
            record = follow(run, places, own_device, numerics)
        else:
            record = lead(prepare_training(run, folder, tags, own_device, init, teacher, **options), watch)
    return record


def check_divisible(run: Run, processes: int):
    """Raise ValueError if the settings of a run do not allow that several processes train it together. `processes` is their
    number.
    """
    objective = function(run.objective)
    if objective is not Supervised:
        raise ValueError(
            f"the objective {objective.__name__} cannot be trained by several processes: only the loss of Supervised is known "
            "to be a mean over images, without random draws; use one process (fit)"
        )
    optimizer = function(run.optimizer)
    if hasattr(optimizer, "two_passes"):
        raise ValueError(
            f"{optimizer.__name__} moves the weights along the gradient of a whole batch, and each of several processes "
            "computes that of a part; use one process (fit), or another optimizer"
        )
    if run.early_stop:
        raise ValueError(f"early_stop={run.early_stop}: only one of several processes measures the accuracy; use early_stop=0")
    if not run.steps:
        raise ValueError("steps is 0, so there is nothing to train with several processes; use one process (fit)")
    if run.batch % processes:
        nearest = max(round(run.batch / processes), 1) * processes
        raise ValueError(f"batch={run.batch} cannot be divided equally among {processes} processes; try batch={nearest}")


def device_of_this_process(device: str) -> str:
    """Return the device of this process: "cpu", or its own GPU. `device` is the parameter of `fit_parallel`.

    Raises ValueError for an unknown device, or if there are more processes than GPUs.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device is {device!r}; expected 'cpu', 'cuda' or 'auto' for several processes")
    own, number = device, int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        own = "cuda" if torch.cuda.is_available() else "cpu"
    if own == "cuda":
        if number >= torch.cuda.device_count():
            raise ValueError(f"process {number + 1} on this machine needs a GPU of its own; found {torch.cuda.device_count()}")
        own = f"cuda:{number}"
        torch.cuda.set_device(own)
    return own


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Context manager that connects this process, which uses `device`, with the others that `torchrun` has started. If the
    script has connected them already, this connection is used and stays.

    Inside it, the first process must not train by DINO: lightly's loss would wait for the other processes.
    """
    started_here = not dist.is_initialized()
    if started_here:
        # PyTorch imports this module later, and the defaults of its functions then keep the group of processes that exists. It
        # would not be destroyed below, and its threads, still running at the end of Python, could abort the process.
        from torch.distributed.nn import functional  # noqa: F401

        store, rank, processes = next(rendezvous("env://", timeout=PATIENCE))
        backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
        own_store = store_of_this_start(store, rank, processes)
        dist.init_process_group(backend, store=own_store, rank=rank, world_size=processes, timeout=PATIENCE)
    yield
    if started_here:  # not after an error: the others could be in the middle of an operation, and torchrun ends them
        dist.destroy_process_group()


def store_of_this_start(store: Store, rank: int, processes: int) -> Store:
    """Return a part of `store` that no process of an earlier start has used. All earlier processes must have ended.

    When `torchrun` starts killed processes again, it keeps its store. In the same part of the store, a new process could read
    the address of a process that has ended (seen with PyTorch 2.14). Then it fails to connect, or waits forever. So the first
    process chooses a random name for this start, and sends it to all others. Each of them confirms by a key under this name,
    and the first process waits until all have confirmed.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"came/{rank}", own)
        name = store.get(f"name/{own}").decode()
        store.set(f"{name}/{rank}", "")
    else:
        name, missing = own, set(range(1, processes))
        while missing:
            for other in sorted(missing):
                if store.check([f"came/{other}"]):  # perhaps still by a process of an earlier start
                    store.set(f"name/{store.get(f'came/{other}').decode()}", name)
            missing = {other for other in missing if not store.check([f"{name}/{other}"])}
            time.sleep(0.01)
    return PrefixStore(name, store)


def lead(prepared: AbstractContextManager, watch: Watch) -> Record:
    """Train a run together with the other processes, write all its files, and return its record (results). This is the part of
    the first process. `prepared` is the context manager of `prepare_training` for this run, and `watch` is called after each
    step.
    """
    with prepared as (training, close):
        if training is None:  # the run has finished
            share(None)
        else:
            training.processes = dist.get_world_size()
            checkpoint.resume([training])
            state = io.BytesIO()
            torch.save(checkpoint.state_of(training), state)
            share(state.getvalue())
            share(training.images.labels.cpu())
            check_images_are_independent(training)
            train([training], lambda: train_step(training), watch)
        record = close()
    return share(record)


def follow(run: Run, places: dict[str, Path], device: str, numerics: Numerics) -> Record:
    """Train a run together with the first process, from the state that this one sends, and return the record (results) that it
    has written. This is the part of the other processes, which write nothing. `places` are the folders of earlier runs, by
    field ("init", "teacher"). The other parameters are those of `fit_parallel`.
    """
    state = share()
    if state is not None:
        with sealed_test_images("a run reads them only when it is scored"), full_float32():
            training = Training(run, *load_data(run), device, places.get("init"), places.get("teacher"), numerics)
            checkpoint.restore(training, torch.load(io.BytesIO(state), map_location=device, weights_only=True))
            training.images.labels.copy_(share())  # pseudo-labels are computed, and could round differently
            training.count_classes()
            check_images_are_independent(training)
            while training.step < run.steps:
                train_step(training)
    return share()


def share(value: Any = None) -> Any:
    """Return in every process the `value` that the first process has given."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def train_step(training: Training):
    """Take one training step of a run together with the other processes: each computes the gradients of its part of the batch,
    and all of them update their weights by the mean of the gradients.
    """
    loss = training.compute_gradients(part(training.next_batch(), dist.get_rank(), dist.get_world_size()))
    average([p.grad for p in training.parameters if p.grad is not None] + [loss])
    training.update_weights(loss)


def part(batch: Batch, rank: int, processes: int) -> Batch:
    """Return the part of a batch on which one process computes gradients. `rank` is the number of this process, from 0, and
    `processes` is how many there are. Part 0 has the first images of the batch, part 1 the next ones, and so on.
    """
    size = len(batch.images) // processes
    own = slice(rank * size, (rank + 1) * size)
    return batch._replace(images=batch.images[own], targets=batch.targets[own])


def average(tensors: Sequence[Tensor]):
    """Replace tensors by their mean over all processes, in place. They are sent as one long tensor."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for tensor, mean in zip(tensors, whole.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def check_images_are_independent(training: Training):
    """Raise ValueError if the model of a run, in training, makes random draws, changes buffers, or has another output for an
    image if other images are in the batch. Then several processes would not train as one does.

    This is measured on a few images of the next batch, as at the beginning and as at the end of the training, because parts of
    a model may change in between.
    """
    if training.ended:
        return
    images, objective = training.next_batch().images[:IMAGES], training.objective.train()
    own = [*own_parts(objective).values()]
    for progress in (0.0, 1.0):
        objective.set_progress(progress)
        before, numbers = inner_state(objective, training.device), [numbers_of(part) for part in own]
        whole = objective.model(images)
        halves = torch.cat([objective.model(half) for half in images.chunk(2)])
        after = inner_state(objective, training.device)
        for name in before:
            if not torch.equal(after[name], before[name]):
                raise ValueError(
                    f"a training step changes {name}, differently for each part of a batch; several processes can train only "
                    "models without random draws (dropout, drop_path) and without running statistics (batch normalization)"
                )
        if changed := changed_number(own, numbers):
            raise ValueError(
                f"a training step changes the attribute {changed}, also for each part of a batch; several processes can train "
                "only models without such numbers"
            )
        if (whole - halves).abs().max() > TOLERANCE * whole.abs().max():
            raise ValueError(
                "the output of the model for an image depends on the other images in the batch, so several processes cannot "
                "divide it; use one process (fit)"
            )


def inner_state(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return a dict with copies of what a forward pass may change: the buffers of a module, and the states of the random number
    generators of torch.
    """
    states = {f"the buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    states["the random number generator"] = torch.get_rng_state()
    if device.type == "cuda":
        states["the random number generator of the GPU"] = torch.cuda.get_rng_state(device)
    return states
