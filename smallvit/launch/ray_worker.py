"""The code that a worker (a process that trains runs) executes on a machine of a Ray cluster.

Where the worker sees the folders of the runs, on a shared disk or on the machine of the driver (the process in which `launch`
runs), it writes into them, as a worker of one machine does. Elsewhere it trains in a temporary folder. The `FolderServer` on
the machine of the driver then gives it the files that it needs, and keeps the files that it sends.
"""

import json
import os
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import torch

from smallvit import record as records
from smallvit.data import Dataset
from smallvit.pretrained import Weights
from smallvit.recipe import load_recipe
from smallvit.record import Record
from smallvit.run import Run, rebuild
from smallvit.storage import temporary, write_atomic
from smallvit.train.read_log import READS, all_reads

from .engine import Settings
from .ray_server import LOCK_SECONDS, read_files, write_files
from .scheduler import Task
from .status import FILE
from .worker import fit_group, picklable

records.code()  # hash the files as they were imported: they may be edited while this process runs
REPORT_SECONDS = 1.0  # between two messages with the number of training steps
RECEIVED = Path(tempfile.gettempdir(), f"smallvit-{secrets.token_hex(8)}")  # with what this process has received, for one group


class OtherVersion(RuntimeError):
    """Error for a machine that has another version of smallvit than the driver (the process in which `launch` runs)."""


class Failure(NamedTuple):
    """An error that ended the training of a group of runs, and its traceback as text."""

    error: Exception
    traceback: str


class Parcel(NamedTuple):
    """What a worker on another machine needs to train a group of runs.

    tasks               the settings and folders of the runs; the folders are those on the machine of the driver
    settings            what is the same for all runs
    data                the data sets, by `data_key`: a reference to the data set or, if it is too large to be sent, its hash
    weights             external weights, by `weights_key`: the name of the file, and a reference to its content
    folder              the working folder of the driver
    code                the hash of the files of smallvit
    number              the number of this task
    checkpoint_seconds  time between two checkpoints that are sent
    """

    tasks: list[Task]
    settings: Settings
    data: dict[str, Any]
    weights: dict[str, tuple[str, Any]]
    folder: str
    code: str
    number: int
    checkpoint_seconds: float


def data_key(plain: dict) -> str:
    """Return the description of the data set of a run as text. `plain` is the run as JSON data."""
    return json.dumps(plain["data"], sort_keys=True)


def weights_key(plain: dict) -> str:
    """Return the description of the external weights of a run as text. `plain` is the run as JSON data."""
    return json.dumps(plain["init"], sort_keys=True)


def train_group(parcel: Parcel, server: Any) -> list[Record] | Failure:
    """Train a group of runs in this process, and return their records (results) or the error. This function is the task that
    Ray executes. `parcel` has everything that is needed, and `server` is the `FolderServer`.

    Files that were received are removed at the end of each group, because Ray ends a process without any clean-up.
    """
    try:
        RECEIVED.mkdir(mode=0o700, exist_ok=True)
        if records.code()["sha256"] != parcel.code:
            text = f"the machine {gethostname()} of the Ray cluster has another version of smallvit"
            raise OtherVersion(f"{text}; install the same version on all machines")
        with suppress(OSError):
            os.chdir(parcel.folder)  # for relative paths in recipes, where the folder is shared
        torch.set_num_threads(1)
        settings = parcel.settings
        if settings.source is not None:
            load_recipe(local_recipe(settings.source, settings.recipe_text), tuned=False)
        runs = [rebuild(task.run) for task in parcel.tasks]
        for run, task in zip(runs, parcel.tasks):
            use_sent_files(run, task.run, parcel)
        shared = sees_folder(parcel.tasks[0].folder, server)
        return (train_in_place if shared else train_elsewhere)(runs, parcel, server)
    except Exception as error:
        return Failure(picklable(error), traceback.format_exc())
    finally:
        shutil.rmtree(RECEIVED, ignore_errors=True)


def train_in_place(runs: list[Run], parcel: Parcel, server: Any) -> list[Record]:
    """Train runs in their own folders, which this machine shares with the driver, and return their records (results). `parcel`
    has the tasks, and `server` counts the training steps.

    If another process trains one of the runs, this function waits for up to a minute: the process may be a worker on a lost
    machine, which ends soon. Raises filelock.Timeout if it goes on.
    """
    from filelock import Timeout

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fit_group(runs, parcel.tasks, parcel.settings, Reporter(parcel, server))
        except Timeout:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def train_elsewhere(runs: list[Run], parcel: Parcel, server: Any) -> list[Record]:
    """Train runs in a temporary folder of this machine, send the results to the driver, and return the records (results).
    `parcel` has the tasks. From `server` come the checkpoints of an earlier attempt and the weights of earlier runs.
    """
    with tempfile.TemporaryDirectory(prefix="smallvit-", ignore_cleanup_errors=True) as name:
        here, tasks = Path(name), []
        for index, task in enumerate(parcel.tasks):
            place = here / str(index)
            write_files(place, answer(server.read.remote(task.folder)))
            dependencies = {field: here / f"{index}-{field}" for field in task.dependencies}
            for field, folder in task.dependencies.items():
                write_files(dependencies[field], answer(server.read.remote(folder)))
            tasks.append(task._replace(folder=place, dependencies=dependencies))
        places, reads = [task.folder for task in tasks], here / READS
        settings = parcel.settings._replace(reads=parcel.settings.reads and reads)
        trained = fit_group(runs, tasks, settings, Reporter(parcel, server, places))
        read = {line["fingerprint"]: line["data"] for line in all_reads(reads)}
        contents = [read_files(place) for place in places]
        return answer(server.finish.remote(parcel.tasks, trained, contents, read))


class Reporter:
    """Tells the driver how far the training of a group of runs is. Called after each step with the number of steps that all
    runs have taken together, it sends this number every second. If the runs are trained in temporary folders of this machine,
    `places`, it also sends the files in these folders, such as checkpoints, from time to time. `parcel` has the tasks, and
    `server` is the `FolderServer`.
    """

    def __init__(self, parcel: Parcel, server: Any, places: Sequence[Path] = ()):
        self.server, self.places, self.number = server, places, parcel.number
        self.folders, self.seconds = [task.folder for task in parcel.tasks], parcel.checkpoint_seconds
        self.reported = self.sent = time.monotonic()
        self.on_the_way: Any = None
        server.report.remote(self.number, 0)

    def __call__(self, steps: float):
        now = time.monotonic()
        if now - self.reported > REPORT_SECONDS:
            self.reported = now
            files = [(folder, place / FILE) for folder, place in zip(self.folders, self.places)]
            progress = [(folder, file.read_bytes()) for folder, file in files if file.exists()]
            self.server.report.remote(self.number, steps, progress)
        if self.places and now - self.sent > self.seconds:
            self.send(now)

    def send(self, now: float):
        """Send the files in the folders of the runs, unless there is no checkpoint yet, or the last files are still on their
        way over a slow network. `now` is the present time.
        """
        import ray  # pyright: ignore

        self.sent = now
        if self.on_the_way is not None and not ray.wait([self.on_the_way], timeout=0)[0]:
            return
        contents = [read_files(place) for place in self.places]
        if any(records.CHECKPOINT in files for files in contents):  # a stack has one checkpoint
            self.on_the_way = self.server.keep.remote(self.folders, contents)


def answer(reference: Any) -> Any:
    """Return the answer of the `FolderServer` to a call. `reference` is what the call has returned. An error that ended the
    call is raised.
    """
    import ray  # pyright: ignore

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def sees_folder(folder: Path, server: Any) -> bool:
    """Return whether this machine sees the folder of a run that the machine of the driver sees: it writes a file there, and
    asks `server` whether the file has arrived.
    """
    probe = temporary(folder / "probe")
    try:
        probe.touch()
        return answer(server.exists.remote(probe))
    except OSError:  # no such folder here, or it cannot be written
        return False
    finally:
        with suppress(OSError):
            probe.unlink()


def local_recipe(source: Path, text: str) -> Path:
    """Return the path of a recipe file on this machine. `source` is its path on the machine of the driver, and `text` its
    source code. If the file is not here, it is written to the folder `RECEIVED`.
    """
    with suppress(OSError):
        if source.read_text(encoding="utf-8-sig") == text:
            return source
    copy = RECEIVED / source.name
    copy.write_text(text, encoding="utf-8")
    return copy


# Data and weights that were sent


class SentData(partial):
    """The data loader of a run, which returns the data set that the driver has sent instead of loading it. The run still names
    its own loader: for everything but the call, the object is a `functools.partial` of it.

    fetch  a function that returns the data set
    """

    fetch: Callable[[], Dataset]

    def __call__(self) -> Dataset:
        return self.fetch()


def use_sent_files(run: Run, plain: dict, parcel: Parcel):
    """Let a run, and the earlier runs that it needs, use the data sets and external weights that the driver has sent. `plain`
    is the run as JSON data, and `parcel` has what was sent. The settings of the run, and so its fingerprint, do not change.
    """
    loader: Any = SentData(run.data)
    loader.fetch = partial(sent_data, data_key(plain), run.data, parcel.data)
    object.__setattr__(run, "data", loader)
    if isinstance(run.init, Weights) and (sent := parcel.weights.get(weights_key(plain))):
        vars(run.init)["path"] = partial(sent_weights, *sent)
    for field, earlier in run.dependencies.items():
        use_sent_files(earlier, plain[field], parcel)


SENT: dict[str, tuple[Any, Dataset]] = {}  # data sets that this process has received, with the reference to each


def sent_data(key: str, load: Callable[[], Dataset], data: dict[str, Any]) -> Dataset:
    """Return the data set that `data` names under `key`: it is received from the driver or, if it is too large to be sent,
    loaded by the function `load` from the files of this machine.

    Raises ValueError if the files of this machine are others than those of the driver.
    """
    reference = data[key]
    if isinstance(reference, str):
        loaded = load()
        if loaded.sha256 != reference:
            where = f"{loaded.spec.name} on {gethostname()}"
            raise ValueError(f"{where} has other images or labels than on the machine of the driver; copy the same files there")
        return loaded
    import ray  # pyright: ignore

    if key not in SENT or SENT[key][0] != reference.hex():
        SENT[key] = reference.hex(), ray.get(reference)
    return SENT[key][1]


def sent_weights(name: str, reference: Any) -> Path:
    """Return the path of a file with external weights, which the driver has sent and which is written to the folder `RECEIVED`.
    `name` is the name of the file, and `reference` the reference to its content.
    """
    import ray  # pyright: ignore

    path = RECEIVED / reference.hex() / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, lambda new: new.write_bytes(ray.get(reference)))
    return path
