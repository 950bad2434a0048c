"""Equal costs: change one option of a model until it has as many parameters, or multiply-adds, as its control."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from smallvit.components import function, options
from smallvit.pretrained import Weights
from smallvit.run import Run

TOLERANCE = 0.02  # costs that differ by less than this share count as equal
RATIOS = [number / 20 for number in range(5, 641)]  # values of mlp_ratio that are tried: 0.25 to 32


def match_cost(run: Run, control: Run, of: str, arm: str = "the arm", control_arm: str = "its control") -> Run:
    """Return a copy of `run` whose model has as many parameters (`of="params"`) or multiply-adds (`of="macs"`) as the model of
    `control`, the run with which it is compared. One option of the model is changed: the `mlp_ratio` of its blocks or, if it
    has none, its `dim`. `arm` and `control_arm` are the names of the two in error messages.

    The costs may differ by 2%. A run whose cost is already so close is returned as it is. A dependency in `init`, such as
    pretraining, is changed in the same way; a teacher is not. The data are loaded, because the cost depends on the shape of the
    images.

    Raises ValueError for another `of`, for a model without these options, with weights from a file or with a cost that depends
    on the image, and if no value of the option comes within 2%.
    """
    if of not in ("params", "macs"):
        raise ValueError(f"match is {of!r}; expected 'params' or 'macs'")
    what = "parameters" if of == "params" else "multiply-adds"
    target, before = model_cost(control, of), model_cost(run, of)
    if abs(before - target) <= TOLERANCE * target:
        return run
    if not target:
        raise ValueError(f"{control_arm!r} has no {what}, so {arm!r} cannot have as many; leave out match={of!r}")
    start = f"{arm!r} has {before:,.0f} {what} and {control_arm!r} {target:,.0f}"
    option, values = option_to_change(run)
    if option is None:
        raise ValueError(f"{start}, and {function(run.model).__name__} has no option mlp_ratio or dim; match them by hand")
    if isinstance(run.init, Weights):
        raise ValueError(f"{start}, but its pretrained weights fix the shape of the model; leave out match={of!r}")
    value = nearest(lambda value: model_cost(resized(run, option, value), of), target, values)
    new = resized(run, option, value)
    after = model_cost(new, of)
    if abs(after - target) > TOLERANCE * target:
        raise ValueError(
            f"{start}; {option}={value:g} comes closest with {after:,.0f}, which differs by {abs(after / target - 1):.1%}; "
            f"expected at most {TOLERANCE:.0%}; match them by hand, or leave out match={of!r}"
        )
    return new


def check_tuned_options(run: Run, tune: Any, of: str, arm: str):
    """Raise ValueError if tuning may change the cost of a model that `match` has made equal to another. `run` is the run of the
    arm (variant) named `arm`, `tune` is the `Tune` object with the ranges of its hyperparameters, and `of` is "params" or
    "macs".

    Each option of the model is set to the ends of its range, or to each value of its list. The cost may differ by 2%.
    """
    before = model_cost(run, of)
    for name, values in (tune.ranges | tune.own.get(arm, {})).items():
        for value in values if name in options(run.model) else ():
            after = model_cost(run.vary(**{name: value}), of)
            if abs(after - before) > TOLERANCE * before:
                what = "parameters" if of == "params" else "multiply-adds"
                raise ValueError(
                    f"Tune has {name}={value!r}, which gives {arm!r} {after:,.0f} {what} instead of {before:,.0f}, but "
                    f"match={of!r} keeps them equal; leave {name} out of Tune, or leave out match={of!r}"
                )


def nearest(cost: Callable[[Any], float], target: float, values: list) -> Any:
    """Return the element of `values` whose cost is nearest to `target`. `cost` is a function from a value to its cost, which
    grows with the value. `values` is a list in increasing order; it is searched by bisection.
    """
    low, high = 0, len(values) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(values[middle]) < target else (low, middle)
    return min((values[low], values[high]), key=lambda value: abs(cost(value) - target))


def model_cost(run: Run, of: str) -> float:
    """Return the number of parameters (`of="params"`) or of multiply-adds for one image (`of="macs"`) of the model of a run.
    The model is built without memory for its weights, if its code allows that.
    """
    import torch

    from smallvit.flops import footprint, reduces, tokens_per_layer, without_memory

    spec = run.data().spec
    model = without_memory(partial(run.model, spec.size, spec.channels, len(spec.classes)))
    parameters = list(model.parameters())
    if of == "params":
        return sum(parameter.numel() for parameter in parameters)
    if reduces(model) and tokens_per_layer(model) is None:
        raise ValueError("the multiply-adds of a model depend on the image, so they cannot be matched; use match='params'")
    with parameters[0].device if parameters else torch.device("cpu"):
        return footprint(model, torch.zeros(1, spec.channels, *spec.size))["macs"]


def option_to_change(run: Run) -> tuple[str | None, list]:
    """Return the name of an option that changes the size of a run's model, `mlp_ratio` or `dim`, and a list of values of this
    option to try. The name is None if the model has neither. `match_cost` uses them to give two models equal cost.
    """
    if has_ratio(run.model) or has_ratio(block_of(run.model)):
        return "mlp_ratio", RATIOS
    dim = options(run.model).get("dim")
    if dim is None or not isinstance(dim.default, int):
        return None, []
    heads = options(run.model).get("heads")
    step = heads.default if heads is not None and isinstance(heads.default, int) else 1
    return "dim", list(range(step, 8 * dim.default + 1, step))


def has_ratio(component: Any) -> bool:
    """Return whether a model or a block, given as a class or function, has the option `mlp_ratio`."""
    return component is not None and "mlp_ratio" in options(component)


def block_of(model: Callable) -> Callable | None:
    """Return the class or function in the option `block` of a model, or None if the model has no such option."""
    option = options(model).get("block")
    return option.default if option is not None and callable(option.default) else None


def resized(run: Run, option: str, value: Any) -> Run:
    """Return a copy of a run with another `value` of an option of its model. The option is "mlp_ratio" (of the model or of its
    blocks) or "dim", its width. The earlier run in `init`, such as pretraining, gets the same value, so that its weights still
    fit.
    """
    model, block = run.model, block_of(run.model)
    if option in options(model):
        model = partial(model, **{option: value})
    elif block is not None and option in options(block):
        model = partial(model, block=partial(block, **{option: value}))
    init = resized(run.init, option, value) if isinstance(run.init, Run) else run.init
    return replace(run, model=model, init=init)
