"""The house: which file may import which, what is imported when, what adding a technique touches, and what public names need."""

import ast
import configparser
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from toys import slow_after

import smallvit

PACKAGE = Path(smallvit.__file__).parent
ROOT = PACKAGE.parent
SLOTS = ("attention", "attention_positions", "pooling", "positions", "reduction", "tokenizers")

# Each part of smallvit (a file, or a folder of files) with the parts that it may import, at the top of a file or in a function.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"__init__", "commands"},
    "commands": {
        "__init__", "ablation", "baselines", "data", "deploy", "evaluate", "explain", "flops", "launch", "looks", "native",
        "numerics", "passes", "pretrained", "recipe", "record", "reference_runs", "references", "report", "run", "shapes",
        "storage", "trackers", "train", "trials", "tuning", "verdicts", "words",
    },
    "launch": {
        "ablation", "components", "data", "evaluate", "flops", "native", "numerics", "passes", "pretrained", "ranges", "recipe",
        "record", "run", "shapes", "storage", "train", "tuning", "verdicts", "words",
    },
    "train": {
        "augment", "components", "data", "evaluate", "explain", "flops", "numerics", "objectives", "optim", "optimizers", "packing", "passes",
        "pretrained", "random_weights", "record", "rng", "run", "shapes", "storage", "vit",
    },
    "attention_variants": {"attention"},
    "attention_starts": {"attention", "attention_variants"},
    "block_variants": {"attention_positions", "convolution", "positions", "reduction", "vit"},
    "deploy": {"__init__", "ablation", "baselines", "components", "data", "record", "run", "storage", "train", "words"},
    "ranges": {"components", "run", "shapes"},
    "recipe": {"ablation", "components", "definitions", "passes", "run", "tuning"},
    "looks": {"ablation", "passes", "record", "storage", "words"},
    "trials": {"ablation", "recipe", "record", "shapes", "storage", "tuning"},
    "tuning": {"ablation", "components", "ranges", "record", "run", "shapes", "storage"},
    "ablation": {"components", "evaluate", "match", "passes", "ranges", "record", "reference_runs", "run", "shapes"},
    "reference_runs": {
        "augment", "components", "evaluate", "objectives", "optimizers", "pretrained", "record", "references", "run", "tokenizers", "vit",
    },
    "passes": {"components", "run", "words"},
    "baselines": {"augment", "data", "run", "tokenizers", "vit"},
    "match": {"components", "flops", "pretrained", "run"},
    "run": {"components", "data", "evaluate", "objectives", "optimizers", "pretrained", "vit"},
    "report": {"components", "explain", "recipe", "record", "run", "tuning", "verdicts", "words"},
    "verdicts": {"packing", "record", "words"},
    "explain": {"attention", "data", "evaluate", "flops", "objectives", "positions", "reduction", "vit"},
    "pretrained": {
        "attention", "attention_positions", "flops", "pooling", "positions", "random_weights", "shapes", "slot_checks", "storage",
        "tokenizers", "vit",
    },
    "objectives": {
        "attention", "augment", "components", "evaluate", "flops", "optim", "pooling", "positions", "random_weights", "reduction",
        "slot_checks", "vit",
    },
    "pseudo_labels": {"data", "evaluate"},
    "evaluate": {"augment", "data", "flops", "pooling", "rng", "vit"},
    "flops": {"numerics", "reduction", "vit"},
    "references": {"convolution", "random_weights"},
    "ensemble": {"slot_checks"},
    "tokenizers": {"convolution"},
    "pooling": {"convolution"},
    "vit": {*SLOTS, "optim", "random_weights", "slot_checks"},
    "random_weights": {"rng"},
    "slot_checks": {"tokenizers"},
    "data": {"rng", "storage"},
    "record": {"packing", "shapes", "storage", "words"},
    "augment": {"components"},
    "components": {"shapes"},
    "definitions": set(),
    "trackers": {"record", "storage", "words"},
    "numerics": {"native", "vit"},
    "native": {"attention", "augment", "convolution", "pooling", "reduction", "storage", "tokenizers", "vit"},
    **{part: set() for part in (*(slot for slot in SLOTS if slot not in ("pooling", "tokenizers")), "convolution", "optim", "optimizers", "packing", "rng", "shapes", "storage", "words")},
}  # fmt: skip
# Libraries that may be imported when a file is loaded. A function that needs another one imports it.
AT_THE_TOP = defaultdict(lambda: {"torch"}, {"data": {"numpy", "torch"}, "augment": {"einops", "torch"}})
AT_THE_TOP |= {slot: {"einops", "torch"} for slot in SLOTS}
AT_THE_TOP |= {"deploy": {"numpy", "sklearn", "torch"}}  # the classifier is a subclass of a class of scikit-learn
AT_THE_TOP |= {
    part: set()
    for part in ("__init__", "__main__", "ablation", "commands", "components", "explain", "packing", "passes", "recipe", "record", "report", "rng", "run", "shapes", "storage", "verdicts", "words")
}
AT_FIRST_USE = {"extractor.py": {"sklearn"}}  # files that their package imports when they are first needed
# Each imported module with the library in setup.cfg that installs it.
INSTALLED_BY = {
    "PIL": "torchvision", "einops": "einops", "filelock": "filelock", "huggingface_hub": "timm", "jinja2": "jinja2",
    "lightly": "lightly", "markupsafe": "jinja2", "matplotlib": "matplotlib", "numpy": "torchvision",
    "safetensors": "safetensors", "scipy": "scipy", "sklearn": "scikit-learn", "timm": "timm", "torch": "torch",
    "torchvision": "torchvision", "tqdm": "tqdm",
}  # fmt: skip
EXTRAS = {"onnx": "export", "onnxruntime": "export", "onnxscript": "export", "mlflow": "mlflow", "optuna": "tune", "pandas": "table", "pydicom": "dicom", "ray": "ray", "tensorboard": "tensorboard", "tifffile": "tiff", "wandb": "wandb"}  # each library that one command needs, with the extra in setup.cfg that installs it
HEAVY = sorted({*INSTALLED_BY, *EXTRAS} - {"torch", "numpy", "einops"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """The files of the package, without the installed recipes, as syntax trees."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "recipes"]
    assert len(paths) >= 30
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


@functools.cache
def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> list[tuple[str, str]]:
    """The full name of every module that a file imports, and when: "load", "call" (of a function) or "type check"."""
    when, found, nodes = {}, [], [*ast.walk(sources()[path])]
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            when |= dict.fromkeys(map(id, ast.walk(node)), "call")
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when |= dict.fromkeys(map(id, ast.walk(node)), "type check")
    package = ["smallvit", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            within = base == "smallvit" or (node.level and not node.module)
            names = [f"{base}.{alias.name}" for alias in node.names] if within else [base]
        else:
            continue
        found += [(name, when.get(id(node), "load")) for name in names]
    return found


# Which file may import which


def test_table_of_imports_names_every_part_and_has_no_cycle():
    assert {part_of(path) for path in sources()} == set(MAY_IMPORT)
    assert [*TopologicalSorter(MAY_IMPORT).static_order()][-1] == "__main__"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_part_imports_only_parts_in_the_table(part):
    seen = 0
    for path in sources():
        for name, _ in imports(path) if part_of(path) == part else ():
            seen += 1
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if first == "smallvit" and target != part:
                imported = target if target in MAY_IMPORT else "__init__"
                assert imported in MAY_IMPORT[part], f"{path.name} imports {name}"
    assert seen > 0


def test_files_do_not_import_each_other_in_a_cycle():
    files = {
        ".".join(("smallvit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sources()
    }
    needs = {
        name: {other for other, when in imports(path) if when != "type check"} & files.keys() - {name}
        for name, path in files.items()
    }
    assert len(list(TopologicalSorter(needs).static_order())) == len(files)


def test_libraries_are_imported_where_they_are_used():
    used = set()
    for path in sources():
        for name, when in imports(path):
            library = name.partition(".")[0]
            if library == "smallvit" or library in sys.stdlib_module_names:
                continue
            used.add(library)
            allowed = AT_THE_TOP[part_of(path)] | AT_FIRST_USE.get(path.name, set())
            assert when != "load" or library in allowed, f"{path.name} imports {library} when it is loaded"
    assert used <= {*INSTALLED_BY, *EXTRAS} and len(used) >= 12


def test_setup_cfg_requires_every_library_and_contains_every_folder():
    setup = configparser.ConfigParser()
    if not setup.read(ROOT / "setup.cfg"):
        pytest.skip("needs the setup.cfg of a clone")
    required = {re.split("[><=~!]", line)[0].strip() for line in setup["options"]["install_requires"].split("\n") if line.strip()}
    assert set(INSTALLED_BY.values()) <= required
    assert all(library in setup["options.extras_require"][extra] for library, extra in EXTRAS.items())
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in sources()}
    assert set(setup["options"]["packages"].split()) == folders | {"smallvit.recipes"} and len(folders) >= 4


# What adding a technique touches

# kind -> an existing example, its own file, and the other files of smallvit in whose code its name occurs
EXAMPLES = {
    "attention": ("LocalityAttention", "attention.py", {"__init__.py"}),
    "token reduction": ("Merge", "reduction/merge.py", {"__init__.py", "reduction/__init__.py"}),
    "objective": ("DINO", "objectives/dino.py", {"__init__.py", "objectives/__init__.py"}),
    "evaluator": ("few_shot", "evaluate/probes.py", {"__init__.py", "evaluate/__init__.py"}),
    "data set": ("kmnist", "data/published.py", {"__init__.py", "data/__init__.py"}),
}


FIELDS = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value", ast.ClassDef: "name", ast.FunctionDef: "name"}


@functools.cache
def names_in(path: Path) -> set:
    """Every name in the code of a file, also those in strings such as the items of `__all__`, but not in docstrings."""
    names = set()
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.alias):
            names |= {node.name.rpartition(".")[2], node.asname}
        elif type(node) in FIELDS:
            names.add(getattr(node, FIELDS[type(node)]))
    return names


@pytest.mark.parametrize("kind", slow_after(2, EXAMPLES))
def test_adding_a_technique_touches_few_files(kind):
    name, own, others = EXAMPLES[kind]
    touched = {path.relative_to(PACKAGE).as_posix() for path in sources() if name in names_in(path)}
    assert touched == {own, *others}
    tests = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    assert any(re.search(rf"\b{name}\b", text) for text in tests)


def test_contributing_shows_what_adding_a_technique_touches():
    """The table has one row for each kind. NAME in a path stands for the name of the new file."""
    path = ROOT / "CONTRIBUTING.md"
    if not path.exists():
        pytest.skip("needs the CONTRIBUTING.md of a clone")
    table = path.read_text(encoding="utf-8").partition("<!-- adding -->")[2].partition("<!-- end -->")[0]
    rows = {line.split("|")[1].strip(): re.findall(r"`smallvit/([^`]+)`", line) for line in table.splitlines() if "`" in line}
    assert rows.keys() == EXAMPLES.keys()
    for kind, patterns in rows.items():
        _, own, others = EXAMPLES[kind]
        for file in (own, *others):
            assert any(re.fullmatch(re.escape(p).replace("NAME", "[a-z_]+"), file) for p in patterns), f"{kind}: {file} is missing"
        assert len(patterns) == 1 + len(others), f"{kind}: {patterns}"


# What is loaded when


def python(*words: str, **more) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, **more)


@pytest.mark.slow
def test_slots_and_models_need_only_torch_and_einops():
    parts = [*SLOTS, "rng", "vit", "references", "augment", "objectives", "record", "run", "ablation", "recipe"]
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
for name in {parts!r}:
    importlib.import_module("smallvit." + name)
import torch
model = smallvit.ViT((8, 8), 1, 10)
smallvit.Supervised(model)(smallvit.augment.Batch(torch.rand(2, 1, 8, 8), torch.eye(10)[:2]), 0.0)["loss"].backward()
print("all well", [name for name in {HEAVY!r} if name in sys.modules])
""",
    )
    assert done.stdout.strip() == "all well []", done.stderr


@pytest.mark.parametrize("slot", SLOTS)
def test_file_or_folder_of_a_slot_works_outside_the_package(slot, tmp_path, monkeypatch):
    if (PACKAGE / slot).is_dir():
        shutil.copytree(PACKAGE / slot, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(PACKAGE / f"{slot}.py", tmp_path / "copied.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "copied", raising=False)
    module = importlib.import_module("copied")
    names = smallvit.NAMES[slot]
    assert names and all(getattr(module, name).__module__.partition(".")[0] == "copied" for name in names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "copied"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_every_module_can_be_the_first_one_that_is_imported():
    """Some modules of a circle can be imported only after others; tests that import those first do not notice."""
    files = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if path.stem != "__main__")
    names = [".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).parts) for path in files]
    done = python(
        "-c",
        f"""
import importlib, sys

for name in {names!r}:
    for loaded in [other for other in sys.modules if other.partition(".")[0] == "smallvit"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, repr(error))
print("all well")
""",
    )
    assert done.stdout.strip() == "all well", done.stdout + done.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["list"]], ids=" ".join)
def test_command_line_does_not_import_torch_for_help(words):
    done = python("-X", "importtime", "-m", "smallvit", *words, cwd=ROOT)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0 and done.stdout.strip() and {"argparse", "smallvit"} <= loaded
    assert not loaded & {*INSTALLED_BY, *EXTRAS}


# What public names need


def test_every_public_name_exists_and_has_its_own_docstring():
    assert len(smallvit.__all__) == len(set(smallvit.__all__)) >= 50 and dir(smallvit) == sorted(smallvit.__all__)
    for name in smallvit.__all__:
        doc = getattr(smallvit, name).__doc__
        assert doc and len(doc.split()) >= 3 and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_public_name_is_not_replaced_by_a_module():
    """Importing a file of the same name would replace the public name by that module."""
    assert set(smallvit.__all__) & {part_of(path) for path in sources()} == {"augment"}
    assert all(getattr(smallvit, name) is getattr(smallvit, name) for name in smallvit.__all__)


def test_unknown_public_name_is_refused_with_the_existing_ones():
    with pytest.raises(AttributeError, match=r"smallvit has no 'Vit'; it offers .*ViT"):
        smallvit.Vit  # noqa: B018


@pytest.mark.parametrize("part", sorted(set(smallvit.NAMES)))
def test_public_definitions_have_docstrings_within_128_columns(part):
    trees = {path: tree for path, tree in sources().items() if part_of(path) == part}
    assert any(ast.get_docstring(tree) for tree in trees.values())
    public = [(p, node) for p, tree in trees.items() for node in tree.body if getattr(node, "name", None) in smallvit.NAMES[part]]
    assert len(public) == len(smallvit.NAMES[part])
    for path, node in public:
        assert ast.get_docstring(node), f"{node.name} has no docstring"
        lines, text = path.read_text(encoding="utf-8").splitlines(), node.body[0]
        long = [number for number in range(text.lineno, text.end_lineno + 1) if len(lines[number - 1]) > 128]
        assert not long, f"{path.name}, lines {long}"


def test_no_file_has_a_name_for_everything():
    stems = {part.removesuffix(".py") for path in sources() for part in path.relative_to(PACKAGE).parts}
    assert len(stems) >= 25
    assert not stems & {"utils", "util", "common", "base", "misc", "helpers", "helper", "core", "tools"}


def test_errors_for_users_are_value_errors_with_a_sentence():
    raised = 0
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and "ValueError" in ast.dump(node.exc or node):
                raised += 1
                where = f"{path.name}, line {node.lineno}"
                assert isinstance(node.exc, ast.Call) and node.exc.args, f"{where}: a ValueError without a message"
                message = ast.unparse(node.exc.args[0])
                is_sentence = len(message.split()) >= 4 or "{error}" in message or isinstance(node.exc.args[0], ast.Name)
                assert is_sentence, f"{where}: {message}"
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]} - {"self"}
                asserts = [a for a in ast.walk(node) if isinstance(a, ast.Assert)]
                asserted = {n.id for a in asserts for n in ast.walk(a) if isinstance(n, ast.Name)}
                assert not arguments & asserted, f"{path.name}, {node.name}: an assert on an argument; expected a ValueError"
    assert raised >= 60


def test_ruff_finds_nothing():
    if not importlib.util.find_spec("ruff"):
        pytest.skip("needs ruff")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs the pyproject.toml of a clone")
    done = python("-m", "ruff", "check", "--no-cache", "--output-format=concise", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
