"""Every recipe builds and takes a step; what is committed beside it is what it asks for and what its report says."""

import functools
import os
from pathlib import Path

import pytest

from smallvit import Dataset, Weights, compare, fingerprint, fit, flops, html, markdown
from smallvit.ablation import standard_references
from smallvit.data.images import HeldOut
from smallvit.launch.plan import plan
from smallvit.recipe import load_recipe, shortened
from smallvit.record import read_records

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("[!_]*.py"))
loaded = functools.cache(load_recipe)
MNIST = (Path(os.environ.get("SMALLVIT_DATA", "")) / "MNIST" / "raw").exists()


def test_the_recipes_that_there_are():
    assert {path.stem for path in RECIPES} >= {"quickstart", "spt_lsa"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_asks_what_it_costs_and_what_it_expects(path):
    doc = loaded(path).__doc__
    assert doc.splitlines()[0].endswith("?")
    assert all(word in doc for word in ("Paper", "Cost", "Expect", "Written before the runs"))


QUICK = ("quickstart", "spt_lsa", "mae")  # the others have more arms, or starts that take long
SMOKED = [pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in RECIPES]


@pytest.mark.parametrize("path", SMOKED, ids=lambda path: path.stem)
def test_every_arm_takes_a_step_and_is_evaluated(path, tmp_path, monkeypatch):
    whole = HeldOut.open
    monkeypatch.setattr(HeldOut, "open", lambda self: whole(self).take(slice(100)))  # ten thousand images take minutes
    drawn = Dataset.subset
    monkeypatch.setattr(
        Dataset, "subset", lambda self, *, labels, val, seed: drawn(self, labels=labels or 500, val=val, seed=seed)
    )
    once = flops.milliseconds
    monkeypatch.setattr(flops, "milliseconds", lambda calls, repeats: once(calls, 1))
    runs = [run for run in shortened(loaded(path).RUNS) if not isinstance(run.init, Weights)]  # those have their own tests
    if path.stem != "quickstart":  # the references are the same everywhere
        runs = [run for run in runs if run.role != "reference" or run.arm not in standard_references([run])]
    if not MNIST and "mnist" in path.read_text():
        pytest.skip("SMALLVIT_DATA does not name a folder with MNIST/raw")
    for at, run in enumerate(runs):
        few = {"val": 20, "labels": run.labels or 200, "batch": min(run.batch, 16)}  # of 59,000 labels a probe takes a minute
        run = run.vary(**few, **{field: other.vary(**few) for field, other in run.dependencies.items()})
        start, teacher = ((other := run.dependencies.get(field)) and tmp_path / fingerprint(other) for field in ("init", "teacher"))
        record = fit(run, tmp_path / str(at), recipe=path.stem, start=start, teacher=teacher)
        assert record["status"] == "finished" and 0 <= record["test"][record["score"]] <= 1
    assert len(runs) == len({run.arm for run in runs}) >= 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned(path, monkeypatch):
    if not MNIST and "mnist" in path.read_text():
        pytest.skip("SMALLVIT_DATA does not name a folder with MNIST/raw")
    monkeypatch.setattr(Weights, "at_hand", lambda self: None)
    monkeypatch.setattr("smallvit.launch.plan.estimate", lambda run, device: float(run.steps))  # no step is taken
    said = plan(loaded(path).RUNS, 2, "cpu")
    assert all(f"{arm}: " in said for arm in {run.arm for run in loaded(path).RUNS})


COMMITTED = [path for path in RECIPES if path.with_suffix(".jsonl").exists()]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_records_are_the_runs_that_the_recipe_asks_for(path):
    records, runs = read_records(path.with_suffix(".jsonl")), loaded(path).RUNS
    assert [(r["arm"], r["role"], r["labels"], r["seed"]) for r in records] == [(r.arm, r.role, r.labels, r.seed) for r in runs]
    trained = [r for r, run in zip(records, runs) if not (r["status"] == "unavailable" and isinstance(run.init, Weights))]
    assert all(r["status"] == "finished" and r["test_reads"] == 1 and not r["code"]["dirty"] for r in trained)
    assert len({r["code"]["sha256"] for r in trained}) == 1 and len(trained) > len(records) / 2


DRAWN = [pytest.param(path, marks=[] if path.stem == "spt_lsa" else pytest.mark.slow) for path in COMMITTED]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_page_of_committed_records_fetches_nothing(path):
    page = html(read_records(path.with_suffix(".jsonl")), title=path.stem, doc=loaded(path).__doc__)
    assert "://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_page_fetches_nothing(path):
    assert "://" not in path.with_suffix(".html").read_text().replace("http://www.w3.org", "")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_reports_are_made_from_the_committed_records(path):
    records, doc = read_records(path.with_suffix(".jsonl")), loaded(path).__doc__
    assert path.with_suffix(".md").read_text() == markdown(records, title=path.stem, doc=doc)
    assert all(row.arm in path.with_suffix(".md").read_text() for row in compare(records).rows)
