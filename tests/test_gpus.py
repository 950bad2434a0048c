"""The GPUs of one machine: which ones are found and chosen, and that each worker process sees its own."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from toys import TINY_VIT

from smallvit import ArmRun, Run
from smallvit.__main__ import main
from smallvit.commands import explore
from smallvit.commands import run as command
from smallvit.launch import autotune, gpus, launch, launcher
from smallvit.launch.engine import Settings
from smallvit.launch.local import LocalEngine, Worker, process_context
from smallvit.launch.results import Killed
from smallvit.numerics import DEFAULT
from smallvit.recipe import load_recipe

LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 3g.20gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-c6d4f1ef-42e4-6de3-91c7-45d71c87eb3f)
"""
PARTS = ["MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"]
WHOLE = "GPU-c6d4f1ef-42e4-6de3-91c7-45d71c87eb3f"

# a model that notes which GPU its process sees: when the process began, and now; the first process is killed
RECIPE = '''
"""Which GPU does each worker process see?"""
import os, signal
from functools import partial
from pathlib import Path
from smallvit import PatchEmbed, Run, ViT, ablate

def spy(image, channels, classes, *, depth: int = 1):
    place, name = Path(os.environ["SPY"]), b"CUDA_VISIBLE_DEVICES="
    began = [line for line in Path("/proc/self/environ").read_bytes().split(b"\\0") if line.startswith(name)]
    (place / f"{os.getpid()}.txt").write_text(f"{began[0][len(name):].decode()} {os.environ['CUDA_VISIBLE_DEVICES']}")
    try:
        (place / "killed").touch(exist_ok=False)
    except FileExistsError:
        return ViT(image, channels, classes, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=depth, heads=2)
    os.kill(os.getpid(), signal.SIGKILL)

RUNS = ablate({"spy": Run(model=spy, labels=20, steps=2, batch=8, val=20)}, labels=[20], seeds=range(5), references=False)
'''


def test_gpus_are_those_that_nvidia_smi_lists_with_their_parts(monkeypatch):
    assert gpus.parse_list(LISTED) == [*PARTS, WHOLE]
    assert gpus.parse_list("No devices found.\n") == gpus.parse_list("") == []


@pytest.mark.parametrize(
    "variable, visible",
    [
        ("4,5,6", ["4", "5", "6"]),
        (" 1, 0 ", ["1", "0"]),
        (",".join(PARTS), PARTS),
        ("2,-1,3", ["2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", ["NoDevFiles"]),
    ],
)
def test_variable_of_a_cluster_is_respected(variable, visible, monkeypatch):
    monkeypatch.setattr(gpus, "listed_gpus", lambda: pytest.fail("all GPUs were listed"))
    assert gpus.visible_gpus({gpus.VISIBLE: variable}) == visible


@pytest.mark.parametrize(
    "chosen, names",
    [
        ("all", [*PARTS, WHOLE]),
        ("0,2", [PARTS[0], WHOLE]),
        ("2", [WHOLE]),
        ("GPU-c6d4", [WHOLE]),
        (f"{PARTS[1]},0", [PARTS[1], PARTS[0]]),
    ],
)
def test_gpus_are_chosen_by_position_or_name(chosen, names):
    assert gpus.chosen_gpus(chosen, [*PARTS, WHOLE]) == names


def test_worker_processes_are_spread_over_the_gpus_and_share_them_on_request(monkeypatch):
    monkeypatch.setattr(gpus, "visible_gpus", lambda environment: ["4", "5", "6"])
    assert gpus.gpu_workers("all", None, None, "cuda") == gpus.gpu_workers("all", 1, 3, "cuda") == ["4", "5", "6"]
    assert gpus.gpu_workers("0,2", 2, 4, "cuda") == ["4", "6", "4", "6"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus", "all", "--device", "cpu"], "--gpus all and --device cpu cannot be combined"),
        (["--per-gpu", "2"], "--per-gpu 2 needs --gpus"),
        (["--gpus", "all", "--jobs", "4"], "--jobs 4 and --gpus all cannot be combined: --gpus all means 2 worker processes"),
        (["--gpus", "0", "--per-gpu", "3", "--jobs", "2"], "--gpus 0 --per-gpu 3 means 3 worker processes"),
        (["--gpus", "0,2"], "'2' is not one of the GPUs that this process can use (4, 5); expected all, or numbers from 0 to 1"),
        (["--gpus", ""], "--gpus is empty; expected all"),
        (["--gpus", "0,,1"], "'' is not one of the GPUs"),
        (["--gpus", "0,0"], "--gpus 0,0 has a GPU twice"),
        (["--gpus", "all"], "no such GPU"),
    ],
)
def test_contradictions_and_missing_gpus_are_refused(words, message, workdir, capsys, monkeypatch):
    monkeypatch.setenv(gpus.VISIBLE, "4,5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "mine.py", *words]) == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()
    assert os.environ[gpus.VISIBLE] == "4,5"


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--device", "cuda"], ["4", "5"] * 4),
        (["--device", "cuda", "--jobs", "3"], ["4", "5", "4"]),
        (["--device", "auto", "--jobs", "1"], ["4"]),
        (["--gpus", "all"], ["4", "5"]),
        ([], []),
    ],
)
def test_processes_share_the_gpus_unless_their_number_is_given(words, expected, workdir, monkeypatch):
    found = []
    monkeypatch.setenv(gpus.VISIBLE, "4,5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "check_device", lambda device: None)
    monkeypatch.setattr(command, "run", lambda options, workers: found.append(workers) or 0)
    assert main(["run", "mine.py", *words]) == 0
    assert found == [expected]


@pytest.mark.parametrize(
    "words, stack, said",
    [
        (["--device", "cuda", "--jobs", "1"], 7, True),
        (["--device", "cuda", "--jobs", "1", "--stack", "2"], 2, False),
        (["--device", "cuda", "--jobs", "1", "--numerics", "compiled=yes"], 1, False),
        (["--device", "cuda", "--jobs", "1", "--numerics", "kernel=fused"], 1, False),
        (["--jobs", "1"], 1, False),
    ],
)
def test_runs_are_stacked_on_a_gpu_unless_their_number_is_given(words, stack, said, workdir, monkeypatch, capsys):
    found = []
    monkeypatch.setattr(command, "check_device", lambda device: None)
    monkeypatch.setattr(autotune, "stack_for_gpu", lambda runs: 7)
    monkeypatch.setattr(command, "launch", lambda *args, stack, **options: found.append(stack))
    main(["run", "mine.py", *words])
    assert found == [stack]
    assert ("on a GPU: up to 7 runs" in capsys.readouterr().err) == said


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_all_commands_use_all_gpus_and_stacks(device, workdir, monkeypatch):
    """`smallvit explore` starts as many processes on the GPUs, and stacks as many runs, as `smallvit run` does."""
    found = []

    class Engine:
        def __init__(self, settings, groups, jobs, gpus):
            found.append((settings.device, list(gpus)))
            raise KeyboardInterrupt

    monkeypatch.setenv(gpus.VISIBLE, "4,5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(explore, "check_device", lambda device: None)
    monkeypatch.setattr(autotune, "stack_for_gpu", lambda runs: found.append(len(runs)) or 3)
    monkeypatch.setattr(launcher, "LocalEngine", Engine)
    with suppress(KeyboardInterrupt):
        main(["explore", "mine.py", "--device", device, "--jobs", "3"])
    assert found[1:] == [("cuda", ["4", "5", "4"])] and found[0] > 0


def test_machine_without_a_gpu_is_named(workdir, capsys, monkeypatch):
    monkeypatch.setattr(gpus, "listed_gpus", lambda: [])
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert main(["run", "mine.py", "--gpus", "all"]) == 2
    assert "--gpus all: this process can use no GPU; leave out --gpus" in capsys.readouterr().err
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert main(["run", "mine.py", "--gpus", "0"]) == 2
    assert "can use no GPU (CUDA_VISIBLE_DEVICES is '')" in capsys.readouterr().err


@pytest.mark.slow
def test_variables_of_a_worker_process_are_its_own_also_after_it_was_killed(monkeypatch):
    monkeypatch.setenv(gpus.VISIBLE, "7")
    workers = [Worker(process_context("cpu"), Settings(None, "cpu", DEFAULT), {gpus.VISIBLE: gpu}) for gpu in ("0", "2")]
    try:
        assert [worker.pool.submit(os.getenv, gpus.VISIBLE).result() for worker in workers] == ["0", "2"]
        workers[1].kill()
        workers[1].restart()
        assert [worker.pool.submit(os.getenv, gpus.VISIBLE).result() for worker in workers] == ["0", "2"]
        assert os.environ[gpus.VISIBLE] == "7"
    finally:
        for worker in workers:
            worker.pool.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("text, same", [("CUDA error: an illegal memory access was encountered", False), ("wrong shape", True)])
def test_worker_process_that_has_lost_its_gpu_is_replaced(text, same, monkeypatch):
    """After such an error CUDA refuses everything in this process, and the runs that follow would fail as well."""
    engine = LocalEngine(Settings(None, "cpu", DEFAULT), groups=1, jobs=1)
    try:
        before = engine.workers[0].pool.submit(os.getpid).result()
        engine.busy[engine.workers[0].pool.submit(fail, text)] = engine.workers[0]
        (_, error), *_ = engine.wait(60)
        assert isinstance(error, RuntimeError) and text in str(error) and not isinstance(error, Killed)
        assert (engine.workers[0].pool.submit(os.getpid).result() == before) == same
    finally:
        engine.close()


def fail(text: str):
    raise RuntimeError(text)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads the first environment of a process in /proc")
def test_each_worker_process_sees_its_own_gpu_from_the_beginning_also_after_a_kill(workdir, monkeypatch):
    """The runs are trained on the CPU: what counts is the environment."""
    monkeypatch.setenv("SPY", str(workdir))
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    records = launch(load_recipe("mine.py").RUNS, workdir / "runs", recipe="mine", source="mine.py", gpus=["3", "MIG-a28a"])
    assert [record.status for record in records] == ["finished"] * 5
    seen = [path.read_text() for path in workdir.glob("*.txt")]
    assert len(seen) == 3 and {*seen} == {"3 3", "MIG-a28a MIG-a28a"}  # three processes: one was started again
    assert gpus.VISIBLE not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_worker_processes_train_on_gpus(tmp_path):
    found, before = gpus.visible_gpus(os.environ), torch.cuda.is_initialized()
    runs = [ArmRun(run=Run(model=TINY_VIT, labels=20, val=20, steps=20, batch=8, seed=seed), arm="a") for seed in range(4)]
    records = launch(runs, tmp_path, recipe="t", device="cuda", gpus=(found * 2)[:2])
    assert all(record.finished and record.device == torch.cuda.get_device_name(0) for record in records)
    assert torch.cuda.is_initialized() == before, "only the workers need the GPU"
