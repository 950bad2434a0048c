"""The DataFrame of a recipe's runs after the recipe was changed: runs of the present recipe win, whatever their folder's name."""

import inspect
import re
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toys import write_recipe

import smallvit
from smallvit import Run, compare, describe, fingerprint, load_recipe
from smallvit.launch.results import folder, tags
from smallvit.packing import pack_bits
from smallvit.record import Record, write_record, write_records
from smallvit.train.fit import new_record

RECIPE = """'''Does it help?'''
from smallvit import Run, SmallCNN, ablate, digits
base = Run(data=digits, model=SmallCNN, val=50, steps=STEPS, batch=16)
RUNS = ablate({"scratch": base, "tuned": base.vary(init=base.vary(lr=5e-4))}, labels=[100], seeds=range(2), references=())
"""

pytest.importorskip("pandas")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe in an empty working folder. The result is a function that gives its runs another number of steps."""
    monkeypatch.chdir(tmp_path)

    def change(steps: int) -> Run:
        write_recipe(RECIPE.replace("STEPS", str(steps)))
        return next(entry.run for entry in load_recipe("mine.py").RUNS if entry.arm == "tuned")

    return change


def record(run: Run, score: float, arm: str = "tuned", role: str = "technique") -> Record:
    known = {"recipe": "mine", "arm": arm, "role": role, "labels": 100, "status": "finished", "score": "accuracy"}
    return Record(**known, seed=run.seed, fingerprint=fingerprint(run), run=describe(run), test={"accuracy": score})


def store(tmp_path, name: str, found: Record):
    folder = tmp_path / "runs" / "mine" / "100" / "arm" / name
    folder.mkdir(parents=True)
    write_record(folder, found)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_run_of_the_present_recipe_replaces_that_of_an_earlier_version(names, recipe, tmp_path):
    old, new = recipe(3), recipe(4)
    for name, run, score in zip(names, (old, new), (0.3, 0.4)):
        store(tmp_path, name, record(run, score))
    store(tmp_path, "old-only", record(old.at_seed(5), 0.5))
    store(tmp_path, "new-seed", record(new.at_seed(6), 0.6))
    store(tmp_path, "init", record(new.init, 0.7, "tuned: init", "dependency"))
    with pytest.warns(UserWarning, match=r"^1 row is of a run with other settings than mine\.py has now; .* frame\[frame\['current'\]\]$"):
        frame = smallvit.records("mine.py")
    found = {(row.arm, row.seed): (row.result, row.current) for row in frame.itertuples()}
    expected = {("tuned", old.seed): (0.4, True), ("tuned", 5): (0.5, False), ("tuned", 6): (0.6, True)}
    assert len(frame) == 4 and found == expected | {("tuned: init", new.seed): (0.7, True)}


def test_command_of_a_recipe_without_records_has_the_folder(recipe):
    recipe(3)
    with pytest.raises(ValueError, match=r"start its runs with: smallvit run mine.py --out 'no where'$"):
        smallvit.records("mine.py", out="no where")
    with pytest.raises(ValueError, match=r"start its runs with: smallvit run mine.py$"):
        smallvit.records("mine.py")


def test_rows_have_the_names_that_the_recipe_gives_their_runs_now(recipe, tmp_path):
    run = recipe(3)
    warnings.simplefilter("error")  # there is no row of an earlier version
    store(tmp_path, "a", replace(record(run, 0.4, "earlier name"), recipe="earlier"))
    ((_, row),) = smallvit.records("mine.py").iterrows()
    assert (row["recipe"], row["arm"], row["result"], row["current"]) == ("mine", "tuned", 0.4, True)


@pytest.mark.parametrize("same_run", [False, True])
def test_committed_record_is_replaced_only_by_a_run_of_the_present_recipe(same_run, recipe, tmp_path):
    old, new = recipe(3), recipe(4)
    write_records(tmp_path / "mine.jsonl", [record(new, 0.4)])
    store(tmp_path, "a", record(new if same_run else old, 0.3))
    ((_, row),) = smallvit.records("mine.py").iterrows()
    assert (row["source"], row["result"]) == (("runs", 0.3) if same_run else ("committed", 0.4)) and row["current"]


def test_of_two_records_of_a_run_the_table_has_the_one_that_a_report_uses(recipe, tmp_path):
    run = recipe(3)
    entry = next(entry for entry in load_recipe("mine.py").RUNS if entry.run == run)
    place = folder(entry, "runs", "mine")
    for name, score in ((place.name, 0.4), (f"{place.name}-m3", 0.3)):
        place.with_name(name).mkdir(parents=True)
        write_record(place.with_name(name), record(run, score))
    with pytest.warns(UserWarning, match=f"^{place} and {place}-m3 hold records of the same run; the first one is used"):
        ((_, row),) = smallvit.records("mine.py").iterrows()
    assert row["result"] == 0.4 and row[["pass", "fold"]].isna().all()


FOLDS = '''"""Does it help?"""
from functools import partial
from smallvit import Run, SmallCNN, ablate, arrays
base = Run(data=partial(arrays, path="a.npz", folds=5), model=SmallCNN, val=0, steps=3, batch=16)
RUNS = ablate({"scratch": base, "small steps": base.vary(lr=1e-4)}, seeds=range(3), references=())
'''


def documented_lines() -> list[str]:
    """The code for a cross-validation on the page about metrics and in the docstring."""
    page = Path(__file__).parents[1] / "docs" / "howto" / "metrics.md"
    (block,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    paragraphs = inspect.getdoc(smallvit.records).split("\n\n")
    example, folds = [textwrap.dedent(text) for text in paragraphs if text.startswith("    ")]
    now = example.splitlines()[1]
    return [block, f"{now}\n{folds.replace('passes.groupby', 'table = passes.groupby')}"]


@pytest.mark.parametrize("lines", documented_lines(), ids=["page", "docstring"])
def test_documented_lines_give_the_mean_and_sd_of_a_report_of_a_cross_validation(lines, tmp_path, monkeypatch):
    """Folds of unequal size; of one arm, a fold is missing and another one has failed."""
    monkeypatch.chdir(tmp_path)
    write_recipe(FOLDS)
    rng, made = np.random.default_rng(0), []
    for entry in load_recipe("mine.py").RUNS:
        mask = np.repeat(np.arange(5), [2, 3, 5, 8, 12]) == entry.seed % 5
        right = rng.random(mask.sum()) < 0.7
        known = {"score": "accuracy", "test": {"accuracy": float(right.mean())}, "correct": pack_bits(right), "test_images": len(right)}
        known |= {"folds": 5, "pool_images": len(mask), "test_index": pack_bits(mask), "data_sha256": "d", "subset_sha256": "s"}
        made.append(replace(new_record(entry.run, tags(entry, "mine"), "finished"), **known))
    made = [each for each in made if (each.arm, each.seed) != ("scratch", 14)]
    made = [new_record(entry.run, tags(entry, "mine"), "failed", "why") if (r.arm, r.seed) == ("small steps", 3) else r
            for r in made for entry in load_recipe("mine.py").RUNS if (entry.arm, entry.seed) == (r.arm, r.seed)]  # fmt: skip
    write_records(tmp_path / "mine.jsonl", made)
    frame = smallvit.records("mine.py")
    assert [*zip(frame["pass"], frame["fold"])] == [(r.seed // 5, r.seed % 5) for r in made]
    found: dict = {"frame": frame}
    exec(lines, found)
    rows = compare(made).rows
    assert [len(row.values) for row in rows] == [2, 2]
    for row in rows:
        ((_, numbers),) = found["table"].xs(row.arm, level="arm").iterrows()
        assert (numbers["mean"], numbers["std"]) == pytest.approx((row.mean, row.sd))
