"""Memory: what one evaluator has computed of a model, the next need not compute again."""

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

KEPT: ContextVar[dict | None] = ContextVar("KEPT", default=None)


@contextmanager
def remembering():
    """While this lasts no model changes: what was computed `once` of it is kept, and forgotten after."""
    before = KEPT.set({})
    try:
        yield
    finally:
        KEPT.reset(before)


def once(compute: Callable[[], Any], *of: Any) -> Any:
    """`compute()`, or what it gave before for the same: equal words and numbers, and the very same objects."""
    kept = KEPT.get()
    if kept is None:
        return compute()
    key = tuple(one if isinstance(one, str | int | float) else id(one) for one in of)
    if key not in kept:
        kept[key] = of, compute()  # the objects too, so that no other gets the number of one that is gone
    return kept[key][1]
