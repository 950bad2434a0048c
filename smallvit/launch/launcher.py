"""Launching: training the runs of a recipe, wherever the engine trains them, and keeping their records.

Nothing is lost when a process dies: finished runs are skipped the next time, and interrupted ones continue from their
checkpoint.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from smallvit.ablation import ArmRun
from smallvit.numerics import DEFAULT, Numerics, check_numerics
from smallvit.recipe import imported_text, own_files
from smallvit.record import Record
from smallvit.train.read_log import READS, all_reads
from smallvit.words import how_many

from .engine import Engine, Settings
from .gpus import cuda_for_auto, gpu_workers
from .local import LocalEngine, process_context
from .scheduler import Scheduler


def launch(
    runs: Sequence[ArmRun],
    out: str | Path,
    *,
    recipe: str,
    recipe_runs: Iterable[ArmRun] = (),
    source: str | Path | None = None,
    jobs: int | None = None,
    gpus: Sequence[str] = (),
    stack: int = 1,
    device: str = "cpu",
    numerics: Numerics = DEFAULT,
    retry: bool | Callable[[Record], bool] = False,
    fail_fast: bool = False,
    validation_only: bool = False,
    curves: bool = True,
    show: Callable[[Record], None] | None = None,
    engine: Callable[[Settings, int], Engine] | None = None,
) -> list[Record]:
    """Train runs in several worker processes. Return a list with the record (settings, results and costs) of each run, in the
    order of `runs`. Runs that already have a record in the folder `out` are not trained again.

    A run that fails leaves a record with its error, and the other runs go on. Failed runs are trained again only with
    `retry=True`, or if `retry` is a function that returns True for their record; runs whose external weights were unavailable
    are tried again each time. If a worker is killed, its run is resumed once from its checkpoint. A script calls this function
    below `if __name__ == "__main__":`, because the workers import the script.

    runs         the runs to train, as `ablate` returns them
    out, recipe  the runs lie in the folder `out/recipe`
    recipe_runs  all runs of the recipe, if `runs` is a part of them. A dependency that is one of them keeps its folder
    source       the recipe file, if it defines components that the runs use. The workers use it as it was imported, also if
                 it is edited during the training
    jobs         number of worker processes; None means one for each core, or with CUDA four on each GPU
    gpus         the GPU of each worker process, as a value of CUDA_VISIBLE_DEVICES. A GPU that occurs twice is used by two
                 processes. There are then as many processes as values, and `jobs` does not count. The default is all GPUs of
                 this machine if the device is CUDA
    engine       a function that creates the `Engine` that trains the runs, from `Settings` and a number of groups of runs. None
                 means the worker processes of this machine
    stack        train so many runs that differ only in seed, learning rate and number of labels as one model. This is faster
                 for small models. The weights agree with those of single runs up to rounding
    device       "cpu", "cuda", "mps" or "auto"
    numerics     precision, attention kernel and compilation; `smallvit.launch.autotune.autotune` finds the fastest
    fail_fast    start no further run after the first failure
    validation_only  score the runs on validation images only; the test images cannot be read. `out` must be a folder in which
                 no other runs lie
    curves       measure the validation accuracy 12 times during training; False saves this time
    show         called with each new record

    Raises       ValueError for a device that is not there, for invalid options, for a folder that holds another run, and for
                 data that cannot be read, have changed, or have no test images (unless `validation_only`), for a damaged
                 file of the reads of test images, and if a worker cannot import the script that calls this function.
    """
    out = Path(out).expanduser()
    if engine is None:
        check_device(device)
    if stack < 1:
        raise ValueError(f"stack is {stack}; expected the number of runs to train as one model, at least 1")
    if wrong := [run for run in runs if not isinstance(run, ArmRun)]:
        raise ValueError(f"runs contains {type(wrong[0]).__name__}; expected ArmRun(run=..., arm=...), as ablate returns")
    check_numerics(numerics, stack)
    if engine is None:
        device = cuda_for_auto(device)
        gpus = gpus or gpu_workers(None, None, jobs, device)
        engine = partial(LocalEngine, jobs=jobs, gpus=gpus)
        if not gpus:
            process_context(device)  # the server of the workers imports torch while the records are read
    schedule = Scheduler(
        runs,
        out,
        recipe,
        recipe_runs=recipe_runs,
        retry=retry,
        stack=stack,
        full_stacks=validation_only,  # choices by validation images must not depend on the number of workers
        test_images=not validation_only,
        fail_fast=fail_fast,
        show=show,
    )
    path = None if source is None else Path(source).resolve()
    recipe_text = "" if path is None else imported_text(path) or path.read_text(encoding="utf-8-sig")
    note_own_files(recipe_text, recipe)
    reads = None if validation_only else Path(out, recipe, READS)
    if not schedule.queue:
        schedule.bar.close()
        return schedule.requested_records
    if reads:
        all_reads(reads)  # a damaged line would end each run after its training
    settings = Settings(path, device, numerics, validation_only, reads, curves, recipe_text)
    trainer = engine(settings, len(schedule.queue))
    try:
        workers = how_many(trainer.slots, "worker process", "worker processes")
        text = f"{recipe}: training {how_many(len(schedule.queue), 'run')}; starting {workers}"
        print(text, file=sys.stderr, flush=True)
        while schedule.queue or trainer.progress():
            while len(trainer.progress()) < trainer.slots and (group := schedule.next_group(trainer.slots)):
                trainer.start(group, [schedule.task(index) for index in group])
            for group, result in trainer.wait(0.5):
                schedule.handle(group, result)
            schedule.bar.show_progress(trainer.progress())
    finally:
        trainer.close()
        schedule.bar.close()
    return schedule.requested_records


@cache  # one note, also if a command launches several times
def note_own_files(text: str, recipe: str):
    """Print a note about each file of a user's own that a recipe imports, because the hash of its code does not cover it.
    `text` is the source code of the recipe file, and `recipe` is its name.
    """
    for file in own_files(text):
        advice = f"copy what it needs into {recipe}.py, or use another folder for the results (--out) after a change"
        print(f"note: the recipe imports {file}, and smallvit does not notice a change there; {advice}", file=sys.stderr)


def check_device(device: str):
    """Raise ValueError if the device, such as "cpu" or "cuda", is unknown or is not available on this machine."""
    if device not in ("cpu", "cuda", "mps", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto")
    from smallvit.train.loop import choose_device  # imports torch

    choose_device(device)
