"""Recipes: Python files with a question in the docstring and a list RUNS of runs to compare. Found, loaded, chosen from."""

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType


def recipe_files() -> list[Path]:
    """The recipe files at hand: those in ./recipes, then those that came with the package."""
    package = Path(__file__).parent
    places = [Path("recipes"), package / "recipes", package.parent / "recipes"]
    found = {path.stem: path for place in reversed(places) for path in sorted(place.glob("[!_]*.py"))}
    return [found[name] for name in sorted(found)]


def find_recipe(name: str) -> Path:
    """The file of a recipe, by path or by name."""
    path = Path(name)
    for file in (path, path.parent / f"{path.name}.py"):
        if file.suffix == ".py" and file.exists():
            return file
    recipes = {path.stem: path for path in recipe_files()}
    if path.stem in recipes and path.suffix in ("", ".py") and path.parent in (Path("."), Path("recipes")):
        return recipes[path.stem]
    near = get_close_matches(path.stem, recipes, 1, 0.4)
    advice = f"did you mean {near[0]!r}?" if near else f"expected the path of a .py file, or one of {', '.join(recipes)}"
    raise ValueError(f"there is no recipe {name!r}; {advice}")


def load_recipe(path: str | Path) -> ModuleType:
    """The recipe as a module named `recipes.<file>`, so that its own classes can stand in records.

    Raises ValueError if it raises on import, naming the line, or defines no list RUNS of runs.
    """
    import traceback
    from importlib.util import module_from_spec, spec_from_file_location

    from smallvit.run import Run

    path = Path(path).resolve()
    if not path.stem.replace("-", "_").isidentifier():
        raise ValueError(f"a recipe's file is called {path.name!r}; expected letters, digits, '_' and '-' before .py")
    name = f"recipes.{path.stem}"
    if name in sys.modules and Path(sys.modules[name].__file__) == path:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        text = path.read_text(encoding="utf-8")
        refuse_doubled(text)
        module.DEFINITIONS = definitions(text)
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        advice = ""
        if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name}.py").exists():
            advice = f"; a recipe is one file, and its records say all of it: write what it needs of {error.name}.py into it"
        raise ValueError(f"{path.name}{where}: {type(error).__name__}: {error}{advice}") from error
    runs = getattr(module, "RUNS", None)
    if not runs or not isinstance(runs, list | tuple) or not all(isinstance(run, Run) for run in runs):
        del sys.modules[name]
        raise ValueError(
            f"{path.name} defines no RUNS; expected RUNS = ablate({{'scratch': Run(...), ...}}, ...), a list of runs"
        )
    refuse_incomparable(runs, path.name)
    return module


def definitions(text: str) -> dict[str, str]:
    """A hash for each name that a recipe's text defines: of its definition and of all in the text that this one uses.

    Blind to comments, and to what else the text says.
    """
    nodes = ast.parse(text).body
    places: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for name in defined(node):
            places.setdefault(name, []).append(at)

    def reached(name: str) -> list[ast.stmt]:
        todo, found = list(places[name]), set()
        while todo:
            found.add(at := todo.pop())
            used = {part.id for part in ast.walk(nodes[at]) if isinstance(part, ast.Name)}
            todo += [other for name in used for other in places.get(name, ()) if other not in found]
        return [nodes[at] for at in sorted(found)]

    return {name: hashlib.sha256("".join(map(ast.dump, reached(name))).encode()).hexdigest()[:16] for name in places}


def refuse_doubled(text: str):
    """Raise ValueError for a name that stands twice in a dict: Python keeps the last, and an arm is gone without a word."""
    for node in ast.walk(ast.parse(text)):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict) else []
        for key, times in Counter(keys).items():
            if times > 1:
                raise ValueError(f"{key!r} stands {times} times in the dict of line {node.lineno}; expected each name once")


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement at the top level gives something to."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}  # what stands inside is its own
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set().union(*(defined(part) for part in ast.iter_child_nodes(node)))


def refuse_incomparable(runs: list, name: str):
    """Raise ValueError for a list of runs that could be trained but not compared."""
    for (arm, labels, seed), times in Counter((run.arm, run.labels, run.seed) for run in runs).items():
        if times > 1:
            raise ValueError(f"{name}: arm {arm!r}, labels={labels}, seed={seed} stands in RUNS {times} times; expected once")
    arms = dict.fromkeys((run.arm, run.role, run.baseline) for run in runs)
    baselines = list(dict.fromkeys(arm for arm, role, _ in arms if role == "baseline"))
    if not baselines:
        raise ValueError(f"{name}: the baselines in RUNS are []; expected at least one, as a call of ablate makes")
    for arm, times in Counter(arm for arm, _, _ in arms).items():
        if times > 1:
            raise ValueError(f"{name}: arm {arm!r} stands in several roles or against several baselines; expected one of each")
    for arm, role, against in arms:
        possible = [arm] if role == "baseline" else baselines
        if against not in possible and (against or len(possible) > 1):
            raise ValueError(
                f"{name}: arm {arm!r} ({role}) is held against {against!r}; expected one of {possible} in its field against"
            )


def only(runs: list, words: list[str]) -> list:
    """The runs that every word admits: `arm=a,b`, `labels=100,1000`, `seed=0-3`; `arm=references` are all references."""
    for word in words:
        key, _, text = word.partition("=")
        if key not in ("arm", "labels", "seed") or not text:
            raise ValueError(f"--only got {word!r}; expected arm=..., labels=... or seed=...")
        offered = {str(value(run, key)): None for run in runs}
        wanted = {one for part in text.split(",") for one in spread(part)} if key != "arm" else arms(text, list(offered))
        references = key == "arm" and "references" in wanted
        for one in sorted(wanted - {"references"} - set(offered)):
            near = get_close_matches(one, list(offered), 1, 0.4)
            advice = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(map(repr, offered))}"
            raise ValueError(f"this recipe has no {key} {one!r}; {advice}")
        runs = [run for run in runs if str(value(run, key)) in wanted or (references and run.role == "reference")]
    if not runs:
        raise ValueError(f"no run of this recipe is all of {' '.join(words)}; expected words that some run fits")
    return runs


def value(run, key: str) -> str | int:
    found = getattr(run, key)
    return "all" if found is None else found


def arms(text: str, offered: list[str]) -> set[str]:
    """The arms named in a comma-separated list; an arm's own name may hold commas."""
    names, rest = set(), text
    for name in sorted(offered, key=len, reverse=True):
        if "," in name and name in rest:
            names.add(name)
            rest = rest.replace(name, "")
    return names | {part for part in rest.split(",") if part}


def spread(text: str) -> list[str]:
    """`0-3` -> 0, 1, 2, 3; anything else is itself."""
    first, _, last = text.replace("_", "").partition("-")
    numbers = first.isdecimal() and last.isdecimal()
    return [str(number) for number in range(int(first), int(last) + 1)] if numbers else [text.replace("_", "")]


def shortened(runs: list) -> list:
    """Two steps of every arm, at the smallest number of labels and the first seed."""
    first: dict = {}
    for run in sorted(runs, key=lambda run: (run.labels is None, run.labels or 0, run.seed)):
        first.setdefault(run.arm, with_length(run, lambda steps: min(steps, 2)))
    return list(first.values())


def with_length(run, length: Callable[[int], int]):
    """The run with another number of steps, and so whatever is trained before it."""
    return replace(run, steps=length(run.steps), **{field: with_length(other, length) for field, other in run.dependencies.items()})
