"""Training: equal bit for bit, also after a kill and resume; what a technique must not change; and what is refused."""

import multiprocessing
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from toys import TINY_VIT, slow_after, slow_but

from smallvit import (
    Attention,
    Block,
    Learned,
    LocalityAttention,
    MeanTokens,
    PatchEmbed,
    Pixels,
    Run,
    ShiftedPatchEmbed,
    SinCos2d,
    SmallCNN,
    Supervised,
    ViT,
    accuracy,
    augment,
    digits,
    evaluator,
    fit,
    knn,
    linear_probe,
    load,
    optim,
)
from smallvit.evaluate import PerImage
from smallvit.numerics import Numerics
from smallvit.packing import unpack_bits, unpack_floats
from smallvit.recipe import load_recipe
from smallvit.record import CHECKPOINT, CURVE, RECORD, WEIGHTS, Record, code, read_record, write_record
from smallvit.rng import stream
from smallvit.storage import HOST
from smallvit.train import checkpoint, fit_stacked
from smallvit.train.batches import batch_index
from smallvit.train.fit import Tags, evaluate
from smallvit.train.loop import CHECKS, Training
from smallvit.train.parallel import fit_parallel

SHORT = Run(model=TINY_VIT, labels=50, val=50, steps=24, batch=8, lr=1e-3, augment=augment.digits())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(record: Record) -> dict:
    return asdict(record) | {"seconds": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the finished run SHORT. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    fit(SHORT, folder)
    return folder


def training_of(run: Run) -> Training:
    data = run.data()
    return Training(run, data, data.subset(labels=run.labels, val=run.val, seed=run.seed), "cpu")


# Equal bit for bit


@pytest.mark.parametrize(
    "run",
    slow_after(1, [
        SHORT.vary(attention=partial(Attention, dropout=0.2), drop_path=0.2, dropout=0.1, ema=0.0, steps=12),
        SHORT,
        SHORT.vary(model=SmallCNN, precision="bf16"),
        SHORT.vary(early_stop=3),
    ]),
    ids=["dropout", "plain", "cnn in bf16", "early stop"],
)
def test_two_fits_are_bitwise_equal_and_another_seed_is_not(run, tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = torch.rand(1)
    one = fit(run, tmp_path / "1")
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected), "the caller's random numbers go on"
    torch.manual_seed(2)  # the caller's generator does not matter
    two = fit(run, tmp_path / "2")
    assert (tmp_path / "1" / WEIGHTS).read_bytes() == (tmp_path / "2" / WEIGHTS).read_bytes()
    assert without_times(one) == without_times(two)
    fit(run.vary(seed=1), tmp_path / "3")
    assert not equal(weights(tmp_path / "1"), weights(tmp_path / "3"))


@pytest.mark.parametrize("without_gradients", slow_after(1, [torch.inference_mode, torch.no_grad]))
def test_fit_trains_also_where_the_caller_has_switched_off_gradients(without_gradients, finished, tmp_path):
    with without_gradients():
        fit(SHORT, tmp_path)
        assert not torch.is_grad_enabled(), "the caller's choice is kept"
    assert equal(weights(finished), weights(tmp_path))


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        (partial(linear_probe, of="mean", layers=9), "layers is 9; expected from 1 to 2, the number of blocks of this model"),
        (partial(knn, of="class token"), "this ViT has no class token"),
    ],
)
def test_features_that_the_model_does_not_have_are_refused_before_the_training(evaluator, message, tmp_path):
    run = SHORT.vary(pool=MeanTokens, evaluators=(accuracy, evaluator))
    with pytest.raises(ValueError, match=message):
        fit(run, tmp_path, watch=lambda *_: pytest.fail("a step was taken"))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu'; expected cpu, cuda, mps or auto"),
        (0.5, "device is 0.5; expected cpu, cuda, mps or auto"),
        ("cuda:99", "device is 'cuda:99', but torch finds no such GPU"),
    ],
)
def test_device_that_is_not_there_is_refused_before_anything_is_trained(device, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(SHORT.vary(init=SHORT), tmp_path, device=device)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        (Numerics(precision="fp16"), "precision of the numerics is 'fp16'; expected 'fp32' or 'bf16'"),
        (Numerics(kernel="nativ"), "kernel of the numerics is 'nativ'; expected 'explicit' or 'fused' or 'native'"),
        (Numerics(kernel="native", compiled=True), "got native blocks and compiled"),
        ("native", r"numerics is 'native'; expected such as Numerics\(kernel='native'\)"),
    ],
    ids=["precision", "kernel", "compiled", "text"],
)
def test_unknown_numerics_are_refused_before_anything_is_trained(numerics, message, tmp_path, monkeypatch):
    for call in (fit, fit_parallel, lambda run, folder, **more: fit_stacked([run, run.vary(seed=1)], [folder, tmp_path], **more)):
        with pytest.raises(ValueError, match=message):
            call(SHORT, tmp_path / "run", numerics=numerics)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        fit_parallel(SHORT, tmp_path / "run", numerics=numerics)
    assert not (tmp_path / "run").exists()


def test_fit_and_load_do_not_depend_on_the_default_type_and_device_of_torch(finished, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            fit(SHORT, tmp_path)
            assert torch.get_default_device().type == "meta", "the caller's choice is kept"
            assert {tensor.device.type for tensor in load(tmp_path).model.parameters()} == {"cpu"}
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(weights(finished), weights(tmp_path))


def test_fit_computes_in_the_precision_of_the_run_also_inside_autocast(finished, tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        fit(SHORT, tmp_path)
        assert torch.is_autocast_enabled("cpu"), "the caller's choice is kept"
    assert equal(weights(finished), weights(tmp_path))


@pytest.mark.slow
def test_two_threads_that_train_at_the_same_time_do_not_disturb_each_other(tmp_path):
    runs = [SHORT.vary(seed=seed, dropout=0.2) for seed in range(2)]  # dropout draws from the generator that all threads share
    for run in runs:
        fit(run, tmp_path / f"alone{run.seed}")
    with ThreadPoolExecutor(2) as pool:
        records = [*pool.map(lambda run: fit(run, tmp_path / f"thread{run.seed}"), runs)]
    assert [record.finished for record in records] == [True, True]
    assert all(equal(weights(tmp_path / f"alone{seed}"), weights(tmp_path / f"thread{seed}")) for seed in range(2))


TIED = """
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate
class Tied(ViT):
    def __init__(self, size, channels, classes):
        super().__init__(size, channels, classes, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)
        self.blocks[1].mlp = self.blocks[0].mlp
RUNS = ablate({"a": Run()}, references=False)
"""


@pytest.mark.parametrize("kernel", slow_after(1, ["native", None]))
def test_model_with_tied_weights_is_trained_saved_and_loaded(kernel, tmp_path):
    numerics = Numerics(kernel=kernel)
    (tmp_path / "tied.py").write_text(TIED)
    run = SHORT.vary(model=load_recipe(tmp_path / "tied.py").Tied, steps=12)
    record = fit(run, tmp_path / "run", numerics=numerics)
    model = load(tmp_path / "run").model
    assert model.blocks[1].mlp is model.blocks[0].mlp and record.params == sum(p.numel() for p in model.parameters())
    saved = weights(tmp_path / "run")
    assert torch.equal(saved["blocks.0.mlp.0.weight"], saved["blocks.1.mlp.0.weight"])
    test = digits().test.open()
    predicted = model(load(tmp_path / "run").preprocess(test.images)).argmax(-1)
    assert (predicted == test.labels).double().mean().item() == pytest.approx(record.test["accuracy"], abs=1e-4)
    together = fit_stacked([run, run.vary(seed=1)], [tmp_path / "one", tmp_path / "two"], numerics=numerics)
    assert [r.status for r in together] == ["finished"] * 2
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=1e-3)


@pytest.mark.skipif(os.name != "posix", reason="needs modes of files")
def test_weights_may_be_read_by_those_who_may_read_the_record(tmp_path):
    fit(SHORT.vary(steps=1), tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / RECORD).stat().st_mode


def first_steps(run: Run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], str]:
    """The augmented batches of three steps of a run, its initial weights, and the hash of its labelled images."""
    training = training_of(run)
    initial = {name: p.detach().clone() for name, p in training.model.state_dict().items()}
    batches = []
    training.objective.register_forward_pre_hook(lambda _, given: batches.append(given[0].images.clone()))
    for _ in range(3):
        training.train_step()
    return batches, initial, training.subset.sha256


def test_technique_changes_neither_subset_nor_batches_nor_shared_weights():
    base = SHORT.vary(attention=partial(Attention, dropout=0.1))
    batches, initial, sha256 = first_steps(base)
    arms = {
        "SPT": base.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2)),
        "LSA": base.vary(attention=partial(LocalityAttention, dropout=0.1)),
        "positions": base.vary(position=SinCos2d),
        "pool": base.vary(pool=MeanTokens),
        "registers": base.vary(registers=2),
        "block": base.vary(block=partial(Block, layer_scale=1e-4, dropout=0.1)),
    }
    for name, run in arms.items():
        other_batches, other_initial, subset = first_steps(run)
        assert subset == sha256 and all(torch.equal(a, b) for a, b in zip(batches, other_batches)), name
        shared = [key for key in initial if key in other_initial and other_initial[key].shape == initial[key].shape]
        assert len(shared) > 15, f"{name} shares {len(shared)} tensors"
        assert all(torch.equal(initial[key], other_initial[key]) for key in shared), name
    assert not torch.equal(batches[0], batches[1])


def test_transform_that_ignores_its_generator_is_still_the_same_in_every_arm():
    class Careless:
        unsafe_for_digits = None

        def __call__(self, batch, generator):
            return batch._replace(images=batch.images + torch.rand(()))

    seen = []
    for dropout in (0.0, 0.5):
        run = SHORT.vary(block=partial(Block, dropout=dropout))
        object.__setattr__(run, "augment", (Careless(),))
        seen.append(first_steps(run)[0])
    assert all(torch.equal(one, two) for one, two in zip(*seen))


# The steps


def test_every_epoch_contains_every_image_once_in_another_order():
    index = torch.cat([batch_index(10, 4, step, seed=0) for step in range(5)])
    first, second = index[:10].tolist(), index[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert torch.equal(index, batch_index(10, 20, 0, seed=0)) and torch.equal(index[16:], batch_index(10, 4, 4, seed=0))
    assert not torch.equal(index, batch_index(10, 20, 0, seed=1))


def test_learning_rate_rises_linearly_and_falls_in_a_cosine():
    rates = [optim.learning_rate(step / 100, 0.1, 1 / 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1) and rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.01 and rates[10:] == sorted(rates[10:], reverse=True)
    assert optim.learning_rate(0.0, 0.0, 0.01) == 1
    with pytest.raises(ValueError, match="schedule is 'linear'; expected 'cosine' or 'constant'"):
        optim.learning_rate(0.5, 0.1, 0.01, "linear")


@pytest.mark.parametrize("schedule, last", [("cosine", 0.0), ("constant", 1.0)])
def test_schedule_of_a_run_sets_the_rate_of_the_optimizer(schedule, last):
    training = training_of(SHORT.vary(steps=100, schedule=schedule, lr=2e-3))
    rates = []
    for training.step in (0, 9, 99):
        training.set_learning_rates(training.optimizer)
        rates.append(training.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2e-4, 2e-3, 2e-3 * last], abs=1e-6)


def test_ema_is_the_stated_running_mean_of_the_weights():
    training = training_of(SHORT.vary(ema=0.25, clip=0.0))
    mean = None
    for step in range(1, 13):
        training.train_step()
        now = training.objective.model.head.weight.detach().double()
        weight = 1 / min(step, 0.25 * 24)
        mean = now.clone() if mean is None else mean + weight * (now - mean)
    assert torch.allclose(training.model.head.weight.double(), mean, atol=1e-6)


def test_weight_decay_spares_norms_biases_temperatures_prefix_tokens_and_positions():
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), attention=LocalityAttention, position=Learned)
    (decayed, spared), rates = optim.decay_groups(Supervised(model), 0.1)
    assert [rate(0.3, 0.7) for rate in rates] == [0.7, 0.7]
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    assert {names[id(p)] for p in decayed["params"]} == {
        name for name, p in model.named_parameters() if p.ndim > 1 and name not in ("prefix", "position.table")
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


@pytest.mark.parametrize(
    "field, value",
    slow_after(1, [("lr", 2e-3), ("weight_decay", 5.0), ("warmup", 0.5), ("schedule", "constant"), ("layer_decay", 0.5), ("clip", 0.01),
     ("ema", 0.5), ("batch", 9)]),
)  # fmt: skip
def test_every_setting_of_the_optimizer_changes_the_weights(field, value, finished, tmp_path):
    fit(SHORT.vary(**{field: value}), tmp_path)
    assert not equal(weights(finished), weights(tmp_path))


# Records


def test_record_contains_what_was_done(tmp_path):
    record = fit(SHORT, tmp_path, tags=Tags(recipe="test", arm="a", role="baseline", baseline="a"))
    assert record.finished and (record.recipe, record.arm, record.role, record.baseline) == ("test", "a", "baseline", "a")
    assert record.score == "accuracy" and record.result == record.test["accuracy"]
    assert record.steps == 24 and record.images_seen == 24 * 8 and record.test_reads == 1
    assert record.params == sum(p.numel() for p in weights(tmp_path).values())
    assert record.macs > 0 and record.threads == torch.get_num_threads() and record.chosen_on_val is None
    assert 0 <= record.test["accuracy"] <= 1 and len(record.curve) == CHECKS and record.curve[-1][0] == 24
    assert read_record(tmp_path) == record and not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("evaluators", slow_but([(accuracy,)], [(accuracy,), (knn,), (linear_probe, accuracy)]), ids=["accuracy", "knn", "probe"])
def test_record_says_which_test_images_are_right(evaluators, tmp_path):
    record = fit(SHORT.vary(evaluators=evaluators), tmp_path)
    bits = record.correct_bits
    assert len(bits) == record.test_images == 500 and record.val_images == 50
    assert bits.mean() == pytest.approx(record.result, abs=1e-12) and 0 < bits.sum() < 500
    if evaluators == (accuracy,):
        test, trained = digits().test.open(), load(tmp_path)
        predicted = trained.predict_proba(test.images).argmax(1)
        assert bits.tolist() == (predicted == test.labels).tolist()


def test_finished_run_is_not_trained_again(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / RECORD).read_bytes()
    fit(SHORT, tmp_path, watch=lambda *_: pytest.fail("it was trained again"))
    assert (tmp_path / RECORD).read_bytes() == before


def test_early_stop_reports_the_best_check_and_counts_the_labels(tmp_path):
    record = fit(SHORT.vary(early_stop=2, steps=144, lr=8e-3), tmp_path)
    curve = [score for _, _, score in record.curve]
    assert len(curve) < CHECKS and max(curve[-2:]) <= max(curve[:-2])
    assert record.val["accuracy"] == max(curve)
    assert record.chosen_on_val == {"what": "early stop", "labels": 50}


@pytest.mark.parametrize(
    ("evaluator", "expected"),
    [
        (linear_probe, {"what": "C of the linear probe", "labels": 50}),
        (partial(linear_probe, strengths=(0.1, 1.0), standardize=False), {"what": "C of the linear probe", "labels": 50}),
        (partial(linear_probe, strengths=(1.0,)), None),
    ],
)
def test_labels_of_validation_images_count_if_a_probe_chooses_by_them(evaluator, expected, tmp_path):
    assert fit(SHORT.vary(steps=2, evaluators=(evaluator,)), tmp_path).chosen_on_val == expected


def test_run_without_validation_images_trains(tmp_path):
    record = fit(SHORT.vary(val=0, steps=12), tmp_path)
    assert record.val == {} and all(score is None for _, _, score in record.curve)


def test_probe_of_an_untrained_model_counts_the_labels_of_its_choice(tmp_path):
    record = fit(SHORT.vary(steps=0, evaluators=(linear_probe,)), tmp_path)
    assert record.steps == 0 and record.score == "linear_probe"
    assert record.chosen_on_val == {"what": "C of the linear probe", "labels": 50}


def half(model, splits):
    yield "half", 0.5


def another_half(model, splits):
    yield "half", 0.25


def seven(model, splits):
    yield "seven", 7.0


def test_numbers_that_hide_another_or_cannot_judge_are_refused():
    data = digits()
    model, subset = SHORT.model((8, 8), 1, 10), data.subset(labels=50, val=20, seed=0)

    def results(*evaluators):
        return evaluate(SimpleNamespace(evaluators=evaluators, early_stop=0, reads_labels=False), model, subset, data.test)

    for evaluators, words in (
        ((half, another_half), "another_half reports 'half'.*expected another name"),
        ((seven, half), "seven reports seven=7 first.*from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            results(*evaluators)
    found = results(half, seven)
    assert found["score"] == "half" and found["val"] == found["test"] == {"half": 0.5, "seven": 7.0}
    assert found["correct"] is None


def test_values_of_the_single_images_are_kept():
    data = digits()
    model, subset = SHORT.model((8, 8), 1, 10), data.subset(labels=50, val=20, seed=0)

    def kept(values, lower=False, right=None):
        @evaluator(lower_is_better=lower)
        def mine(model, splits):
            n = len(splits.test)
            yield "mine", PerImage(values(n), right=right and right(n))

        run = SimpleNamespace(evaluators=(mine,), early_stop=0, reads_labels=False)
        found = evaluate(run, model, subset, data.test)
        return found["correct"], found["contributions"]

    bits, nothing = kept(lambda n: torch.arange(n) % 2)
    assert unpack_bits(bits, 500).tolist() == [i % 2 == 1 for i in range(500)] and nothing is None
    nothing, numbers = kept(lambda n: torch.arange(n) / 1_000)
    assert unpack_floats(numbers, 500) == pytest.approx(np.arange(500) / 1_000) and nothing is None
    wrong, ones = (lambda n: torch.arange(n) % 4 == 0), (lambda n: torch.ones(n))
    nothing, numbers = kept(wrong, lower=True)  # an error rate: True is not "right"
    assert unpack_floats(numbers, 500).tolist() == [float(i % 4 == 0) for i in range(500)] and nothing is None
    nothing, numbers = kept(ones)  # as of an AUC of 1
    assert unpack_floats(numbers, 500).tolist() == [1.0] * 500 and nothing is None
    bits, numbers = kept(ones, right=wrong)
    assert unpack_bits(bits, 500).sum() == 125 and unpack_floats(numbers, 500).tolist() == [1.0] * 500
    bits, nothing = kept(lambda n: wrong(n).double(), right=wrong)
    assert unpack_bits(bits, 500).sum() == 125 and nothing is None
    with pytest.raises(ValueError, match="mine reports mine with 10 values of `right` for 20 images"):
        kept(ones, right=lambda n: torch.ones(10))
    with pytest.raises(ValueError, match="mine reports mine with 10 values for 20 images; expected one for each"):
        kept(lambda n: torch.ones(10))


# Refused


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"early_stop": 2, "val": 0}, "early_stop.*validation"),
        ({"augment": (augment.Flip(),)}, "Flip on digits"),
        ({"tokenizer": partial(PatchEmbed, patch=3)}, "patches of 3 pixels do not tile an image of 8 x 8"),
        ({"heads": 3}, "3 heads do not divide width 16"),
        ({"labels": 5000}, "labels"),
        ({"labels": 100, "batch": 100_000}, "batch=100000 for 100 training images; expected at most 10000"),
        ({"model": Pixels, "evaluators": (knn,)}, "Pixels has no weights to train and the run has steps=24; expected steps=0"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_before_training(changes, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "train_step", lambda self: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=words):
        fit(SHORT.vary(**changes), tmp_path)


def test_unsafe_transform_can_be_forced_and_a_batch_may_repeat_images(tmp_path):
    assert fit(SHORT.vary(augment=(augment.Flip(force=True),), steps=2), tmp_path / "flip").finished
    assert fit(SHORT.vary(labels=10, batch=1000, steps=1), tmp_path / "batch").finished


def test_loss_that_is_not_finite_ends_the_run_with_its_step_and_seed(tmp_path):
    with pytest.raises(FloatingPointError, match=r"loss is nan at step \d+ of 24 \(seed 0\)"):
        fit(SHORT.vary(lr=10.0, clip=0.0, weight_decay=10.0, block=partial(Block, layer_scale=1e30)), tmp_path)
    assert read_record(tmp_path) is None


def test_two_processes_cannot_train_one_run_at_the_same_time(tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(Timeout):
        fit(SHORT, tmp_path)


# Killed and resumed


def start_fit(run: Run, folder: Path) -> multiprocessing.Process:
    """Start `fit` in another process."""
    process = multiprocessing.get_context("fork").Process(target=fit, args=(run, folder))
    process.start()
    return process


def checkpoint_step(folder: Path) -> int:
    """The step of the checkpoint in a folder; 0 if there is none."""
    return torch.load(folder / CHECKPOINT, weights_only=True)[0]["step"] if (folder / CHECKPOINT).exists() else 0


@pytest.mark.slow
def test_run_killed_at_random_steps_and_resumed_ends_bitwise_equal(tmp_path, monkeypatch):
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.05)
    run = SHORT.vary(steps=300, attention=partial(Attention, dropout=0.1), early_stop=50)
    uninterrupted = fit(run, tmp_path / "uninterrupted")
    folder, resumed_at = tmp_path / "killed", [0]
    for attempt in range(4):
        process = start_fit(run, folder)
        while process.is_alive() and checkpoint_step(folder) == resumed_at[-1]:
            time.sleep(0.005)
        time.sleep((stream(attempt, "kill") % 100) / 1000)
        process.kill()
        process.join()
        resumed_at.append(checkpoint_step(folder))
    killed = fit(run, folder)
    assert len(set(resumed_at)) >= 3, f"the kills came too late: {resumed_at}"
    assert equal(weights(tmp_path / "uninterrupted"), weights(folder))
    assert without_times(uninterrupted) == without_times(killed)


def leave_checkpoint(folder: Path, run: Run = SHORT, origin: str = "") -> bytes:
    """Write a checkpoint of a run at step 10 into a folder, as a killed `fit` leaves it. Returns its content."""
    folder.mkdir(exist_ok=True)
    training = training_of(run)
    for _ in range(10):
        training.train_step()
    training.origin = origin or code()["sha256"] + run.data().sha256
    checkpoint.save([training], folder / CHECKPOINT)
    return (folder / CHECKPOINT).read_bytes()


def test_checkpoint_is_resumed_at_its_step(finished, tmp_path, monkeypatch):
    leave_checkpoint(tmp_path / "resumed")
    steps, train_step = [], Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self: (steps.append(self.step), train_step(self)))
    fit(SHORT, tmp_path / "resumed")
    assert steps == list(range(10, 24)) and equal(weights(tmp_path / "resumed"), weights(finished))


def test_checkpoint_of_other_code_or_data_starts_again_with_a_note(tmp_path, monkeypatch, capsys):
    leave_checkpoint(tmp_path, origin="other")
    steps, train_step = [], Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self: (steps.append(self.step), train_step(self)))
    fit(SHORT, tmp_path)
    assert steps == list(range(24)) and not (tmp_path / f"{CHECKPOINT}.damaged").exists()
    assert f"have changed since the checkpoint {tmp_path / CHECKPOINT}; training starts again" in capsys.readouterr().err


def spoil_checkpoint(kind: str, folder: Path, finished: Path):
    if kind == "other run":
        leave_checkpoint(folder, SHORT.vary(lr=5e-4))
    elif kind == "record of another run":
        fit(SHORT.vary(lr=5e-4, steps=2), folder)
    elif kind == "torn record":
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        (folder / RECORD).write_bytes((folder / RECORD).read_bytes()[:-100])
    else:
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        record = read_record(folder)
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[:-4] + b"\0\0\0\0" if kind == "damaged weights" else content[:-4])
        write_record(folder, record)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("other run", r"checkpoint.pt belongs to run \w+, not to"),
        ("record of another run", r"holds run \w+, not"),
        ("torn record", "record.json is damaged .*delete it"),
        ("damaged weights", "model.safetensors is damaged.*delete the folder"),
        ("torn weights", "model.safetensors is damaged.*delete the folder"),
    ],
)
def test_damaged_files_and_files_of_another_run_are_refused_and_kept(kind, words, finished, tmp_path):
    spoil_checkpoint(kind, tmp_path, finished)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"}
    with pytest.raises(ValueError, match=words):
        fit(SHORT, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"} == before


def test_full_disk_during_a_checkpoint_keeps_the_one_before(finished, tmp_path, monkeypatch):
    before = leave_checkpoint(tmp_path)

    def full(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"could not write checkpoint\.pt.*No space left on device"):
        fit(SHORT, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / CHECKPOINT).read_bytes() == before and len(list(tmp_path.glob(".checkpoint*"))) == 0
    fit(SHORT, tmp_path)
    assert equal(weights(tmp_path), weights(finished))


def test_half_written_files_of_a_killed_run_are_deleted(tmp_path):
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    own, another, old = f"{HOST}.{ended.pid}", "another.1", "another.2"
    for owner in (own, f"{HOST}.{os.getppid()}", another, old):
        (tmp_path / f".{CHECKPOINT}.{owner}.01234567.new").write_bytes(b"half")
    os.utime(tmp_path / f".{CHECKPOINT}.{old}.01234567.new", (0, 0))
    fit(SHORT.vary(steps=2), tmp_path)
    living = [f".{CHECKPOINT}.{owner}.01234567.new" for owner in (f"{HOST}.{os.getppid()}", another)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", CURVE, WEIGHTS, RECORD, *living])
