"""What an evaluator declares about itself, so that runs, references and reports need no list of evaluator names."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable)


class Declaration(NamedTuple):
    """The properties of an evaluator (a function that scores a trained model), as `evaluator` describes them. The defaults
    apply to a function without a declaration.
    """

    probe: bool = False
    judges: bool = True
    chooses: str | Callable[..., str] | None = None
    needs: Callable[..., Any] | None = None
    pixel_options: tuple[str, ...] = ()
    lower_is_better: bool = False
    head: bool = False


def evaluator(
    *,
    probe: bool = False,
    judges: bool = True,
    chooses: str | Callable[..., str] | None = None,
    needs: Callable[..., Any] | None = None,
    pixel_options: tuple[str, ...] = (),
    lower_is_better: bool = False,
    head: bool = False,
) -> Callable[[Function], Function]:
    """Decorator that says what an evaluator (a function that scores a trained model) does. The training loop and the reports
    use these properties. The function is returned unchanged; they are stored in it. An evaluator for which all defaults are
    right needs no decorator.

    probe            True: it trains a classifier on frozen features. A comparison that is judged by a probe also evaluates an
                     untrained model.
    judges           True: its first number can judge an arm (variant in a comparison). It is an accuracy or another share from
                     0 to 1, or, with `lower_is_better`, any number from 0 on.
    chooses          what it chooses on the validation images, in a few words for the report, or a function `chooses(**options)`
                     that returns these words for its options. None or an empty text: nothing.
    needs            a function `needs(splits, **options)` that raises ValueError for unsuitable data or options. It is called
                     before the training. None: no check.
    pixel_options    names of its options that also apply to raw pixels, a reference without layers and tokens
    lower_is_better  True: a smaller first number is better, as for a loss
    head             True: it reads the logits of the model, so it needs an objective that trains the head
    """

    def declare(function: Function) -> Function:
        """Store the properties that were given to the decorator `evaluator` in `function`, as its attribute `declaration`.
        Return the function. It is an evaluator: it scores a trained model.
        """
        vars(function)["declaration"] = Declaration(probe, judges, chooses, needs, tuple(pixel_options), lower_is_better, head)
        return function

    return declare


def choice_of(evaluator: Callable) -> str:
    """Return what an evaluator (a function that scores a trained model) chooses on the validation images, in a few words. The
    text is empty if it chooses nothing. `evaluator` may also be a `functools.partial` with options.
    """
    chooses = declaration(evaluator).chooses
    return (chooses(**getattr(evaluator, "keywords", {})) if callable(chooses) else chooses) or ""


def declaration(evaluator: Callable) -> Declaration:
    """Return the `Declaration` (the properties) of an evaluator, which is a function that scores a trained model. An evaluator
    without a declaration gets the default properties.

    `evaluator` may also be a `functools.partial`.
    """
    while isinstance(evaluator, partial):
        evaluator = evaluator.func
    return getattr(evaluator, "declaration", Declaration())
