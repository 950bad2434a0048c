"""The README is run: its recipes, its timm example, its words on the command line, its picture of the house."""

import ast
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from smallvit.__main__ import arguments, main
from smallvit.recipe import find_recipe, load_recipe, recipe_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The code between `<!-- name -->` and `<!-- end -->`."""
    return re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```\n<!-- end -->", README, re.S)[1]


def test_each_of_the_two_commands_is_complete():
    for name in ("quickstart", "tests"):
        assert block(name).startswith("python3 -m venv .venv && .venv/bin/pip install") and block(name).count("\n") == 1
    assert "recipes/quickstart.py" in block("quickstart") and (ROOT / "recipes" / "quickstart.py").exists()


@pytest.mark.parametrize("name", ["recipe", "attention", "dino", "weights"])
def test_the_recipes_in_the_readme_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(recipe := f"readme_{name}.py").write_text(block(name))
    arms = {run.arm for run in load_recipe(find_recipe(recipe)).RUNS}
    quick = arms - {"ViT-S from scratch"}  # which takes as long as all others here together
    assert main(["run", recipe, "--smoke", "--only", f"arm={','.join(sorted(quick))}"]) == 0
    out = capsys.readouterr().out
    assert "scratch" in out and (len(arms) > len(quick)) == (name == "weights")


def test_every_component_written_in_the_readme_can_stand_in_a_run():
    import smallvit

    written = re.findall(r"partial\((?:folder|arrays), [^()]*\)", README)
    for one in written:
        smallvit.Run(data=eval(one, {"partial": partial, "folder": smallvit.folder, "arrays": smallvit.arrays}))
    assert len(written) == 3


def test_the_new_attention_is_a_recipe_of_thirty_lines():
    assert len(block("attention").strip().splitlines()) <= 30


def test_the_timm_example_prints_what_it_says(capsys):
    exec(block("timm"), {})
    assert capsys.readouterr().out.split("\n") == ["torch.Size([2, 10])", "True", "True", ""]


def test_the_pipeline_of_scikit_learn_runs(capsys):
    exec(block("probe"), {})
    assert 0.1 < float(capsys.readouterr().out) <= 1


def test_the_reduction_of_a_timm_model_prints_what_it_says(capsys):
    exec(block("reduce"), {})
    said = [line.removeprefix("# ") for line in block("reduce").splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == said and len(said) == 2


def test_every_command_in_the_readme_is_one_that_smallvit_takes():
    lines = [line for line in re.findall(r"^smallvit .*$", README, re.M)]
    for line in lines:
        arguments().parse_args(shlex.split(line.partition("#")[0])[1:])
    assert len(lines) == 8


def test_the_house_is_drawn_as_it_stands():
    drawn = set(re.findall(r"^  (\w+(?:\.py|/)) ", README, re.M))
    stands = {
        path.name + ("/" if path.is_dir() else "") for path in (ROOT / "smallvit").iterdir() if path.name != "__pycache__"
    }
    assert drawn == stands - {"__init__.py"}


def test_every_recipe_stands_in_the_table_with_its_question():
    table = README.partition("## What the recipes found")[2].partition("\n## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.M))
    ours = {path.stem: ast.get_docstring(ast.parse(path.read_text())).splitlines()[0] for path in recipe_files()}
    assert named == ours


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)
