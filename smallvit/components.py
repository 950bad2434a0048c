"""Components in plain JSON, and back: what a recipe may bind, how it is written down, and what a record may call.

A component is a public class or function of a slot file or of a recipe, its knobs bound by `functools.partial`. Records are
data from somewhere: `component` is the one door from a name in a record to something that can be called.
"""

import functools
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

# the files, and folders of files, that define components
ROOMS = (
    "attention", "augment", "data", "evaluate", "references", "objectives", "pooling", "positions", "pretrained", "pseudo_labels",
    "reduction", "tokenizers", "vit",
)  # fmt: skip


VALUES = ("pretrained",)  # of these a record may make values, weights to start from, and call nothing


def describe(value: Any) -> Any:
    """A component, or a plain value, in JSON, every default spelled out, so that it is the same when a default changes.

    A component is `{"call": "smallvit.tokenizers.PatchEmbed", "patch": 7, ...}`; one that is already made (an augmentation) is
    `{"make": ..., ...}`.
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {"make": address(type(value)), **written(type(value))} | {
            f.name: describe(getattr(value, f.name)) for f in fields(value)
        }
    if callable(value):
        chosen = {name: p.default for name, p in sorted(knobs(value).items()) if p.default is not p.empty}
        made_of = function(value)
        return {"call": address(made_of), **written(made_of)} | {name: describe(knob) for name, knob in chosen.items()}
    raise ValueError(f"cannot describe {value!r}; expected a plain value, a function or class, or a partial of one")


def rebuild(plain: Any) -> Any:
    """The value that `describe` wrote down. Only names of components in `smallvit` and in loaded recipes are looked up.

    Raises ValueError for any other name, and for `make` of anything but an augmentation, since that is called here and now.
    """
    if isinstance(plain, list):
        return tuple(rebuild(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    if not plain.keys() & {"call", "make"}:
        raise ValueError(f"{plain} names no component; expected 'call' or 'make' in it, as describe writes")
    made = component(plain.get("make", plain.get("call")))
    rest = {name: rebuild(value) for name, value in plain.items() if name not in ("call", "make", "recipe_sha256")}
    # None counts as not made (see `canonical`), also where there is no such choice any more
    rest = {name: value for name, value in rest.items() if value is not None or name in arguments(made)}
    if plain.get("recipe_sha256") != written(made).get("recipe_sha256"):
        raise ValueError(f"{plain.get('make', plain.get('call'))} is not the one of the record: its recipe has changed since")
    if "make" in plain:
        if "call" in plain or not (isinstance(made, type) and is_dataclass(made)):
            raise ValueError(
                f"{plain['make']} cannot be made from a record; expected a dataclass, as augmentations are, and no call"
            )
        try:
            return made(**rest)
        except TypeError as error:
            raise ValueError(f"{plain['make']} cannot be made of {rest}: {error}; expected what describe wrote") from error
    return partial(made, **rest) if rest else made


def unequal(here: Any, there: Any, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    same_kind = isinstance(here, dict) and isinstance(there, dict)
    if same_kind and all(here.get(kind) == there.get(kind) for kind in ("call", "make")):
        for key in here | there:
            yield from unequal(here.get(key), there.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for at, pair in enumerate(zip(here, there)):
            yield from unequal(*pair, f"{name}[{at}]")
    elif here != there:
        yield name, (in_words(here), in_words(there))


def in_words(plain: Any) -> str:
    """A described value as one would say it: `ShiftedPatchEmbed(norm=True, patch=7)`."""
    if isinstance(plain, list):
        return ", ".join(map(in_words, plain)) or "none"
    if not isinstance(plain, dict):
        return repr(plain) if isinstance(plain, str) else str(plain)
    name = (plain.get("call") or plain.get("make") or "Run").rpartition(".")[2]
    knobs = [
        f"{key}={in_words(knob)}"
        for key, knob in plain.items()
        if key not in ("call", "make", "recipe_sha256") and not isinstance(knob, dict) and knob is not None
    ]
    return f"{name}({', '.join(knobs)})" if knobs else name


def differences(plain: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two described runs differ: dotted path of the option -> (its value in `plain`, its value in `other`).

    A component that was exchanged for another is one difference; its own options are not listed. An absent option is None.
    """
    if isinstance(plain, dict) and isinstance(other, dict) and name_of(plain) == name_of(other):
        pairs = {f"{path}.{key}".lstrip("."): (plain.get(key), other.get(key)) for key in plain | other}
    elif isinstance(plain, list) and isinstance(other, list) and len(plain) == len(other):
        pairs = {f"{path}[{index}]": pair for index, pair in enumerate(zip(plain, other))}
    else:
        return {} if plain == other else {path: (plain, other)}
    return {name: values for key, pair in pairs.items() for name, values in differences(*pair, key).items()}


def describe_value(plain: Any) -> str:
    """A described value as a person writes it in a recipe: `ShiftedPatchEmbed(patch=2)`.

    Options at their default are left out if the component can be looked up. A run is shortened to its model, objective and
    number of steps.
    """
    if isinstance(plain, list):
        return f"[{', '.join(map(describe_value, plain))}]"
    if not isinstance(plain, dict):
        return json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else str(plain)
    if not name_of(plain):
        parts = {key: name_of(value).rpartition(".")[2] or value for key, value in plain.items()}
        options = {key: parts[key] for key in ("model", "objective", "steps") if key in parts}
        return f"Run({', '.join(f'{key}={value}' for key, value in options.items())})"
    defaults = described_defaults(name_of(plain))
    options = {key: value for key, value in plain.items() if key not in ("call", "make", "recipe_sha256")}
    shown = [f"{key}={describe_value(value)}" for key, value in options.items() if value != defaults.get(key)]
    return name_of(plain).rpartition(".")[2] + f"({', '.join(shown)})" * bool(shown)


def name_of(plain: Any) -> str:
    """The public name of the class or function of a described component; empty for a run or a plain value."""
    return (plain.get("call") or plain.get("make") or "") if isinstance(plain, dict) else ""


def described_defaults(name: str) -> dict[str, Any]:
    """The defaults of a component as `describe` writes them; empty if this version or the loaded recipes do not have it."""
    try:
        options = knobs(component(name))
    except ValueError:
        return {}
    return {key: describe(option.default) for key, option in options.items() if option.default is not option.empty}


def written(thing: Callable) -> dict[str, str]:
    """For a component of a recipe, a hash of its definition and of what that uses, as its file was loaded: it may change."""
    if not thing.__module__.startswith("recipes."):
        return {}
    sha256 = getattr(sys.modules.get(thing.__module__), "DEFINITIONS", {}).get(thing.__qualname__)
    return {"recipe_sha256": sha256} if sha256 else {}


def address(thing: Callable) -> str:
    """The public name under which a component is found again: `smallvit.<room>.Name`, however many files the room has."""
    own = getattr(thing, "__qualname__", None)
    if own is None:
        raise ValueError(
            f"{repr(thing)[:60]} is neither a function nor a class and cannot stand in a record; give the class itself,"
            " its knobs bound by functools.partial"
        )
    if "<" in own:
        raise ValueError(
            f"{own} is a lambda or a local function and cannot stand in a record; define it at the top level of the recipe"
        )
    name = ".".join([*str(thing.__module__).split(".")[:2], own])
    if component(name) is not thing:
        raise ValueError(f"{name} is not what its name leads to; define it once, at the top level of its file")
    return name


def component(name: str) -> Callable:
    """The class or function of that name. A record must not reach anything else: it is data from somewhere.

    Raises ValueError for all but the public classes and functions of the component files and of the loaded recipes.
    """
    package, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    room, _, attribute = rest.partition(".")
    module = f"{package}.{room}"
    if not (package == "smallvit" and room in ROOMS) and not (package == "recipes" and module in sys.modules):
        raise ValueError(
            f"{name!r} is outside the component files of smallvit and the loaded recipes; expected"
            f" smallvit.<{'|'.join(ROOMS)}>.Name or recipes.<file>.Name"
        )
    found = vars(importlib.import_module(module)).get(attribute)
    home = getattr(found, "__module__", None) or ""
    own = getattr(found, "__qualname__", None) == attribute and f"{home}.".startswith(f"{module}.")
    own = own and (room not in VALUES or is_dataclass(found))
    if not own or attribute.startswith("_"):
        raise ValueError(
            f"{module} has no component {attribute!r}; expected a public class or function defined at its top level, no lambda"
        )
    return found


def check(component: Any, where: str):
    """Hold every knob of a component, however deep, against its signature."""
    if not callable(component):
        shown = repr(component) if len(repr(component)) < 80 else f"an object of class {type(component).__name__}"
        raise ValueError(f"{where} is {shown}; expected a function or class, or functools.partial of one with its knobs")
    if is_dataclass(component) and not isinstance(component, type):
        describe(component)
        return
    address(function(component))
    taken = arguments if where == "data" else knobs  # a loader is called with nothing: all that it takes is a choice
    if isinstance(component, partial):
        if component.args:
            raise ValueError(f"{where} binds {component.args!r} by position; expected every knob by name")
        defaults = taken(function(component))
        for name, knob in component.keywords.items():
            known(name, defaults, function(component).__name__)
            text, number = isinstance(knob, str), isinstance(defaults[name].default, int | float)
            if text and number:
                raise ValueError(f"{name} of {function(component).__name__} is {knob!r}; expected a number, without quotes")
            if where == "data" and isinstance(knob, list | dict | set):  # loaders remember what they loaded
                raise ValueError(f"{name} of {function(component).__name__} is {knob!r}; expected a tuple, or a plain value")
    for name, p in taken(component).items():
        if p.default is p.empty:
            raise ValueError(f"{where} has no {name!r}; expected partial({function(component).__name__}, {name}=...)")
        if callable(p.default):
            check(p.default, f"{where}.{name}")
    describe(component)


def function(component: Callable) -> Callable:
    """The class or function under any number of partials."""
    while isinstance(component, functools.partial):
        component = component.func
    return component


def arguments(component: Callable) -> dict[str, inspect.Parameter]:
    """All that a component takes by name, with the defaults in force."""
    if not isinstance(component, partial):
        return dict(own_arguments(component))
    taken = arguments(component.func)
    if component.args:
        raise ValueError(
            f"{function(component).__name__} has {component.args!r} bound by position; expected every knob by name"
        )
    for name, knob in component.keywords.items():
        known(name, taken, function(component).__name__)
        taken[name] = taken[name].replace(default=knob, kind=inspect.Parameter.KEYWORD_ONLY)
    return taken


@functools.cache  # a recipe asks for the same few a hundred thousand times, which takes seconds
def own_arguments(component: Callable) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(component).parameters
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def knobs(component: Callable) -> dict[str, inspect.Parameter]:
    """What a recipe may choose of a component: all but the shapes, which have no default."""
    return {name: p for name, p in arguments(component).items() if p.kind == p.KEYWORD_ONLY or p.default is not p.empty}


def known(name: str, names: Iterable[str], owner: str):
    names = list(names)
    if name not in names:
        swapped = [other for other in names if sorted(other) == sorted(name)]
        near = swapped or get_close_matches(name, names, 1, 0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(names))}"
        raise ValueError(f"{owner} has no choice {name!r}; {advice}")


def canonical(plain: Any) -> Any:
    """A described value in one spelling: choices of None left out, and 2.0 as 2."""
    if isinstance(plain, dict):
        return {name: canonical(value) for name, value in plain.items() if value is not None}
    if isinstance(plain, list):
        return [canonical(item) for item in plain]
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain
