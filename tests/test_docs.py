"""The documentation and the README: all code runs, printed outputs are right, commands parse, and links lead somewhere.

A ```python block that is followed by a ```text block must print exactly this text. A block that assigns RUNS is a recipe: it is
written to a file and every arm is trained for two steps. All blocks of a page share one namespace and one temporary folder.
Recipes for MNIST are trained on a small data set in its place, and only by `-m slow`; otherwise their models are built. Of the other
pages, too, only the short ones run without `-m slow`.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from toys import load_script, slow_after

from smallvit import Pixels, Run, augment, digits, objectives
from smallvit.__main__ import main, parser
from smallvit.ablation import with_dependencies
from smallvit.recipe import load_recipe, recipe_files
from smallvit.record import read_records
from smallvit.report import text

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"


generate = load_script("generate")
GENERATED = {DOCS / name for name in generate.generated_pages()}
PAGES = [
    README,
    *sorted(
        page for page in DOCS.rglob("*.md") if page not in GENERATED and not {"_build", "jupyter_execute"} & set(page.parts)
    ),
]


class Block(NamedTuple):
    """A fenced block of a page: its language, its content, and the text of the page before it."""

    language: str
    content: str
    before: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    markdown = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], markdown[: m.start()]) for m in re.finditer(r"^```(\w+)\n(.*?)^```$", markdown, re.M | re.S)]


def marked(page: Path, name: str) -> str:
    """The part of a page between `<!-- name -->` and `<!-- end -->`."""
    return re.search(rf"<!-- {name} -->(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.S)[1]


def fenced(part: str) -> str:
    """The content of the fenced block that is this part of a page."""
    return re.fullmatch(r"\s*```\w+\n(.*?)\n```\s*", part, re.S)[1]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_recipe(block: Block) -> bool:
    return block.language == "python" and re.search(r"^RUNS = ", block.content, re.M) is not None


def code_and_output(page: Path) -> list[tuple[Block, str | None]]:
    """The Python blocks of a page, each with the output that the page shows for it, or None.

    The output is the text block directly below the code; in the README, a comment behind `print(...)`.
    """
    found, result = blocks(page), []
    for block, following in zip(found, [*found[1:], Block("", "", "")]):
        below = following.language == "text" and following.before.endswith(f"{block.content}```\n\n")
        comments = re.findall(r"^print\(.*  # (.+\n)", block.content, re.M) if page == README else []
        if block.language == "python":
            result.append((block, following.content if below else "".join(comments) or None))
    return result


with_code = [page for page in PAGES if code_and_output(page)]
for_mnist = [page for page in with_code if any("data=mnist" in block.content for block, _ in code_and_output(page))]


def write_recipe(block: Block) -> Path:
    """Write a recipe to the file that the page names, or to `my_recipe.py`, and return its path.

    MNIST is replaced by scikit-learn's digits, enlarged to 28 x 28 pixels.
    """
    file, content = Path((re.findall(r"as `(\w+\.py)`", block.before) or ["my_recipe.py"])[-1]), block.content
    if "data=mnist" in content:
        splits = {"train": digits().train, "test": digits().test.open()}
        pixels = {f"{name}_images": np.kron(images.images[:, 0], np.ones((3, 3))) for name, images in splits.items()}
        pixels = {name: np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8) for name, images in pixels.items()}
        np.savez("small.npz", **pixels, **{f"{name}_labels": images.labels.numpy() for name, images in splits.items()})
        content = content.replace("data=mnist", 'data=partial(arrays, path="small.npz", digits=True)')
        content = f"from functools import partial\nfrom smallvit import arrays\n{content}"
    file.write_text(content)
    return file


def smoke_test(block: Block, page: Path) -> ModuleType:
    """Train each arm of a recipe for two steps, and return the recipe as a module.

    The runs are moved to `runs`, so that the code below it finds them where a full run would have put them.
    """
    file = write_recipe(block)
    module = load_recipe(file)
    arms = ",".join(dict.fromkeys(entry.arm for entry in module.RUNS if entry.role != "reference" or "from Image" in entry.arm))
    assert main(["run", str(file), "--smoke", "--jobs", "1", "--out", ".", "--only", f"arm={arms}"]) == 0, page
    Path("runs").mkdir(exist_ok=True)
    Path("smoke", file.stem).rename(Path("runs", file.stem))
    return module


@pytest.mark.parametrize("page", slow_after(2, for_mnist), ids=page_id)
def test_models_of_recipes_for_mnist_can_be_built(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, _ in code_and_output(page):
        if is_recipe(block):
            entries, _ = with_dependencies(load_recipe(write_recipe(block)).RUNS)
            models = [model for model in dict.fromkeys(entry.run.model for entry in entries) if model is not Pixels]
            assert models and all(model((28, 28), 1, 10).eval()(torch.zeros(1, 1, 28, 28)).shape == (1, 10) for model in models)


SHORT_PAGES = {"README.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page.name in SHORT_PAGES else pytest.mark.slow) for page in with_code], ids=page_id
)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block, output in code_and_output(page):
        if is_recipe(block):
            namespace |= vars(smoke_test(block, page))
            continue
        capsys.readouterr()
        exec(compile(block.content, page_id(page), "exec"), namespace)
        assert capsys.readouterr().out == output or output is None


def test_pages_have_recipes_and_outputs():
    """The test above runs what it finds; this one asks that it finds something."""
    code = [(block, output) for page in with_code for block, output in code_and_output(page)]
    assert sum(is_recipe(block) for block, _ in code) >= 9
    assert sum(output is not None for _, output in code) >= 18
    tutorials = {page.name for page in with_code if page.parent.name == "tutorials"}
    assert tutorials == {"first_comparison.md", "own_images.md", "add_a_technique.md", "learning_without_labels.md"}


def commands(page: Path) -> list[str]:
    """The `smallvit` commands in the shell blocks of a page."""
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.content.splitlines()]
    return [part for line in lines for part in re.findall(r"(?:^|[ /])smallvit (\w.*)$", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_id)
def test_commands_have_existing_options(page):
    for command in commands(page):
        parser().parse_args(shlex.split(command, comments=True))


def test_page_names_all_transforms_and_objectives_that_are_refused():
    page = (DOCS / "howto" / "combine_slots.md").read_text(encoding="utf-8").partition("## Which augmentation")[2]
    may_change_digits = [name for name in augment.__all__ if hasattr(getattr(augment, name), "force")]
    digits_part, _, erasing = page.partition("`force=True`")
    assert len(may_change_digits) == 3 and all(f"`{name}`" in digits_part for name in may_change_digits)
    refusing = []
    for name in objectives.__all__:
        try:
            Run(objective=getattr(objectives, name), augment=(augment.RandomErasing(),))
        except ValueError as error:
            refusing += [name] * ("black rectangles" in str(error))
    assert refusing and refusing == [name for name in objectives.__all__ if f"`{name}`" in erasing]


def test_guide_for_the_command_line_shows_every_command_and_option_of_run():
    shown = " ".join(commands(DOCS / "howto" / "run_and_resume.md"))
    actions = parser()._subparsers._group_actions[0].choices
    assert {command for command in actions if f"{command} " in f"{shown} "} == set(actions)
    options = {option for action in actions["run"]._actions for option in action.option_strings if option.startswith("--")}
    assert {option for option in options if option in shown.split()} == options - {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    markdown = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", markdown):
        target = (page.parent / link).resolve()
        assert target.exists() and target not in GENERATED, f"{link}: in a clone, only committed files exist"


def test_links_to_committed_files_lead_to_pages_of_the_site():
    text = "[a](../../recipes/dino.md#b), [c](../../smallvit/evaluate/__init__.py), [d](mae.md), [e](https://x.org/recipes/dino.md)"
    expected = "[a](../recipes/dino.md#b), [c](../reference/evaluate.md), [d](mae.md), [e](https://x.org/recipes/dino.md)"
    assert generate.with_generated_links(text, "techniques/dino") == expected


def test_every_page_is_in_a_table_of_contents():
    for page in PAGES:
        if page in (README, DOCS / "index.md"):
            continue
        entry = page.relative_to(page.parent).stem
        contents = [DOCS / "index.md", page.parent / "index.md"]
        listed = [b.content for c in contents if c.exists() for b in toctrees(c)]
        line = rf"^(?:.+ <)?(?:{page.parent.name}/)?{entry}>?$"  # a title may stand before it
        assert any(re.search(line, content, re.M) for content in listed), page


def toctrees(page: Path) -> list[Block]:
    """The tables of contents of a page."""
    markdown = page.read_text(encoding="utf-8")
    return [Block("toctree", m[1], "") for m in re.finditer(r"^```\{toctree\}\n(.*?)^```$", markdown, re.M | re.S)]


def test_every_recipe_is_in_the_list_of_reports():
    page = DOCS / "recipes" / "index.md"
    (contents,) = toctrees(page)
    listed = re.findall(r"^\w+$", contents.content, re.M)
    recipes = [path for path in recipe_files() if path.parent.resolve() == ROOT / "recipes"]
    assert sorted(listed) == sorted(path.stem for path in recipes if path.with_suffix(".jsonl").exists())
    _, _, not_run = page.read_text(encoding="utf-8").partition("## Not run yet")
    assert re.findall(r"`(\w+)`", not_run) == sorted(path.stem for path in recipes if not path.with_suffix(".jsonl").exists())


def test_list_of_files_is_complete():
    listed = set(re.findall(r"^  (\w+(?:\.\w+|/)) ", marked(DOCS / "explanation" / "code.md", "files"), re.M))
    exist = {p.name + "/" * p.is_dir() for p in (ROOT / "smallvit").iterdir() if p.name not in ("__pycache__", "__init__.py")}
    assert listed == exist


def test_readme_is_short_and_has_a_picture():
    assert README.stat().st_size <= 9_000
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README.read_text(encoding="utf-8"))
    assert len(pictures) == 2 and all((ROOT / picture).exists() for picture in pictures)


@pytest.mark.slow
def test_report_becomes_a_pdf_without_links_that_lead_nowhere(tmp_path):
    make = load_script("report_pdf")
    text = make.plain_markdown((DOCS / "report.md").read_text(encoding="utf-8"))
    assert "<!--" not in text and text.count("| ---") >= 5
    links = re.findall(r"(!?)\[[^\]]+\]\(([^)]+)\)", text)
    assert links == [("!", "_static/results-light.svg"), ("!", "_static/accuracy-light.svg")]
    assert all((DOCS / path).exists() for _, path in links)
    pytest.importorskip("pypandoc", reason="pypandoc_binary and typst come with the extra docs")
    pytest.importorskip("typst", reason="pypandoc_binary and typst come with the extra docs")
    make.main(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_both_commands_of_the_readme_are_complete():
    for name in ("quickstart", "tests"):
        (line,) = fenced(marked(README, name)).splitlines()
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "recipes/quickstart.py" in fenced(marked(README, "quickstart"))


@pytest.mark.slow
def test_results_and_pictures_are_those_of_the_records():
    """Another version of matplotlib writes other bytes for the same picture; its first line names the version."""
    for path, content in load_script("results").written():
        there = path.read_text(encoding="utf-8")
        if path.suffix != ".svg" or there.splitlines()[0] == content.splitlines()[0]:
            assert there == content, f"run python docs/results.py, which writes {path.name}"


def test_signs_of_tables_are_explained_once_on_each_page():
    paths = (*DOCS.glob("techniques/*.md"), DOCS / "explanation" / "negative-results.md")
    pages = [page for page in (path.read_text(encoding="utf-8") for path in paths) if "<!-- results:" in page]
    assert len(pages) >= 20 and any("]**†" in page for page in pages)
    for page in pages:
        assert page.count("Bold: the [verdict]") == 1
        assert page.count("† Fragile:") == ("]**†" in page)
        assert page.count("(against X)") == ("(against " in page.replace("(against X)", ""))


@pytest.mark.parametrize(
    "page, name",
    [(README, "quickstart output"), (DOCS / "tutorials" / "first_comparison.md", "quickstart report")],
    ids=["readme", "tutorial"],
)
def test_output_of_the_quickstart_is_that_of_the_records(page, name):
    assert fenced(marked(page, name)) == text(read_records(ROOT / "recipes" / "quickstart.jsonl")).strip()


def test_accuracy_of_label_spreading_is_that_of_the_records():
    page = DOCS / "tutorials" / "learning_without_labels.md"
    (row,) = [r for r in load_script("results").rows_of("pseudo_labels", "DINO, labels spread") if r.labels == 10]
    assert marked(page, "pseudo-labels") == f"{row.mean:.2%}"


DOCSTRING = """Return the mean of `x`, shape (b, d).

The first paragraph continues
over two lines, with *stars* and a_name_.

one.py    the first file
two.py    the second file

    code(x)

    more(code)

width: the width
    of the result.
of, layers   which features

- a point
  that continues
- another point

Paper    Vaswani et al. 2017,
         arXiv:1706.03762.
Raises   ValueError for `x` without images.
"""


def test_docstrings_become_paragraphs_definitions_code_and_lists():
    assert "\n".join(generate.to_rst(DOCSTRING.splitlines())).split("\n") == [
        "Return the mean of ``x``, shape (b, d).",
        "",
        "The first paragraph continues over two lines, with \\*stars\\* and a\\_name\\_.",
        "",
        "- ``one.py``: the first file",
        "- ``two.py``: the second file",
        "",
        ".. code-block:: python",
        "",
        "   code(x)",
        "",
        "   more(code)",
        "",
        "**width**",
        "   the width of the result.",
        "",
        "**of, layers**",
        "   which features",
        "",
        "- a point that continues",
        "- another point",
        "",
        "**Paper**",
        "   Vaswani et al. 2017, `arXiv:1706.03762 <https://arxiv.org/abs/1706.03762>`__.",
        "",
        "**Raises**",
        "   ValueError for ``x`` without images.",
        "",
    ]


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "cache")]
    built = subprocess.run([*command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2_000:]
    assert (tmp_path / "site" / "reference" / "attention.html").exists()


def test_recipes_that_are_said_to_have_no_results_have_none():
    said = []
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        said += [re.findall(r"`(\w+)`", before)[-5:] for before in re.findall(r"([^.]*\.)? They have no results yet", text)]
    assert said and not [name for names in said for name in names if (ROOT / "recipes" / f"{name}.jsonl").exists()]
