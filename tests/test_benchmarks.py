"""The benchmarks: each runs at a tiny size, all libraries do equal work, and the table shows the record. No test depends on time."""

import configparser
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import slow_but

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are not part of the package

from benchmarks import digits, memory, ours, peers, table, tasks, verdict  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.peers import Shape  # noqa: E402
from smallvit.native import reason_against  # noqa: E402
from smallvit.recipe import load_recipe  # noqa: E402
from smallvit.train import fit  # noqa: E402

SHAPE = Shape(16, 1, 2, 3)
TINY = {
    "train": {"shapes": [SHAPE]},
    "inference": {"shapes": [SHAPE]},
    "augmentation": {"batch": 5},
    "views": {"batch": 3},
    "dino": {"shape": SHAPE},
    "recipe": {"steps": [2], "runs": 1, "labels": 20, "shape": SHAPE._replace(patch=7)},
    "scale": {"images": (20, 40), "runs": (1, 2), "steps": 2, "shape": SHAPE._replace(patch=7)},
    "gpu": {},
    "memory": {"shape": SHAPE, "growth": lambda make, shape: make(shape)() or 2.0},
    "reduction": {"settings": [(SHAPE, 28, 1, 4)]},
    "verdict": {"steps": [1, 2], "length": 3, "options": (), "make_pool": partial(ThreadPoolExecutor, 1)},  # and a job
}
PEERS_OF = {
    "train": {"timm", "vit-pytorch"},
    "inference": {"timm", "vit-pytorch"},
    "augmentation": {"torchvision", "kornia"},
    "views": {"lightly"},
    "dino": {"lightly"},
    "recipe": {"timm"},
    "scale": {"20 labels", "1 runs"},  # smallvit itself, at the smallest setting
    "gpu": {"timm"},
    "memory": {"timm"},
    "reduction": {"without merging"},  # smallvit itself
    "verdict": {"smallvit run, no options", "timm, one run after another", "timm, one process a core"},
}
COUNT = {"views": 2, "dino": 2, "scale": 2, "gpu": 0}  # tasks of a benchmark; all others have 1
COUNT |= {name: COUNT.get(name, 1) * (1 + peers.has_native_bf16()) for name in ("train", "inference", "dino")}
COUNT |= {"memory": 2 * (sys.platform == "linux"), "reduction": 1 + (reason_against() is None)}


def call_once(calls, repeats):
    """A measure that calls everything once and returns 1 for each."""
    for call in calls:
        call()
    return [1.0 for _ in calls]


@pytest.fixture
def one_process(monkeypatch):
    """Train runs in this process on one thread; processes of `launch` are tested elsewhere."""
    monkeypatch.setattr(peers, "threads", lambda number: nullcontext())
    monkeypatch.setattr(ours, "launch", lambda runs, out, **more: [fit(one.run, Path(out) / str(one.run.seed)) for one in runs])


@pytest.fixture
def job(tmp_path):
    """A recipe of two arms and two seeds on digits of 28 x 28 pixels; it declares tuning and has references."""
    (train, train_labels), (test, test_labels) = digits.splits(28).values()
    file = tmp_path / "digits.npz"
    np.savez(file, train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)
    path = tmp_path / "a_recipe.py"
    path.write_text(RECIPE.format(data=str(file)))
    return verdict.Job(str(path), 20, 2, SHAPE._replace(patch=7, mlp_ratio=4.0))


RECIPE = """
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, Tune, ViT, ablate, arrays

vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=7), dim=16, depth=1, heads=2)
scratch = Run(data=partial(arrays, path={data!r}), val=10, model=vit, steps=50, batch=3)
arms = {{"scratch": scratch, "+LSA": scratch.vary(attention=LocalityAttention)}}
RUNS = ablate(arms, labels=[20, 40], tune=Tune({{"lr": (1e-4, 1e-2)}}, trials=2))
"""


@pytest.mark.parametrize(
    "name", slow_but(("train", "inference"), tasks.BENCHMARKS)
)
def test_every_benchmark_runs(name, one_process, job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(verdict, "command", lambda *args: None)
    found = list(tasks.BENCHMARKS[name](**TINY[name] | ({"job": job} if name == "verdict" else {})))
    assert len(found) == COUNT.get(name, 1) and TINY.keys() == PEERS_OF.keys() == tasks.BENCHMARKS.keys()
    lines = [line for task in found for line in tasks.compare(task._replace(measure=call_once), repeats=1)]
    assert {line["peer"] for line in lines} == (PEERS_OF[name] if found else set())
    own = name in ("scale", "reduction", "verdict")  # the peer is smallvit, or its name says more than that of a package
    assert own or PEERS_OF[name] <= set(peers.PEERS)
    for line in lines:
        installed = own or peers.version(line["peer"]) is not None
        assert line["smallvit"] == 1 and line["default settings"] == (1 if installed else None)


def test_seconds_per_run_counts_the_cores_that_are_used(monkeypatch):
    monkeypatch.setattr(peers, "cores", lambda: 2)
    monkeypatch.setattr(tasks, "seconds", lambda calls, repeats: [32.0, 4.0])
    assert tasks.seconds_per_run((32, 1), [], 3) == [2.0, 4.0]


def test_missing_peer_does_not_affect_the_others(monkeypatch):
    monkeypatch.setattr(tasks, "version", lambda peer: None if peer == "vit-pytorch" else "1")
    monkeypatch.setattr(tasks, "with_and_without_bf16", lambda: [(False, "")])
    (task,) = tasks.train([SHAPE])
    lines = {line["peer"]: line for line in tasks.compare(task._replace(measure=call_once), repeats=1)}
    assert lines["timm"]["best flags"] == 1 and lines["vit-pytorch"]["default settings"] is None
    assert ["", "", "vit-pytorch", "not installed", ""] in cells(make_record([*lines.values()]))


# Equal work


@pytest.mark.parametrize("peer", peers.VITS)
def test_peer_with_other_multiply_adds_is_refused(peer, monkeypatch):
    if peers.version(peer) is None:
        pytest.skip(f"needs {peer}")
    tasks.check_models(SHAPE)
    make = peers.VITS[peer]
    monkeypatch.setitem(peers.VITS, peer, lambda shape, *args, **flags: make(shape._replace(depth=2), *args, **flags))
    with pytest.raises(ValueError, match=f"multiply-adds of {peer}"):
        next(tasks.train([SHAPE]))


def test_timm_has_equal_parameters_and_its_flag_selects_the_attention_kernel():
    timm, model = peers.timm_vit(SHAPE, 28, 1, best=True), ours.vit(SHAPE)((28, 28), 1, 10)
    assert tasks.count_parameters(timm) == tasks.count_parameters(model)
    assert not timm.blocks[0].attn.fused_attn and peers.timm_vit(SHAPE, 28, 1, best=False).blocks[0].attn.fused_attn


def test_augmentation_with_one_draw_for_all_images_is_refused():
    images = torch.rand(4, 1, 28, 28)
    with pytest.raises(ValueError, match="different images after the flip"):
        tasks.check_augmentation("the flip", lambda images: images.flip(3), images)
    with pytest.raises(ValueError, match="image size after the crop"):
        tasks.check_augmentation("the crop", lambda images: images[..., 2:], images)


def test_views_are_those_of_the_kernel_that_is_given():
    usual, native = (list(tasks.views(batch=3, given=given)) for given in ({}, {"kernel": "native"}))
    assert [task.numerics for task in usual] == [None, None]
    assert [task.numerics for task in native] == [None if reason_against() else "native views"] * 2
    for task, other in zip(usual, native):
        assert task.name == other.name
        for views, same in zip(task.ours(), other.ours()):
            torch.testing.assert_close(same, views, rtol=0, atol=1e-4)


def test_other_views_are_refused():
    views = [torch.zeros(4, 1, 28, 28), torch.zeros(8, 1, 16, 16)]
    tasks.check_views(views, [*views[0].split(2), *views[1].split(2)])
    with pytest.raises(ValueError, match="views: smallvit 12, peer 10"):
        tasks.check_views(views, [*views[0].split(2), *views[1].split(2)][:-1])
    with pytest.raises(ValueError, match="pixels"):
        tasks.check_views(views, [torch.zeros(12, 1, 28, 28)])


def test_both_sides_of_a_recipe_make_equal_steps_with_equal_batches(one_process, monkeypatch):
    batches = {"ours": [], "theirs": []}
    train_step, learn = ours.Training.train_step, peers.learn
    monkeypatch.setattr(ours.Training, "train_step", lambda self: batches["ours"].append(self.run.batch) or train_step(self))
    monkeypatch.setattr(peers, "learn", lambda *args: batches["theirs"].append(len(args[2])) or learn(*args))
    shape, (number, steps, labels) = SHAPE._replace(patch=7), (2, 3, 20)
    ours.runs(shape, number, steps, labels)
    peers.runs(shape, number, steps, labels, "cpu", best=False)
    assert batches["ours"] == batches["theirs"] == number * steps * [shape.batch]


def test_recipe_with_a_failed_run_raises(monkeypatch):
    monkeypatch.setattr(ours, "launch", lambda *args, **options: [SimpleNamespace(status="failed", error="out of luck")])
    with pytest.raises(RuntimeError, match="out of luck"):
        ours.runs(SHAPE, 1, 1, 20)


def test_both_sides_of_a_verdict_train_the_same_arms_and_seeds(one_process, job, monkeypatch):
    made = []

    def record(make, seed, steps, batch, train, test, best, workers):
        made.append((make(), seed, steps, len(train[0]), len(test[0])))

    monkeypatch.setattr(verdict, "run", record)
    verdict.loop(job, False, None, 5)
    assert [rest for _, *rest in made] == [[seed, 5, 20, 500] for seed in (0, 0, 1, 1)]
    assert [type(model).__module__.partition(".")[0] for model, *_ in made] == 2 * ["timm", "smallvit"]

    def run_in_this_process(words, **_):
        recipe = load_recipe(words[4])
        runs = [(e.arm, e.seed, e.labels, e.run.steps) for e in recipe.RUNS]
        assert runs == [(arm, seed, 20, 5) for seed in (0, 1) for arm in ("scratch", "+LSA")] and words[-1] == "--fast"
        return SimpleNamespace(returncode=0, stdout="fast: native blocks")

    monkeypatch.setattr(verdict.subprocess, "run", run_in_this_process)
    verdict.command(job, ["--fast"], 5)


@pytest.mark.slow
def test_verdict_ends_with_a_report(job, monkeypatch):
    folders = []
    run = verdict.subprocess.run
    monkeypatch.setattr(verdict.subprocess, "run", lambda words, **more: folders.append(words[6]) or run(words, **more))
    monkeypatch.setattr(verdict, "TemporaryDirectory", lambda: nullcontext(Path(job.recipe).parent))
    verdict.command(job._replace(seeds=1), ["--jobs", "1"], 1)
    assert (Path(folders[0]) / "verdict" / "report.html").exists()
    with pytest.raises(RuntimeError, match="smallvit run failed"):
        verdict.command(job, ["--jobs", "none"], 1)


def test_estimate_follows_a_straight_line(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 15.0, 20.0, 27.0])
    monkeypatch.setattr(verdict.time, "perf_counter", lambda: next(clock))
    lengths = []
    assert verdict.estimate(lengths.append, [20, 40], 100, factor=2) == 2 * (5 + 60 * 0.1) and lengths == [20, 40]
    assert verdict.estimate(lengths.append, [100], 100) == 7


def test_share_of_the_saved_multiply_adds_that_becomes_time():
    cell = table.peer_cells(line("merging", "without", 60.0, 100.0, None) | {"macs": 0.5})
    assert cell == ["100 ms, 1.7x, share 0.80", ""]
    assert "Share: saved time" in table.markdown(make_record([line("merging", "without", 60.0, 100.0, None) | {"macs": 0.5}]))


def test_merging_saves_the_multiply_adds_that_the_benchmark_says():
    merging, plain, macs = ours.merging(SHAPE._replace(depth=2), 28, 1, 10, ours.DEFAULT)
    assert merging().shape == plain().shape == (3, 10) and not torch.equal(merging(), plain()) and 0.7 < macs < 0.9


def test_digits_are_enlarged_digits_of_scikit_learn():
    data = digits.dataset(32, 3)
    assert len(data.train) == digits.TRAIN and data.spec.size == (32, 32) and data.spec.channels == 3
    assert data.train.images.amax() == 255 and data.train.labels.bincount().amin() >= 100  # 1,000 balanced labels


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_the_tensors_of_both_steps():
    tensors = []

    def make(shape):
        return lambda: tensors.append(torch.ones(shape.dim * 2**18))  # `dim` MiB

    assert memory.growth(make, Shape(64, 1, 1, 1)) >= 128  # two steps


# The command, the record, the table


def make_record(lines: list[dict], **machine) -> dict:
    defaults = {"cpu": "A processor", "cores": 2, "threads": 1, "bf16": False, "gpu": None, "versions": {"torch": "2.15"}}
    return {"machine": defaults | machine, "repeats": 9, "lines": lines}


def cells(record: dict) -> list[list[str]]:
    """The cells of the table without its header."""
    rows = [row for row in table.markdown(record).splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def line(task: str, peer: str, smallvit: float, default: float | None, best: float | None, steps=None, unit="ms") -> dict:
    known = {"task": task, "steps": steps, "unit": unit, "smallvit": smallvit, "peer": peer}
    return known | {"default settings": default, "best flags": best}


def test_table_shows_the_record():
    lines = [
        line("a step", "timm", 50.0, 1234.5, 60.0),
        line("a step", "vit-pytorch", 50.0, None, None),
        line("warping", "kornia", 8.0, 10.04, None),
        line("16 runs", "timm", 10.0, 30.0, 20.0, steps=20, unit="s"),
        line("16 runs", "timm", 14.0, 70.0, 40.0, steps=60, unit="s"),
        line("memory", "timm", 900.0, 990.0, 900.0, unit="MiB"),
    ]
    assert cells(make_record(lines)) == [
        ["a step", "50 ms", "timm", "1,234 ms, 24.7x", "60 ms, 1.2x"],
        ["", "", "vit-pytorch", "not installed", ""],
        ["warping", "8 ms", "kornia", "10 ms, 1.3x", ""],
        ["16 runs, 20 steps each", "10 s", "timm", "30 s, 3.0x", "20 s, 2.0x"],
        ["16 runs, 60 steps each", "14 s", "timm", "70 s, 5.0x", "40 s, 2.9x"],
        ["16 runs, 1,500 steps each (extrapolated)", "158 s", "timm", "1,510 s, 9.6x", "760 s, 4.8x"],
        ["memory", "900 MiB", "timm", "990 MiB, 1.1x", "900 MiB, 1.0x"],
    ]
    method = table.markdown(make_record(lines)).splitlines()[-1]
    assert "A processor, 2 cores, 1 torch thread; torch 2.15. The CPU has no native bf16" in method
    assert "medians of 9 repetitions" in method and "There is no GPU" in method
    assert "GPU: Some card" in table.markdown(make_record(lines, gpu="Some card"))
    assert "repeat their task" not in method
    assert "repeat their task for 20 ms before it is timed" in table.markdown(make_record(lines) | {"warm_up": 0.02})


def test_extrapolation_needs_two_lengths_and_ends_below_the_measured_ones():
    short, long = line("runs", "timm", 1.0, 2.0, 2.0, steps=20), line("runs", "timm", 5.0, 9.0, 9.0, steps=1_500)
    for lines in ([short], [short, long], [short, short | {"task": "others"}]):
        assert table.extrapolate(lines) == []
    (one,) = table.extrapolate([short, short | {"steps": 60}, short | {"steps": 120, "smallvit": 2.0}])
    assert one["smallvit"] == 1 + (1_500 - 60) / (120 - 60) and one["best flags"] == 2


def test_table_is_inserted_between_the_markers_of_a_page():
    page = "# smallvit\n<!-- speed b.json -->\nold\n\nold\n<!-- end -->\nmore\n<!-- speed a.json -->\n<!-- end -->\n"
    changed = table.insert_table(page, r"| \1 |", "b.json")
    assert changed == page.replace("old\n\nold", r"| \1 |")
    assert table.insert_table(changed, "new", "a.json") == changed.replace("a.json -->\n", "a.json -->\nnew\n")
    with pytest.raises(ValueError, match=r"the page has no <!-- speed c\.json -->"):
        table.insert_table(page, "| new |", "c.json")


def test_one_page_shows_the_table_of_each_committed_record():
    records = {path.name: json.loads(path.read_text()) for path in (ROOT / "benchmarks").glob("record*.json")}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    shown = [found for page in pages for found in re.findall(r"<!-- speed (\S+) -->\n(.*?)\n<!-- end -->", page, re.S)]
    assert sorted(shown) == sorted((name, table.markdown(record)) for name, record in records.items()) and len(shown) >= 2


def test_command_writes_a_record_and_prints_its_table(tmp_path, monkeypatch, capsys):
    def quick(steps=None, given=None) -> Iterator[tasks.Task]:
        yield tasks.Task(f"nothing {steps}", lambda: None, {"timm": {"default settings": lambda: None}}, measure=call_once)

    names = ("quick", "train", "inference", "dino", "views", "recipe", "gpu", "verdict")
    monkeypatch.setattr(tasks, "BENCHMARKS", dict.fromkeys(names, quick))
    out = tmp_path / "deep" / "record.json"
    assert main(["quick", "recipe", "--repeats", "2", "--steps", "7", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == table.markdown(record)
    assert [line["task"] for line in record["lines"]] == ["nothing None", "nothing [7]"] and record["repeats"] == 2
    assert record["machine"]["threads"] == 1 and record["machine"]["versions"]["torch"] == peers.version("torch")
    assert str(ROOT) not in out.read_text()


def test_update_replaces_the_lines_of_a_task_and_keeps_the_others(tmp_path, monkeypatch, capsys):
    def benchmark(name, times):
        calls = {"timm": {"default settings": lambda: None}, "vit-pytorch": {}}
        yield tasks.Task(name, lambda: None, calls, measure=lambda calls, repeats: [times.pop()] * len(calls))

    times = [3.0, 2.0, 1.0]
    others = dict.fromkeys(("inference", "dino", "recipe", "gpu", "verdict"), benchmark)
    own = {"train": lambda given: benchmark("train", times), "views": lambda given: benchmark("views", times)}
    monkeypatch.setattr(tasks, "BENCHMARKS", others | own)
    for names in (["train", "views"], ["train"]):
        assert main([*names, "--repeats", "2", "--update", "--out", str(tmp_path / "record.json")]) == 0
    lines = json.loads((tmp_path / "record.json").read_text())["lines"]
    assert [(line["task"], line["peer"], line["smallvit"]) for line in lines] == [
        ("train", "timm", 3), ("train", "vit-pytorch", 3), ("views", "timm", 2), ("views", "vit-pytorch", 2),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["train", "--repeats", "3", "--update", "--out", str(tmp_path / "record.json")])
    assert "another number of repetitions" in capsys.readouterr().err
    monkeypatch.setattr(tasks, "WARM_UP", 2 * tasks.WARM_UP)
    with pytest.raises(SystemExit):
        main(["train", "--repeats", "2", "--update", "--out", str(tmp_path / "record.json")])
    assert "another warm-up" in capsys.readouterr().err


def test_update_keeps_the_code_with_which_each_line_was_measured(tmp_path, monkeypatch):
    def benchmark(name):
        yield tasks.Task(name, lambda: None, {"timm": {"default settings": lambda: None}}, measure=call_once)

    names = ("train", "inference", "dino", "views", "recipe", "gpu", "verdict")
    monkeypatch.setattr(tasks, "BENCHMARKS", {name: lambda name=name, **_: benchmark(name) for name in names})
    measured = (["train", "dino", "views"], ["dino"], ["views", "dino"])
    for code, some in enumerate(measured, start=1):
        monkeypatch.setattr("smallvit.record.code", lambda code=code: {"sha256": f"code {code}"})
        assert main([*some, "--update", "--out", str(tmp_path / "record.json")]) == 0
        record = json.loads((tmp_path / "record.json").read_text())
        last = {task: f"code {max(n for n, names in enumerate(measured[:code], start=1) if task in names)}" for task in measured[0]}
        assert {line["task"]: (line.get("code") or record["machine"]["code"])["sha256"] for line in record["lines"]} == last


def test_without_bf16_no_side_uses_it(monkeypatch):
    monkeypatch.setattr(tasks, "has_native_bf16", lambda: True)
    monkeypatch.setattr(peers, "has_native_bf16", lambda device="cpu": True)
    monkeypatch.setattr(ours, "has_native_bf16", lambda: True)
    assert tasks.with_and_without_bf16() == [(True, ""), (False, ", without bf16")]
    assert {way.precision for way in ours.ways(True, {})} == {None, "bf16"}
    assert {way.precision for way in ours.ways(False, {})} == {None}
    assert [way.kernel for way in ours.ways(False, {"kernel": "fused"})] == ["fused"]
    assert peers.autocast(True)._enabled and not peers.autocast(True, bf16=False)._enabled


def test_unknown_benchmark_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "'trian'; expected some of train, inference" in capsys.readouterr().err


def test_peers_are_dependencies_of_the_package_or_of_its_extra():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"] + setup["options.extras_require"]["bench"]
    assert set(peers.PEERS) <= set(re.findall(r"^([\w-]+)>=", required, re.M))
    assert "benchmarks" not in setup["options"]["packages"]
