"""The DataFrame of a recipe's runs after the recipe was changed: runs of the present recipe win, whatever their folder's name."""

from dataclasses import replace

import pytest
from toys import write_recipe

import smallvit
from smallvit import Run, describe, fingerprint, load_recipe
from smallvit.record import Record, write_record, write_records

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
    frame = smallvit.records("mine.py")
    found = {(row.arm, row.seed): (row.result, row.current) for row in frame.itertuples()}
    expected = {("tuned", old.seed): (0.4, True), ("tuned", 5): (0.5, False), ("tuned", 6): (0.6, True)}
    assert len(frame) == 4 and found == expected | {("tuned: init", new.seed): (0.7, True)}


def test_rows_have_the_names_that_the_recipe_gives_their_runs_now(recipe, tmp_path):
    run = recipe(3)
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
