"""Components as plain JSON and back: which options a recipe may set, how they are written, and what a record may call.

A component is a public class or function of a component file or of a recipe, with its options bound by `functools.partial`.
Records may come from anywhere, so `component` is the only place where a name in a record becomes something callable.
"""

import functools
import importlib
import inspect
import json
import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, get_args

from smallvit.shapes import printable

# modules of smallvit that define components
MODULES = (
    "attention", "attention_positions", "attention_starts", "attention_variants", "augment", "block_variants", "data",
    "ensemble", "evaluate", "objectives", "optimizers", "pooling", "positions", "pretrained", "pseudo_labels", "reduction",
    "references", "tokenizers", "vit",
)  # fmt: skip
VALUE_MODULES = ("pretrained",)  # a record may create dataclasses of these (weights to load), but call no function


def python_numbers(value: Any) -> Any:
    """Return a value with Python numbers in the place of NumPy numbers, such as those of `np.arange(3)`, and with a list in the
    place of an array with one axis. They are replaced also inside lists, tuples and dicts and in the options of a `partial`. A
    value without them is returned as it is.
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 2) < 2:
        return value.tolist()
    if type(value) in (list, tuple):
        changed = [python_numbers(item) for item in value]
        return value if all(map(operator.is_, changed, value)) else type(value)(changed)
    if type(value) is dict:
        given = {name: python_numbers(item) for name, item in value.items()}
        return value if all(given[name] is item for name, item in value.items()) else given
    if isinstance(value, partial):
        args, given = python_numbers(value.args), python_numbers(value.keywords)
        return value if args is value.args and given is value.keywords else partial(value.func, *args, **given)
    return value


def describe(value: Any) -> Any:
    """Return a description of a component (such as a model or a transform) or of a plain value as JSON data. It contains all
    options, also those with their default value.

    A component becomes `{"call": "smallvit.tokenizers.PatchEmbed", "patch": 7, ...}`; an instance of a dataclass, such as a
    transform, becomes `{"make": "smallvit.augment.Warp", ...}`.

    Raises ValueError for other values, and for a dataclass whose arguments are not its fields: its description would be the
           same for different arguments.
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # pyright: ignore
            raise ValueError(
                f"{type(value).__name__} is a dataclass whose values can change during a run; its record would then name other"
                " settings than those of the start; expected @dataclass(frozen=True)"
            )
        names, accepted = [f.name for f in fields(value)], [*own_arguments(type(value))]
        if sorted(names) != sorted(accepted):
            raise ValueError(
                f"cannot describe {type(value).__name__}: its constructor takes ({', '.join(accepted)}), and its fields are"
                f" ({', '.join(names)}); expected a class with @dataclass whose arguments are its fields, without an __init__"
                " of its own, InitVar or field(init=False)"
            )
        return {"make": full_name(type(value)), **definition_hash(type(value))} | {
            name: describe(getattr(value, name)) for name in names
        }
    if callable(value):
        values = {name: p.default for name, p in sorted(options(value).items()) if p.default is not p.empty}
        called = function(value)
        description = {"call": full_name(called), **definition_hash(called)}
        return description | {name: describe(value) for name, value in values.items()}
    raise ValueError(f"cannot describe {value!r}; expected a plain value, a function or class, or a partial of one")


def rebuild(plain: Any) -> Any:
    """Return the component (such as a model or a transform) or plain value that a description in JSON data stands for. This is
    the inverse of `describe`.

    Only classes and functions of smallvit and of loaded recipes are looked up, because the data may come from an untrusted
    record.

    Options that were added after the description was written get the value of the old behavior (see `added_options`).

    Raises ValueError for any other name, for a component of a recipe that has changed since, and for `make` of anything but a
    dataclass, because `make` calls it at once.
    """
    if isinstance(plain, list):
        return tuple(rebuild(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    if not plain.keys() & {"call", "make"}:
        raise ValueError(f"{plain} names no component; expected 'call' or 'make' in it, as describe writes")
    made = component(plain.get("make") or plain.get("call", ""))
    values = {name: rebuild(value) for name, value in plain.items() if name not in ("call", "make", "recipe_sha256")}
    # an option of None counts as absent (see `canonical`), even if the option no longer exists
    values = {name: value for name, value in values.items() if value is not None or name in arguments(made)}
    values = added_options(made) | values
    if plain.get("recipe_sha256") != definition_hash(made).get("recipe_sha256"):
        name = plain.get("make", plain.get("call"))
        if not definition_hash(made):
            raise ValueError(f"the recipe of {name} was imported with a plain import; load it with smallvit.load_recipe(path)")
        raise ValueError(f"{name} has changed in its recipe since the record was written")
    if "make" in plain:
        if "call" in plain or not (isinstance(made, type) and is_dataclass(made)):
            raise ValueError(
                f"{plain['make']} cannot be created from a record; expected a dataclass, such as a transform, and no call"
            )
        try:
            return made(**values)
        except TypeError as error:
            raise ValueError(f"{plain['make']} does not accept {values}: {error}; expected what describe wrote") from error
    return partial(made, **values) if values else made


def differences(plain: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the options in which two descriptions differ, as a dict from a name such as `model.depth` to a pair (value in
    `plain`, value in `other`). Descriptions are JSON data from `describe`. `path` is put before each name.

    A component that was exchanged for another is one difference; its own options are not listed. An absent option is None.
    """
    if isinstance(plain, dict) and isinstance(other, dict) and described_name(plain) == described_name(other):
        pairs = {f"{path}.{printable(key)}".lstrip("."): (plain.get(key), other.get(key)) for key in plain | other}
    elif isinstance(plain, list) and isinstance(other, list) and len(plain) == len(other):
        pairs = {f"{path}[{index}]": pair for index, pair in enumerate(zip(plain, other))}
    else:
        return {} if plain == other else {path: (plain, other)}
    return {name: values for key, pair in pairs.items() for name, values in differences(*pair, key).items()}


def describe_value(plain: Any) -> str:
    """Return a short text for a component or a value, in the form of Python code: `ShiftedPatchEmbed(patch=2)`. `plain` is its
    description as JSON data, which `describe` returns.

    Options at their default are left out if the component can be looked up. A run is shortened to its model, objective and
    number of steps.
    """
    if isinstance(plain, list):
        return f"[{', '.join(map(describe_value, plain))}]"
    if not isinstance(plain, dict):
        return printable(json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else str(plain))
    if not described_name(plain):
        parts = {key: described_name(value).rpartition(".")[2] or value for key, value in plain.items()}
        shown = {key: parts[key] for key in ("model", "objective", "steps") if key in parts}
        return printable(f"Run({', '.join(f'{key}={value}' for key, value in shown.items())})")
    defaults = described_defaults(described_name(plain))
    skipped = ("call", "make", "recipe_sha256")
    changed = {key: value for key, value in plain.items() if key not in skipped and value != defaults.get(key)}
    shown = [f"{printable(key)}={describe_value(value)}" for key, value in changed.items()]
    return printable(described_name(plain).rpartition(".")[2]) + f"({', '.join(shown)})" * bool(shown)


def described_name(plain: Any) -> str:
    """Return the full name of a class or function from its description, such as `smallvit.vit.ViT`. `plain` is this description
    as JSON data. The name is empty for a run or a plain value.
    """
    return (plain.get("call") or plain.get("make") or "") if isinstance(plain, dict) else ""


def described_defaults(name: str) -> dict[str, Any]:
    """Return the default values of a component (such as a model or a transform), as a dict from option to JSON data. `name` is
    the full name of its class or function.

    The dict is empty if this version of smallvit and the loaded recipes have no such component.
    """
    try:
        accepted = options(component(name))
        return {key: describe(p.default) for key, p in accepted.items() if p.default is not p.empty}
    except ValueError:
        return {}


def definition_hash(thing: Callable) -> dict[str, str]:
    """Return the hash of the source code of a class or function, if a recipe file defines it, as a dict with the key
    `recipe_sha256`. For other classes and functions the dict is empty. The caller adds the dict to a description of `thing`.

    The hash includes all definitions of the recipe that the class or function uses.
    """
    if not thing.__module__.startswith("recipes."):
        return {}
    sha256 = getattr(sys.modules.get(thing.__module__), "DEFINITIONS", {}).get(thing.__qualname__)
    return {"recipe_sha256": sha256} if sha256 else {}


def full_name(thing: Callable) -> str:
    """Return the full name under which the results of a run store a class or function: `smallvit.<module>.<Name>` or, if a
    recipe file defines it, `recipes.<file>.<Name>`.

    `component` finds the class or function again by this name.

    Raises ValueError for lambdas, local functions and instances, which have no such name.
    """
    qualified = getattr(thing, "__qualname__", None)
    if qualified is None:
        raise ValueError(
            f"{repr(thing)[:60]} is neither a function nor a class and cannot be written to a record; give the class itself,"
            " with its options bound by functools.partial; a transform or an evaluator with options is an instance of a class"
            " with @dataclass(frozen=True)"
        )
    if "<" in qualified:
        raise ValueError(
            f"{qualified} is a lambda or a local function and cannot be written to a record; define it at the top level of the"
            " recipe"
        )
    name = ".".join([*str(thing.__module__).split(".")[:2], qualified])
    if component(name) is not thing:
        raise ValueError(f"the name {name} refers to something else; define it once, at the top level of its file")
    return name


def component(name: str) -> Any:
    """Return the class or function with a given full name, such as `smallvit.vit.ViT`. For safety, only public classes and
    functions of smallvit and of loaded recipe files can be found.

    The name may come from an untrusted record.

    Raises ValueError for anything but a public class or function of the component modules and of the loaded recipes.
    """
    package, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    file, _, attribute = rest.partition(".")
    module = f"{package}.{file}"
    if not (package == "smallvit" and file in MODULES) and not (package == "recipes" and module in sys.modules):
        raise ValueError(
            f"{name!r} is not in smallvit or in a loaded recipe; expected a name that a record can refer to, "
            "recipes.<file>.Name: define it in a recipe file, and load the file by load_recipe(path). For code of another "
            "library, define a function there that calls it, such as def my_model(image, channels, classes)"
        )
    found = vars(importlib.import_module(module)).get(attribute)
    home = getattr(found, "__module__", None) or ""
    defined_here = getattr(found, "__qualname__", None) == attribute and f"{home}.".startswith(f"{module}.")
    defined_here = defined_here and (file not in VALUE_MODULES or is_dataclass(found))
    if found is None or not defined_here or attribute.startswith("_"):
        raise ValueError(
            f"{module} has no component {attribute!r}; expected a public class or function defined at its top level, no lambda"
        )
    return found


def check(component: Any, name: str):
    """Raise ValueError for a component (such as a model or a transform) that is not callable, and for an unknown option, an
    option bound by position, a missing option, and a text in place of a number. Components among its options are checked, too.
    `name` is the setting of the run that holds the component.
    """
    if not callable(component):
        shown = repr(component) if len(repr(component)) < 80 else f"an object of class {type(component).__name__}"
        raise ValueError(f"{name} is {shown}; expected a function or class, or functools.partial of one with its options")
    if is_dataclass(component) and not isinstance(component, type):
        describe(component)
        return
    called = function(component)
    try:
        full_name(called)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if name == "model" and not takes_three(called):
        raise ValueError(
            f"{called.__name__} cannot be called as a model, with (image, channels, classes) by position; write in the recipe"
            " file a function def my_model(image, channels, classes) that returns the model, and give further options a default"
        )
    loads_data = name.rpartition(".")[2] == "data"
    accepted = arguments if loads_data else options  # a loader is called without arguments: all of them are options
    if isinstance(component, partial):
        if component.args:
            raise ValueError(f"{name} binds {component.args!r} by position; expected every option by name")
        defaults = accepted(called)
        for option, value in component.keywords.items():
            check_option(option, defaults, called.__name__)
            takes_text = str in get_args(defaults[option].annotation)
            if isinstance(value, str) and isinstance(defaults[option].default, int | float) and not takes_text:
                raise ValueError(f"{option} of {called.__name__} is {value!r}; expected a number, without quotes")
            if loads_data and isinstance(value, list | dict | set):  # loaders cache their result by their options
                raise ValueError(f"{option} of {called.__name__} is {value!r}; expected a tuple, or a plain value")
    for option, p in accepted(component).items():
        if p.default is p.empty:
            raise ValueError(f"{name} has no {option!r}, a required option; write partial({called.__name__}, {option}=...)")
        if callable(p.default):
            check(p.default, f"{name}.{option}")
    describe(component)


def function(component: Any) -> Any:
    """Return the class or function inside any number of `functools.partial` objects: for `partial(Merge, r=8)` the class
    `Merge`.
    """
    while isinstance(component, functools.partial):
        component = component.func
    return component


def added_options(component: Any) -> dict[str, Any]:
    """Return the options of a component (such as a model) that were added after version 0.2.0, as a dict from name to value.
    With these values, the component behaves as it did before the options existed.

    A component declares them in its attribute `added_options`. They keep the fingerprints of older runs valid. A subclass
    inherits the declaration for those options that it accepts.
    """
    declared = getattr(component, "added_options", {})
    return {name: value for name, value in declared.items() if name in arguments(component)}


def neutral_options(component: Any) -> tuple[str, ...]:
    """Return the names of the options of a component (such as a data loader) that do not change its result, such as where a
    loader keeps decoded images. They are not part of a fingerprint. A component declares them in its attribute
    `neutral_options`.
    """
    return tuple(getattr(function(component), "neutral_options", ()))


def arguments(component: Callable) -> dict[str, inspect.Parameter]:
    """Return all parameters that a component (such as a model or a transform) accepts by name, as a dict from name to
    `inspect.Parameter`. A value that `functools.partial` has set counts as the default.
    """
    if not isinstance(component, partial):
        return dict(own_arguments(component))
    accepted = arguments(component.func)
    if component.args:
        raise ValueError(
            f"{function(component).__name__} has {component.args!r} bound by position; expected every option by name"
        )
    for name, value in component.keywords.items():
        check_option(name, accepted, function(component).__name__)
        accepted[name] = accepted[name].replace(default=value, kind=inspect.Parameter.KEYWORD_ONLY)
    return accepted


@functools.cache  # a recipe needs the same few signatures 100,000 times
def own_arguments(component: Callable) -> dict[str, inspect.Parameter]:
    """Return the parameters in the signature of a class or function that can be given by name, as a dict from name to
    `inspect.Parameter`. `component` is the class or function itself, not a `functools.partial` of it.
    """
    parameters = inspect.signature(component).parameters
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


@functools.cache
def takes_three(component: Callable) -> bool:
    """Return whether a class or function can be called with three arguments by position, and has at most three without a
    default that are not keyword-only.
    """
    try:
        signature = inspect.signature(component)
        signature.bind_partial(None, None, None)
    except TypeError:
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in by_position for p in signature.parameters.values()) <= 3


def options(component: Callable) -> dict[str, inspect.Parameter]:
    """Return the parameters of a component (such as a model or a transform) that a user may set, as a dict from name to
    `inspect.Parameter`. Parameters whose values the library passes are left out, such as the number of channels.

    These are the positional parameters without a default.
    """
    return {name: p for name, p in arguments(component).items() if p.kind == p.KEYWORD_ONLY or p.default is not p.empty}


# other names of options, in other libraries and in smallvit 0.1
SYNONYMS = {"learning_rate": "lr", "batch_size": "batch", "epochs": "steps", "average": "ema", "embed_dim": "dim"}


def check_option(name: str, names: Iterable[str], owner: str):
    """Raise ValueError if `name` is not among the existing options `names`. The message says that `owner`, such as a class
    name, has no such option, and it suggests the most similar option.
    """
    names = list(names)
    if name not in names:
        anagrams = [other for other in names if sorted(other) == sorted(name)]
        synonym = [SYNONYMS[name]] if SYNONYMS.get(name) in names else []
        similar = synonym or anagrams or get_close_matches(name, names, 1, 0.5)
        advice = f"did you mean {similar[0]!r}?" if similar else f"expected one of {', '.join(sorted(names))}"
        raise ValueError(f"{owner} has no option {name!r}; {advice}")


def canonical(plain: Any) -> Any:
    """Return the description of a component (such as a model or a transform) in a fixed form, from which a hash is computed.
    `plain` is the description as JSON data. Options that are None are left out.

    Newer options whose value keeps the old behavior are left out, too, and so are options that do not change the result (see
    `neutral_options`).

    Whole numbers are integers: 2.0 becomes 2.
    """
    if isinstance(plain, dict):
        name = plain.get("call") or plain.get("make")
        old = {option: describe(value) for option, value in added_options(component(name)).items()} if name else {}
        same = [option for option in old if option in plain and plain[option] == old[option]]
        same += neutral_options(component(name)) if name else ()
        return {option: canonical(value) for option, value in plain.items() if value is not None and option not in same}
    if isinstance(plain, list):
        return [canonical(item) for item in plain]
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain
