"""The notebooks: each is a pair of files with equal cells, is executed, and uses public names only.

After a change, execute them again (needs nbconvert):  PYTHONWARNINGS=ignore jupytext --to ipynb --execute notebooks/*.py
"""

import ast
import os
import re
import tempfile
from pathlib import Path

import pytest

import smallvit
from smallvit.__main__ import main
from smallvit.record import Record, read_record

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def cells(notebook, kind: str = "code") -> list:
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def python_code(source: str) -> str:
    """A cell in which the notebook commands, lines that start with `%` or `!`, are replaced by `pass`."""
    return "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def stdout(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def tagged_cell(notebook, tag: str):
    (found,) = [cell for cell in cells(notebook) if tag in cell.metadata.get("tags", [])]
    return found


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """A function that runs a notebook in its short mode, in an empty folder and a kernel of its own; each notebook once."""
    done = {}

    def run(path: Path):
        if path.stem not in done:
            notebook = jupytext.read(path)
            environment = os.environ | {
                "SMALLVIT_SHORT": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            folder = {"metadata": {"path": tmp_path_factory.mktemp(path.stem)}}
            nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute(env=environment)
            done[path.stem] = notebook
        return done[path.stem]

    return run


def test_all_notebooks_are_found():
    assert {path.stem for path in NOTEBOOKS} == {"add_a_module", "advise", "linear_probe", "look_inside", "own_images"}
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in NOTEBOOKS}


@each
def test_both_files_of_a_pair_have_equal_cells(path):
    script, page = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in script.cells] == [(cell.cell_type, cell.source) for cell in page.cells]
    assert script.metadata.jupytext.formats == page.metadata.jupytext.formats == "ipynb,py:percent"
    assert len(cells(script)) >= 8 and len(cells(script, "markdown")) >= 8


@each
def test_committed_notebook_was_executed_in_order_without_errors(path):
    page = jupytext.read(path.with_suffix(".ipynb"))
    assert [cell.execution_count for cell in cells(page)] == list(range(1, len(cells(page)) + 1))
    outputs = [output for cell in cells(page) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any({"image/png", "text/markdown"} & set(output.get("data", {})) for output in outputs)  # a picture, or a report
    only_text = [output.data["text/plain"] for output in outputs if list(output.get("data", {})) == ["text/plain"]]
    assert not [text for text in only_text if "Figure" in text]  # a figure must be shown as a picture


@each
def test_committed_notebook_is_small_and_contains_no_local_paths(path):
    text = path.with_suffix(".ipynb").read_text()
    assert len(text) < 600_000
    text = re.sub(r'"image/png": "[^"]*"', "", text)
    local = (str(ROOT), str(Path.home()), "/tmp", "/opt", "/home", "/usr", "site-packages", "C:\\\\")
    assert not [name for name in local if name in text]


@each
def test_notebook_imports_public_names_and_defines_no_helpers(path):
    """A helper function that a notebook needs belongs in the library."""
    imported, defined = set(), set()
    for cell in cells(jupytext.read(path)):
        for node in ast.walk(ast.parse(python_code(cell.source))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.partition(".")[0] == "smallvit"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "smallvit":
                assert node.module == "smallvit"
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                defined.add(node.name)
    assert imported <= set(smallvit.__all__) and len(imported) >= 8
    assert defined == ({"TalkingHeads", "__init__", "reset_parameters", "forward"} if path.stem == "add_a_module" else set())


@pytest.mark.slow
@each
def test_notebook_runs(path, execute):
    assert all(cell.execution_count for cell in cells(execute(path)))


@pytest.mark.slow
def test_cells_of_a_notebook_run(tmp_path, monkeypatch):
    """Without a kernel, which imports everything once more; the test above runs all notebooks in one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMALLVIT_SHORT", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace: dict = {}
    for number, cell in enumerate(cells(jupytext.read(ROOT / "notebooks" / "look_inside.py")), 1):
        exec(compile(python_code(cell.source), f"cell {number}", "exec"), namespace)
    assert number >= 8


@pytest.fixture
def command_line_record(tmp_path, monkeypatch, capfd) -> Record:
    """The record of the run in the notebook `linear_probe`, trained by the command line as a recipe."""
    first, *_ = cells(notebook := jupytext.read(ROOT / "notebooks" / "linear_probe.py"))
    runs = "from smallvit import ablate\nRUNS = ablate({'DINO': pretrained}, labels=[200], seeds=[0], references=False)\n"
    (tmp_path / "probed.py").write_text("\n".join([python_code(first.source), tagged_cell(notebook, "run").source, runs]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMALLVIT_SHORT", "1")
    assert main(["run", "probed.py", "--jobs", "1"]) == 0, capfd.readouterr().err
    (record,) = map(read_record, {path.parent for path in tmp_path.rglob("record.json")})
    return record


@pytest.mark.slow
def test_notebook_and_command_line_give_equal_probe_results(execute, command_line_record):
    notebook = execute(ROOT / "notebooks" / "linear_probe.py")
    for tag, numbers in (("validation", command_line_record.val), ("test", command_line_record.test)):
        rows = [line.split() for line in stdout(tagged_cell(notebook, tag)).splitlines()]
        assert {"linear_probe", "linear_probe_c", "knn_1", "knn_5", "knn_20"} <= set(numbers)
        assert rows == [[name, f"{number:.6f}", f"{number:.6f}"] for name, number in numbers.items()]
    assert command_line_record.val["linear_probe"] != command_line_record.test["linear_probe"]
