"""Training: what is equal bit for bit, what survives a kill, and what is refused."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from smallvit import (
    Attention,
    Block,
    Learned,
    LocalityAttention,
    MeanTokens,
    PatchEmbed,
    Run,
    ShiftedPatchEmbed,
    SinCos2d,
    SmallCNN,
    ViT,
    augment,
    digits,
    fit,
    linear_probe,
    optim,
    record,
)
from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, read_record
from smallvit.rng import stream
from smallvit.train.fit import evaluations
from smallvit.train.loop import CHECKS, Training, order

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)
SHORT = Run(model=TINY, labels=50, val=50, steps=24, batch=8, lr=1e-3, augment=augment.digits())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "seconds"}


@pytest.mark.parametrize(
    "run",
    [
        SHORT,
        SHORT.vary(attention=partial(Attention, dropout=0.2), drop_path=0.2, dropout=0.1, ema=0.0),
        SHORT.vary(model=SmallCNN, precision="bf16"),
        SHORT.vary(early_stop=3),
    ],
    ids=["plain", "dropout", "cnn in bf16", "early stop"],
)
def test_two_fits_are_bitwise_equal_and_another_seed_is_not(run, tmp_path):
    one, two = fit(run, tmp_path / "1"), fit(run, tmp_path / "2")
    assert equal(weights(tmp_path / "1"), weights(tmp_path / "2"))
    assert without_times(one) == without_times(two)
    fit(run.vary(seed=1), tmp_path / "3")
    assert not equal(weights(tmp_path / "1"), weights(tmp_path / "3"))


def test_the_generator_of_the_caller_does_not_matter(tmp_path):
    torch.manual_seed(1)
    fit(SHORT, tmp_path / "1")
    torch.manual_seed(2)
    fit(SHORT, tmp_path / "2")
    assert equal(weights(tmp_path / "1"), weights(tmp_path / "2"))


def seen_by(run: Run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], str]:
    """Every augmented batch of the run, the weights it starts from, and its labelled images."""
    data = run.data()
    subset = data.subset(labels=run.labels, val=run.val, seed=run.seed)
    training = Training(run, data, subset, "cpu")
    start = {name: p.detach().clone() for name, p in training.model.state_dict().items()}
    batches = []
    training.objective.register_forward_pre_hook(lambda _, given: batches.append(given[0].images.clone()))
    for _ in range(5):
        training.train_step()
    return batches, start, subset.sha256


def test_a_technique_changes_neither_subset_nor_order_nor_pixels_nor_shared_weights():
    base = SHORT.vary(attention=partial(Attention, dropout=0.1))
    batches, start, sha256 = seen_by(base)
    arms = {
        "SPT": base.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2)),
        "LSA": base.vary(attention=partial(LocalityAttention, dropout=0.1)),
        "positions": base.vary(position=SinCos2d),
        "pool": base.vary(pool=MeanTokens),
        "registers": base.vary(registers=2),
        "block": base.vary(block=partial(Block, layer_scale=1e-4, dropout=0.1)),
    }
    for name, run in arms.items():
        theirs, begin, subset = seen_by(run)
        assert subset == sha256 and all(torch.equal(a, b) for a, b in zip(batches, theirs)), name
        shared = [key for key in start if key in begin and begin[key].shape == start[key].shape]
        assert len(shared) > 15, f"{name} shares {len(shared)} tensors"
        assert all(torch.equal(start[key], begin[key]) for key in shared), name
    assert not torch.equal(batches[0], batches[1])


def test_every_epoch_sees_every_image_once_and_in_another_order():
    places = torch.cat([order(10, 4, step, seed=0) for step in range(5)])
    first, second = places[:10].tolist(), places[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert torch.equal(places, order(10, 20, 0, seed=0)) and torch.equal(places[16:], order(10, 4, 4, seed=0))
    assert not torch.equal(places, order(10, 20, 0, seed=1))


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    paces = [optim.learning_rate(step / 100, 0.1, 1 / 100) for step in range(100)]
    assert paces[0] == pytest.approx(0.1) and paces[9] == pytest.approx(1) and paces[55] == pytest.approx(0.5)
    assert 0 < paces[-1] < 0.01 and paces[10:] == sorted(paces[10:], reverse=True)
    assert optim.learning_rate(0.0, 0.0, 0.01) == 1


def test_averaged_weights_are_the_stated_running_mean(tmp_path):
    run = SHORT.vary(ema=0.25, clip=0.0)
    data = run.data()
    subset = data.subset(labels=run.labels, val=run.val, seed=0)
    training = Training(run, data, subset, "cpu")
    mean = None
    for step in range(1, 13):
        training.train_step()
        now = training.objective.model.head.weight.detach().double()
        weight = 1 / min(step, 0.25 * 24)
        mean = now.clone() if mean is None else mean + weight * (now - mean)
    assert torch.allclose(training.model.head.weight.double(), mean, atol=1e-6)


def test_weight_decay_spares_norms_biases_temperatures_tokens_and_positions():
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), attention=LocalityAttention, position=Learned)
    (decayed, spared), paces = optim.decay_groups(model, 0.1)
    assert [pace(0.3, 0.7) for pace in paces] == [0.7, 0.7]
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    assert {names[id(p)] for p in decayed["params"]} == {
        name for name, p in model.named_parameters() if p.ndim > 1 and name not in ("prefix", "position.table")
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


@pytest.mark.parametrize(
    "field, value", [("lr", 2e-3), ("weight_decay", 5.0), ("warmup", 0.5), ("clip", 0.01), ("ema", 0.5), ("batch", 9)]
)
def test_every_choice_of_the_optimizer_matters(field, value, tmp_path):
    fit(SHORT, tmp_path / "1")
    fit(SHORT.vary(**{field: value}), tmp_path / "2")
    assert not equal(weights(tmp_path / "1"), weights(tmp_path / "2"))


def test_a_record_says_what_was_done(tmp_path):
    record = fit(SHORT, tmp_path, recipe="test")
    assert record["status"] == "finished" and record["recipe"] == "test" and record["score"] == "accuracy"
    assert record["steps"] == 24 and record["images_seen"] == 24 * 8 and record["test_reads"] == 1
    assert record["params"] == sum(p.numel() for p in weights(tmp_path).values())
    assert record["macs"] > 0 and record["threads"] == torch.get_num_threads() and record["chosen_on_val"] is None
    assert 0 <= record["test"]["accuracy"] <= 1 and len(record["curve"]) == CHECKS and record["curve"][-1][0] == 24
    assert read_record(tmp_path) == record
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_finished_run_is_not_trained_again(tmp_path):
    fit(SHORT, tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    fit(SHORT, tmp_path, watch=lambda *_: pytest.fail("it was trained again"))
    assert (tmp_path / RECORD).read_bytes() == before


def test_early_stop_ends_early_reports_the_best_and_counts_the_labels(tmp_path):
    record = fit(SHORT.vary(early_stop=2, steps=240, lr=8e-3), tmp_path)
    curve = [score for _, _, score in record["curve"]]
    assert len(curve) < CHECKS and max(curve[-2:]) <= max(curve[:-2])
    assert record["val"]["accuracy"] == max(curve)
    assert record["chosen_on_val"] == {"what": "early stop", "labels": 50}


def test_early_stop_without_validation_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"early_stop.*validation"):
        fit(SHORT.vary(early_stop=2, val=0), tmp_path)


def test_a_run_without_validation_images_trains(tmp_path):
    record = fit(SHORT.vary(val=0), tmp_path)
    assert record["val"] == {} and all(score is None for _, _, score in record["curve"])


def test_a_probe_of_an_untrained_model_counts_what_it_chose_on(tmp_path):
    record = fit(SHORT.vary(steps=0, evaluators=(linear_probe,)), tmp_path)
    assert record["steps"] == 0 and record["score"] == "linear_probe"
    assert record["chosen_on_val"] == {"what": "C of the linear probe", "labels": 50}


def test_flips_on_digits_are_refused_unless_forced(tmp_path):
    with pytest.raises(ValueError, match="Flip on digits"):
        fit(SHORT.vary(augment=(augment.Flip(),)), tmp_path)
    assert fit(SHORT.vary(augment=(augment.Flip(force=True),)), tmp_path)["status"] == "finished"


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_seed(tmp_path):
    with pytest.raises(FloatingPointError, match=r"loss is nan by step \d+ of 24 \(seed 0\)"):
        fit(SHORT.vary(lr=10.0, clip=0.0, weight_decay=10.0, block=partial(Block, layer_scale=1e30)), tmp_path)
    assert read_record(tmp_path) is None


def test_what_does_not_fit_the_data_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"patches of 3 pixels do not tile an image of 8 x 8"):
        fit(SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)), tmp_path)
    with pytest.raises(ValueError, match=r"3 heads do not divide width 16"):
        fit(SHORT.vary(heads=3), tmp_path)
    with pytest.raises(ValueError, match="labels"):
        fit(SHORT.vary(labels=5000), tmp_path)


# Killed and taken up again


def child(run: Run, folder: Path) -> multiprocessing.Process:
    """`fit` in a process of its own, to be killed."""
    process = multiprocessing.get_context("fork").Process(target=fit, args=(run, folder))
    process.start()
    return process


def test_killed_at_random_steps_and_resumed_ends_bitwise_equal(tmp_path, monkeypatch):
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.05)
    run = SHORT.vary(steps=300, attention=partial(Attention, dropout=0.1), early_stop=50)
    whole = fit(run, tmp_path / "whole")
    folder, resumed_at = tmp_path / "killed", [0]
    for attempt in range(4):
        process = child(run, folder)
        while process.is_alive() and step_of(folder) == resumed_at[-1]:
            time.sleep(0.005)
        time.sleep((stream(attempt, "kill") % 100) / 1000)
        process.kill()
        process.join()
        resumed_at.append(step_of(folder))
    killed = fit(run, folder)
    assert len(set(resumed_at)) >= 3, f"the kills hit nothing: {resumed_at}"
    assert equal(weights(tmp_path / "whole"), weights(folder))
    assert without_times(whole) == without_times(killed)


def step_of(folder: Path) -> int:
    """The step that the folder's checkpoint holds."""
    return torch.load(folder / CHECKPOINT, weights_only=True)["step"] if (folder / CHECKPOINT).exists() else 0


def half_way(tmp_path: Path, run: Run = SHORT) -> None:
    """Leave a checkpoint of `run` at step 10 in the folder."""
    tmp_path.mkdir(exist_ok=True)
    data = run.data()
    training = Training(run, data, data.subset(labels=run.labels, val=run.val, seed=run.seed), "cpu")
    for _ in range(10):
        training.train_step()
    training.checkpoint, training.made_by = tmp_path / CHECKPOINT, record.code()["sha256"] + data.sha256
    training.save()


def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path):
    half_way(tmp_path, SHORT.vary(lr=5e-4))
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match=r"is of run .* not of"):
        fit(SHORT, tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_record_of_another_run_is_refused_and_kept(tmp_path):
    fit(SHORT, tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(ValueError, match="holds the record of run"):
        fit(SHORT.vary(lr=5e-4), tmp_path)
    assert (tmp_path / RECORD).read_bytes() == before


def test_a_broken_checkpoint_is_named_and_a_malicious_one_is_not_run(tmp_path):
    half_way(tmp_path)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be read"):
        fit(SHORT, tmp_path)

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/owned",))

    torch.save({"fingerprint": Evil()}, tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be read"):
        fit(SHORT, tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_full_disk_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    half_way(tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()

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
    fit(SHORT, tmp_path / "whole")
    assert equal(weights(tmp_path), weights(tmp_path / "whole"))


def test_two_processes_do_not_train_one_run_at_the_same_time(tmp_path):
    from filelock import FileLock, Timeout

    with FileLock(tmp_path / ".lock"), pytest.raises(Timeout):
        fit(SHORT, tmp_path)


def test_a_checkpoint_of_other_code_or_data_is_not_gone_on_from(tmp_path):
    half_way(tmp_path / "old")
    state = torch.load(tmp_path / "old" / CHECKPOINT, weights_only=True)
    torch.save(state | {"made_by": "other"}, tmp_path / "old" / CHECKPOINT)
    fit(SHORT, tmp_path / "old")
    fit(SHORT, tmp_path / "new")
    assert equal(weights(tmp_path / "old"), weights(tmp_path / "new"))


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / ".checkpoint.pt.1.new").write_bytes(b"half")
    fit(SHORT, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", WEIGHTS, RECORD]


def test_an_augmentation_that_draws_elsewhere_is_still_the_same_in_every_arm():
    class Careless:
        unsafe_for_digits = None

        def __call__(self, batch, generator):
            return batch._replace(images=batch.images + torch.rand(()))

    seen = []
    for dropout in (0.0, 0.5):
        run = SHORT.vary(block=partial(Block, dropout=dropout))
        object.__setattr__(run, "augment", (Careless(),))
        seen.append(seen_by(run)[0])
    assert all(torch.equal(one, two) for one, two in zip(*seen))


# The numbers of evaluators


def half(model, splits):
    yield "half", 0.5


def another_half(model, splits):
    yield "half", 0.25


def seven(model, splits):
    yield "seven", 7.0


@pytest.mark.parametrize(
    ("evaluators", "words"),
    [
        ((half, another_half), "another_half yields 'half', 0.25; expected another name"),
        ((seven, half), "seven yields 'seven', 7; expected a share from 0 to 1 first"),
    ],
    ids=["a name twice", "no share"],
)
def test_numbers_that_overwrite_another_or_cannot_judge_are_refused(evaluators, words):
    data = digits()
    model, subset = SHORT.model((8, 8), 1, 10), data.subset(labels=50, val=20, seed=0)
    with pytest.raises(ValueError, match=words):
        evaluations(SimpleNamespace(evaluators=evaluators, early_stop=0), model, subset, data.test)
    found = evaluations(SimpleNamespace(evaluators=(half, seven), early_stop=0), model, subset, data.test)
    assert found["score"] == "half" and found["val"] == found["test"] == {"half": 0.5, "seven": 7.0}
