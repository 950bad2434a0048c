"""The notebooks are in pairs, executed, made of public names, and say what the command line says.

After a change of a notebook: PYTHONWARNINGS=ignore jupytext --to ipynb --execute notebooks/*.py
"""

import ast
import os
import re
from pathlib import Path

import pytest

import smallvit
from smallvit.__main__ import main
from smallvit.record import read_record

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def cells(notebook, kind: str = "code") -> list:
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def python(source: str) -> str:
    """The cell without what only a notebook understands: lines of `%` and `!`."""
    return "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def tagged(notebook, tag: str):
    (found,) = [cell for cell in cells(notebook) if tag in cell.metadata.get("tags", [])]
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook after it has run in its short mode, in an empty folder, in a kernel of its own."""
    done = {}

    def execute(path: Path):
        if path.stem not in done:
            notebook = jupytext.read(path)
            environment = os.environ | {
                "SMALLVIT_SHORT": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            where = {"metadata": {"path": tmp_path_factory.mktemp(path.stem)}}
            nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute(env=environment)
            done[path.stem] = notebook
        return done[path.stem]

    return execute


def test_the_notebooks_that_there_are():
    assert {path.stem for path in NOTEBOOKS} == {"add_a_module", "linear_probe", "look_inside"}
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in NOTEBOOKS}


@each
def test_a_pair_says_the_same(path):
    text, page = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [(cell.cell_type, cell.source) for cell in page.cells]
    assert text.metadata.jupytext.formats == page.metadata.jupytext.formats == "ipynb,py:percent"
    assert len(cells(text)) >= 8 and len(cells(text, "markdown")) >= 8


@each
def test_the_page_was_executed_from_top_to_bottom(path):
    page = jupytext.read(path.with_suffix(".ipynb"))
    assert [cell.execution_count for cell in cells(page)] == list(range(1, len(cells(page)) + 1))
    outputs = [output for cell in cells(page) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any({"image/png", "text/markdown"} & set(output.get("data", {})) for output in outputs)  # a picture, or a report
    assert not [
        output.data["text/plain"]
        for output in outputs
        if output.output_type == "execute_result"
        and list(output.data) == ["text/plain"]
        and "Figure" in output.data["text/plain"]
    ]


@each
def test_the_page_is_small_and_names_no_machine(path):
    text = path.with_suffix(".ipynb").read_text()
    assert len(text) < 600_000
    words = re.sub(r'"image/png": "[^"]*"', "", text)
    found = [
        word
        for word in (str(ROOT), str(Path.home()), "/tmp", "/opt", "/home", "/usr", "site-packages", "C:\\\\")
        if word in words
    ]
    assert not found


@each
def test_a_notebook_takes_public_names_and_defines_nothing(path):
    """What would need a function or a module of ours that is not public belongs into the library."""
    taken, defined = set(), set()
    for cell in cells(jupytext.read(path)):
        for node in ast.walk(ast.parse(python(cell.source))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.partition(".")[0] == "smallvit"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "smallvit":
                assert node.module == "smallvit"
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                defined.add(node.name)
    assert taken <= set(smallvit.__all__) and len(taken) >= 8
    assert defined == ({"TalkingHeads", "__init__", "reset_parameters", "forward"} if path.stem == "add_a_module" else set())


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == "look_inside" else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path, executed):
    assert all(cell.execution_count for cell in cells(executed(path)))


@pytest.fixture
def trained(tmp_path, monkeypatch, capfd) -> dict:
    """The record of the notebook's run, trained as a recipe by the command line."""
    first, *_ = cells(notebook := jupytext.read(ROOT / "notebooks" / "linear_probe.py"))
    runs = "from smallvit import ablate\nRUNS = ablate({'DINO': pretrained}, labels=[200], seeds=[0], references=False)\n"
    (tmp_path / "probed.py").write_text("\n".join([python(first.source), tagged(notebook, "run").source, runs]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMALLVIT_SHORT", "1")
    assert main(["run", "probed.py", "--jobs", "1"]) == 0, capfd.readouterr().err
    (record,) = map(read_record, {path.parent for path in tmp_path.rglob("record.json")})
    return record


@pytest.mark.slow
def test_the_probe_says_what_the_command_line_says(executed, trained):
    notebook = executed(ROOT / "notebooks" / "linear_probe.py")
    for tag, numbers in (("validation", trained["val"]), ("test", trained["test"])):
        rows = [line.split() for line in printed(tagged(notebook, tag)).splitlines()]
        assert {"linear_probe", "linear_probe_c", "knn_1", "knn_5", "knn_20"} <= set(numbers)
        assert rows == [[name, f"{number:.6f}", f"{number:.6f}"] for name, number in numbers.items()]
    assert trained["val"]["linear_probe"] != trained["test"]["linear_probe"]
