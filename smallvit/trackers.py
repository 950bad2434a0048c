"""Sending the learning curves and results of runs to TensorBoard, Weights & Biases (W&B) or MLflow.

A process of its own reads the curve files and records in the folders of the runs and sends what is new. Training never waits
for it: if a tracker is slow, cannot be reached or crashes, the runs go on, and their records are the same. What was not sent
can be sent later with `smallvit report R --log`.

W&B and MLflow are set up by their own environment variables, such as WANDB_MODE=offline and MLFLOW_TRACKING_URI.
"""

import json
import re
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smallvit.record import CURVE, Record, condition_text, read_record
from smallvit.storage import parse_json, read_bounded, write_text
from smallvit.words import how_many

MOST_BYTES = 1_000_000  # of a curve file
SECONDS = 2.0  # between two looks at the folders
PATIENCE = 30.0  # seconds that a tracker gets at the end, after the last run


class Followed(NamedTuple):
    """A run whose results are sent to a tracker: its folder, its arm (variant) and number of labelled images as text, its seed,
    its fingerprint (hash of its settings), and these settings as a dict.
    """

    folder: str
    arm: str
    condition: str
    seed: int
    fingerprint: str
    settings: dict

    @property
    def name(self) -> str:
        """The name of the run in the tracker: arm, condition and seed."""
        return f"{self.arm}, {self.condition}, seed {self.seed}"


class Tracker(ABC):
    """A program that shows learning curves, such as TensorBoard. `folder` is the folder of the recipe, in which local files are
    written, and `recipe` is the name of the recipe.
    """

    def __init__(self, folder: Path, recipe: str):
        self.folder, self.recipe = folder, recipe

    @abstractmethod
    def begin(self, run: Followed) -> Any:
        """Start a run in the tracker, and return an object by which the other methods know it."""

    @abstractmethod
    def points(self, handle: Any, values: Sequence[tuple[int, dict[str, float]]]):
        """Send points of curves: pairs of a training step and a dict from the name of a curve to its value."""

    @abstractmethod
    def end(self, handle: Any, results: Mapping[str, float], status: str):
        """Send the results of a run that has ended, as a dict from name to number, and its status, such as "finished"."""


class TensorBoard(Tracker):
    """Writes event files below `out/R/tensorboard`, for `tensorboard --logdir`. It needs no server and no torch."""

    def begin(self, run: Followed) -> Any:
        from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

        parts = (run.arm, run.condition, f"seed {run.seed} {run.fingerprint[:8]}")
        return Writer(str(self.folder.joinpath("tensorboard", *(part.replace("/", "-").strip(".") or "-" for part in parts))))

    def points(self, handle: Any, values: Sequence[tuple[int, dict[str, float]]]):
        for step, curves in values:
            for name, value in curves.items():
                handle.add_scalar(name, value, step=step)
        handle.flush()

    def end(self, handle: Any, results: Mapping[str, float], status: str):
        for name, value in results.items():
            handle.add_scalar(name, value, step=0)
        handle.close()


class WandB(Tracker):
    """Sends runs to Weights & Biases: the project is "smallvit" (or WANDB_PROJECT), the group is the recipe."""

    def begin(self, run: Followed) -> Any:
        import os

        import wandb  # pyright: ignore[reportMissingImports]

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "smallvit"),
            group=self.recipe,
            job_type=run.arm,
            name=run.name,
            id=f"{self.recipe}-{run.fingerprint[:16]}",
            config={"arm": run.arm, "condition": run.condition, **run.settings},
            dir=self.folder,
            reinit="create_new",
            resume="allow",
            settings=wandb.Settings(silent=True),
        )

    def points(self, handle: Any, values: Sequence[tuple[int, dict[str, float]]]):
        for step, curves in values:
            handle.log(curves, step=step)

    def end(self, handle: Any, results: Mapping[str, float], status: str):
        handle.summary.update(dict(results) | {"status": status})
        handle.finish(exit_code=0 if status == "finished" else 1)


class MLflow(Tracker):
    """Sends runs to MLflow: the experiment is the recipe, and the server is that of MLFLOW_TRACKING_URI."""

    def begin(self, run: Followed) -> Any:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self.client = MlflowClient()
        found = self.client.get_experiment_by_name(self.recipe)
        experiment = found.experiment_id if found else self.client.create_experiment(self.recipe)
        tags = {"arm": run.arm, "condition": run.condition, "seed": str(run.seed), "fingerprint": run.fingerprint}
        if earlier := self.client.search_runs([experiment], f"tags.fingerprint = '{run.fingerprint}'", max_results=1):
            return earlier[0].info.run_id  # a process that was killed has begun it
        handle = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        for name, value in run.settings.items():
            self.client.log_param(handle, name, str(value)[:500])
        return handle

    def points(self, handle: Any, values: Sequence[tuple[int, dict[str, float]]]):
        for step, curves in values:
            for name, value in curves.items():
                self.client.log_metric(handle, name, value, step=step)

    def end(self, handle: Any, results: Mapping[str, float], status: str):
        for name, value in results.items():
            allowed = re.sub(r"[^\w/.: -]", "_", name.replace("@", " at "))  # MLflow refuses other characters
            self.client.log_metric(handle, allowed, value)
        self.client.set_terminated(handle, "FINISHED" if status == "finished" else "FAILED")


TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}  # name on the command line -> class, and the package that must be installed


def check_tracker(name: str):
    """Raise ValueError if the tracker `name` is unknown, or if its package is not installed."""
    from importlib.util import find_spec

    if name not in TRACKERS:
        raise ValueError(f"--log is {name!r}; expected one of {', '.join(TRACKERS)}")
    if find_spec(TRACKERS[name][1]) is None:
        raise ValueError(f"--log {name} needs the package {TRACKERS[name][1]}: pip install 'smallvit[{name}]'")


def followed(records: Iterable[tuple[Path, Record]]) -> list[Followed]:
    """Return the runs to send as a list of `Followed`. `records` are pairs of the folder of a run and its record, which may be
    that of a run without results.
    """
    return [
        Followed(
            str(folder), r.arm, condition_text(r.labels, r.length, r.tuning is not None), r.seed, r.fingerprint, flat(r.run)
        )
        for folder, r in records
    ]


def flat(settings: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict: `{"model": {"dim": 64}}` becomes `{"model.dim": 64}`. Lists become text."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{start}{name}.")
        else:
            found[start + name] = value if isinstance(value, str | int | float | bool | None) else json.dumps(value)
    return found


class Follower:
    """Reads the folders of runs again and again, and sends what is new to a tracker. `tracker` is the `Tracker`, and `runs` are
    the runs to follow. Runs that were sent completely before are left out; the file `logged.NAME.json` lists them.
    """

    def __init__(self, tracker: Tracker, name: str, runs: Sequence[Followed]):
        self.tracker, self.done_file = tracker, tracker.folder / f"logged.{name}.json"
        self.done: set[str] = set()
        with suppress(OSError, ValueError, TypeError):  # no file yet, or a damaged one: then runs are sent again
            self.done = set(parse_json(self.done_file.read_text()))
        self.waiting = {run.fingerprint: run for run in runs if run.fingerprint not in self.done}
        self.handles: dict[str, Any] = {}  # of runs that have begun in the tracker
        self.steps = dict.fromkeys(self.waiting, 0)  # the last step that was sent

    def look(self, last: bool = False):
        """Send the points and results that have come since the last look. With `last`, also send which runs have failed: before
        that, they could still be trained again.
        """
        for key, run in list(self.waiting.items()):
            record = read_record_safely(Path(run.folder))
            record = record if record and (record.finished or last) else None
            curve = (record and record.curve) or read_curve(Path(run.folder, CURVE))
            new = [point for point in curve if point[0] > self.steps[key]]
            if (new or record) and key not in self.handles:
                self.handles[key] = self.tracker.begin(run)
            if new:
                self.tracker.points(self.handles[key], [(step, named(loss, score)) for step, loss, score in new])
                self.steps[key] = new[-1][0]
            if record:
                self.tracker.end(self.handles.pop(key), results(record), record.status)
                del self.waiting[key]
                self.done |= {key} if record.finished else set()
                write_text(self.done_file, json.dumps(sorted(self.done)) + "\n")


def named(loss: float | None, score: float | None) -> dict[str, float]:
    """Return a point of a learning curve as a dict from the name of a curve to its value. `loss` is the training loss, and
    `score` the validation accuracy; None is left out.
    """
    return {name: value for name, value in (("train/loss", loss), ("val/accuracy", score)) if value is not None}


def results(record: Record) -> dict[str, float]:
    """Return the numbers of a run that has ended, as a dict from name to number: validation and test results, and costs.
    `record` holds them. The names of validation results begin with "final_", because "val/accuracy" is the learning curve.
    """
    parts = [(f"val/final_{name}", value) for name, value in (record.val or {}).items()]
    parts += [(f"test/{name}", value) for name, value in (record.test or {}).items()]
    costs = [(f"cost/{name}", getattr(record, name)) for name in ("seconds", "params", "macs", "images_seen")]
    return {name: float(value) for name, value in [*parts, *costs] if isinstance(value, int | float)}


def read_curve(path: Path) -> list[list]:
    """Return the points in a curve file, as a list of [step, training loss, validation accuracy]. `path` is the file. The list
    is empty if there is no file. A line that is not complete yet is left out.
    """
    try:
        lines = read_bounded(path, MOST_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return []
    points = []
    for line in lines:
        try:
            point = parse_json(line)
            points.append([point["step"], point["loss"], point["val"]])
        except (ValueError, KeyError, TypeError):
            continue
    return points


def read_record_safely(folder: Path) -> Record | None:
    """Return the record (results) of a run from its folder, or None if there is none that can be read."""
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None


def send(name: str, folder: Path, recipe: str, runs: Sequence[Followed]) -> int:
    """Send all results of runs that have ended to the tracker `name`, and return how many runs were sent. `folder` is the
    folder of the recipe, `recipe` its name, and `runs` are the runs. Runs that were sent before are left out.

    Raises ValueError if the tracker is unknown, is not installed, or fails.
    """
    check_tracker(name)
    follower = Follower(TRACKERS[name][0](folder, recipe), name, runs)
    count = len(follower.waiting)
    try:
        follower.look(last=True)
    except Exception as error:  # a tracker can raise anything
        left = how_many(len(follower.waiting), "run was not sent", "runs were not sent")
        raise ValueError(f"{name} failed ({type(error).__name__}: {error}); {left}") from error
    return count - len(follower.waiting)


class TrackerProcess:
    """A process that sends the results of runs to the tracker `name` while they are trained. `folder` is the folder of the
    recipe, `recipe` its name, and `runs` are the runs to follow.

    The process ends when this process ends, or `PATIENCE` seconds after `close`.
    """

    def __init__(self, name: str, folder: Path, recipe: str, runs: Sequence[Followed]):
        check_tracker(name)
        self.name = name
        command = [sys.executable, "-m", "smallvit.trackers", name, str(folder), recipe]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        self.input: Any = self.process.stdin
        threading.Thread(target=self._tell, args=(json.dumps([*map(list, runs)]),), daemon=True).start()

    def _tell(self, text: str):
        """Send the list of runs to the process. A process that has ended is no error: training goes on without it."""
        with suppress(OSError, ValueError):
            self.input.write(text.encode() + b"\n")
            self.input.flush()

    def close(self, patience: float = PATIENCE):
        """Let the process send what is left, and end it. If it takes longer than `patience` seconds, it is killed, and a note
        says how to send the rest.
        """
        with suppress(OSError):
            self.input.close()
        try:
            failed = self.process.wait(patience) != 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            failed = True
        if failed:
            text = f"note: {self.name} did not get all results; the records are complete: send them with smallvit report --log"
            print(text, file=sys.stderr)


def main(name: str, folder: str, recipe: str) -> int:
    """Follow runs until the standard input ends, and send their results to the tracker `name`. The first line of the standard
    input is the list of runs as JSON. `folder` is the folder of the recipe, and `recipe` its name. Return the exit status: 1 if
    the tracker failed.
    """
    runs = [Followed(*each) for each in json.loads(sys.stdin.readline() or "[]")]
    ended = threading.Event()

    def wait_for_end():
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        follower = Follower(TRACKERS[name][0](Path(folder), recipe), name, runs)
        while not ended.wait(SECONDS):
            follower.look()
        follower.look(last=True)
    except Exception as error:  # a tracker can raise anything
        print(f"note: {name} failed, training goes on without it ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
