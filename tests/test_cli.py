"""The command line, as a user meets it: also from elsewhere, with wrong words, and with broken recipes."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate
from smallvit.__main__ import main
from smallvit.recipe import load_recipe, only, recipe_files, refuse_incomparable
from smallvit.record import read_records

RECIPE = '''
"""Does locality attention help a very small model?

More.
"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20,
              augment=augment.digits())
RUNS = ablate({"scratch": scratch, "+LSA": scratch.vary(attention=LocalityAttention)}, labels=[20, 40], seeds=range(2))
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory with one recipe in it."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(RECIPE)
    yield tmp_path
    sys.modules.pop("recipes.mine", None)


def smallvit(*words: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "smallvit", *words], capture_output=True, text=True, **kwargs)


def test_help_needs_no_torch():
    code = "import sys; sys.argv=['smallvit','--help']\nimport runpy\ntry: runpy.run_module('smallvit', run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("list", "run", "report", "verify", "summary"))


def test_list_shows_every_recipe_with_its_question(capsys, here):
    (here / "recipes").mkdir()
    (here / "recipes" / "own.py").write_text(RECIPE)
    (here / "recipes" / "torn.py").write_bytes(b'"""\xff\x00"""')
    (here / "recipes" / "half.py").write_text('"""What?')
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert out.count("cannot be read: ") == 2
    assert "own" in out and "Does locality attention help" in out
    assert all(path.stem in out for path in recipe_files()) and "quickstart" in out


def test_a_recipe_run_reported_published_and_verified(here, capsys):
    assert main(["run", "mine.py", "--only", "labels=20", "arm=scratch,+LSA,references", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "20 labels" in out and "not enough seeds" in out and "small CNN" in out
    page = (here / "runs" / "mine" / "report.html").read_text()
    assert "Does locality attention help" in page and "+LSA" in page
    assert main(["report", "mine.py", "--publish"]) == 2, "half a recipe was published"
    assert "have not finished" in capsys.readouterr().err
    assert main(["run", "mine.py"]) == 0
    assert main(["report", "mine.py", "--publish"]) == 0
    records = read_records(here / "mine.jsonl")
    assert len(records) == 2 * 2 * 5 and (here / "mine.md").exists() and (here / "mine.html").exists()
    assert main(["verify", "mine.py", "--jobs", "1"]) == 0
    assert "identical to the record" in capsys.readouterr().out
    text = (here / "mine.jsonl").read_text()
    (here / "mine.jsonl").write_text(text.replace('"accuracy": 0.', '"accuracy": 0.9'))
    assert main(["verify", "mine.py", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "OUTSIDE" in out or "TOO WIDE" in out


def test_dry_run_says_how_the_arms_differ_and_trains_nothing(here, capsys):
    assert main(["run", "mine.py", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "model.attention: Attention(" in out and "LocalityAttention(" in out and "20 runs, about" in out
    assert not (here / "runs").exists()


def test_dry_run_counts_what_has_finished_in_that_folder(here, capsys):
    assert main(["run", "mine.py", "--only", "labels=20", "arm=scratch", "--jobs", "1", "--out", "mine"]) == 0
    capsys.readouterr()
    assert main(["run", "mine.py", "--dry-run", "--out", "mine"]) == 0
    out = capsys.readouterr().out
    assert "scratch: 4 runs" in out and out.count("; 2 have finished") == 1
    assert "20 runs, 2 have finished, the others take about" in out
    assert main(["run", "mine.py", "--dry-run"]) == 0
    assert "have finished" not in capsys.readouterr().out


def test_dry_run_downloads_nothing(here, capsys, monkeypatch):
    import huggingface_hub

    for name in ("get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, lambda *words, **options: pytest.fail("something was downloaded"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words: None)
    text = (here / "mine.py").read_text()
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    more = f"RUNS = RUNS + ablate({{'tuned': scratch.vary(init=Weights(name={name!r}))}}, labels=[50], seeds=[0], references=False)"
    (here / "more.py").write_text(f"from smallvit import Weights\n{text}\n{more}\n")
    assert main(["run", "more.py", "--dry-run"]) == 0
    assert f"{name} is to be downloaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, model, rows, params",
    [
        (["mine.py"], "mine, scratch:", ["16 x 16", "17 x 16"], 3_850),
        (["mine.py", "--arm", "+LSA", "--image", "16"], "mine, +LSA:", ["64 x 16", "65 x 16"], 4_620),
        (["vit_tiny_patch16_224"], "step ", ["3 x 224 x 224", "196 x 192", "197 x 192"], 5_717_416),
        (["vit_base_patch16_224", "--image", "224", "--channels", "3"], "step ", ["197 x 768"], 86_567_656),
        (["resnet18", "--image", "32", "--channels", "1"], "step ", ["1 x 32 x 32", "64 x 16 x 16"], 11_683_240),
    ],
)
def test_shapes_of_an_arm_and_of_a_model_of_timms(words, model, rows, params, here, capsys):
    assert main(["summary", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(model) and all(row in out for row in rows)
    assert out.splitlines()[-1].split()[:2] == ["total", f"{params:,}"]
    assert sorted(path.name for path in here.iterdir()) == ["mine.py"]


def test_smoke_takes_every_arm_and_leaves_the_real_runs_alone(here, capsys):
    assert main(["run", "mine.py", "--smoke", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert all(arm in out for arm in ("scratch", "+LSA", "small CNN", "pixels, nearest neighbour"))
    assert not (here / "runs" / "mine").exists()


def test_runs_of_another_length_have_their_own_place_and_report(here, capsys):
    assert main(["run", "mine.py", "--scale-steps", "2", "--only", "labels=20", "seed=0", "arm=scratch", "--jobs", "1"]) == 0
    (here / "runs" / "scale-steps-2" / "mine" / "report.html").unlink()
    assert main(["report", "mine.py", "--scale-steps", "2"]) == 1, "most runs are missing"
    page = (here / "runs" / "scale-steps-2" / "mine" / "report.md").read_text()
    assert "| scratch (baseline) |" in page and "smallvit run mine.py --scale-steps 2 (or its path)" in page
    assert (here / "runs" / "scale-steps-2" / "mine" / "report.html").exists() and not (here / "runs" / "mine").exists()


def test_only_chooses_by_arm_labels_and_seed(here):
    runs = load_recipe("mine.py").RUNS
    assert {r.arm for r in only(runs, ["arm=+LSA"])} == {"+LSA"}
    assert {(r.labels, r.seed) for r in only(runs, ["labels=40", "seed=0-1"])} == {(40, 0), (40, 1)}
    assert {r.arm for r in only(runs, ["arm=pixels, logistic regression,+LSA"])} == {"pixels, logistic regression", "+LSA"}
    assert {r.role for r in only(runs, ["arm=references"])} == {"reference"}


@pytest.mark.parametrize(
    "words, said",
    [
        (["run", "quickstrat"], "did you mean 'quickstart'?"),
        (["run", "nowhere.py"], "there is no recipe 'nowhere.py'"),
        (["run", "elsewhere/recipes/quickstart.py"], "there is no recipe 'elsewhere/recipes/quickstart.py'"),
        (["run", "mine.py", "--only", "arm=+LAS"], "has no arm '+LAS'; did you mean '+LSA'?"),
        (["run", "mine.py", "--only", "labels=30"], "has no labels '30'"),
        (["run", "mine.py", "--only", "seeds=1"], "--only got 'seeds=1'; expected arm=..., labels=... or seed=..."),
        (["report", "mine.py"], "no runs of mine in runs; start them with: smallvit run mine.py"),
        (["report", "mine.py", "--scale-steps", "2"], "no runs of mine in runs/scale-steps-2"),
        (["report", "mine.py", "--scale-steps", "2", "--publish"], "--scale-steps 2 is not what mine.py says"),
        (["verify", "mine.py"], "no committed records"),
        (["run", "mine.py", "--numerics", "compiled=yes", "compiled=no"], "compiled twice; expected each choice once"),
        (["run", "mine.py", "--out", "mine.py"], "--out mine.py cannot be made"),
        (["run", "mine.py", "--fast", "--out", "mine.py/runs"], "--out mine.py/runs cannot be made"),
        (["run", "mine.py", "--device", "cdua"], "device is 'cdua'; expected cpu, cuda, mps or auto"),
        (["summary", "quickstrat"], "did you mean 'quickstart'? (timm has no model of that name either)"),
        (["summary", "mine.py", "--arm", "+LAS"], "has no arm '+LAS'; did you mean '+LSA'?"),
        (["summary", "mine.py", "--image", "9"], "patches of 2 pixels do not tile an image of 9 x 9"),
        (["summary", "vit_tiny_patch16_224", "--arm", "+LSA"], "is a model of timm's and has no arm '+LSA'"),
        (["summary", "vit_tiny_patch16_224", "--image", "28"], "patches of 16 pixels do not tile an image of 28 x 28"),
        (["summary", "swin_tiny_patch4_window7_224", "--image", "28"], "does not take images of 3 x 28 x 28"),
    ],
)
def test_wrong_words_get_one_sentence_and_a_status(words, said, here, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("smallvit: ") and "Traceback" not in err


@pytest.mark.parametrize(
    "text, said",
    [
        ("import smallvit\nraise RuntimeError('no luck')", "broken.py, line 2: RuntimeError: no luck"),
        ("RUNS = [", "broken.py, line 1: SyntaxError"),
        ("x = 1", "broken.py defines no RUNS"),
        ("RUNS = [1]", "broken.py defines no RUNS"),
        (
            "from smallvit import Run\nRUNS = [Run(stepps=3)]",
            "line 2: ValueError: a run has no choice 'stepps'; did you mean 'steps'?",
        ),
        ("ARMS = {\n'a': 1, 'b': 2, 'a': 3}", "broken.py: ValueError: 'a' stands 2 times in the dict of line 1; expected each"),
        ("from smallvit import mnits", "line 1: ImportError: cannot import name 'mnits'"),
        ("from mine import scratch", "line 1: ModuleNotFoundError: No module named 'mine'; a recipe is one file"),
    ],
)
def test_a_broken_recipe_is_named_with_its_line(text, said, here, capsys):
    Path("broken.py").write_text(text)
    assert main(["run", "broken.py"]) == 2
    assert said in capsys.readouterr().err


def test_a_failing_arm_gives_a_status_and_keeps_the_others(here, capsys):
    Path("mine.py").write_text(
        RECIPE.replace('"+LSA": scratch.vary(attention=LocalityAttention)', '"odd": scratch.vary(heads=3)')
    )
    assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "--jobs", "1"]) == 1
    captured = capsys.readouterr()
    assert "FAILED odd, 20 labels, seed 0: ValueError: 3 heads do not divide width 16" in captured.err
    assert "scratch" in captured.out and (here / "runs" / "mine" / "report.html").exists()
    assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "--jobs", "1"]) == 1  # nothing is tried again
    assert "  odd: ValueError: 3 heads do not divide width 16" in capsys.readouterr().err


def test_a_torn_record_is_named_and_the_others_stay(here, capsys):
    Path("mine.py").write_text(RECIPE)
    assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "arm=scratch,+LSA", "--jobs", "1"]) == 0
    torn, other = sorted(here.rglob("record.json"))
    torn.write_bytes(torn.read_bytes()[:100])
    kept = other.read_bytes()
    assert main(["report", "mine.py"]) == 2
    assert f"{torn.relative_to(here)} is torn" in capsys.readouterr().err and other.read_bytes() == kept


def test_a_new_attention_in_a_recipe_file_runs_without_touching_the_package(here, capsys):
    recipe = '''"""Does attention that ignores distance help?"""
from functools import partial
import torch
from torch import nn
from smallvit import AttentionOutput, PatchEmbed, Run, ViT, ablate

class MeanAttention(nn.Module):
    """Every token sees the mean of all tokens."""

    def __init__(self, dim, heads, *, gain: float = 1.0):
        super().__init__()
        self.proj, self.gain = nn.Linear(dim, dim), gain

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(self.gain * self.proj(x.mean(1, keepdim=True).expand_as(x)))

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, labels=20, val=20)
RUNS = ablate({"scratch": scratch, "mean": scratch.vary(attention=partial(MeanAttention, gain=2.0))}, labels=[20], seeds=[0])
'''
    Path("mine.py").write_text(recipe)
    assert main(["run", "mine.py", "--jobs", "2"]) == 0
    record = next(r for r in map(read_one, here.rglob("record.json")) if r["arm"] == "mean")
    assert record["run"]["model"]["attention"] | {"recipe_sha256": ""} == {
        "call": "recipes.mine.MeanAttention",
        "gain": 2.0,
        "recipe_sha256": "",
    }


def test_an_edited_class_of_a_recipe_is_trained_again_and_a_comment_is_not(here, capsys):
    recipe = RECIPE.replace(
        '{"scratch": scratch, "+LSA": scratch.vary(attention=LocalityAttention)}', '{"a": scratch.vary(attention=Mine)}'
    )
    recipe = recipe.replace("scratch = Run", "class Mine(LocalityAttention):\n    gain = 1.0\n\n\nscratch = Run").replace(
        "[20, 40]", "[20]"
    )
    words = ["run", "mine.py", "--only", "arm=a", "seed=0", "--jobs", "1"]

    def trained(text: str) -> int:
        Path("mine.py").write_text(text)
        sys.modules.pop("recipes.mine", None)
        assert main(words) == 0
        return len(list(here.rglob("record.json")))

    assert trained(recipe) == 1 and trained("# a comment\n" + recipe) == 1
    assert trained(recipe.replace("gain = 1.0", "gain = 2.0")) == 2


def test_verdicts_pay_for_the_whole_recipe_also_when_only_a_part_has_run(here):
    assert main(["run", "mine.py", "--only", "arm=+LSA,scratch", "labels=20", "--jobs", "1"]) == 0
    page = (here / "runs" / "mine" / "report.md").read_text()
    assert "2 comparisons" in page and "missing" in page and "40 labels" in page


def test_what_cannot_be_compared_is_refused_before_it_is_trained(here, capsys):
    Path("mine.py").write_text(RECIPE + "RUNS = RUNS + RUNS")
    assert main(["run", "mine.py"]) == 2
    assert "stands in RUNS 2 times" in capsys.readouterr().err
    Path("mine.py").write_text(RECIPE + "RUNS = [scratch]")
    assert main(["run", "mine.py"]) == 2
    assert "the baselines in RUNS are []" in capsys.readouterr().err


def two_baselines() -> list:
    """What a recipe makes that concatenates two calls of `ablate`."""
    runs = []
    for patch in (2, 4):
        base = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=patch)))
        arms = {f"patch {patch}": base, f"+LSA, patch {patch}": base.vary(attention=LocalityAttention)}
        runs += ablate(arms, seeds=range(2), references=patch == 2)
    return runs


def test_a_recipe_may_have_several_baselines_if_every_arm_names_its_own():
    runs = two_baselines()
    refuse_incomparable(runs, "r.py")
    refuse_incomparable([replace(run, baseline="") for run in runs if run.baseline == "patch 2"], "r.py")
    for spoilt, says in (
        ([replace(run, baseline="") for run in runs], r"arm '\+LSA, patch 2' \(technique\) is held against ''"),
        ([run for run in runs if run.arm != "patch 4"], r"'patch 4'; expected one of \['patch 2'\]"),
        ([replace(runs[0], baseline="patch 4"), *runs[1:]], "'patch 2' stands in several roles or against several"),
        ([replace(run, baseline="patch 4") if run.arm == "patch 2" else run for run in runs], r"'patch 2' \(baseline\) is held"),
        ([replace(run, role="technique") if run.seed else run for run in runs], "'patch 2' stands in several roles"),
    ):
        with pytest.raises(ValueError, match=says):
            refuse_incomparable(spoilt, "r.py")


def test_a_broken_recipe_beside_the_others_does_not_hide_them(here, capsys):
    (here / "recipes").mkdir()
    (here / "recipes" / "half.py").write_text("RUNS = [")
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "half" in out and "cannot be read" in out and "quickstart" in out


def read_one(path: Path) -> dict:
    import json

    return json.loads(path.read_text())


def test_it_works_from_any_directory_and_leaves_that_directory_alone(here):
    done = smallvit("list", cwd=here, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 0 and "quickstart" in done.stdout
    assert sorted(path.name for path in here.iterdir()) == ["mine.py"]
