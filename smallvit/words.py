"""Words in messages and reports: numbers with their nouns, and lists of names."""

from collections.abc import Sequence


def how_many(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun as text. `one` is the noun for a single thing, also with a verb, and `many` the one for
    several; the default adds an s. For example, `how_many(1, "run")` is `1 run`, `how_many(0, "run")` is `0 runs`, and
    `how_many(1_200, "class is", "classes are")` is `1,200 classes are`.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def unit(folds: object) -> str:
    """Return the word for one repetition of an arm: "pass" in a cross-validation, which has `folds`, or "seed"."""
    return "pass" if folds else "seed"


def units(folds: object) -> str:
    """Return the word for several repetitions of an arm: "passes" in a cross-validation, which has `folds`, or "seeds"."""
    return "passes" if folds else "seeds"


def join_names(names: Sequence[str], limit: int = 3, word: str = "more") -> str:
    """Join names to one text: `A, B and C`. Only the first `limit` names are shown, and the text says how many more there are:
    `A, B, C and 2 more`. `word` is used in place of "more".
    """
    shown = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} {word}"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
