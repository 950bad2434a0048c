"""One run trained by several processes: the weights of one process up to rounding, the same record, also after a kill."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toys import TINY_VIT

from smallvit import (
    DINO,
    DeepEnsemble,
    EachMember,
    MeanTokens,
    Merge,
    Projected,
    Run,
    ShiftedPatchEmbed,
    SmallCNN,
    Supervised,
    augment,
    digits,
    label_spreading,
)
from smallvit import record as records
from smallvit.augment import Batch
from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, read_record
from smallvit.report.provenance import provenance, warnings
from smallvit.train import fit, loop, parallel
from smallvit.train.loop import Training

TOLERANCE = 1e-5  # of a weight after 36 steps in single precision; measured: 1.5e-7 and less
SHORT = Run(
    model=TINY_VIT, labels=50, val=20, steps=36, batch=8, clip=0.5, ema=0.3, augment=(*augment.digits(), augment.Mixup())
)
RUNS = {
    "plain": SHORT,
    "init": SHORT.vary(init=SHORT.vary(steps=6), layer_decay=0.5),
    "slots": SHORT.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2), pool=MeanTokens, reduction=partial(Merge, r=2), ema=0.0),
    "class weights": SHORT.vary(objective=partial(Supervised, class_weight="balanced"), clip=0.0),
    "dropout": SHORT.vary(dropout=0.1),
    "guessed labels": SHORT.vary(
        teacher=SHORT.vary(
            model=partial(DeepEnsemble, of=TINY_VIT, count=2), objective=partial(EachMember, of=partial(DINO, prototypes=16)),
            augment=augment.digit_crops(local=0), unlabelled=True, batch=16, steps=4, ema=0.0,
        ),
        unlabelled=True, pseudo_labels=label_spreading, objective=partial(Supervised, class_weight="balanced"),
    ),
}
SHARED = {  # fields of a record that do not depend on rounding
    "fingerprint", "run", "seed", "status", "steps", "images_seen", "subset_sha256", "data_sha256", "params", "macs", "device", "threads", "init_weights", "tokens", "stacked",
}  # fmt: skip


def main(name: str, folder: str, deadly_step: str):
    """What each process of a test does: train the run `name` in `folder`. The first process prints each step. It kills itself
    before the checkpoint of the step `deadly_step`, but only once. Each process prints a hash of its weights and its record.
    """
    torch.set_num_threads(1)
    loop.CHECKPOINT_SECONDS = 0.0 if int(deadly_step) else 10.0
    killed, trained = Path(folder).with_suffix(".killed"), []
    take_step = parallel.train_step
    parallel.train_step = lambda training: (trained.append(training), take_step(training))

    def watch(step, accuracy):
        print("step", step, flush=True)
        if step == int(deadly_step) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as for `fit`, the choice of the caller must not matter
        record = parallel.fit_parallel(RUNS[name], folder, watch=watch)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads of gloo:", sum("gloo" in thread for thread in threads))
    tensors = [*trained[-1].objective.state_dict().values(), *trained[-1].model.state_dict().values()]
    print("weights", hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
    print("record", hashlib.sha256(records.to_json(record).encode()).hexdigest())


def start(name: str, folder: Path, processes: int, deadly_step: int = 0) -> list[subprocess.Popen]:
    """Start the processes that train a run. `torchrun` starts them with the same environment variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, __file__, name, str(folder), str(deadly_step)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [subprocess.Popen(command, env=os.environ | shared | rank, **pipes) for rank in ranks]


def train(name: str, folder: Path, processes: int = 2) -> list[str]:
    """Train a run with several processes, and return what each of them has printed."""
    started = start(name, folder, processes)
    outputs = [one.communicate(timeout=600) for one in started]
    assert [one.returncode for one in started] == [0] * processes, outputs
    return [output for output, _ in outputs]


def without_key_bias(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder, but 0 for the bias of the keys. Attention does not depend on it, so its gradient is nothing but
    rounding errors, and Adam makes steps of the usual size from them.
    """
    weights = load_file(folder / WEIGHTS)
    for name, tensor in weights.items():
        if name.endswith("qkv.bias"):
            tensor.chunk(3)[1].zero_()
    return weights


def assert_as_one_process(name: str, folder: Path, processes: int):
    outputs = train(name, folder / "parallel", processes)
    alone, record = fit(RUNS[name], folder / "alone"), read_record(folder / "parallel")
    assert record is not None
    expected, found = without_key_bias(folder / "alone"), without_key_bias(folder / "parallel")
    assert expected.keys() == found.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=TOLERANCE, msg=key)
    assert {key: getattr(record, key) for key in SHARED} == {key: getattr(alone, key) for key in SHARED}
    assert (record.processes, alone.processes) == (processes, None)
    assert (record.trace["initial"], record.trace["batches"]) == (alone.trace["initial"], alone.trace["batches"])
    assert record.test == pytest.approx(alone.test, abs=TOLERANCE) and record.val == pytest.approx(alone.val, abs=TOLERANCE)
    assert [step for step, _, _ in record.curve] == [step for step, _, _ in alone.curve]
    for point, other in zip(record.curve, alone.curve):
        assert point == pytest.approx(other, abs=2e-5)
    assert {file.name for file in (folder / "parallel").iterdir()} == {file.name for file in (folder / "alone").iterdir()}
    assert [output.count("step ") for output in outputs] == [RUNS[name].steps] + [0] * (processes - 1)
    assert len({output[output.index("weights ") :] for output in outputs}) == 1, "the processes end with other weights or records"
    assert all("threads of gloo: 0\n" in output for output in outputs), "threads at the end of Python can abort a process"


@pytest.mark.slow
def test_two_processes_have_the_weights_and_the_record_of_one(tmp_path):
    assert_as_one_process("plain", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name, processes", [("init", 2), ("slots", 4), ("class weights", 2), ("guessed labels", 2)])
def test_several_processes_have_the_weights_and_the_record_of_one(name, processes, tmp_path):
    assert_as_one_process(name, tmp_path, processes)


@pytest.mark.slow
def test_killed_processes_continue_from_the_checkpoint_and_end_with_equal_weights(tmp_path):
    train("plain", tmp_path / "whole")
    first, second = start("plain", tmp_path / "killed", 2, deadly_step=20)
    output, _ = first.communicate(timeout=600)
    second.kill()
    second.communicate()
    assert first.returncode == -signal.SIGKILL and output.endswith("step 20\n")
    assert (tmp_path / "killed" / CHECKPOINT).exists() and not (tmp_path / "killed" / RECORD).exists()
    output, _ = train("plain", tmp_path / "killed")
    assert output.startswith("step 20\n"), "not continued after the checkpoint of step 19"
    assert (tmp_path / "killed" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_torchrun_starts_killed_processes_again(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, __file__, "plain", str(tmp_path / "run"), "20"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 20\n") == 2 and done.stdout.count("step 19\n") == 1, done.stdout
    train("plain", tmp_path / "whole")
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_processes_started_again_do_not_read_what_earlier_ones_wrote():
    def join(rank: int, start: int):
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        own = parallel.store_of_this_start(client, rank, 3)
        own.set(f"address of {rank}", str(start))
        read[start, rank] = [int(own.get(f"address of {other}")) for other in range(3)]

    server, read = dist.TCPStore("127.0.0.1", 0, is_master=True), {}
    server.set("came/1", "a process that was killed before the first one came")
    for start in (1, 2, 3):
        processes = [threading.Thread(target=join, args=(rank, start), daemon=True) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
    assert read == {(start, rank): [start] * 3 for start in (1, 2, 3) for rank in range(3)}


@pytest.mark.slow
def test_all_processes_refuse_a_model_with_dropout_and_end(tmp_path):
    started = start("dropout", tmp_path / "run", 2)
    for one in started:
        _, errors = one.communicate(timeout=600)
        assert one.returncode == 1 and "random draws (dropout" in errors
    assert not (tmp_path / "run" / RECORD).exists() and not (tmp_path / "run" / CHECKPOINT).exists()


# Without other processes


def test_script_without_torchrun_trains_as_fit_does(tmp_path):
    run = SHORT.vary(steps=3, dropout=0.1)
    parallel.fit_parallel(run, tmp_path / "script")
    fit(run, tmp_path / "fit")
    assert (tmp_path / "script" / WEIGHTS).read_bytes() == (tmp_path / "fit" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    "run, reason",
    [
        (SHORT.vary(objective=partial(DINO, prototypes=16), augment=augment.digit_crops(local=0)), "DINO.*mean over images"),
        (SHORT.vary(early_stop=2), "early_stop=2"),
        (SHORT.vary(steps=0, init=SHORT), "nothing to train"),
        (SHORT.vary(batch=9), "batch=9.*4 processes; try batch=8"),
    ],
    ids=["objective", "early stop", "no steps", "batch"],
)
def test_run_with_other_results_in_parts_is_refused_before_it_begins(run, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=reason):
        parallel.fit_parallel(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_device_that_several_processes_cannot_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for device in ("mps", "gpu", "cuda:0"):
        with pytest.raises(ValueError, match=f"'{device}'; expected 'cpu', 'cuda' or 'auto'"):
            parallel.fit_parallel(SHORT, tmp_path, device=device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 2 on this machine needs a GPU of its own; found 1"):
        parallel.fit_parallel(SHORT, tmp_path, device="cuda")


def test_old_record_without_the_number_of_processes_is_valid_and_reports_name_it(tmp_path):
    record = fit(SHORT.vary(steps=1), tmp_path)
    plain = json.loads(records.to_json(record))
    del plain["processes"], plain[records.CHECKSUM]
    assert records.parse(json.dumps(plain).encode(), "old") == record
    with pytest.raises(ValueError, match="processes is 'two'; expected int or None"):
        replace(record, processes="two")
    assert "processes" not in provenance([record], "")["Machine"]
    four = replace(record, processes=4, arm="B")
    assert "threads 1, processes 4" in provenance([four], "")["Machine"]
    differ = [text for text in warnings([replace(four, processes=2, arm="A"), four]) if "processes" in text]
    assert differ == ["Runs differ in processes: 2 in A; 4 in B"]


class Calls(MeanTokens):
    """It counts its calls."""

    calls = 0

    def forward(self, *arguments, **options):
        self.calls += 1
        return super().forward(*arguments, **options)


def training(run: Run) -> Training:
    return Training(run, data := digits(), data.subset(labels=run.labels, val=run.val, seed=run.seed), "cpu")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dropout": 0.01}, "random number generator.*dropout"),
        ({"drop_path": 0.01}, "random number generator.*drop_path"),
        ({"pool": Projected}, "running_mean.*batch normalization"),
        ({"model": SmallCNN}, "running_mean.*batch normalization"),
    ],
    ids=["dropout", "drop path", "batch norm", "cnn"],
)
def test_model_with_draws_or_batch_normalization_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        parallel.check_images_are_independent(training(SHORT.vary(**change)))


def test_model_that_counts_in_an_attribute_is_refused():
    one = training(SHORT)
    one.objective.model.pool = Calls(dim=1)
    with pytest.raises(ValueError, match=r"changes the attribute Calls\.calls, also for each part of a batch"):
        parallel.check_images_are_independent(one)


@pytest.mark.parametrize("begin", [0.0, 0.5, None])
def test_model_whose_images_affect_each_other_is_refused(begin):
    """From the fraction `begin` of the training on, the mean over the batch is subtracted from the logits."""
    one = training(SHORT)
    model = one.objective.model
    model.progress = 0.0  # the objective keeps this up to date
    model.register_forward_hook(lambda m, _, logits: logits if begin is None or m.progress < begin else logits - logits.mean(0))
    if begin is None:
        return parallel.check_images_are_independent(one)
    with pytest.raises(ValueError, match="depends on the other images"):
        parallel.check_images_are_independent(one)


def test_training_without_a_checkpoint_file_writes_no_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = training(SHORT.vary(steps=2))
    loop.train([one], one.train_step, lambda step, accuracy: None)
    assert one.ended and len(one.curve) == 2 and not list(tmp_path.iterdir())


def test_parts_of_a_batch_are_the_whole_batch():
    whole = Batch(torch.arange(12.0).view(12, 1, 1, 1), torch.arange(12.0).view(12, 1))
    parts = [parallel.part(whole, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([one.images for one in parts]), whole.images)
    assert torch.equal(torch.cat([one.targets for one in parts]), whole.targets)


if __name__ == "__main__":
    main(*sys.argv[1:])
