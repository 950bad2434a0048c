"""A cache that lets several evaluators of the same model share features and fitted classifiers."""

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

CACHE: ContextVar[dict | None] = ContextVar("CACHE", default=None)


@contextmanager
def cached_features():
    """Context manager inside which several evaluators (functions that score a model) share the features of images. The features
    are computed only once. At the end of the context they are deleted.

    Classifiers fitted on the features are cached too. No model may be changed inside the context, because its features would
    be out of date.
    """
    token = CACHE.set({})
    try:
        yield
    finally:
        CACHE.reset(token)


def cached(compute: Callable[[], Any], *arguments: Any) -> Any:
    """Return the result of the function `compute`. Inside the context manager `cached_features`, results are stored: if an
    earlier call had equal `arguments`, its result is returned without computing it again. `arguments` are values of any kind
    that together identify the result.

    The arguments serve only as the key of the cache. They are equal if they are equal strings or numbers, or the same objects.
    """
    cache = CACHE.get()
    if cache is None:
        return compute()
    key = tuple(argument if isinstance(argument, str | int | float) else id(argument) for argument in arguments)
    if key not in cache:
        cache[key] = arguments, compute()  # also keeps the objects alive, so that no id is reused
    return cache[key][1]
