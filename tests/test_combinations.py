"""Combinations: every two techniques of different slots train together or are refused, and the documentation says which."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from toys import load_script, randomize

import smallvit
from smallvit import MeanTokens, Preprocess, Run, TrainedModel, ViT, export, pooling

combinations = load_script("combinations")


@pytest.fixture
def add(monkeypatch):
    """A function that adds a public class to `smallvit.pooling`, as if somebody had written it there."""

    def add(made: type):
        made.__module__, made.__qualname__ = pooling.__name__, made.__name__
        monkeypatch.setattr(pooling, made.__name__, made, raising=False)
        monkeypatch.setitem(smallvit.NAMES, "pooling", (*smallvit.NAMES["pooling"], made.__name__))
        monkeypatch.setitem(smallvit.HOME, made.__name__, "pooling")
        combinations.choices.cache_clear()

    yield add
    monkeypatch.undo()
    combinations.choices.cache_clear()


@pytest.mark.slow
def test_page_says_which_techniques_work_together():
    """Another error than a ValueError of smallvit fails, too: `outcomes` lists such errors."""
    page = combinations.PAGE.read_text(encoding="utf-8")
    assert page == combinations.with_content(page), "run python docs/combinations.py, which writes the tables again"


def test_defaults_of_the_small_model_are_those_of_the_library():
    run = combinations.run_with(combinations.with_defaults({}))
    model, plain = run.model((12, 12), 1, 4), ViT((12, 12), 1, 4, dim=32, depth=2, heads=2)
    assert repr(model) == repr(plain) and (run.objective.func, run.optimizer.func) == (Run().objective, Run().optimizer)
    assert {slot: next(iter(names)) for slot, names in combinations.choices().items() if None in names.values()} == {
        "position": "Learned",
        "position in attention": "no positions in attention",
        "initialization of attention": "default initialization",
        "reduction": "no reduction",
    }


def test_every_slot_of_a_vit_is_combined():
    slots = {name for name, p in inspect.signature(ViT).parameters.items() if "Callable" in str(p.annotation)}
    assert len(slots) >= 6 and slots <= set(combinations.SLOTS)
    assert all(len(names) >= 2 for names in combinations.choices().values())


def test_every_refusal_on_the_page_says_what_to_do():
    page = combinations.PAGE.read_text(encoding="utf-8").partition("### Refused combinations")[2].partition("###")[0]
    messages = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(messages) >= 10
    for message in messages:
        assert re.search(r"\b(expected|use|set|remove)\b", message) and len(message.split()) >= 8, message


@pytest.mark.slow
@pytest.mark.parametrize("slot", [slot for slot in combinations.SLOTS if slot not in ("objective", "optimizer")])
def test_models_of_every_technique_are_exported_to_onnx(slot, tmp_path):
    """`export` raises ValueError for a model that cannot be exported, and if its probabilities differ."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    preprocess = Preprocess(size=(12, 12), channels=1, mean=(0.3,), std=(0.4,), classes=("a", "b", "c", "d"))
    record = SimpleNamespace(init_weights=None, arm="scratch", fingerprint="0" * 16, seed=0)
    for name in combinations.choices()[slot]:
        run = combinations.run_with(combinations.with_defaults({slot: name}))
        assert combinations.reason_against_export(run) is None
        export(TrainedModel(randomize(run.model((12, 12), 1, 4)), preprocess, run, record), tmp_path / "model.onnx", resize=False)


def test_new_technique_is_combined_without_a_further_edit(add):
    class NewPool(MeanTokens):
        """A pool that somebody adds."""

    add(NewPool)
    assert list(combinations.choices()["pool"])[-1] == "NewPool"
    run = combinations.run_with(combinations.with_defaults({"pool": "NewPool"}))
    assert type(run.model((12, 12), 1, 4).pool) is NewPool and combinations.refusal(lambda: run) is None


def test_new_technique_with_a_required_option_asks_for_it(add):
    class NewPool(MeanTokens):
        def __init__(self, dim, *, power):
            super().__init__(dim)

    add(NewPool)
    with pytest.raises(ValueError, match="NewPool needs power; add it to OPTIONS"):
        combinations.choices()


def test_new_name_that_is_created_in_another_way_is_not_overlooked(add):
    class NewPool(MeanTokens):
        def __init__(self, dim, tokens):
            super().__init__(dim)

    add(NewPool)
    with pytest.raises(ValueError, match=r"smallvit.pooling.NewPool stands beside techniques .* or its name in NO_TECHNIQUES"):
        combinations.choices()


@pytest.mark.parametrize("wrong", [lambda: torch.zeros(2)[5], lambda: torch.randn(2).norm("no"), lambda: int("no")])
def test_only_value_errors_of_smallvit_are_refusals(wrong):
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        combinations.refusal(wrong)
    assert combinations.refusal(lambda: Run(labels=0)).startswith("labels is 0")


def test_training_without_a_gradient_is_no_success(add):
    class NewPool(MeanTokens):
        """A pool that hands on no gradient."""

        def forward(self, x, size=None, prefix=0):
            return super().forward(x, size, prefix).detach() * torch.nan

    add(NewPool)
    with pytest.raises(AssertionError, match="not finite"):
        combinations.train_one_step(combinations.run_with(combinations.with_defaults({"pool": "NewPool"})))
