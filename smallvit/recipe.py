"""Recipes: Python files with a question in the docstring and a list RUNS; how they are found, loaded and filtered."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smallvit.definitions import definitions

if TYPE_CHECKING:
    from smallvit.ablation import ArmRun

LISTED = 5  # files that a message lists
MOST_NUMBERS = 100_000  # of a range such as 0-3


def recipe_files() -> list[Path]:
    """Return the paths of all available recipe files (Python files that list the runs of a comparison). They are in the folder
    `./recipes` or were installed with smallvit.
    """
    package = Path(__file__).parent
    places = [Path("recipes"), package / "recipes", package.parent / "recipes"]
    found = {path.stem: path for place in reversed(places) for path in sorted(place.glob("[!_.]*.py"))}
    return [found[name] for name in sorted(found)]


def find_recipe(name: str) -> Path:
    """Return the path of a recipe file (a Python file that lists the runs of a comparison). `name` is a path or the name of an
    installed recipe, such as quickstart.

    Raises ValueError if there is none, with a similar name: of the Python files in that folder first, then of the available
    recipes.
    """
    path = Path(name).expanduser()
    for file in (path, path.parent / f"{path.name}.py"):
        if file.suffix == ".py" and file.exists():
            return file
    recipes = {path.stem: path for path in recipe_files()}
    if path.stem in recipes and path.suffix in ("", ".py") and path.parent in (Path("."), Path("recipes")):
        return recipes[path.stem]
    message = missing_recipe(path, list(recipes))
    raise ValueError(message)


def missing_recipe(path: Path, recipes: Sequence[str]) -> str:
    """Return an error message for a recipe file that does not exist. `path` is what the user gave, and `recipes` are the names
    of the available recipes. The message names the folder that was searched, and a similar file in it or a similar recipe.
    """
    folder = path.parent.absolute()
    beside = {file.stem: str(file) for file in sorted(path.parent.glob("*.py"))}
    near = [beside[stem] for stem in get_close_matches(path.stem, beside, 1, 0.6)]
    near = near or get_close_matches(path.stem, recipes, 1, 0.6)
    is_file = path.suffix == ".py" or path.parent != Path(".")
    missing = f"there is no file {path.name} in {folder}" if is_file else f"there is no recipe {str(path)!r}"
    if not folder.is_dir():
        missing = f"there is no file {path}, because there is no folder {folder}"
    if near:
        return f"{missing}; did you mean {near[0]!r}?"
    files = f"one of the files {', '.join([*beside.values()][:LISTED])}, or " if beside else ""
    return f"{missing}; expected {files}the path of another .py file, or one of the recipes {', '.join(recipes)}"


def load_recipe(path: str | Path, *, tuned: bool = True, old_options: bool = False) -> ModuleType:
    """Import a recipe file (a Python file that lists the runs of a comparison), and return the module. Its name is
    `recipes.<file>`.

    Under this name, records can refer to classes and functions that the recipe defines.

    If the recipe asks for tuning, the runs with the settings in `<recipe>.tuned.json`, which `smallvit tune` writes, are added
    to its list RUNS. `tuned=False` leaves them out. Arms that have not been tuned yet have no tuned runs. If `path` is a link,
    this file lies beside the link, as all files of a recipe do. With `old_options=True`, the settings may have been chosen with
    other options of `Tune`, such as other ranges, than the recipe has now.

    Raises ValueError, naming the line, if the import fails, and if the file defines no list RUNS as `ablate` returns it. Raises
    ValueError if the tuned settings are not those of this recipe.
    """
    path = Path(path).expanduser()
    module = import_recipe(path.resolve())
    runs = module.DECLARED
    if tuned and any(entry.tune is not None for entry in runs):
        from smallvit.tuning import with_tuned

        runs = with_tuned(runs, path, old_options)
        check_comparable(runs, path.name)
    module.RUNS = list(runs)
    return module


def carry_over(recipe: str, data: Callable, labels: Iterable[int | None] | None = None) -> "list[ArmRun]":
    """Return the list of all runs of the comparison of another recipe, on another data set. Nothing else is changed and
    nothing is tuned: the arms (variants), their learning rates and other settings, and the seeds stay. So the runs show
    whether the results of that recipe hold for images for which nobody has chosen a setting.

    recipe  the name or the path of the other recipe. If `smallvit tune` has chosen settings for it, these are used
    data    the loader of the data set, such as `textured_shapes`, or a `partial` of one. The models of the recipe must accept
            its images; `at_size` changes their size. With folds (cross-validation), each seed of the recipe becomes a pass
            over all folds
    labels  numbers of labelled images; by default those of the recipe

    Raises ValueError if there is no such recipe, for a number of labels that it does not have, if only some of its arms have
    been tuned, and if `data` is no loader.
    """
    from smallvit.ablation import as_list
    from smallvit.components import check
    from smallvit.passes import passes_of, seeds_of
    from smallvit.tuning import untuned_cells

    check(data, "data")
    runs = load_recipe(find_recipe(recipe)).RUNS
    tuned = any(entry.tuning is not None for entry in runs)
    known = list(dict.fromkeys(entry.labels for entry in runs))
    chosen = known if labels is None else as_list(labels, "labels")
    if missing := [count for count in chosen if count not in known]:
        raise ValueError(f"labels has {missing[0]}; expected some of {known}, for which the recipe {recipe} has settings")
    if tuned and (left := [cell for cell in untuned_cells(runs) if cell[1] in chosen]):
        arm, count = left[0]
        raise ValueError(
            f"arm {arm!r} with labels={count} of the recipe {recipe} is not tuned, and other arms are; first run smallvit tune"
            f" {recipe}"
        )
    carried = {}
    for entry in runs:
        if entry.labels not in chosen or (entry.tuning is not None) != tuned:
            continue
        run, folds = entry.run.with_data(data), entry.run.folds
        if run.folds == folds:
            copies = [run]
        else:  # all folds of the pass to which the run belongs; the pass has several runs if the recipe has folds, too
            copies = [run.at_seed(seed) for seed in seeds_of(passes_of([entry.seed], folds), run.folds)]
        for copy in copies:
            carried.setdefault((entry.cell, copy.seed), replace(entry, run=copy, tuning=None, tune=None))
    conditions = list(dict.fromkeys(cell[1:] for cell, _ in carried))
    if any(entry.run.folds for entry in carried.values()):  # as `ablate` orders them: the arms of a seed, then the next seed
        carried = dict(sorted(carried.items(), key=lambda item: (conditions.index(item[0][0][1:]), item[0][1])))
    return list(carried.values())


def import_recipe(path: Path, text: str | None = None) -> Any:
    """Import a recipe file (a Python file that lists the runs of a comparison), and return the module. A file that was imported
    before is not imported again, unless it was changed. `path` is the absolute path of the file. `text` is the source code to
    import; None means that of the file. Unlike `load_recipe`, this function adds no runs with tuned settings.

    The module gets the list `DECLARED` of the runs that the file itself lists, and its source code as `TEXT`.
    """
    import linecache
    import traceback
    from importlib.machinery import ModuleSpec, SourceFileLoader
    from importlib.util import module_from_spec

    from smallvit.ablation import ArmRun

    if not path.stem.replace("-", "_").isidentifier():
        raise ValueError(f"the recipe file is called {path.name!r}; expected letters, digits, '_' and '-' before .py")
    name = f"recipes.{path.stem}"
    module: Any = module_from_spec(ModuleSpec(name, SourceFileLoader(name, str(path)), origin=str(path)))
    module.__file__ = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig") if text is None else text
        if (other := sys.modules.get(name)) and hasattr(other, "TEXT") and not hasattr(other, "DECLARED"):  # it is being loaded
            if other.__file__ != str(path):
                raise ValueError(f"the recipe {other.__file__} loads another recipe of this name, {path}; rename one of them")
            raise ValueError(f"the recipe {path.name} loads itself; rename this file, or give the path of the other recipe")
        if imported_text(path) == text:
            return sys.modules[name]
        sys.modules[name] = module
        check_repeated_keys(text)
        module.TEXT, module.DEFINITIONS = text, definitions(text)
        linecache.cache[str(path)] = len(text), None, text.splitlines(True), str(path)  # a traceback shows this text
        exec(compile(text, str(path), "exec"), vars(module))  # the loader's cache might not notice a change within a second
    except (Exception, SystemExit) as error:  # a recipe that ends the program has not succeeded
        sys.modules.pop(name, None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        advice = ""
        if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name}.py").exists():
            advice = f"; a recipe must be one file: copy what it needs of {error.name}.py into it"
        raise ValueError(f"{path.name}{where}: {type(error).__name__}: {error}{advice}") from error
    runs = getattr(module, "RUNS", None)
    try:
        if not runs or not isinstance(runs, list | tuple) or not all(isinstance(run, ArmRun) for run in runs):
            raise ValueError(f"{path.name} defines no list RUNS; expected RUNS = ablate({{'scratch': Run(...), ...}}, ...)")
        check_comparable(runs, path.name)
    except ValueError:
        del sys.modules[name]
        raise
    module.DECLARED = list(runs)
    return module


def imported_text(path: Path) -> str | None:
    """Return the source code of a recipe file as this process has imported it last, or None if it was not imported. The file
    may have been edited since. `path` is the absolute path of the file.
    """
    module: Any = sys.modules.get(f"recipes.{path.stem}")
    return getattr(module, "TEXT", None) if module is not None and module.__file__ == str(path) else None


def own_files(text: str) -> list[str]:
    """Return the Python files and packages that the source code `text` of a recipe file imports and that are no installed
    libraries, as a list of paths. The hash of the recipe's code does not cover them.
    """
    import sysconfig
    from importlib.util import find_spec

    nodes = [*ast.walk(ast.parse(text))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = []
    for name in sorted({module.partition(".")[0] for module in modules} - {"smallvit"} - sys.stdlib_module_names):
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            continue
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        place = next((Path(each).resolve() for each in places if each and each not in ("built-in", "frozen")), None)
        if place and not folders & {*place.parents} and not {"site-packages", "dist-packages"} & {*place.parts}:
            found.append(str(place))
    return found


def check_repeated_keys(text: str):
    """Raise ValueError if a dict in the source code `text` has the same key twice. Python would silently keep only the last
    value, so a variant of the comparison would be lost.
    """
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)):
        for key, times in Counter(key.value for key in node.keys if isinstance(key, ast.Constant)).items():
            if times > 1:
                raise ValueError(f"the dict in line {node.lineno} has the key {key!r} {times} times; expected each key once")


def check_comparable(runs: Sequence["ArmRun"], name: str):
    """Raise ValueError if the runs of a recipe file cannot be compared, for example because a run occurs twice or because there
    is no baseline. `name` is the name of the file, which the error message shows.

    An arm (one variant in the comparison) with several roles or several baselines raises the error, too. An arm may be compared
    with any other arm, but the baselines of baselines must lead to an arm with the role "baseline".
    """
    for (cell, seed), times in Counter((entry.cell, entry.seed) for entry in runs).items():
        if times > 1:
            arm, labels, length, tuned = cell
            more = f", length={length}" * (length is not None) + ", tuned" * tuned
            raise ValueError(f"{name}: RUNS has arm {arm!r}, labels={labels}, seed={seed}{more} {times} times; expected once")
    arms = dict.fromkeys((entry.arm, entry.role, entry.baseline) for entry in runs)
    baselines = list(dict.fromkeys(arm for arm, role, _ in arms if role == "baseline"))
    if not baselines:
        raise ValueError(f"{name}: RUNS has no baseline; expected at least one arm with role='baseline', as ablate makes it")
    for arm, times in Counter(arm for arm, _, _ in arms).items():
        if times > 1:
            raise ValueError(f"{name}: arm {arm!r} has several roles or several baselines; expected one of each")
    controls = {arm: arm if role == "baseline" else baseline or baselines[0] for arm, role, baseline in arms}
    for arm, role, baseline in arms:
        others = [other for other, other_role, _ in arms if other != arm and other_role != "dependency"]
        allowed, suggested = ([arm], [arm]) if role == "baseline" else (others, baselines)
        if baseline not in allowed and (baseline or len(suggested) > 1):
            raise ValueError(f"{name}: arm {arm!r} ({role}) has the baseline {baseline!r}; expected one of {suggested}")
    for arm in controls:
        chain = [arm]
        while (control := controls[chain[-1]]) != chain[-1]:
            if control in chain:
                circle = " -> ".join(map(repr, [*chain, control]))
                raise ValueError(f"{name}: the baselines of arms form a circle: {circle}; expected one that ends at a baseline")
            chain.append(control)


def by_settings(runs: Iterable["ArmRun"], seeds: Iterable[int]) -> dict[str, list["ArmRun"]]:
    """Return which runs of a recipe have certain settings, as a dict from the fingerprint (hash of the settings) to a list of
    runs. The random seed does not count: the dict also has the fingerprint of each run with each of the `seeds`. `runs` are the
    runs of the recipe; of each arm and condition, the list has one.
    """
    from smallvit.run import fingerprint

    seeds = set(seeds)
    found: dict[str, list[ArmRun]] = {}
    for entry in {entry.cell: entry for entry in runs}.values():
        for run in {entry.seed: entry.run, **{seed: entry.run.at_seed(seed) for seed in seeds}}.values():
            found.setdefault(fingerprint(run), []).append(entry)
    return found


FILTERS = ("arm", "labels", "seed", "pass", "length", "settings")


def only(runs: Sequence["ArmRun"], filters: Sequence[str]) -> list["ArmRun"]:
    """Return the list of the runs that pass all filters. A filter is a text: `arm=a,b` selects variants of the comparison
    (arms) by name, `labels=100,1000` selects by number of labelled images, and `seed=0-3` selects by seed.

    In a cross-validation, a seed is one fold: that of pass p and fold f is p * folds + f. `pass=0` selects all folds of a pass.

    The filter `arm=references` selects all reference models. `length=500` selects by training length, and `settings=tuned` or
    `settings=common` by how the settings were chosen.

    Raises ValueError for an unknown filter or value, with the most similar one, for two filters of one kind, and if no run is
    left.
    """
    selected, given = list(runs), dict[str, str]()
    for text in filters:
        key, _, values = text.partition("=")
        if key not in FILTERS or not values:
            *names, last = (f"{name}=..." for name in FILTERS)
            raise ValueError(f"--only got {text!r}; expected {', '.join(names)} or {last}")
        if given.setdefault(key, values) != values:
            raise ValueError(f"--only got {key}={given[key]} and {text}; expected one filter: {key}={given[key]},{values}")
        folds = max((entry.run.folds for entry in selected), default=0)
        if key == "pass" and not folds:
            raise ValueError(f"--only got {text!r}, but this recipe has no cross-validation (folds=); expected seed={values}")
        offered = list({filter_value(entry, key): None for entry in selected})
        if key == "arm":
            selection = split_arms(values, offered)
        else:
            selection = {value for part in values.split(",") for value in expand_range(part)}
        references = key == "arm" and "references" in selection
        for one in sorted(selection - {"references"} - set(offered)):
            similar = get_close_matches(one, offered, 1, 0.4)
            advice = f"did you mean {similar[0]!r}?" if similar else f"expected one of {', '.join(map(repr, offered))}"
            if folds and key == "seed":
                advice = f"it has {seed_filter(offered)}; a seed is one of {folds} folds, and pass=0 is a pass over all folds"
            raise ValueError(f"this recipe has no {key} {one!r}; {advice}")
        selected = [e for e in selected if filter_value(e, key) in selection or (references and e.role == "reference")]
    if not selected:
        raise ValueError(f"no run of this recipe passes all filters {' '.join(filters)}")
    return selected


def filter_value(entry: "ArmRun", key: str) -> str:
    """Return one property of the run `entry` as text. `key` is "arm" (the variant in the comparison), "labels" (the number of
    labelled images), "seed", "pass" (over all images, in a cross-validation), "length" (of the training) or "settings": `tuned`
    if the settings were chosen by tuning, else `common`. If the property is None, the text is `all`.
    """
    if key == "pass":
        return str(entry.seed // (entry.run.folds or 1))
    if key == "settings":
        return "common" if entry.tuning is None else "tuned"
    value = getattr(entry, key)
    return "all" if value is None else str(value)


def seed_filter(seeds: Sequence[str]) -> str:
    """Return the seeds of a recipe as text, such as `seed=0-29`. `seeds` are the seeds, each as text."""
    numbers = sorted(map(int, seeds))
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"seed={numbers[0]}-{numbers[-1]}" if whole else f"seed={','.join(map(str, numbers))}"


def split_arms(text: str, offered: Sequence[str]) -> set[str]:
    """Return the set of arm names (names of variants) in a text in which commas separate them. `offered` are all existing
    names. They are needed because a name may itself contain commas.
    """
    names, rest = set(), text
    for name in sorted(offered, key=len, reverse=True):
        whole = rf"(?:^|(?<=,)){re.escape(name)}(?=,|$)"
        if "," in name and re.search(whole, rest):
            names.add(name)
            rest = re.sub(whole, "", rest)
    return names | {part for part in rest.split(",") if part}


def expand_range(text: str) -> list[str]:
    """Return the numbers of a range such as `0-3` as a list of texts. Any other text gives a list that contains only this text.

    Underscores are removed. Raises ValueError for a range of more than 100,000 numbers.
    """
    first, _, last = text.replace("_", "").partition("-")
    is_range = first.isdecimal() and last.isdecimal()
    if is_range and int(last) - int(first) >= MOST_NUMBERS:
        raise ValueError(f"--only got the range {text}; expected at most {MOST_NUMBERS:,} numbers; give a shorter range")
    return [str(number) for number in range(int(first), int(last) + 1)] if is_range else [text.replace("_", "")]


def smoke_test_runs(runs: Sequence["ArmRun"]) -> list["ArmRun"]:
    """Return a few very short runs that test whether a recipe file works. There is one run for each arm (variant), with at most
    two training steps, the fewest labelled images and the smallest seed. In a cross-validation, there is one for each fold.
    """
    first: dict[str, ArmRun] = {}
    for entry in sorted(runs, key=lambda entry: (entry.labels is None, entry.labels or 0, entry.seed)):
        first.setdefault(entry.arm, entry)

    def is_in_first_pass(entry: "ArmRun") -> bool:
        other, folds = first[entry.arm], entry.run.folds or 1
        return entry.cell == other.cell and entry.seed // folds == other.seed // folds

    return [entry.with_steps(lambda steps: min(steps, 2)) for entry in runs if is_in_first_pass(entry)]
