"""The interface between `launch` and what trains runs: the worker processes of this machine (`local.py`), or a cluster.

`launch` decides with the `Scheduler` what is trained next and keeps all records. An `Engine` only trains, and says when runs
have ended.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from smallvit.numerics import Numerics
from smallvit.record import Record

from .scheduler import Task

# Environment variables of a worker process. Libraries read them when they are loaded; torch.set_num_threads does not reach all.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}


class Settings(NamedTuple):
    """What is the same for all runs that an engine trains.

    source           the absolute path of the recipe file, if it defines components that the runs use
    device           "cpu", "cuda", "mps" or "auto"
    numerics         precision, attention kernel and compilation
    validation_only  score the runs on validation images only
    reads            the file in which reads of the test images are counted, or None
    curves           measure the validation accuracy during training
    recipe_text      the source code of the recipe file when the command started: the file may be edited during the training
    """

    source: Path | None
    device: str
    numerics: Numerics
    validation_only: bool = False
    reads: Path | None = None
    curves: bool = True
    recipe_text: str = ""


class Engine(ABC):
    """Something that trains groups of runs somewhere: worker processes of this machine, or a cluster. A group is one run, or
    several that are trained together as one model. It is named by the positions of its runs in the list of all runs.

    An engine trains at most `slots` groups at once. The runs write their own records and checkpoints into their folders.
    """

    slots: int

    @abstractmethod
    def start(self, group: list[int], tasks: list[Task]):
        """Begin to train a group of runs. `group` are their positions, and `tasks` are their settings and folders. Fewer than
        `slots` groups are in training when this is called.
        """

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[list[int], list[Record] | BaseException]]:
        """Wait until a group has ended, but at most `seconds` seconds. Return the groups that have ended, each with the records
        (results) of its runs or with the error that ended it. A lost worker gives the error `Killed`.
        """

    @abstractmethod
    def progress(self) -> list[tuple[list[int], float]]:
        """Return the groups in training, each with the number of training steps that its runs have taken together, or -1 if
        they have not begun.
        """

    @abstractmethod
    def close(self):
        """Stop everything that is still in training, and free what the engine holds. Runs keep their checkpoints."""
