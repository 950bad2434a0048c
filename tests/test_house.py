"""The house: who may import whom, what is loaded when, and what every public name owes its reader."""

import ast
import configparser
import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import smallvit

PACKAGE = Path(smallvit.__file__).parent
ROOT = PACKAGE.parent
SLOTS = ("attention", "pooling", "positions", "reduction", "tokenizers")

# Downhill only: a room (a file, or a folder of files) and the rooms of smallvit that it may import, wherever in the file it does so.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"__init__", "commands"},
    "commands": {"__init__", "numerics", "launch", "recipe", "record", "report", "run", "train"},
    "launch": {"components", "flops", "numerics", "pretrained", "recipe", "record", "run", "train"},
    "train": {
        "augment",
        "components",
        "flops",
        "data",
        "evaluate",
        "numerics",
        "explain",
        "objectives",
        "optim",
        "pretrained",
        "record",
        "run",
        "rng",
        "vit",
    },
    "numerics": set(),
    "recipe": {"run"},
    "ablation": {"augment", "components", "evaluate", "references", "objectives", "pretrained", "record", "run", "tokenizers", "vit"},
    "run": {"augment", "components", "data", "evaluate", "objectives", "pretrained", "vit"},
    "components": set(),
    "optim": set(),
    "report": {"explain", "record"},
    "record": set(),
    "explain": {"attention", "flops", "evaluate", "positions", "reduction", "vit"},
    "pretrained": {*SLOTS, "flops", "vit"} - {"reduction"},
    "evaluate": {"flops", "data", "pooling", "rng", "vit"},
    "objectives": {"attention", "augment", "flops", "evaluate", "optim", "pooling", "positions", "reduction", "vit"},
    "flops": {"reduction", "vit"},
    "references": {"vit"},
    "pseudo_labels": {"data", "evaluate"},
    "vit": {*SLOTS, "rng"},
    "data": {"rng"},
    "augment": set(),
    "rng": set(),
    **{slot: set() for slot in SLOTS},
}
# What may be imported as a file is loaded; all else only by the function that needs it.
AT_THE_TOP = defaultdict(lambda: {"torch"}, {"data": {"numpy", "torch"}, "augment": {"einops", "torch"}})
AT_THE_TOP |= {slot: {"einops", "torch"} for slot in SLOTS}
AT_THE_TOP |= {
    room: set()
    for room in (
        "__init__",
        "__main__",
        "explain",
        "recipe",
        "record",
        "report",
        "run",
        "rng",
    )
}
# Who brings a library: a name in setup.cfg.
BROUGHT_BY = {
    "PIL": "torchvision", "einops": "einops", "filelock": "filelock", "huggingface_hub": "timm", "jinja2": "jinja2",
    "lightly": "lightly", "markupsafe": "jinja2", "matplotlib": "matplotlib", "numpy": "torchvision",
    "safetensors": "safetensors", "scipy": "scipy", "sklearn": "scikit-learn", "timm": "timm", "torch": "torch",
    "torchvision": "torchvision", "tqdm": "tqdm",
}  # fmt: skip
HEAVY = sorted(set(BROUGHT_BY) - {"torch", "numpy", "einops"})


@functools.cache
def sources() -> dict[Path, ast.Module]:
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "recipes"]
    assert len(paths) >= 30
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, tree: ast.Module):
    """Every imported module with its full name, and whether that happens as the file is loaded."""
    later = {id(node) for function in ast.walk(tree) if isinstance(function, FUNCTIONS) for node in ast.walk(function)}
    package = ["smallvit", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            within = base == "smallvit" or (node.level and not node.module)
            names = [f"{base}.{alias.name}" for alias in node.names] if within else [base]
        else:
            continue
        for name in names:
            yield name, id(node) not in later


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


# Who may import whom


def test_every_room_is_in_the_table_and_the_table_goes_downhill():
    assert {room(path) for path in sources()} == set(MAY_IMPORT)
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order[-1] == "__main__"


@pytest.mark.parametrize("where", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(where):
    seen = 0
    for path, tree in sources().items():
        for name, _ in imports(path, tree) if room(path) == where else ():
            seen += 1
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if first == "smallvit" and target != where:
                below = target if target in MAY_IMPORT else "__init__"
                assert below in MAY_IMPORT[where], f"{path.name} imports {name}"
    assert seen > 0


def test_files_import_each_other_downhill_too():
    files = {
        ".".join(("smallvit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sources()
    }
    needs = {name: {of for of, _ in imports(path, sources()[path])} & files.keys() - {name} for name, path in files.items()}
    assert len(list(TopologicalSorter(needs).static_order())) == len(files)


def test_libraries_are_imported_where_they_are_used():
    used = set()
    for path, tree in sources().items():
        for name, at_the_top in imports(path, tree):
            library = name.partition(".")[0]
            if library == "smallvit" or library in sys.stdlib_module_names:
                continue
            used.add(library)
            assert not at_the_top or library in AT_THE_TOP[room(path)], f"{path.name} imports {library} as it is loaded"
    assert used <= set(BROUGHT_BY) and len(used) >= 12


def test_setup_cfg_asks_for_every_library_and_packs_every_folder():
    setup = configparser.ConfigParser()
    if not setup.read(ROOT / "setup.cfg"):
        pytest.skip("needs the setup.cfg of a clone")
    asked = {line.partition(">")[0].strip() for line in setup["options"]["install_requires"].split("\n") if line.strip()}
    assert set(BROUGHT_BY.values()) <= asked
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in sources()}
    assert set(setup["options"]["packages"].split()) == folders | {"smallvit.recipes"} and len(folders) >= 4


# What is loaded when


def python(*words: str, **more) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, **more
    )


def test_the_slots_and_the_model_need_torch_and_einops_alone():
    done = python(
        "-c",
        f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import smallvit
assert "torch" not in sys.modules
for name in {[*SLOTS, "rng", "vit", "references", "augment", "objectives", "record", "run", "recipe"]!r}:
    importlib.import_module("smallvit." + name)
import torch
model = smallvit.ViT((8, 8), 1, 10)
smallvit.Supervised(model)(smallvit.augment.Batch(torch.rand(2, 1, 8, 8), torch.eye(10)[:2]), 0.0)["loss"].backward()
print("all well", [name for name in {HEAVY!r} if name in sys.modules])
""",
    )
    assert done.stdout.strip() == "all well []", done.stderr


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_file_or_folder_can_be_taken_away_on_its_own(slot, tmp_path, monkeypatch):
    if (PACKAGE / slot).is_dir():
        shutil.copytree(PACKAGE / slot, tmp_path / "theirs", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(PACKAGE / f"{slot}.py", tmp_path / "theirs.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    module = importlib.import_module("theirs")
    names = smallvit.NAMES[slot]
    assert names and all(getattr(module, name).__module__.partition(".")[0] == "theirs" for name in names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["list"]], ids=" ".join)
def test_the_command_line_does_not_wait_for_torch(words):
    done = python("-X", "importtime", "-m", "smallvit", *words, cwd=ROOT)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0 and done.stdout.strip() and {"argparse", "smallvit"} <= loaded
    assert not loaded & set(BROUGHT_BY)


# What a public name owes its reader


def test_every_public_name_is_there_documented_and_listed():
    assert len(smallvit.__all__) == len(set(smallvit.__all__)) >= 50 and dir(smallvit) == sorted(smallvit.__all__)
    for name in smallvit.__all__:
        doc = getattr(smallvit, name).__doc__
        assert doc and len(doc.split()) >= 3 and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_a_public_name_stays_what_it_is():
    """A name that is also a file's would turn into that module as soon as the file is imported."""
    files = {room(path) for path in sources()}
    assert set(smallvit.__all__) & files == {"augment"}
    for name in smallvit.__all__:
        assert getattr(smallvit, name) is getattr(smallvit, name)


def test_an_unknown_public_name_lists_the_right_ones():
    with pytest.raises(AttributeError, match=r"smallvit has no 'Vit'; it offers .*ViT"):
        smallvit.Vit  # noqa: B018


@pytest.mark.parametrize("slot", [*SLOTS, "vit", "references", "objectives", "evaluate", "explain", "pretrained", "run"])
def test_everything_offered_is_documented_within_128_columns(slot):
    trees = {path: tree for path, tree in sources().items() if room(path) == slot}
    assert any(ast.get_docstring(tree) for tree in trees.values())
    offered = [(path, node) for path, tree in trees.items() for node in tree.body if named(node) in smallvit.NAMES[slot]]
    assert len(offered) == len(smallvit.NAMES[slot])
    for path, node in offered:
        assert ast.get_docstring(node), f"{node.name} has no docstring"
        lines, text = path.read_text(encoding="utf-8").splitlines(), node.body[0]
        long = [number for number in range(text.lineno, text.end_lineno + 1) if len(lines[number - 1]) > 128]
        assert not long, f"{path.name}, lines {long}"


def named(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


def test_no_room_is_a_drawer():
    stems = {part.removesuffix(".py") for path in sources() for part in path.relative_to(PACKAGE).parts}
    assert len(stems) >= 25
    assert not stems & {"utils", "util", "common", "base", "misc", "helpers", "helper", "core", "tools"}


def test_errors_for_users_are_value_errors_with_a_sentence():
    raised = 0
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and "ValueError" in ast.dump(node.exc or node):
                raised += 1
                assert isinstance(node.exc, ast.Call) and node.exc.args, (
                    f"{path.name}, line {node.lineno}: a ValueError without words"
                )
                text = ast.unparse(node.exc.args[0])
                assert len(text.split()) >= 4 or "{error}" in text or isinstance(node.exc.args[0], ast.Name), (
                    f"{path.name}, line {node.lineno}: {text}"
                )
            if isinstance(node, ast.FunctionDef):
                given = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]} - {"self"}
                asserted = {
                    n.id for a in ast.walk(node) if isinstance(a, ast.Assert) for n in ast.walk(a) if isinstance(n, ast.Name)
                }
                assert not given & asserted, (
                    f"{path.name}, {node.name}: an assert about an argument, where a ValueError belongs"
                )
    assert raised >= 60


def test_ruff_has_nothing_to_say():
    if not importlib.util.find_spec("ruff"):
        pytest.skip("needs ruff")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs the pyproject.toml of a clone")
    done = python("-m", "ruff", "check", "--no-cache", "--output-format=concise", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
