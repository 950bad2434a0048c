"""Every recipe can be planned and takes a step; the records and reports that are committed beside it belong to it."""

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from smallvit import Dataset, Run, Weights, compare, fingerprint, fit, flops, html, markdown, rebuild
from smallvit.data.images import HeldOut
from smallvit.launch.plan import plan
from smallvit.recipe import find_recipe, load_recipe, smoke_test_runs
from smallvit.record import read_records
from smallvit.reference_runs import standard_references
from smallvit.trials import trials
from smallvit.verdicts.sequential import LOOKS

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("[!_]*.py"))
COMMITTED = [path for path in RECIPES if path.with_suffix(".jsonl").exists()]
DATA = Path(os.environ.get("SMALLVIT_DATA", ""))
MNIST = (DATA / "MNIST" / "raw").exists()
loaded = functools.cache(load_recipe)
records_of = functools.cache(lambda path: read_records(path.with_suffix(".jsonl")))


def each(paths, quick=None):
    """Parametrize a test by recipe. Recipes that are not in `quick` are marked slow; None: all are quick."""
    marks = {path: [] if quick is None or path.stem in quick else pytest.mark.slow for path in paths}
    return pytest.mark.parametrize("path", [pytest.param(path, marks=marks[path], id=path.stem) for path in paths])


QUICK = ("quickstart", "records")  # few records or dependencies


DOWNLOADS = {  # recipes on data sets that must be downloaded, with what is there if that was done
    "ablation_blood": Path("data/bloodmnist.npz").absolute(),
    "ablation_cifar10": DATA / "cifar-10-batches-py",
    "ablation_fashion": DATA / "FashionMNIST" / "raw",
}


@pytest.fixture
def needs_data(path):
    """Skip a test of a recipe whose data set is not on this machine."""
    if path.stem in DOWNLOADS and not DOWNLOADS[path.stem].exists():
        pytest.skip(f"{DOWNLOADS[path.stem]} is not on this machine")
    if not MNIST and "mnist" in path.read_text():
        pytest.skip("SMALLVIT_DATA does not name a folder with MNIST/raw")


def test_recipe_of_an_editor_that_writes_a_byte_order_mark_is_loaded(tmp_path):
    path = tmp_path / "with_mark.py"
    path.write_text(find_recipe("quickstart").read_text(), encoding="utf-8-sig")
    module = load_recipe(path)
    assert len(module.RUNS) == len(loaded(find_recipe("quickstart")).RUNS) and load_recipe(path) is module


def test_recipes_are_found():
    assert {path.stem for path in COMMITTED} >= {"quickstart", "spt_lsa"} and len(COMMITTED) >= 11


@each(RECIPES, quick=("quickstart",))  # the others have more arms or long dependencies
def test_every_arm_takes_a_step_and_is_evaluated(path, needs_data, tmp_path, monkeypatch):
    whole, subset, measured = HeldOut.open, Dataset.subset, flops.milliseconds
    monkeypatch.setattr(HeldOut, "open", lambda self: whole(self).take(slice(100)))  # 10,000 test images take minutes
    monkeypatch.setattr(
        Dataset, "subset", lambda self, *, labels, val, seed: subset(self, labels=labels or 500, val=val, seed=seed)
    )
    monkeypatch.setattr(flops, "milliseconds", lambda calls, repeats: measured(calls, 1))
    entries = [entry for entry in smoke_test_runs(loaded(path).RUNS) if not isinstance(entry.run.init, Weights)]
    if path.stem != "quickstart":  # the standard references are the same in every recipe
        entries = [e for e in entries if e.role != "reference" or e.arm not in standard_references([e.run])]
    for index, entry in enumerate(entries):
        run = small(entry.run)
        folders = {field: tmp_path / fingerprint(other) for field, other in run.dependencies.items()}
        record = fit(run, tmp_path / str(index), init=folders.get("init"), teacher=folders.get("teacher"))
        assert record.finished and 0 <= record.result <= 1
    assert len(entries) == len({entry.arm for entry in entries}) >= (1 if path.stem in ("records", "records_unlabelled") else 5)


def small(run: Run) -> Run:
    """The run with fewer images, so that probes are fast."""
    dependencies = {field: small(other) for field, other in run.dependencies.items()}
    return replace(run, val=20, labels=run.labels or 200, batch=min(run.batch, 16), **dependencies)


@each(RECIPES, quick=QUICK)
def test_plan_names_every_arm(path, needs_data, monkeypatch):
    monkeypatch.setattr(Weights, "local_path", lambda self: None)
    monkeypatch.setattr("smallvit.launch.plan.estimate", lambda run, device, numerics: float(run.steps))  # no step is taken
    monkeypatch.setattr("smallvit.launch.plan.worker_start", lambda device: 1.0)
    text = plan(loaded(path).RUNS, 2, "cpu")
    untuned = {entry.arm for entry in loaded(path).RUNS if entry.tuning is None}
    for arm in {entry.arm for entry in loaded(path).RUNS}:
        assert f"\n{arm}{', tuned' * (arm not in untuned)}: " in text


# Committed records and reports


def entries_of(path: Path) -> list:
    """The runs of a recipe. If seeds were added until the comparison was decided, they are in the order of the records, and
    each arm also has the seeds that were added.
    """
    entries, records = loaded(path).RUNS, records_of(path)
    if not any(record.looks for record in records):
        return entries
    first = {(entry.arm, entry.labels): entry for entry in reversed(entries)}
    seeds = {place: [r.seed for r in records if (r.arm, r.labels) == place] for place in first}
    assert all(sorted(found) == list(range(len(found))) and len(found) in LOOKS for found in seeds.values())
    assert all(entry.seed in seeds[entry.arm, entry.labels] for entry in entries)
    arms = [first[record.arm, record.labels] for record in records]
    return [replace(entry, run=entry.run.at_seed(record.seed)) for entry, record in zip(arms, records)]


@each(COMMITTED, quick=QUICK)
def test_committed_records_are_those_of_the_recipe_and_finished(path):
    records, entries = records_of(path), entries_of(path)
    assert [(r.arm, r.role, r.labels, r.seed) for r in records] == [(e.arm, e.role, e.labels, e.seed) for e in entries]
    assert all(r.baseline in ("", e.baseline) for r, e in zip(records, entries))  # "" means the only baseline
    weights_missing = [r.status == "unavailable" and isinstance(e.run.init, Weights) for r, e in zip(records, entries)]
    trained = [r for r, missing in zip(records, weights_missing) if not missing]
    assert all(r.finished and r.recipe == path.stem and r.test_reads == 1 and not r.code["dirty"] for r in trained)
    assert all(0 <= r.result <= 1 for r in trained)
    assert len(trained) > len(records) / 2
    # what is compared was trained by one code; a recipe may be published in parts, one number of labels after another
    compared = {(r.labels, r.baseline) for r in trained}
    assert len({(r.labels, r.baseline, r.code["sha256"]) for r in trained}) == len(compared)
    nothing_is_compared = len({(r.labels, r.baseline, r.arm) for r in trained}) == len(compared)
    assert len({r.code["sha256"] for r in trained}) == 1 or nothing_is_compared


@each(COMMITTED, quick=QUICK)
def test_committed_records_rebuild_to_runs_of_the_recipe(path):
    """The exceptions are arms whose code computes something else today. Their records say so, and keep the old fingerprint."""
    superseded = []
    for record, entry in zip(records_of(path), entries_of(path), strict=True):
        current = fingerprint(rebuild(record.run))
        assert len(record.fingerprint) == len(current) == 16
        if record.superseded:
            superseded.append((record.arm, record.seed))
            assert record.fingerprint != current and len(record.superseded.split()) >= 8
        else:
            assert record.fingerprint == current == fingerprint(entry.run), f"{record.arm}, seed {record.seed}"
    assert len(superseded) <= len(records_of(path)) / 10
    assert not superseded or path.stem in ("spt_lsa", "tokens")


@pytest.mark.slow
@each(COMMITTED, quick=("spt_lsa",))
def test_page_of_committed_records_loads_nothing_from_the_network(path):
    page = html(records_of(path), title=path.stem, doc=loaded(path).__doc__, trials=trials(path))
    assert "://" not in page.replace("http://www.w3.org", "")


@each(COMMITTED)
def test_committed_page_loads_nothing_from_the_network(path):
    assert "://" not in path.with_suffix(".html").read_text().replace("http://www.w3.org", "")


@each(COMMITTED, quick=QUICK)
def test_committed_report_is_that_of_the_committed_records(path):
    text = path.with_suffix(".md").read_text()
    assert text == markdown(records_of(path), title=path.stem, doc=loaded(path).__doc__, trials=trials(path))
    assert all(row.arm in text for row in compare(records_of(path)).rows)
