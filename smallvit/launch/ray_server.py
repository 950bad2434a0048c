"""The server of the folders of the runs, for workers of a Ray cluster on machines that do not see these folders.

All files of a run, such as its record (saved results), weights and checkpoint, lie on the machine of the driver (the process in
which `launch` runs). Workers (processes that train runs) on other machines read and write them through the `FolderServer`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smallvit import record as records
from smallvit.recipe import import_recipe
from smallvit.record import Record
from smallvit.run import rebuild
from smallvit.storage import locked, remove_leftovers, temporary, write_atomic
from smallvit.train.publish import publish
from smallvit.train.read_log import log_test_read

from .engine import Settings
from .scheduler import Task
from .status import FILE, put_progress

LOCK_SECONDS = 60.0  # in which a lost worker on another machine lets go of the folder of a run

Files = dict[str, bytes]
"""The files in the folder of a run, from name to content."""


class FolderServer:
    """Reads and writes the folders of the runs for workers on other machines. It is an actor of Ray, which means a process that
    answers calls, on the machine of the driver. `settings` is what is the same for all runs.
    """

    def __init__(self, settings: Settings):
        self.reads, self.steps = settings.reads, dict[int, float]()
        if settings.source is not None:
            import_recipe(settings.source, settings.recipe_text)

    def exists(self, path: Path) -> bool:
        """Return whether a file exists on this machine. A worker that has just written it thus finds out whether it sees the
        same folder as this machine.
        """
        return path.exists()

    def read(self, folder: Path) -> Files:
        """Return all files in the folder of a run, except hidden files."""
        return read_files(folder)

    def report(self, number: int, steps: float, progress: Sequence[tuple[Path, bytes]] = ()):
        """Note that the runs of the task `number` have taken `steps` training steps together. `progress` has a pair for each
        run: its folder, and the content of its file `progress.json`, which shows how far the training is.
        """
        self.steps[number] = steps
        for folder, content in progress:
            put_progress(folder, content)

    def steps_taken(self) -> dict[int, float]:
        """Return how many training steps the runs of each task have taken together, as a dict from the number of the task."""
        return self.steps

    def keep(self, folders: Sequence[Path], contents: Sequence[Files]):
        """Write the files of runs in training, such as their checkpoints, into the folders of these runs. `contents` has the
        files for each folder. Nothing is written if the run has finished meanwhile.
        """
        for folder, files in zip(folders, contents):
            done = records.read_record(folder)
            for name, content in files.items() if done is None or not done.finished else ():
                write(folder / name, content)

    def finish(
        self, tasks: Sequence[Task], trained: Sequence[Record], contents: Sequence[Files], test_sha256: dict[str, str]
    ) -> list[Record]:
        """Write the weights and records (results) of a group of runs into their folders, and return the records. `tasks` has
        the settings and folders of the runs, `trained` their records, and `contents` their files. `test_sha256` has the hash of
        the test images for each run that has read them, by the fingerprint of the run: these reads are counted.

        If a run has finished in its folder before, its record stays and is returned.
        """
        return [
            self.finish_run(task, record, files, test_sha256.get(record.fingerprint))
            for task, record, files in zip(tasks, trained, contents)
        ]

    def finish_run(self, task: Task, record: Record, files: Files, test_sha256: str | None) -> Record:
        """Write the weights and the record (results) of one run into its folder, and return the record. For the parameters see
        `finish`. `test_sha256` is None if the run has not read the test images.
        """
        folder = task.folder
        with locked(folder / ".lock", timeout=LOCK_SECONDS):
            done = records.read_record(folder)
            if done is not None and done.finished:
                return done
            remove_leftovers(folder)
            if test_sha256 and self.reads:
                count = log_test_read(self.reads, rebuild(task.run), task.tags.arm, test_sha256)
                record = replace(record, test_settings=count)
            for name, content in files.items():
                if name not in (records.RECORD, records.WEIGHTS, records.CHECKPOINT, FILE):
                    write(folder / name, content)
            weights = temporary(folder / records.WEIGHTS)
            try:
                write(weights, files[records.WEIGHTS])
                record = publish(folder, record, weights)
            finally:
                weights.unlink(missing_ok=True)
            for name in (records.CHECKPOINT, FILE):
                (folder / name).unlink(missing_ok=True)
        return record


def read_files(folder: Path) -> Files:
    """Return all files in a folder, except hidden files, as a dict from name to content."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


def write_files(folder: Path, files: Files):
    """Write files into a folder, which is created. `files` is a dict from name to content."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write(path: Path, content: bytes):
    """Write a file. If writing fails, an existing file at `path` stays unchanged."""
    write_atomic(path, lambda new: new.write_bytes(content))
