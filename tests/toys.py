"""What many test files share: a small ViT, random weights, comparison of tensors, and the scripts of the documentation."""

import importlib.util
import pickle
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch

from smallvit import PatchEmbed, Run, ViT, digits
from smallvit.train.loop import Training

TINY_VIT = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)


def tiny_vit(image=(12, 12), channels=1, classes=5, **options) -> ViT:
    """A ViT of width 16 with 2 blocks and patches of 2 pixels, unless the options say otherwise."""
    return TINY_VIT(image, channels, classes, **options)


def training_of(run: Run, seed: int) -> Training:
    """The training of a run on the scikit-learn digits, before its first step."""
    data = digits()
    return Training(run.vary(seed=seed), data, data.subset(labels=run.labels, val=run.val, seed=seed), "cpu")


def load_script(name: str) -> ModuleType:
    """Import a Python file of `docs/`, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", Path(__file__).parents[1] / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager inside which new tensors have another type by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def write_recipe(text: str):
    """Write mine.py into the working directory; the next command imports it again."""
    Path("mine.py").write_text(text)
    sys.modules.pop("recipes.mine", None)


def leave_out_figures(monkeypatch: pytest.MonkeyPatch):
    """Let the pages of reports have no figures."""
    for name in ("forest", "by_length", "by_tuning", "by_macs", "by_labels", "by_hyperparameter", "dots", "learning_curves"):
        monkeypatch.setattr(f"smallvit.report.figures.{name}", lambda *_: "")
    for name in ("confusion_matrices", "reliability_diagrams"):
        monkeypatch.setattr(f"smallvit.report.class_figures.{name}", lambda *_: "")


def randomize(module, std=0.1):
    """Add N(0, std) to every parameter, so that no zero or one that a parameter starts with can hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return module


def assert_close(one, other, atol=1e-10):
    """Equal shapes, and no two elements further apart than `atol`."""
    assert one.shape == other.shape
    assert (one - other).abs().max() <= atol


def slow_after(count: int, cases: Collection) -> list:
    """The cases of a parametrized test, all marked slow but the first few. A tuple holds the values of several arguments."""
    quick, rest = [*cases][:count], [*cases][count:]
    return [*quick, *(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in rest)]


def slow_but(quick: Collection, values: Iterable) -> list:
    """The values of the argument of a parametrized test, all marked slow but those in `quick`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def option_id(component) -> str:
    """A test id for a component or a partial of one: `Prune(keep=0.5)`."""
    if component is None:
        return "none"
    name = getattr(getattr(component, "func", component), "__name__", str(component))
    options = ", ".join(f"{key}={value}" for key, value in getattr(component, "keywords", {}).items())
    return f"{name}({options})" if options else name


def pairwise(choices: Iterable[tuple]) -> list[int]:
    """The indices of a few tuples of options: every pair of options that one of all tuples has is in one of these."""
    pairs = [set(combinations(enumerate(map(option_id, options)), 2)) for options in choices]
    missing, chosen = set().union(*pairs), []
    while missing:
        chosen.append(max(range(len(pairs)), key=lambda index: len(pairs[index] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


MOVES = {  # what a loop of one's own may do with an objective between two steps
    "other numbers and back": lambda objective: objective.double().float(),
    "pickled": lambda objective: pickle.loads(pickle.dumps(objective)),
    "weights loaded": lambda objective: objective.load_state_dict(deepcopy(objective.state_dict()), assign=True) and objective,
    "only the student": lambda objective: objective.student.double().float() and objective,
}


def check_average_after_a_move(objective, move):
    """Check that the teacher of an objective with momentum 0 equals the student after each step, also after `move`."""
    for _ in range(3):
        with torch.no_grad():
            for parameter in objective.student.parameters():
                parameter.add_(1.0)
        objective.after_step(0.0)
        for teacher, student in zip(objective.model.parameters(), objective.student.parameters()):
            assert torch.equal(teacher, student)
        objective = move(objective)
