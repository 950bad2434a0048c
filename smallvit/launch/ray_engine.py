"""RayEngine: training on a Ray cluster, whose machines need not share a disk.

Each group of runs is one task of Ray. Ray queues the tasks, places them on CPUs and GPUs, and starts the tasks of a lost
machine again on another one. The driver is the process in which `launch` runs. Beside it, on the same machine, runs a
`FolderServer`: it reads and writes the folders of the runs for workers (processes that train runs) on other machines. So all
records, weights and checkpoints lie on the machine of the driver, as after a training there. Data sets are sent once to each
machine.

The code of the workers is in ray_worker.py, and that of the server in ray_server.py.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smallvit import record as records
from smallvit.data import Dataset
from smallvit.data.images import Rows
from smallvit.pretrained import Weights
from smallvit.record import Record
from smallvit.run import DEPENDENCIES, rebuild
from smallvit.train.failures import first_line

from .engine import ONE_THREAD, Engine, Settings
from .ray_server import FolderServer
from .ray_worker import Failure, OtherVersion, Parcel, data_key, train_group, weights_key
from .results import Killed
from .scheduler import Task
from .status import remove_progress

RETRIES = 3  # so often Ray starts a task again whose machine or worker process was lost
CHECKPOINT_SECONDS = 30.0  # between two checkpoints that a worker sends to the driver
ANSWER_SECONDS = 60.0  # in which a machine must say which version of smallvit it has
UNITS = 10_000  # Ray counts in ten-thousandths of a CPU or GPU
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}  # kind of resource -> option of a Ray task


class Busy(NamedTuple):
    """A group of runs in training: the positions of its runs, their settings and folders, and the number of its task."""

    group: list[int]
    tasks: list[Task]
    number: int


class RayEngine(Engine):
    """Trains runs on a Ray cluster. Each group of runs is one task, with one CPU and, on a GPU, with a part of a GPU.

    settings            what is the same for all runs
    groups              the largest number of groups of runs that could be trained at once
    address             of the cluster, such as 10.0.0.1:6379; "auto" is the cluster of this machine or of RAY_ADDRESS; "local"
                        starts Ray on this machine only. If this process is connected already, the address does not count
    per_gpu             how many groups share one GPU; a number below 1 is the share of a GPU that one group gets
    jobs                the largest number of groups in training; None: as many as the cluster has room for. With a larger
                        number, tasks wait in the queue of Ray, so that a cluster that can grow does
    checkpoint_seconds  time between two checkpoints that a worker sends, if its machine does not share the folders of the runs

    Raises ValueError if Ray is not installed or cannot be reached, if the cluster has no CPU or GPU for the runs, and if
    another version of smallvit is installed on one of its machines.
    """

    def __init__(
        self,
        settings: Settings,
        groups: int,
        address: str = "auto",
        per_gpu: float = 1,
        jobs: int | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ):
        self.ray = ray = connect(address)
        self.groups, self.jobs, self.checkpoint_seconds = groups, jobs, checkpoint_seconds
        self.needs = resources(settings.device, per_gpu, ray.cluster_resources())
        check_machines(ray)
        self.settings = settings._replace(reads=settings.reads and settings.reads.absolute())
        server = ray.remote(FolderServer).options(
            num_cpus=0,
            scheduling_strategy=on_machine(ray, ray.get_runtime_context().get_node_id()),
            max_restarts=-1,
            max_task_retries=-1,
        )
        self.server = server.remote(self.settings)
        self.train = ray.remote(train_group).options(
            max_retries=RETRIES,
            retry_exceptions=False,
            runtime_env={"env_vars": ONE_THREAD},
            scheduling_strategy="SPREAD",
            **{OPTIONS[kind]: amount for kind, amount in self.needs.items()},
        )
        self.busy: dict[Any, Busy] = {}  # by the reference to the result of their task
        self.steps: dict[int, float] = {}  # by the number of the task
        self.started, self.question = 0, self.server.steps_taken.remote()
        self.data: dict[str, Any] = {}
        self.weights: dict[Path, Any] = {}
        self.slots = self.count_slots()

    def start(self, group: list[int], tasks: list[Task]):
        self.started += 1
        tasks = [with_absolute_paths(task) for task in tasks]
        try:
            for task in tasks:
                task.folder.mkdir(parents=True, exist_ok=True)  # a worker that sees this folder writes into it
            result = self.train.remote(self.parcel(tasks), self.server)
        except (OSError, ValueError) as error:
            result = self.ray.put(Failure(error, ""))
        self.busy[result] = Busy(group, tasks, self.started)

    def wait(self, seconds: float) -> list[tuple[list[int], list[Record] | BaseException]]:
        if self.busy:
            self.ray.wait(list(self.busy), timeout=seconds)
        self.slots = self.count_slots()
        self.ask_for_steps()
        ended, _ = self.ray.wait(list(self.busy), num_returns=len(self.busy), timeout=0) if self.busy else ([], [])
        return [(self.busy[reference].group, self.result(reference)) for reference in ended]

    def progress(self) -> list[tuple[list[int], float]]:
        return [(busy.group, self.steps.get(busy.number, -1)) for busy in self.busy.values()]

    def close(self):
        for reference in self.busy:
            self.ray.cancel(reference)  # raises KeyboardInterrupt in the worker, which then removes its temporary files
        with suppress(self.ray.exceptions.RayError):
            waited_for = [*self.busy, self.question]
            self.ray.wait(waited_for, num_returns=len(waited_for), timeout=5)
            self.ray.kill(self.server)
        for busy in self.busy.values():
            for task in busy.tasks:
                remove_progress(task.folder)

    def count_slots(self) -> int:
        """Return how many groups of runs are trained at once: as many as the cluster has room for now, or `jobs`."""
        room = self.ray.cluster_resources()
        places = min(room.get(kind, 0) / amount for kind, amount in self.needs.items())
        return max(1, min(self.jobs or math.floor(places + 1e-6), self.groups))

    def ask_for_steps(self):
        """Read how many training steps the runs have taken, if the server of the folders has answered the last question."""
        if self.ray.wait([self.question], timeout=0)[0]:
            with suppress(self.ray.exceptions.RayError):  # the server was lost; Ray starts it again
                self.steps = self.ray.get(self.question)
            self.question = self.server.steps_taken.remote()

    def result(self, reference: Any) -> list[Record] | BaseException:
        """Return the records (results) of a group of runs whose task has ended, or the error that ended it. `reference` is the
        reference to the result of the task.

        Raises ValueError if a machine has another version of smallvit.
        """
        for task in self.busy.pop(reference).tasks:
            remove_progress(task.folder)  # which stays if the runs have failed on another machine
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # what the worker could not catch, such as an argument it cannot read
            return error.cause
        except self.ray.exceptions.RayError as error:
            return Killed(f"Ray lost the worker process {RETRIES + 1} times ({type(error).__name__})")
        if not isinstance(result, Failure):
            return result
        if isinstance(result.error, OtherVersion):
            raise ValueError(f"the Ray cluster cannot train these runs: {result.error}")
        if result.traceback:
            result.error.__cause__ = RuntimeError(result.traceback)  # where `record_failure` looks for it
        return result.error

    def parcel(self, tasks: list[Task]) -> Parcel:
        """Return what a worker (a process that trains runs) on another machine needs to train the runs in `tasks`.

        Raises ValueError for data or external weights that cannot be read.
        """
        plain = [part for task in tasks for part in with_earlier_runs(task.run)]
        for run in plain:
            if (key := data_key(run)) not in self.data:
                self.data[key] = self.send_data(rebuild(run["data"])())
        weights = {}
        for task in tasks:
            if (task.run["init"] or {}).keys() & {"make"} and isinstance(init := rebuild(task.run["init"]), Weights):
                path = init.path()
                if path not in self.weights:
                    self.weights[path] = self.ray.put(path.read_bytes())
                weights[weights_key(task.run)] = path.name, self.weights[path]
        data = {key: self.data[key] for key in map(data_key, plain)}
        return Parcel(
            tasks, self.settings, data, weights, os.getcwd(), records.code()["sha256"], self.started, self.checkpoint_seconds
        )

    def send_data(self, dataset: Dataset) -> Any:
        """Send a data set to the cluster, and return the reference to it. Pixels in a memory-mapped file are not sent, because
        they may not fit into memory: the result is then the hash of the data set, which each machine must load itself.
        """
        parts = [part for part in (dataset.train, dataset.val, dataset.unlabelled) if part is not None]
        return dataset.sha256 if any(isinstance(part.images, Rows) for part in parts) else self.ray.put(dataset)


def connect(address: str) -> Any:
    """Connect this process to a Ray cluster, and return the library Ray. `address` is that of the cluster, "auto" or "local".

    Raises ValueError if Ray is not installed, or if there is no cluster at this address.
    """
    if "://" in address:
        raise ValueError(
            f"--address is {address}, that of a Ray client; expected host:port, with smallvit on a machine of the cluster: "
            "start it there, or let this machine join with `ray start --address=host:port --num-cpus=0`"
        )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # a cluster that is started here sends no usage statistics
    try:
        import ray as library  # pyright: ignore
    except ImportError as error:
        raise ValueError(f"--on ray needs the library Ray ({error}); pip install 'smallvit[ray]'") from error
    ray: Any = library
    if ray.is_initialized():
        return ray
    try:
        ray.init(address, log_to_driver=False, logging_level="warning")
    except ray.exceptions.AuthenticationError as error:
        raise ValueError(
            f"the Ray cluster at {address} asks for a token ({first_line(error)}); set RAY_AUTH_MODE=token, and put the token "
            "of the cluster (`ray get-auth-token` on its head) into RAY_AUTH_TOKEN or ~/.ray/auth_token"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(
            f"there is no Ray cluster to connect to at {address} ({first_line(error)}); start one with `ray start --head` and "
            "`ray start --address=host:port` on the other machines, or give its --address host:port"
        ) from error
    return ray


def on_machine(ray: Any, machine: str) -> Any:
    """Return the option of a Ray task or actor that places it on one machine. `ray` is the library Ray, and `machine` is the
    identifier of the machine.
    """
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(machine, soft=False)


def resources(device: str, per_gpu: float, room: dict[str, float]) -> dict[str, float]:
    """Return what one group of runs needs, as a dict from the kind of resource to the amount: one CPU and, with CUDA, a share
    of a GPU. `device` is "cpu", "cuda" or "auto" (a GPU if the cluster has one). `per_gpu` is the number of groups that share a
    GPU or, below 1, the share of each. `room` has the resources of the whole cluster.

    Raises ValueError for another device, for a share below a ten-thousandth, and if the cluster lacks a CPU or GPU.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda or auto on a Ray cluster")
    if not 1 / UNITS <= per_gpu <= UNITS:
        raise ValueError(f"per_gpu is {per_gpu}; expected the number of groups of runs that share one GPU, such as 4")
    needs: dict[str, float] = {"CPU": 1}
    if device == "cuda" or (device == "auto" and room.get("GPU")):
        share = per_gpu if per_gpu < 1 else 1 / per_gpu
        needs["GPU"] = math.floor(share * UNITS) / UNITS
    for kind, amount in needs.items():
        if amount > room.get(kind, 0):
            raise ValueError(f"device is {device!r}, but no machine of the Ray cluster offers a {kind}; see `ray status`")
    return needs


def check_machines(ray: Any):
    """Raise ValueError if a machine of the cluster lacks smallvit, or has another version of it than this process. Print a note
    if a machine has another version of torch. `ray` is the library Ray. Machines that do not answer are left out: workers on
    them check the version before they train.
    """

    def installed() -> tuple[str, str, str]:  # sent as code, because the machine may not have this file
        try:
            from smallvit import record
        except ImportError as error:
            return f"cannot import smallvit: {error}", "", ""
        return "", record.code()["sha256"], record.versions().get("torch", "")

    ask = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": ONE_THREAD})(installed)
    alive = [node for node in ray.nodes() if node["Alive"]]
    asked = {ask.options(scheduling_strategy=on_machine(ray, node["NodeID"])).remote(): node for node in alive}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    own_sha256, own_torch, problems = records.code()["sha256"], records.versions().get("torch", ""), []
    for reference in answered:
        name = f"{asked[reference]['NodeManagerHostname']} ({asked[reference]['NodeManagerAddress']})"
        try:
            problem, sha256, torch = ray.get(reference)
        except ray.exceptions.RayError:  # the machine was lost meanwhile
            continue
        if problem or sha256 != own_sha256:
            problems.append(f"{name}: {problem or 'other files'}")
        elif torch != own_torch:
            text = f"{name} has torch {torch}, and this machine {own_torch}; results may round differently"
            print(f"note: {text}", file=sys.stderr)
    if problems:
        raise ValueError(
            f"{len(problems)} machines of the Ray cluster do not have this version of smallvit: {', '.join(problems[:5])}; "
            "install the same version on all machines"
        )


def with_absolute_paths(task: Task) -> Task:
    """Return a copy of a task in which the paths of all folders are absolute, because workers have other working folders."""
    dependencies = {field: place.absolute() for field, place in task.dependencies.items()}
    return task._replace(folder=task.folder.absolute(), dependencies=dependencies)


def with_earlier_runs(plain: dict) -> Iterator[dict]:
    """Yield a run and all earlier runs that it needs, such as pretraining, as JSON data. `plain` is the run as JSON data."""
    yield plain
    for field in DEPENDENCIES:
        earlier = plain[field]
        if earlier and not earlier.keys() & {"call", "make"}:
            yield from with_earlier_runs(earlier)
