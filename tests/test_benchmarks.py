"""The benchmarks: each builds and runs at a tiny size, who is timed against whom does equal work, the table says what was measured.

No time decides a test.
"""

import configparser
import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # they are run from a checkout and are no part of the package

from benchmarks import digits, memory, ours, peers, table, work  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.peers import Shape  # noqa: E402
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
}
BESIDE = {
    "train": {"timm", "vit-pytorch"},
    "inference": {"timm", "vit-pytorch"},
    "augmentation": {"torchvision", "kornia"},
    "views": {"lightly"},
    "dino": {"lightly"},
    "recipe": {"timm"},
    "scale": {"20 labels", "1 runs"},  # itself
    "gpu": {"timm"},
    "memory": {"timm"},
}
COUNT = {"views": 2, "dino": 2, "scale": 2, "gpu": 0, "memory": 2 * (sys.platform == "linux")}  # all others: 1


def called_once(calls, repeats):
    for call in calls:
        call()
    return [1.0 for _ in calls]


@pytest.fixture
def one_process(monkeypatch):
    """Runs are trained here, on one thread; that `launch` starts processes is tested elsewhere."""
    monkeypatch.setattr(peers, "threads", lambda number: nullcontext())
    monkeypatch.setattr(ours, "launch", lambda runs, out, **more: [fit(run, Path(out) / str(run.seed)) for run in runs])


@pytest.mark.parametrize("name", work.BENCHMARKS)
def test_every_benchmark_runs_once(name, one_process, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = list(work.BENCHMARKS[name](**TINY[name]))
    assert len(found) == COUNT.get(name, 1) and TINY.keys() == BESIDE.keys() == work.BENCHMARKS.keys()
    lines = [line for one in found for line in work.compare(one._replace(measure=called_once), repeats=1)]
    assert {line["peer"] for line in lines} == (BESIDE[name] if found else set())
    assert name == "scale" or BESIDE[name] <= set(peers.PEERS)
    for line in lines:
        there = name == "scale" or peers.version(line["peer"]) is not None
        assert line["ours"] == 1 and line["as shipped"] == (1 if there else None)


def test_what_each_of_many_runs_takes_is_shared_out(monkeypatch):
    monkeypatch.setattr(peers, "cores", lambda: 2)
    monkeypatch.setattr(work, "seconds", lambda calls, repeats: [32.0, 4.0])
    assert work.each_of((32, 1), [], 3) == [2.0, 4.0]


def test_a_peer_that_is_not_installed_leaves_the_others_alone(monkeypatch):
    monkeypatch.setattr(work, "version", lambda peer: None if peer == "vit-pytorch" else "1")
    (one,) = work.train([SHAPE])
    lines = {line["peer"]: line for line in work.compare(one._replace(measure=called_once), repeats=1)}
    assert lines["timm"]["best flags"] == 1 and lines["vit-pytorch"]["as shipped"] is None
    assert ["", "", "vit-pytorch", "not installed", ""] in cells(a_record([*lines.values()]))


# Equal work


@pytest.mark.parametrize("peer", peers.VITS)
def test_a_peer_with_other_products_is_not_timed(peer, monkeypatch):
    if peers.version(peer) is None:
        pytest.skip(f"needs {peer}")
    work.check_models(SHAPE)
    deeper = peers.VITS[peer]
    monkeypatch.setitem(peers.VITS, peer, lambda shape, *more, **flags: deeper(shape._replace(depth=2), *more, **flags))
    with pytest.raises(ValueError, match=f"multiply-adds of {peer}"):
        next(work.train([SHAPE]))


def test_timm_has_as_many_parameters_and_its_attention_is_chosen_by_a_flag():
    theirs, mine = peers.timm_vit(SHAPE, 28, 1, best=True), ours.vit(SHAPE)((28, 28), 1, 10)
    assert work.trained(theirs) == work.trained(mine)
    assert not theirs.blocks[0].attn.fused_attn and peers.timm_vit(SHAPE, 28, 1, best=False).blocks[0].attn.fused_attn


def test_an_augmentation_that_draws_once_for_all_is_not_timed():
    images = torch.rand(4, 1, 28, 28)
    with pytest.raises(ValueError, match="different images that the flip makes"):
        work.check_augmentation("the flip", lambda images: images.flip(3), images)
    with pytest.raises(ValueError, match="size of what the crop gives"):
        work.check_augmentation("the crop", lambda images: images[..., 2:], images)


def test_other_views_are_not_timed():
    mine = [torch.zeros(4, 1, 28, 28), torch.zeros(8, 1, 16, 16)]
    work.check_views(mine, [*mine[0].split(2), *mine[1].split(2)])
    with pytest.raises(ValueError, match="views: ours 12, theirs 10"):
        work.check_views(mine, [*mine[0].split(2), *mine[1].split(2)][:-1])
    with pytest.raises(ValueError, match="pixels"):
        work.check_views(mine, [torch.zeros(12, 1, 28, 28)])


def test_both_sides_of_a_recipe_make_as_many_steps_with_as_many_images(one_process, monkeypatch):
    seen = {"ours": [], "theirs": []}
    train_step, learn = ours.Training.train_step, peers.learn
    monkeypatch.setattr(ours.Training, "train_step", lambda self: seen["ours"].append(self.run.batch) or train_step(self))
    monkeypatch.setattr(peers, "learn", lambda *words: seen["theirs"].append(len(words[2])) or learn(*words))
    shape, (number, steps, labels) = SHAPE._replace(patch=7), (2, 3, 20)
    ours.runs(shape, number, steps, labels)
    peers.runs(shape, number, steps, labels, "cpu", best=False)
    assert seen["ours"] == seen["theirs"] == number * steps * [shape.batch]


def test_a_recipe_that_fails_is_not_timed(monkeypatch):
    monkeypatch.setattr(ours, "launch", lambda *words, **more: [{"status": "failed", "error": "out of luck"}])
    with pytest.raises(RuntimeError, match="out of luck"):
        ours.runs(SHAPE, 1, 1, 20)


def test_the_digits_are_those_of_scikit_learn_enlarged():
    data = digits.dataset(32, 3)
    assert len(data.train) == digits.TRAIN and data.spec.size == (32, 32) and data.spec.channels == 3
    assert data.train.images.amax() == 255 and data.train.labels.bincount().amin() >= 100  # 1,000 balanced labels


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_what_a_step_holds():
    held = []

    def make(shape):
        return lambda: held.append(torch.ones(shape.dim * 2**18))  # so many MiB

    assert memory.growth(make, Shape(64, 1, 1, 1)) >= 128  # two steps


# The command, the record, the table


def a_record(lines: list[dict], **machine) -> dict:
    known = {"cpu": "A processor", "cores": 2, "threads": 1, "bf16": False, "gpu": None, "versions": {"torch": "2.15"}}
    return {"machine": known | machine, "repeats": 9, "lines": lines}


def cells(record: dict) -> list[list[str]]:
    """The table, its head left out."""
    rows = [row for row in table.markdown(record).splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def line(name: str, peer: str, mine: float, shipped: float | None, best: float | None, steps=None, unit="ms") -> dict:
    return {"work": name, "steps": steps, "unit": unit, "ours": mine, "peer": peer, "as shipped": shipped, "best flags": best}


def test_the_table_is_made_from_the_record():
    lines = [
        line("a step", "timm", 50.0, 1234.5, 60.0),
        line("a step", "vit-pytorch", 50.0, None, None),
        line("warping", "kornia", 8.0, 10.04, None),
        line("16 runs", "timm", 10.0, 30.0, 20.0, steps=20, unit="s"),
        line("16 runs", "timm", 14.0, 70.0, 40.0, steps=60, unit="s"),
        line("memory", "timm", 900.0, 990.0, 900.0, unit="MiB"),
    ]
    assert cells(a_record(lines)) == [
        ["a step", "50 ms", "timm", "1,234 ms, 24.7x", "60 ms, 1.2x"],
        ["", "", "vit-pytorch", "not installed", ""],
        ["warping", "8 ms", "kornia", "10 ms, 1.3x", ""],
        ["16 runs, 20 steps each", "10 s", "timm", "30 s, 3.0x", "20 s, 2.0x"],
        ["16 runs, 60 steps each", "14 s", "timm", "70 s, 5.0x", "40 s, 2.9x"],
        ["16 runs, 1,500 steps each (reckoned)", "158 s", "timm", "1,510 s, 9.6x", "760 s, 4.8x"],
        ["memory", "900 MiB", "timm", "990 MiB, 1.1x", "900 MiB, 1.0x"],
    ]
    words = table.markdown(a_record(lines)).splitlines()[-1]
    assert "A processor, 2 cores, 1 torch thread; torch 2.15. bf16 is not native here" in words
    assert "Medians of 9 turns" in words and "No GPU was found" in words
    assert "GPU: Some card" in table.markdown(a_record(lines, gpu="Some card"))


def test_nothing_is_reckoned_from_one_length_or_beyond_what_was_measured():
    short, long = line("runs", "timm", 1.0, 2.0, 2.0, steps=20), line("runs", "timm", 5.0, 9.0, 9.0, steps=1_500)
    assert table.reckoned([short]) == table.reckoned([short, long]) == table.reckoned([short, short | {"work": "others"}]) == []
    (one,) = table.reckoned([short, short | {"steps": 60}, short | {"steps": 120, "ours": 2.0}])
    assert one["ours"] == 1 + (1_500 - 60) / (120 - 60) and one["best flags"] == 2


def test_the_table_takes_its_place_in_a_readme():
    readme = "# smallvit\n<!-- speed -->\nold\n\nold\n<!-- end -->\nmore\n<!-- end -->\n"
    assert table.put_into(readme, r"| \1 |") == "# smallvit\n<!-- speed -->\n| \\1 |\n<!-- end -->\nmore\n<!-- end -->\n"
    assert table.put_into("<!-- speed -->\n<!-- end -->\n", "new") == "<!-- speed -->\nnew\n<!-- end -->\n"
    with pytest.raises(ValueError, match="the README has no <!-- speed -->"):
        table.put_into("# smallvit", "| new |")


def test_the_table_of_the_readme_is_that_of_the_committed_record():
    record = ROOT / "benchmarks" / "record.json"
    shown = re.search(r"<!-- speed -->\n(.*?)\n<!-- end -->", (ROOT / "README.md").read_text(), re.S)
    if not record.exists() and not shown:
        pytest.skip("no record is committed")
    assert shown and shown[1] == table.markdown(json.loads(record.read_text()))


def test_the_command_leaves_a_record_and_prints_its_table(tmp_path, monkeypatch, capsys):
    def quick(steps=None) -> Iterator[work.Work]:
        yield work.Work(f"nothing {steps}", lambda: None, {"timm": {"as shipped": lambda: None}}, measure=called_once)

    monkeypatch.setattr(work, "BENCHMARKS", {"quick": quick, "recipe": quick, "gpu": partial(quick)})
    out = tmp_path / "deep" / "record.json"
    assert main(["quick", "recipe", "--repeats", "2", "--steps", "7", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == table.markdown(record)
    assert [one["work"] for one in record["lines"]] == ["nothing None", "nothing [7]"] and record["repeats"] == 2
    assert record["machine"]["threads"] == 1 and record["machine"]["versions"]["torch"] == peers.version("torch")
    assert str(ROOT) not in out.read_text()


def test_an_unknown_benchmark_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "'trian'; expected some of train, inference" in capsys.readouterr().err


def test_peers_come_with_the_package_or_with_its_extra():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    asked = setup["options"]["install_requires"] + setup["options.extras_require"]["bench"]
    assert set(peers.PEERS) <= set(re.findall(r"^([\w-]+)>=", asked, re.M))
    assert "benchmarks" not in setup["options"]["packages"]
