"""What an evaluator declares about itself, so that runs, references and reports need no list of evaluator names."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable)


class Declaration(NamedTuple):
    """What an evaluator declares about itself; the defaults describe a function that declares nothing.

    probe: whether the evaluator trains a classifier on frozen features, and so says something of an untrained model too.
    judges: whether the first number is an accuracy or another share from 0 to 1, so that an arm can be judged by it.
    chooses: what the evaluator chooses on the validation images, in words for the report; None if nothing is chosen.
    needs: a function `needs(splits, **options)` that raises ValueError if the splits do not suffice; it is called before
        training with the options of the evaluator. None if any splits will do.
    pixel_options: the options of the evaluator that also apply where the model is raw pixels, which has no layers.
    """

    probe: bool = False
    judges: bool = True
    chooses: str | None = None
    needs: Callable[..., Any] | None = None
    pixel_options: tuple[str, ...] = ()


def evaluator(
    *,
    probe: bool = False,
    judges: bool = True,
    chooses: str | None = None,
    needs: Callable[..., Any] | None = None,
    pixel_options: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Return a decorator that attaches a `Declaration` with these fields to an evaluator and returns the same function."""

    def declare(function: Function) -> Function:
        vars(function)["declaration"] = Declaration(probe, judges, chooses, needs, tuple(pixel_options))
        return function

    return declare


def declaration(evaluator: Callable) -> Declaration:
    """Return what an evaluator, or a `functools.partial` of an evaluator, declares; the defaults if it declares nothing."""
    while isinstance(evaluator, partial):
        evaluator = evaluator.func
    return getattr(evaluator, "declaration", Declaration())
