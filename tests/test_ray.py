"""Ray: equal results on machines without a shared disk, and nothing lost when a machine or the driver is lost.

The long tests start a Ray cluster on this machine. A machine that sees no file of the driver (the process in which `launch` runs)
is a node of Ray in a mount namespace of its own, where empty folders cover those of the test.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from toys import TINY_VIT

from smallvit import ArmRun, Run, Weights, describe, digits, fingerprint, fit, folder, load_recipe
from smallvit.__main__ import main
from smallvit.data.images import Rows
from smallvit.launch import launch, ray_worker, worker
from smallvit.launch.engine import Settings
from smallvit.launch.ray_engine import RayEngine, connect, resources, with_earlier_runs
from smallvit.launch.ray_server import FolderServer, read_files
from smallvit.launch.ray_worker import Parcel, data_key, use_sent_files, weights_key
from smallvit.launch.scheduler import Scheduler
from smallvit.launch.status import RecipeState
from smallvit.numerics import DEFAULT
from smallvit.record import CHECKPOINT, CURVE, RECORD, WEIGHTS, code, read_record, user_line
from smallvit.train.read_log import all_reads

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=4, batch=8)
has_ray = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="needs the library Ray: pip install 'smallvit[ray]'")


# Without a cluster


def test_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'smallvit\[ray\]'"):
        connect("auto")


def test_address_of_a_ray_client_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"ray://.*Ray client.*ray start --address"):
        connect("ray://10.0.0.1:10001")


def test_each_group_of_runs_gets_a_cpu_and_its_share_of_a_gpu():
    room = {"CPU": 8.0, "GPU": 2.0}
    assert resources("cpu", 1, room) == {"CPU": 1}
    assert resources("cuda", 1, room) == {"CPU": 1, "GPU": 1}
    assert resources("cuda", 4, room) == resources("cuda", 0.25, room) == {"CPU": 1, "GPU": 0.25}
    assert 3 * resources("cuda", 3, room)["GPU"] <= 1, "Ray would not place three groups on one GPU"
    assert resources("auto", 2, room) == {"CPU": 1, "GPU": 0.5} and resources("auto", 2, {"CPU": 1.0}) == {"CPU": 1}


@pytest.mark.parametrize(
    ("device", "per_gpu", "room", "named"),
    [
        ("cuda", 1, {"CPU": 8.0}, "no machine of the Ray cluster offers a GPU"),
        ("cpu", 1, {}, "no machine of the Ray cluster offers a CPU"),
        ("mps", 1, {"CPU": 8.0}, "device is 'mps'; expected cpu, cuda or auto"),
        ("cuda", 0, {"CPU": 8.0, "GPU": 1.0}, "per_gpu is 0; expected the number"),
        ("cuda", 20_000, {"CPU": 8.0, "GPU": 1.0}, "per_gpu is 20000; expected the number"),
        ("cuda", 0.00001, {"CPU": 8.0, "GPU": 1.0}, "per_gpu is 1e-05; expected the number"),
    ],
)
def test_cluster_that_cannot_train_the_runs_is_refused(device, per_gpu, room, named):
    with pytest.raises(ValueError, match=named):
        resources(device, per_gpu, room)


@pytest.mark.parametrize("per_gpu", ["4", "0.25"])
def test_share_of_a_gpu_needs_runs_on_gpus(per_gpu, capsys):
    assert main(["run", "quickstart", "--on", "ray", "--per-gpu", per_gpu]) == 2
    assert "--per-gpu is about GPUs, and the runs have --device cpu; add --device cuda\n" in capsys.readouterr().err


def parcel(tasks=(), data=None, weights=None) -> Parcel:
    return Parcel([*tasks], Settings(None, "cpu", DEFAULT), data or {}, weights or {}, ".", "", 1, 30.0)


def test_run_with_sent_data_and_weights_keeps_its_fingerprint(tmp_path, monkeypatch):
    weights = Weights(name="vit_tiny_patch16_224.augreg_in21k_ft_in1k", file="/only/there/weights.safetensors")
    run = SHORT.vary(teacher=None, init=SHORT.vary(data=partial(folder, path="/only/there", test=0.2), init=weights))
    plain = describe(run)
    assert [data_key(part) for part in with_earlier_runs(plain)] == [data_key(plain), data_key(plain["init"])]
    monkeypatch.setattr(ray_worker, "sent_data", lambda key, load, data: data[key])
    monkeypatch.setattr(ray_worker, "sent_weights", lambda name, content: tmp_path / name)
    sent = {data_key(plain): "digits", data_key(plain["init"]): "photos"}
    key = weights_key(plain["init"])
    use_sent_files(run, plain, parcel(data=sent, weights={key: ("weights.safetensors", b"")}))
    assert run.data() == "digits" and run.init.data() == "photos"
    assert run.init.init.path() == tmp_path / "weights.safetensors"
    assert describe(run) == plain and fingerprint(run.at_seed(3)) == fingerprint(SHORT.vary(init=run.init).at_seed(3))
    assert run.at_seed(3).data() == "digits"


def test_data_too_large_to_be_sent_must_be_the_same_on_every_machine():
    class Driver:
        ray = type("Ray", (), {"put": staticmethod(lambda data: "a reference")})

    data = digits()
    stored = replace(data.train, images=Rows(data.train.images, torch.arange(len(data.train))))
    assert RayEngine.send_data(Driver(), data) == "a reference"
    sent = RayEngine.send_data(Driver(), replace(data, train=stored))
    assert sent == data.sha256
    assert ray_worker.sent_data("key", digits, {"key": sent}) is data
    with pytest.raises(ValueError, match=r"digits on .* has other images or labels"):
        ray_worker.sent_data("key", digits, {"key": "0" * 64})


def test_first_record_of_a_run_stays_and_counts_its_read_of_the_test_images_once(tmp_path):
    """Two workers finish the same run, because one of them was thought to be lost."""
    schedule = Scheduler([ArmRun(run=SHORT, arm="scratch")], tmp_path / "out", "t")
    task = schedule.task(0)
    task.folder.mkdir(parents=True)
    reads = tmp_path / "out" / "reads.jsonl"
    server = FolderServer(Settings(None, "cpu", DEFAULT, reads=reads))
    record = fit(SHORT, tmp_path / "worker", tags=task.tags)
    files = read_files(tmp_path / "worker")
    server.keep([task.folder], [{CHECKPOINT: b"an old checkpoint"}])
    assert (task.folder / CHECKPOINT).read_bytes() == b"an old checkpoint"
    tested = {record.fingerprint: digits().test.sha256}
    (first,) = server.finish([task], [record], [files], tested)
    assert first == replace(record, test_settings=1) == read_record(task.folder) and len(all_reads(reads)) == 1
    (second,) = server.finish([task], [replace(record, seconds=9.0)], [files | {WEIGHTS: b"damaged"}], tested)
    assert second == first and len(all_reads(reads)) == 1
    server.keep([task.folder], [{CHECKPOINT: b"a late checkpoint"}])
    assert {path.name for path in task.folder.iterdir()} == {CURVE, RECORD, WEIGHTS, ".lock"}
    assert (task.folder / WEIGHTS).read_bytes() == (tmp_path / "worker" / WEIGHTS).read_bytes()


def test_restarted_server_uses_the_recipe_as_it_was_when_the_command_started(tmp_path):
    (tmp_path / "mine.py").write_text("def half-typed(")
    text = RECIPE.replace("STEPS", "1").replace("loop.CHECKPOINT_SECONDS", "SECONDS")
    try:
        FolderServer(Settings(tmp_path / "mine.py", "cpu", DEFAULT, recipe_text=text))
        assert sys.modules["recipes.mine"].RUNS
    finally:
        sys.modules.pop("recipes.mine", None)


def test_worker_removes_the_recipe_and_the_weights_that_it_has_received(tmp_path, monkeypatch):
    """Ray ends a worker without running functions registered with atexit, so each group of runs cleans up."""
    monkeypatch.chdir(tmp_path)  # `train_group` changes the working folder
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(ray_worker, "RECEIVED", tmp_path / "temporary" / "received", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda reference: reference))
    monkeypatch.setattr(ray_worker, "sees_folder", lambda folder, server: True)
    monkeypatch.setattr(ray_worker, "Reporter", lambda parcel, server: None)
    (tmp_path / "temporary").mkdir()
    seen = []

    def train(runs, tasks, settings, reporter):
        weights = ray_worker.sent_weights("tiny.safetensors", b"weights")
        assert weights == ray_worker.sent_weights("tiny.safetensors", b"weights") and weights.read_bytes() == b"weights"
        seen.append(sys.modules["recipes.mine"])
        assert Path(seen[-1].__file__).exists(), "a traceback shows the code of the recipe"
        raise ValueError("broken")

    monkeypatch.setattr(ray_worker, "fit_group", train)
    text = RECIPE.replace("STEPS", "1").replace("loop.CHECKPOINT_SECONDS", "SECONDS")
    task = Scheduler([ArmRun(run=SHORT, arm="scratch")], tmp_path / "out", "t").task(0)
    sent = parcel([task])._replace(code=code()["sha256"], folder=str(tmp_path))
    sent = sent._replace(settings=sent.settings._replace(source=Path("/only/there/mine.py"), recipe_text=text))
    try:
        for _ in range(2):
            assert str(ray_worker.train_group(sent, None).error) == "broken"
    finally:
        sys.modules.pop("recipes.mine", None)
    assert not [*(tmp_path / "temporary").iterdir()] and seen[0] is seen[1], "the recipe was imported twice"


class MyError(Exception):
    """An error class that cannot be pickled."""

    def __init__(self, one, two):
        super().__init__(one)


@pytest.mark.parametrize("error", [ValueError("as it is"), MyError("a text", 2)], ids=["of Python", "of the user"])
def test_workers_of_all_kinds_train_alike_and_send_errors_that_can_be_pickled(error, tmp_path, monkeypatch):
    entries = [ArmRun(run=SHORT.at_seed(seed), arm="scratch") for seed in (0, 1)]
    schedule, settings, steps = Scheduler(entries, tmp_path / "out", "t"), Settings(None, "cpu", DEFAULT), []
    tasks = [schedule.task(index) for index in (0, 1)]
    trained = worker.fit_group([SHORT, SHORT.at_seed(1)], tasks, settings, steps.append)
    assert steps[-1] == 8 and [record.seed for record in trained] == [0, 1]
    assert ray_worker.fit_group is worker.fit_group, "Ray workers have a training loop of their own"

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(worker, "fit_stacked", fail)
    expected = error if isinstance(error, ValueError) else RuntimeError("MyError: a text")
    with pytest.raises(type(expected), match=f"^{expected}$"):
        worker.work(tasks, settings)
    monkeypatch.chdir(tmp_path)  # `train_group` changes the working folder
    monkeypatch.setattr(ray_worker, "sees_folder", lambda folder, server: True)
    server = type("Server", (), {"report": type("Report", (), {"remote": print})})
    failure = ray_worker.train_group(parcel(tasks)._replace(code=code()["sha256"], folder=str(tmp_path)), server)
    assert repr(failure.error) == repr(expected) and type(error).__name__ in failure.traceback


# On a cluster


RECIPE = '''"""A recipe with a component of its own, an initialization and 24 runs."""

from functools import partial

from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment
from smallvit.train import loop

loop.CHECKPOINT_SECONDS = 0.2  # also in the workers, which import this file


class Own(LocalityAttention):
    """An attention that only this file knows."""


SHORT = Run(
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2),
    labels=50, val=20, steps=STEPS, batch=8, augment=augment.digits(),
)
RUNS = ablate(
    {"scratch": SHORT, "own": SHORT.vary(attention=Own), "tuned": SHORT.vary(init=SHORT.vary(lr=5e-4), lr=2e-4)},
    labels=[50], seeds=range(6), references=False,
)
'''
DRIVER = """
import sys
from functools import partial
from smallvit import load_recipe
from smallvit.launch import launch
from smallvit.launch.ray_engine import RayEngine

recipe, out, address, stack = sys.argv[1:]
shown = open(out + ".txt", "a", buffering=1)  # not standard output, to which Ray writes what it has to say of lost machines
launch(
    load_recipe(recipe).RUNS, out, recipe="mine", source=recipe, stack=int(stack), validation_only=int(stack) > 1,
    engine=partial(RayEngine, address=address, checkpoint_seconds=0.5),
    show=lambda record: print(record.arm, record.seed, record.status, file=shown),
)
"""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
STORE = 100 * 2**20  # bytes of the object store of each machine
HIDE = 'for place in $HIDDEN; do mount -t tmpfs none "$place" || exit 1; done; exec "$@"'


def wait_until(condition, what: str, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds} s in vain: {what}"
        time.sleep(0.05)


class Machines:
    """A Ray cluster: the machine of the driver without a CPU for runs, and the machines that a test adds, with one CPU each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(True, head_node_args={"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False})
        self.address, self.added = self.cluster.address, []

    def cpus(self) -> float:
        import ray

        return ray.cluster_resources().get("CPU", 0)

    def add(self, count: int, hidden: tuple[Path, ...] = (), pythonpath: str = "") -> list:
        """Start machines, which do not see the folders `hidden`, and wait until they have joined the cluster."""
        machines = []
        for _ in range(count):
            expected = self.cpus() + 1
            machines.append(self.start(hidden, pythonpath))
            self.added.append(machines[-1])
            wait_until(lambda: self.cpus() == expected, "a machine joins the cluster", 60)  # noqa: B023
        return machines

    def start(self, hidden: tuple[Path, ...], pythonpath: str):
        """Start one machine. Ray cannot start two at the same moment on one host."""
        if not hidden and not pythonpath:
            return self.cluster.add_node(wait=False, num_cpus=1, object_store_memory=STORE)
        start = [*RAY, "start", f"--address={self.address}", "--block", "--num-cpus=1", f"--object-store-memory={STORE}"]
        env = os.environ | {"HIDDEN": " ".join(map(str, hidden)), "PYTHONPATH": pythonpath}
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", HIDE, "sh", *start]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=env, start_new_session=True, cwd="/", **quiet)

    def kill(self, machine):
        """Kill all processes of a machine at once."""
        self.added.remove(machine)
        if isinstance(machine, subprocess.Popen):
            os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
        else:
            self.cluster.remove_node(machine, allow_graceful=False)


@pytest.fixture(scope="module")
def cluster():
    """The machine of the driver. A secret token protects the cluster from other users of the network."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AUTH_MODE", "token"), ("AUTH_TOKEN", uuid.uuid4().hex), ("USAGE_STATS_ENABLED", "0")):
            patch.setenv(f"RAY_{name}", value)  # read when Ray is imported
        import ray

        machines = Machines()
        connect(machines.address)
        yield machines
        ray.shutdown()
        machines.cluster.shutdown()


@pytest.fixture
def machines(cluster):
    """The cluster, without the machines that the test adds, after the test."""
    yield cluster
    for machine in [*cluster.added]:
        cluster.kill(machine)
    wait_until(lambda: cluster.cpus() == 0, "the end of all machines")


@pytest.fixture
def place(tmp_path):
    """A folder that machines can hide, which is no folder of pytest: those belong to all tests."""
    yield tmp_path
    sys.modules.pop("recipes.mine", None)


def can_hide() -> bool:
    done = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True) if shutil.which("unshare") else None
    return done is not None and done.returncode == 0


needs_namespaces = pytest.mark.skipif(not can_hide(), reason="needs mount namespaces: unshare --map-root-user --mount")


def write_recipe(place: Path, steps: int, text: str = RECIPE) -> Path:
    path = place / "recipe" / "mine.py"
    path.parent.mkdir()
    path.write_text(text.replace("STEPS", str(steps)))
    return path


def finished(out: Path) -> list[Path]:
    return sorted(path.relative_to(out) for path in out.rglob(RECORD))


def content(out: Path) -> dict[str, tuple]:
    """The weights and the record of each run, without the times in it."""
    found = {}
    for path in finished(out):
        record = read_record((out / path).parent)
        earlier = record.pretraining and {**record.pretraining, "seconds": 0, "runs": sorted(record.pretraining["runs"])}
        found[str(path)] = (out / path).with_name(WEIGHTS).read_bytes(), replace(record, seconds=0, pretraining=earlier)
    return found


def driver(recipe: Path, out: Path, address: str, stack: int) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(recipe), str(out), address, str(stack)]
    return subprocess.Popen(command)


def shown(out: Path) -> list[str]:
    """The runs that the drivers have seen the end of, one in each line."""
    return out.with_suffix(".txt").read_text().splitlines()


@pytest.mark.long
@needs_ray
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=needs_namespaces)], ids=["shared", "nothing shared"])
def test_lost_machine_and_killed_driver_lose_no_run_and_change_no_weight(shared, stack, machines, place):
    """Three machines train 24 runs. One machine is lost, then the driver is killed and started again."""
    out, recipe = place / "out", write_recipe(place, steps=80)
    out.mkdir()
    machine, *_ = machines.add(3, hidden=() if shared else (out, recipe.parent))
    first = driver(recipe, out, machines.address, stack)
    wait_until(lambda: len(finished(out)) >= 6, "6 finished runs")
    machines.kill(machine)
    wait_until(lambda: len(finished(out)) >= 12, "12 finished runs")
    first.kill()
    first.wait()
    before = len(finished(out))
    second = driver(recipe, out, machines.address, stack)
    assert second.wait() == 0 and 12 <= before < 24, "the driver was killed too late"
    assert [line for line, count in Counter(shown(out)).items() if count > 1] == [], "a run was trained twice"
    assert [line for line in shown(out) if not line.endswith("finished")] == []

    launch(load_recipe(recipe).RUNS, place / "local", recipe="mine", source=recipe, jobs=2, stack=stack, validation_only=stack > 1)
    assert len(finished(out)) == 24 and content(out) == content(place / "local")
    left = {path.name for path in out.rglob("*") if path.is_file()} - {CURVE, RECORD, WEIGHTS, ".lock", ".test_reads.jsonl.lock"}
    assert left == ({"test_reads.jsonl"} if stack == 1 else set())
    if stack == 1:
        reads = Counter(read["fingerprint"] for read in all_reads(out / "mine" / "test_reads.jsonl"))
        assert len(reads) == 24, "a read of the test images was not counted"


@pytest.mark.long
@needs_ray
@needs_namespaces
def test_run_of_a_lost_machine_resumes_from_the_last_checkpoint_that_was_sent(machines, place):
    text = RECIPE[: RECIPE.index("RUNS =")] + 'RUNS = ablate({"scratch": SHORT}, labels=[50], seeds=[0], references=False)\n'
    out, recipe = place / "out", write_recipe(place, steps=3000, text=text)
    out.mkdir()

    def step() -> int:
        """The training step that the file progress.json shows."""
        states = RecipeState(load_recipe(recipe).RUNS, [], out, "mine")
        states.update()
        return max([progress.step for _, progress in states.running], default=0)

    (machine,) = machines.add(1, hidden=(out, recipe.parent))
    run = driver(recipe, out, machines.address, 1)
    wait_until(lambda: step() > 300 and list(out.rglob(CHECKPOINT)), "a checkpoint from the other machine")
    (checkpoint,) = out.rglob(CHECKPOINT)
    machines.kill(machine)
    saved = torch.load(checkpoint, weights_only=True)["step"]
    for path in out.rglob("progress.json"):
        path.unlink()
    machines.add(1, hidden=(out, recipe.parent))
    wait_until(lambda: step() > 0, "the training on the second machine")
    assert 0 < saved < step(), "the training has started again from its first step"
    assert run.wait() == 0 and shown(out) == ["scratch 0 finished"]
    launch(load_recipe(recipe).RUNS, place / "local", recipe="mine", source=recipe, jobs=1)
    assert content(out) == content(place / "local")


@pytest.mark.long
@needs_ray
@needs_namespaces
def test_machine_without_any_file_trains_own_images_external_weights_and_reports_errors(machines, place):
    """The images, the weights and the recipe are on the machine of the driver only."""
    import timm
    from safetensors.torch import save_file

    name, rng = "vit_tiny_patch16_224.augreg_in21k_ft_in1k", np.random.default_rng(0)
    for label in "ab":
        (place / "data" / "photos" / label).mkdir(parents=True)
        for index in range(20):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "data" / "photos" / label / f"{index}.png")
    save_file(timm.create_model(name, num_classes=0).state_dict(), place / "data" / "tiny.safetensors")
    weights = f'Weights(name="{name}", file={str(place / "data" / "tiny.safetensors")!r})'
    recipe = write_recipe(
        place,
        2,
        f"""
from functools import partial
from smallvit import ArmRun, PatchEmbed, Pixels, Run, ViT, Weights, folder, like

class Broken(PatchEmbed):
    "A tokenizer that always fails."

    def __init__(self, *arguments, **options):
        raise MyError("from the recipe")

class MyError(Exception):
    "An error class of the recipe."

photos = partial(folder, path={str(place / "data" / "photos")!r}, test=0.25)
SHORT = Run(data=photos, model=partial(ViT, dim=16, depth=2, heads=2, tokenizer=partial(PatchEmbed, patch=4)), val=4, steps=STEPS, batch=4)
TINY = SHORT.vary(model=like("{name}", tokenizer=partial(PatchEmbed, patch=16)), init={weights})
RUNS = [
    ArmRun(run=SHORT, arm="photos", role="baseline"),
    ArmRun(run=TINY, arm="external weights"),
    ArmRun(run=SHORT.vary(tokenizer=Broken), arm="broken"),
]
""",
    )
    out, runs = place / "out", load_recipe(recipe).RUNS
    out.mkdir()
    machines.add(1, hidden=(out, recipe.parent, place / "data"))
    options = {"recipe": "mine", "source": recipe}
    trained = launch(runs, out, engine=partial(RayEngine, address=machines.address), **options)
    assert [record.status for record in trained] == ["finished", "finished", "failed"]
    assert trained[1].init_weights["file"] == "tiny.safetensors" and trained[1].init_weights["loaded"] > 100
    assert trained[2].error == "MyError: from the recipe" and trained[2].traceback.endswith("MyError: from the recipe")
    expected = launch(runs, place / "local", jobs=1, **options)
    assert [record.weights_sha256 for record in trained] == [record.weights_sha256 for record in expected]
    assert [user_line(record.traceback or "") for record in trained] == [user_line(record.traceback or "") for record in expected]


@pytest.mark.long
@needs_ray
@needs_namespaces
def test_machine_with_another_version_of_smallvit_is_refused(machines, place):
    package = Path(ray_worker.__file__).parents[1]
    shutil.copytree(package, place / "other" / "smallvit", ignore=shutil.ignore_patterns("__pycache__"))
    with open(place / "other" / "smallvit" / "rng.py", "a") as file:
        file.write("# changed\n")
    machines.add(1, hidden=(package,), pythonpath=str(place / "other"))
    with pytest.raises(ValueError, match=r"1 machines of the Ray cluster do not have this version.*other files.*install"):
        launch([ArmRun(run=SHORT, arm="scratch")], place / "out", recipe="t", engine=partial(RayEngine, address="auto"))
    assert not list(place.rglob(RECORD))
