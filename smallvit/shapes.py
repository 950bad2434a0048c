"""What the fields of a record (results of a run) may contain, and texts without characters that deceive a reader.

A record may come from anywhere. What is checked here, a report can show without further checks.
"""

import re
from collections.abc import Callable
from typing import Any

DEEPEST = 64  # levels of nested lists and dicts
LARGEST = 1e39  # of all numbers; above the largest float32
MOST_PIXELS = 2**26  # values of all images in the picture of a record
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reverse what a reader sees
UNSAFE = re.compile(f"[\0-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029{DIRECTIONS}]")  # control characters, surrogates, line breaks

Kind = tuple[str, Callable[[Any], bool]]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no boolean."""
    return type(value) in (int, float) and abs(value) <= LARGEST


KINDS: dict[str, Kind] = {
    "count": ("a whole number from 0", lambda value: type(value) is int and 0 <= value <= LARGEST),
    "few": ("a whole number from 0 to 1,000,000", lambda value: type(value) is int and 0 <= value <= 1_000_000),
    "positive": ("a whole number from 1", lambda value: type(value) is int and 1 <= value <= LARGEST),
    "number": ("a finite number", is_number),
    "amount": ("a finite number from 0", lambda value: is_number(value) and value >= 0),
    "share": ("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
    "text": ("a text", lambda value: isinstance(value, str)),
    "name": ("a name", lambda value: isinstance(value, str) and bool(value.strip())),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "value": ("a text or a number", lambda value: isinstance(value, str | bool | None) or is_number(value)),
    "any": ("anything", lambda value: True),
}
# the test of each kind, also of "kind?"
TESTS = {name: test for name, (words, test) in KINDS.items()}
TESTS |= {f"{name}?": lambda value, test=test: value is None or test(value) for name, (words, test) in KINDS.items()}
PLAIN = str, bool, type(None)  # types of values that are never a problem
COSTS = {"images_seen?": "amount", "steps?": "amount", "seconds?": "amount"}
VALUES: Any = "value", ["value"]

# Each field with its shape. A shape is
#   "kind"             one of KINDS; "kind?" may also be null
#   [shape]            a list of any length, all items of this shape
#   [shape, shape]     a list of just these items
#   {"name": shape}    a dict with these names; "name?" may be absent; ... stands for all other names, which else are refused
#   (shape, shape)     one of these shapes
SHAPES: dict[str, Any] = {
    "recipe": "text",
    "arm": "name",
    "labels": "positive?",
    "seed": "count",
    "length": "count?",
    "tuning": {
        "settings?": {...: VALUES}, "trials?": "count", "labels?": "count?", "images_seen?": "amount", "seconds?": "amount",
        "loss?": "number?", "edge?": ["text"], "curve?": [[{...: VALUES}, "number?", "count"]], "note?": "text", ...: "any",
    },
    "looks": ["positive"],
    "removed": "few?",
    "unused_seeds": ["count"],
    "val": {...: "number"},
    "val_images": "count?",
    "test": {...: "number"},
    "probes": ["text"],
    "confusion": [["count"]],
    "reliability": [["count", "share", "share"]],
    "test_reads": "count?",
    "test_settings": "count?",
    "test_images": "count?",
    "test_majority": "share?",
    "test_repeats": "count?",
    "folds": "positive?",
    "pool_images": "count?",
    "test_groups": ["number"],
    "chosen_on_val": {"what?": "text", "labels?": "count", ...: "value"},
    "curve": [["count", "number?", "number?"]],
    "health": [{"step": "count", ...: "number?"}],
    "picture": {"error?": "text", ...: "any"},
    "params": "count?",
    "macs": "amount?",
    "tokens": "count?",
    "patches": "count?",
    "images_seen": "count?",
    "unlabelled": "count?",
    "steps": "count?",
    "seconds": "amount?",
    "pretraining": {
        **COSTS, "labels?": "count?", "chosen_labels?": "count?", "unlabelled?": "count?", "fingerprint?": "text",
        "runs?": {...: {**COSTS, "stacked?": "positive?", ...: "any"}}, ...: "any",
    },
    "preprocess": {
        "size?": ["positive", "positive"], "channels?": "positive", "mean?": ["number"], "std?": ["number"],
        "classes?": ["text"], "dtype?": "text", ...: "any",
    },
    "init_weights": {"loaded?": "count", "missing?": ["text"], "sha256?": "text", "name?": "text", ...: VALUES},
    "drawn_share": "share?",
    "trace": {
        "initial?": "text?", "batches?": "text?", "losses?": ["number"], "ema_distance?": "amount?", "final_norm?": "amount?",
        "instructions?": "text?", ...: "any",
    },
    "skipped_files": "count?",
    "threads": "count?",
    "stacked": "positive?",
    "processes": "positive?",
    "code": {"sha256?": "text", "commit?": "text?", "dirty?": "flag?", ...: "any"},
    "versions": {...: "text"},
}  # fmt: skip
COMPONENT = {"call?": "text", "make?": "text", "recipe_sha256?": "text", ...: "any"}
COMPONENTS = ("data", "model", "objective", "pseudo_labels")  # settings of a run that are descriptions of components, or null


def problem(record: dict[str, Any]) -> str:
    """Return what is wrong with the fields of a record, as text such as `seed is 'x'; expected a whole number from 0`. `record`
    is a dict of its fields, as JSON has them; fields that are absent or null are left out. The text is empty if nothing is
    wrong.
    """
    for name, value in record.items():
        if found := plain_problem(value, name):
            return found
        shape = SHAPES.get(name)
        if value is not None and shape is not None and (found := shape_problem(value, shape, name)):
            return found
    run = record.get("run")
    return run_problem(run, "run") or component_problem(run, "run") or sizes_problem(record)


def plain_problem(value: Any, place: str, depth: int = 0) -> str:
    """Return why a value cannot be shown or computed with, as text, or an empty text: a number that is infinite or has hundreds
    of digits, or lists in lists without end. `place` is the path to the value, and `depth` the number of levels above it.
    """
    if isinstance(value, dict | list):
        if depth > DEEPEST:
            return f"{place:.60} has more than {DEEPEST} levels; expected fewer"
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(item) not in PLAIN and not is_number(item) and (found := plain_problem(item, f"{place}.{key}", depth + 1)):
                return found
        return ""
    if type(value) in (int, float) and not is_number(value):
        return f"{place:.200} is {shown(value)}; expected finite numbers, of at most {LARGEST:.0e}"
    return ""


def shape_problem(value: Any, shape: Any, place: str) -> str:
    """Return how a value differs from its shape, as text, or an empty text. `shape` is one of those in `SHAPES`, and `place` is
    the path to the value.
    """
    if isinstance(shape, str):
        words, nothing = KINDS[shape.rstrip("?")][0], " or null" * shape.endswith("?")
        return "" if TESTS[shape](value) else f"{place:.200} is {shown(value)}; expected {words}{nothing}"
    if isinstance(shape, tuple):
        found = [shape_problem(value, each, place) for each in shape]
        return "" if "" in found else found[0]
    if isinstance(shape, list):
        if not isinstance(value, list) or (len(shape) > 1 and len(value) != len(shape)):
            return f"{place:.200} is {shown(value)}; expected a list" + f" of {len(shape)} items" * (len(shape) > 1)
        if isinstance(shape[0], str) and len(shape) == 1 and all(map(TESTS[shape[0]], value)):
            return ""  # most lists are of this kind, and long
        shapes = shape * len(value) if len(shape) == 1 else shape
        pairs = enumerate(zip(value, shapes))
        return next((found for k, (item, each) in pairs if (found := shape_problem(item, each, f"{place}[{k}]"))), "")
    if not isinstance(value, dict):
        return f"{place:.200} is {shown(value)}; expected names with values"
    if absent := [name for name in shape if name is not ... and not name.endswith("?") and name not in value]:
        return f"{place:.200} lacks {', '.join(absent)}"
    for name, item in value.items():
        each = shape.get(name, shape.get(f"{name}?", shape.get(...)))
        if each is None:
            return f"{place:.200} has the unknown name {shown(name)}"
        if isinstance(each, str) and TESTS[each](item):
            continue  # without a text for the place, which would take longer than the test
        if found := shape_problem(item, each, f"{place}.{name}"):
            return found
    return ""


def run_problem(run: Any, place: str) -> str:
    """Return which settings in the description of a run (JSON data) are no components and no earlier runs, as text, or an empty
    text. `place` is the path to the description.
    """
    if not isinstance(run, dict):
        return ""
    for name in COMPONENTS:
        if run.get(name) is not None and not isinstance(run[name], dict):
            return f"{place}.{name} is {shown(run[name])}; expected a component, such as {{'call': 'smallvit.vit.ViT'}}"
    for name in ("init", "teacher"):
        earlier = run.get(name)
        if earlier is not None and not isinstance(earlier, dict):
            return f"{place}.{name} is {shown(earlier)}; expected the settings of a run"
        if earlier and "make" in earlier and not isinstance(earlier.get("name"), str):
            return f"{place}.{name}.name is {shown(earlier.get('name'))}; expected the name of weights"
        if found := run_problem(earlier, f"{place}.{name}"):
            return found
    return ""


def component_problem(value: Any, place: str) -> str:
    """Return what is wrong with the names of components anywhere in the description of a run, as text, or an empty text."""
    if isinstance(value, dict):
        if found := shape_problem(value, COMPONENT, place):
            return found
    elif not isinstance(value, list):
        return ""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, dict | list) and (found := component_problem(item, f"{place}.{key}")):
            return found
    return ""


def sizes_problem(record: dict[str, Any]) -> str:
    """Return which lists of a record do not fit each other, as text, or an empty text. `record` is a dict of its fields."""
    matrix, groups, images = record.get("confusion"), record.get("test_groups"), record.get("test_images")
    classes = (record.get("preprocess") or {}).get("classes")
    if matrix is not None:
        k = len(matrix)
        if any(len(row) != k for row in matrix) or (classes is not None and len(classes) != k):
            return f"confusion has {k} rows; expected a square with a row for each of the {len(classes or matrix)} classes"
    if groups is not None and images is not None and len(groups) != images:
        return f"test_groups has {len(groups)} groups for {images} test images; expected one for each"
    if (record.get("folds") or 2) < 2:
        return "folds is 1; expected at least 2"
    looks = record.get("looks") or []
    if looks != sorted(set(looks)):
        return f"looks is {shown(looks)}; expected numbers of seeds that increase"
    return picture_problem(record.get("picture") or {})


def picture_problem(picture: dict[str, Any]) -> str:
    """Return what is wrong with the picture in a record, which shows what a token reduction did to a few images, as text, or an
    empty text. Its compressed pixels are unpacked no further than its size says.
    """
    import base64
    import zlib

    if not picture.get("groups"):
        return ""
    shape = {
        "shape": ["positive"] * 4, "pixels": "text", "grid": ["positive", "positive"], "blocks": ["count"],
        "groups": [[["number"]]], ...: "any",
    }  # fmt: skip
    if found := shape_problem(picture, shape, "picture"):
        return found
    (n, h, w, c), (rows, columns), groups = picture["shape"], picture["grid"], picture["groups"]
    if c not in (1, 3) or n * h * w * c > MOST_PIXELS:
        return f"picture.shape is {picture['shape']}; expected images, height, width and 1 or 3, at most {MOST_PIXELS:,} values"
    patches = {len(patches) for blocks in groups for patches in blocks}
    if len(groups) != n or {len(blocks) for blocks in groups} != {len(picture["blocks"])} or patches != {rows * columns}:
        return f"picture.groups does not fit {n} images, {len(picture['blocks'])} blocks and {rows} x {columns} patches"
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(picture["pixels"], validate=True), n * h * w * c + 1)
    except (ValueError, zlib.error) as error:
        return f"picture.pixels cannot be unpacked: {error}"
    return "" if len(unpacked) == n * h * w * c else f"picture.pixels does not have the size {picture['shape']}"


def shown(value: Any) -> str:
    """Return a value for an error message: short, and without characters that deceive a reader."""
    if type(value) is int and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    return printable(f"{value!r:.60}")


# Texts


def printable(text: str, lines: bool = False) -> str:
    r"""Return a text that is safe to print: control characters, escape sequences of a terminal and characters that reverse the
    direction of reading are replaced by their code, such as `\x1b`. Line breaks and tabs become spaces, or stay with
    `lines=True`. A text without such characters is returned unchanged.
    """

    def replaced(match: re.Match) -> str:
        character = match[0]
        if character in "\n\t":
            return character if lines else " "
        return character.encode("unicode_escape").decode()

    return UNSAFE.sub(replaced, text)


def all_printable(value: Any, lines: bool = False) -> Any:
    """Return JSON data in which all texts, also the names in dicts, are safe to print: see `printable`."""
    if isinstance(value, str):
        return printable(value, lines)
    if isinstance(value, list):
        return [all_printable(item, lines) for item in value]
    if isinstance(value, dict):
        return {printable(name): all_printable(item, lines) for name, item in value.items()}
    return value
