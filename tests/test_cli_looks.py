"""`smallvit run --until-decided`: more seeds where a verdict is open, also after an interruption; and `smallvit explore`."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from toys import write_recipe

from smallvit import ArmRun, PatchEmbed, Run, Tune, ViT, ablate, arrays, digits, fingerprint
from smallvit.__main__ import main
from smallvit.commands import explore, until_decided
from smallvit.commands.report import with_published
from smallvit.commands.stored import known_looks, removed_comparisons, with_present_names
from smallvit.launch.results import folder, recall, tags
from smallvit.looks import FILE, Looks, choose_schedule, read_looks, seed_list, seeds_left_out, with_looks, write_looks
from smallvit.recipe import load_recipe
from smallvit.record import RECORD, Record, read_record, read_records, write_record, write_records
from smallvit.train.fit import new_record
from smallvit.trials import add_trial, read_trials, trials, trials_file
from smallvit.verdicts import ADDED_LOOKS, LOOKS

# the pixels are better with every seed, and +LSA is better with some and worse with others
RECIPE = '''
"""Which arms need more seeds?"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Pixels, Run, ViT, ablate, knn

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=30, batch=8, lr=5e-3,
              val=20)
pixels = scratch.vary(model=Pixels, steps=0, ema=0.0, evaluators=(knn,))
ARMS = {"scratch": scratch, "pixels": pixels, "+LSA": scratch.vary(attention=LocalityAttention)}
RUNS = ablate(ARMS, labels=[40], seeds=range(2), references=False)
'''
UNTIL_DECIDED = ("run", "mine.py", "--until-decided", "--jobs", "1")
pytestmark = pytest.mark.usefixtures("without_figures")


def seeds_of_arms(place: Path) -> dict[str, list[int]]:
    """The seeds of the finished runs of each arm in a folder."""
    records = [read_record(path.parent) for path in place.rglob(RECORD)]
    arms = sorted({record.arm for record in records})
    return {arm: sorted(r.seed for r in records if r.arm == arm and r.finished) for arm in arms}


@pytest.mark.slow
def test_seeds_are_added_to_undecided_arms_only_also_after_an_interruption(workdir, capsys, monkeypatch):
    looks, collect = 0, until_decided.collect

    def interrupt(*arguments):
        nonlocal looks
        looks += 1
        if looks == 2:  # the first call is before training; the second is the first look
            raise KeyboardInterrupt
        return collect(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(until_decided, "collect", interrupt)
        assert main([*UNTIL_DECIDED, "--max-seeds", "8"]) == 130
    assert seeds_of_arms(workdir / "runs") == {arm: [*range(6)] for arm in ("+LSA", "pixels", "scratch")}
    trained = {path: path.stat().st_mtime_ns for path in workdir.rglob(RECORD)}
    capsys.readouterr()

    assert main([*UNTIL_DECIDED, "--max-seeds", "8"]) == 0
    assert seeds_of_arms(workdir / "runs") == {"+LSA": [*range(8)], "pixels": [*range(6)], "scratch": [*range(8)]}
    assert all(path.stat().st_mtime_ns == time for path, time in trained.items()), "finished runs were trained again"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("pixels, 40", "+LSA, 40"))]
    assert [line.partition(",")[0] for line in lines[:4]] == ["pixels", "+LSA"] * 2
    assert all("after 6 seeds, decided: better, P = " in line for line in (lines[0], lines[2]))
    assert "after 6 seeds, goes on to 8 seeds" in lines[1] and "after 8 seeds" in lines[3] and "--max-seeds 8" in lines[3]

    before = sorted(workdir.rglob(RECORD))
    assert main(["run", "mine.py", "--jobs", "1"]) == 0 and sorted(workdir.rglob(RECORD)) == before
    Path("mine.py").write_text(RECIPE.replace("range(2)", "range(20)"))
    assert main(["run", "mine.py", "--jobs", "1", "--dry-run"]) == 0
    assert "chose 8 of the 20 seeds of the recipe for 'scratch' (and 2 other arms" in capsys.readouterr().err
    Path("mine.py").write_text(RECIPE)
    assert main(["report", "mine.py", "--publish"]) == 0
    records = read_records(workdir / "mine.jsonl")
    assert len(records) == 22 and {tuple(record.looks) for record in records} == {LOOKS}
    assert all(record.finished for record in records)


@pytest.mark.slow
def test_known_result_of_all_declared_seeds_is_the_first_look(workdir, capsys):
    write_recipe(RECIPE.replace("range(2)", "range(8)").replace('"pixels": pixels, ', ""))
    assert main(["run", "mine.py", "--jobs", "1"]) == 0
    count = len([*workdir.rglob(RECORD)])
    assert main([*UNTIL_DECIDED, "--max-seeds", "8"]) == 0
    assert read_looks(workdir / "runs" / "mine").schedule == ADDED_LOOKS and len([*workdir.rglob(RECORD)]) == count == 16
    assert "after 8 seeds, inconclusive: stopped by --max-seeds 8" in capsys.readouterr().out


@pytest.mark.slow
def test_schedule_survives_a_deleted_file_and_other_seeds_are_named(workdir, capsys):
    """Without `looks.json` the records still say at which looks the comparison was tested."""
    assert main([*UNTIL_DECIDED, "--max-seeds", "8"]) == 0
    page = workdir / "runs" / "mine" / "report.md"
    before = page.read_text()
    (workdir / "runs" / "mine" / FILE).unlink()
    assert main(["report", "mine.py"]) == 0 and page.read_text() == before
    assert main([*UNTIL_DECIDED, "--max-seeds", "8"]) == 0
    assert read_looks(workdir / "runs" / "mine").schedule == LOOKS and seeds_of_arms(workdir / "runs")["+LSA"] == [*range(8)]
    assert "are not used" not in page.read_text()

    write_recipe(RECIPE.replace("range(2)", "range(4, 10)"))
    (workdir / "runs" / "mine" / FILE).unlink()
    capsys.readouterr()
    main(["report", "mine.py"])
    sentence = "with other seeds (0 to 3) are not used. Deciding by their results which seeds to use makes verdicts invalid"
    assert sentence in capsys.readouterr().out and sentence in page.read_text()


@pytest.mark.slow
def test_record_keeps_its_looks_if_the_recipe_names_none(workdir):
    assert main([*UNTIL_DECIDED, "--only", "arm=scratch,pixels", "--max-seeds", "6"]) == 0
    entry = next(entry for entry in load_recipe(workdir / "mine.py").RUNS if entry.arm == "pixels")
    assert entry.looks is None and recall(entry, workdir / "runs", "mine").looks == list(LOOKS)


@pytest.mark.slow
def test_dry_run_shows_the_first_look_and_trains_nothing(workdir, capsys):
    assert main([*UNTIL_DECIDED, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "scratch: 6 runs" in out and "looks 6, 8, 12, 16, 24, 32" in out
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--until-decided", "--smoke"), "a smoke test has no verdicts"),
        (("--until-decided", "--only", "seed=0"), "looks choose the seeds"),
        (("--until-decided", "--only", "pass=0"), "looks choose the passes"),
        (("--until-decided", "--only", "arm=+LSA"), "leaves out 'scratch', the baseline of '+LSA'"),
        (("--until-decided", "--max-seeds", "40"), "expected at most 32"),
        (("--until-decided", "--max-seeds", "5"), "expected at least 6"),
        (("--max-seeds", "8"), "needs --until-decided"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message, workdir, capsys):
    assert main(["run", "mine.py", "--jobs", "1", *words]) == 2
    assert message in capsys.readouterr().err and not (workdir / "runs").exists()


def test_fewer_seeds_than_an_earlier_command_has_chosen_are_refused(workdir, capsys):
    looks = Looks((6, 8, 12), {(arm, 40, None, False): 12 for arm in ("scratch", "+LSA")})
    write_looks(workdir / "runs" / "mine", looks)
    assert main([*UNTIL_DECIDED, "--max-seeds", "8", "--dry-run"]) == 2
    assert "--max-seeds is 8, but an earlier command has chosen 12 seeds" in capsys.readouterr().err


def test_first_look_of_a_cross_validation_is_counted_in_passes(tmp_path):
    pair = {arm: run.vary(data=partial(arrays, path="a.npz", folds=3)) for arm, run in PAIR.items()}
    runs = ablate(pair, seeds=range(2), references=False)
    for most, message in ((3, "at least 6, the passes of the first look"), (40, "at most 32, the passes of the last look")):
        with pytest.raises(ValueError, match=f"^--max-seeds is {most}; expected {message}$"):
            until_decided.begin(runs, None, SimpleNamespace(max_seeds=most, only=[]), tmp_path, tmp_path / "mine.py")


def test_schedule_depends_on_what_is_known():
    assert choose_schedule(8, False, LOOKS, ADDED_LOOKS) == LOOKS
    assert choose_schedule(5, True, LOOKS, ADDED_LOOKS) == LOOKS, "five seeds have no verdict"
    assert choose_schedule(8, True, LOOKS, ADDED_LOOKS) == ADDED_LOOKS
    assert choose_schedule(6, True, LOOKS, ADDED_LOOKS) == LOOKS
    assert choose_schedule(10, True, LOOKS, ADDED_LOOKS) == (10, 12, 16, 24, 32)
    assert choose_schedule(2, True, LOOKS, ADDED_LOOKS, folds=True) == (2, *LOOKS), "two passes over all folds have a verdict"
    with pytest.raises(ValueError, match="32 seeds with results"):
        choose_schedule(32, True, LOOKS, ADDED_LOOKS)
    with pytest.raises(ValueError, match="32 passes with results"):
        choose_schedule(32, True, LOOKS, ADDED_LOOKS, folds=True)


def runs_of(arms: dict[str, Run], count: int, looks: tuple[int, ...] | None = None) -> list[ArmRun]:
    runs = ablate(arms, labels=[20], seeds=range(count), references=False)
    return [replace(entry, looks=looks) for entry in runs]


def finished(runs: list[ArmRun]) -> list[Record]:
    return [replace(new_record(e.run, tags(e, "mine"), "finished"), score="accuracy", test={"accuracy": 0.5}) for e in runs]


VIT = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
SCRATCH = Run(data=digits, model=VIT, steps=6, batch=8)
PAIR = {"scratch": SCRATCH, "deep": SCRATCH.vary(depth=2)}


@pytest.mark.parametrize("kept", ["looks.json", "committed records"])
def test_arm_with_a_new_name_keeps_the_seeds_that_were_added(kept, tmp_path):
    before = runs_of(PAIR, 8, LOOKS)
    records, committed = finished(before), []
    if kept == "looks.json":
        for index, record in enumerate(records):
            (tmp_path / "mine" / str(index)).mkdir(parents=True)
            write_record(tmp_path / "mine" / str(index), record)
        write_looks(tmp_path / "mine", Looks(LOOKS, {(arm, 20, None, False): 8 for arm in PAIR}))
    else:
        committed = records
    runs = runs_of({"scratch": SCRATCH, "deeper": PAIR["deep"], "new": SCRATCH.vary(depth=3)}, 6)
    found = with_looks(runs, known_looks(runs, tmp_path, "mine", committed))
    assert Counter(e.arm for e in found) == {"scratch": 8, "deeper": 8, "new": 6}
    assert known_looks(runs, tmp_path / "elsewhere", "mine") is None


def test_added_seeds_are_not_those_of_the_trials(tmp_path):
    def look(first: int):
        runs = ablate(PAIR, labels=[20], seeds=range(first, first + 8), references=False, tune=Tune({"lr": (1e-3, 1e-2)}))
        options = SimpleNamespace(max_seeds=None, only=[])
        return until_decided.begin(runs, None, options, tmp_path, tmp_path / "mine.py")

    assert look(1_900).schedule[-1] == 32
    with pytest.raises(ValueError, match=r"would use seed 2000, which the trials .*; expected a recipe with seeds below 1968"):
        look(1_990)


def test_seeds_of_the_first_look_may_have_been_trained_before_the_looks_were_planned(tmp_path):
    """16 seeds, 8 of them before `--until-decided`. Then the file of the looks is lost and an arm gets another name."""
    records = finished(runs_of(PAIR, 16, LOOKS))
    committed = [record if record.seed >= 8 else replace(record, looks=None) for record in records]
    runs = runs_of({"scratch": SCRATCH, "deeper": PAIR["deep"], "new": SCRATCH.vary(depth=3)}, 8)
    found = with_looks(runs, known_looks(runs, tmp_path, "mine", committed))
    assert Counter(entry.arm for entry in found) == {"scratch": 16, "deeper": 16, "new": LOOKS[0]}
    before = [record for record in committed if record.seed < 8]
    assert known_looks(runs, tmp_path, "mine", before) is None


@pytest.mark.parametrize(
    ("arms", "removed"),
    [
        (PAIR, 0),
        ({"plain": SCRATCH, "deeper": PAIR["deep"]}, 0),
        ({"scratch": SCRATCH.vary(lr=1e-4), "deep": PAIR["deep"]}, 1),
        ({"plain": SCRATCH.vary(lr=1e-4), "deep": PAIR["deep"]}, 1),
        ({"scratch": SCRATCH.vary(lr=1e-4), "deep": PAIR["deep"].vary(lr=1e-4)}, 1),
        ({"scratch": SCRATCH}, 1),
    ],
)
def test_comparison_with_an_earlier_version_of_the_baseline_still_counts(arms, removed):
    before, runs = finished(runs_of(PAIR, 2)), runs_of(arms, 2)
    for records in (before, before + finished(runs)):
        assert removed_comparisons(runs, records, [record.fingerprint for record in records]) == removed


def test_technique_that_was_not_scored_before_the_baseline_was_edited_has_no_comparison_with_the_earlier_one():
    edited = {"scratch": SCRATCH.vary(lr=1e-4), "deep": PAIR["deep"]}
    records = finished(runs_of({"scratch": SCRATCH}, 2)) + finished(runs_of(edited, 2))
    assert removed_comparisons(runs_of(edited, 2), records, [record.fingerprint for record in records]) == 0


def test_committed_records_of_a_renamed_arm_and_the_family_stay_when_published(capsys):
    records = [replace(record, removed=2) for record in finished(runs_of(PAIR, 2))]
    runs = runs_of({"scratch": SCRATCH, "deeper": PAIR["deep"]}, 2)
    missing = [new_record(e.run, tags(e, "mine"), "missing") for e in runs]
    published = with_published(missing, records, "mine.jsonl")
    assert [(r.arm, r.finished, r.removed) for r in published] == [(e.arm, True, 2) for e in runs]
    assert "4 of 4 runs have no result here; their committed records in mine.jsonl stay" in capsys.readouterr().out
    assert [r.removed for r in with_published(finished(runs), records, "mine.jsonl")] == [2] * 4
    assert [(r.arm, r.baseline) for r in with_present_names(records, runs)] == [(e.arm, e.baseline) for e in runs]


def store(entries: list[ArmRun], records: list[Record]) -> list[Path]:
    """Write records into the folders of their runs, and return the folders."""
    places = [folder(entry, "runs", "mine") for entry in entries]
    for place, record in zip(places, records):
        place.mkdir(parents=True)
        write_record(place, record)
    return places


def test_publishing_says_which_committed_records_have_gone(workdir, capsys):
    write_recipe(RECIPE.replace("40]", "40, 20]"))
    runs = load_recipe("mine.py").RUNS
    records = [replace(record, test_images=500) for record in finished(runs)]
    store(runs, records)
    assert main(["report", "mine.py", "--publish"]) == main(["report", "mine.py", "--publish"]) == 0
    assert "committed record" not in capsys.readouterr().out, "equal records were not replaced"
    other = [replace(records[0], test={"accuracy": 0.4}), replace(records[1], weights_sha256="ab"), *records[2:]]
    write_records(workdir / "mine.jsonl", [replace(other[0], fingerprint="0" * 64), *other, *finished([runs[2]])])
    assert main(["report", "mine.py", "--publish"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert shown == [
        "note: 1 committed record of these runs is replaced by others with different results in mine.jsonl",
        "note: 1 committed record of earlier settings is no longer in mine.jsonl",
    ]
    write_recipe(RECIPE.replace("40]", "40, 20]").replace("range(2)", "range(1)"))
    assert main(["report", "mine.py", "--publish"]) == 0
    assert "note: 6 committed records of seeds that are not used now are no longer in mine.jsonl\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "status"])
def test_two_folders_with_a_record_of_the_same_run_are_named(command, workdir, capsys):
    runs = load_recipe("mine.py").RUNS
    first, *_ = store(runs, finished(runs))
    shutil.copytree(first, first.with_name(f"{first.name}-m3"))
    assert main([command, "mine.py"]) == 0
    assert capsys.readouterr().err.count(f"note: {first} and {first}-m3 hold records of the same run; the first one is used") == 1


def test_added_seeds_follow_the_declared_ones():
    assert seed_list([5, 3], 1) == [3] and seed_list([3, 5], 4) == [3, 5, 6, 7]
    run = Run(model=ViT, init=Run(model=ViT, labels=10), labels=10)
    entries = [ArmRun(run=run.at_seed(seed), arm=arm, baseline="a") for seed in (5, 3) for arm in "ab"]
    looks = Looks((3, 4), {("b", 10, None, False): 4})
    found = with_looks(entries, looks)
    assert [(e.arm, e.seed) for e in found] == [("a", 3), ("b", 3), ("a", 5), ("b", 5), ("a", 6), ("b", 6), ("b", 7)]
    assert all(e.looks == (3, 4) and e.run.init.seed == e.seed and e.run == run.at_seed(e.seed) for e in found)
    assert with_looks(entries, None) == entries


def test_seeds_of_the_recipe_that_the_looks_leave_out_are_said():
    runs = runs_of({"scratch": Run(data=digits), "wide": Run(data=digits, batch=8)}, 8)
    looks = Looks((6, 8, 12), {runs[0].cell: 8})
    note = seeds_left_out(runs, looks)
    assert note.startswith("note: an earlier command with --until-decided chose 6 of the 8 seeds of the recipe for 'wide'; to add")
    both = seeds_left_out(runs, looks._replace(seeds={}))
    assert "chose 6 of the 8 seeds of the recipe for 'scratch' (and 1 other arm less than listed); to add seeds" in both
    assert seeds_left_out(runs[:12], looks) == "" == seeds_left_out(runs, None)


def test_damaged_schedule_is_named(tmp_path):
    looks = Looks((6, 8), {("a, b", None, 500, True): 8, ("c", 10, None, False): 6})
    write_looks(tmp_path, looks)
    assert read_looks(tmp_path) == looks and read_looks(tmp_path / "elsewhere") is None
    for text in ('{"looks": [6', "[]", '{"looks": [8, 6], "cells": []}', '{"looks": [], "cells": []}', "[" * 100_000):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ValueError, match=FILE):
            read_looks(tmp_path)
    write_looks(tmp_path, Looks((6, 8), {("a", None, None, False): 0}))
    with pytest.raises(ValueError, match="has the number of seeds 0; expected 1 or more"):
        read_looks(tmp_path)


@pytest.mark.slow
def test_recipe_that_declares_tuning_says_that_it_was_not_tuned(workdir, capsys):
    text = RECIPE.replace("import Loc", "import Tune, Loc").replace("references=False", "references=False, tune=TUNE")
    write_recipe(text.replace("RUNS =", 'TUNE = Tune({"lr": (3e-4, 6e-3)}, trials=2, seeds=1, val=20)\nRUNS ='))
    assert main(["run", "mine.py", "--dry-run"]) == 0
    assert "the recipe declares tuning; run `smallvit tune mine.py` first" in capsys.readouterr().err
    assert main(["run", "mine.py", "--dry-run", "--out", "my runs"]) == 0
    assert "run `smallvit tune mine.py --out 'my runs'` first" in capsys.readouterr().err


# explore


@pytest.mark.slow
def test_exploring_reads_no_test_images_and_counts_each_setting_once(workdir, capsys):
    words = ("explore", "mine.py", "--only", "arm=scratch,+LSA", "--jobs", "1")
    assert main(list(words)) == 0
    assert "scratch, 40 labels: " in (out := capsys.readouterr().out) and "trials of each arm so far: scratch 1, +LSA 1" in out
    records = [read_record(path.parent) for path in workdir.rglob(RECORD)]
    assert len(records) == 2 and all(r.test is None and r.val_result >= 0 and r.seed == 1_000 for r in records)
    assert not {entry.seed for entry in load_recipe("mine.py").RUNS} & {record.seed for record in records}
    (scratch, _), path = read_trials(trials_file("mine.py")), workdir / "mine.trials.jsonl"
    assert (scratch["arm"], scratch["labels"], scratch["seeds"]) == ("scratch", 40, 1)
    assert scratch["val"] == next(r.val_result for r in records if r.arm == "scratch")

    assert main([*words, "--seeds", "2"]) == 0 and main(list(words)) == 0
    assert len(path.read_text().splitlines()) == 4 and trials("mine.py") == {"scratch": 1, "+LSA": 1}
    write_recipe(RECIPE.replace("steps=30", "steps=31"))
    assert main(list(words)) == 0 and trials("mine.py") == {"scratch": 2, "+LSA": 2}
    assert main(["report", "mine.py"]) == 2, "explored runs were reported as results"


def test_trials_lie_with_the_runs_if_the_recipe_folder_cannot_be_written(workdir, capsys, monkeypatch):
    monkeypatch.setattr(explore.os, "access", lambda path, mode: False)
    assert main(["explore", "mine.py", "--only", "arm=pixels", "--jobs", "1"]) == 0
    assert not trials_file("mine.py").exists() and "the list is runs/mine/mine.trials.jsonl" in capsys.readouterr().out
    assert trials("mine.py", "runs/mine") == {"pixels": 1} and trials("mine.py") == {}


def test_arm_with_a_new_name_keeps_its_trials(tmp_path):
    shared = {"labels": 20, "seeds": 1, "val": 0.5}
    for run in (PAIR["deep"], PAIR["deep"].vary(lr=1e-4)):  # the present settings, and others that were tried
        add_trial(trials_file(tmp_path / "mine.py"), shared | {"arm": "deep", "fingerprint": fingerprint(run.vary(labels=20))})
    deeper = runs_of({"scratch": SCRATCH, "deeper": PAIR["deep"]}, 2)
    assert trials(tmp_path / "mine.py", runs=deeper) == {"deeper": 2}
    add_trial(trials_file(tmp_path / "mine.py"), shared | {"arm": "deeper", "fingerprint": fingerprint(PAIR["deep"].vary(labels=20))})
    assert trials(tmp_path / "mine.py", runs=deeper) == {"deeper": 2}, "the same settings, explored again under the new name"
    trials_file(tmp_path / "mine.py").write_text("".join(trials_file(tmp_path / "mine.py").read_text().splitlines(True)[:2]))
    assert trials(tmp_path / "mine.py", runs=runs_of(PAIR, 2)) == trials(tmp_path / "mine.py") == {"deep": 2}


@pytest.mark.parametrize(
    ("seeds", "words", "message"),
    [
        ("range(2)", ("--only", "seed=0"), "uses seeds of its own"),
        ("range(2)", ("--only", "arm=deep", "pass=0"), "--only pass=... cannot be used here"),
        ("[0, 1_000]", (), r"the recipe uses the seeds [1000]"),
    ],
)
def test_seeds_of_the_comparison_are_not_explored(seeds, words, message, workdir, capsys):
    write_recipe(RECIPE.replace("range(2)", seeds))
    assert main(["explore", "mine.py", "--jobs", "1", *words]) == 2
    assert message in capsys.readouterr().err and not (workdir / "runs").exists()


def test_damaged_list_of_trials_is_named_with_its_line(tmp_path):
    path = tmp_path / "mine.trials.jsonl"
    trial = {"arm": "a", "labels": None, "fingerprint": "f", "seeds": 1, "val": 0.5}
    assert add_trial(path, trial) and not add_trial(path, trial) and add_trial(path, trial | {"seeds": 2})
    assert trials(tmp_path / "mine.py") == {"a": 1}
    assert path.write_text(path.read_text() + "\n") and read_trials(path)[1]["seeds"] == 2, "an empty line is no damage"
    wrong = [json.dumps(trial | change) for change in ({"seeds": "1"}, {"seeds": True}, {"arm": ["a"]}, {"fingerprint": None}, {"val": None})]
    no_trial = [(line.encode(), "line 4 is no trial") for line in (json.dumps({"arm": "b"}), *wrong)]
    deep = b"[" * 100_000, "line 4 is not JSON .*nested too deeply"
    for line, words in (deep, (b"{", "line 4 is not JSON"), (b'"\xff"', "line 4 is not JSON"), *no_trial):
        text = path.read_text()
        path.write_bytes(text.encode() + line)
        with pytest.raises(ValueError, match=words):
            add_trial(path, trial)
        path.write_text(text)
