"""The final evaluation of a run: its scores on validation and test images, and which images they are about, for its record."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from smallvit import packing
from smallvit.components import function
from smallvit.data import Dataset, HeldOut, Images, Subset, sealed_test_images
from smallvit.evaluate import PerImage, Splits, cached_features, confusion, declaration, frozen, reliability
from smallvit.evaluate.declare import choice_of
from smallvit.evaluate.scores import BATCH
from smallvit.numerics import DEFAULT, Numerics, NumericsContext
from smallvit.run import Run

from .trained_model import trains_classifier

LOGIT_TOLERANCE = 1e-3  # of the largest logit: how much a logit may differ between two kernels
MOST_CLASSES = 100  # a record has the confusion matrix of a data set with at most so many classes


def evaluate(run: Run, model: nn.Module, subset: Subset, test: HeldOut | None, numerics: Numerics = DEFAULT) -> dict:
    """Measure a trained model with all evaluators of its run, on the validation images in `subset` and then on the test images
    in `test`. Return the results as a dict. If `test` is None, only the validation images are used. `numerics` are the options
    with which the model was trained; see `evaluation_numerics`.

    Returns fields of the record. `score` is None if there are no images to score the run on. Raises ValueError if two numbers
    have the same name, or if the first cannot judge a run: it must be between 0 and 1 or, if lower numbers are better, finite
    and at least 0.
    """
    probes: dict[str, None] = {}
    lower = declaration(run.evaluators[0]).lower_is_better

    def measure(images: Images) -> tuple[dict[str, float], dict]:
        splits, numbers, values = Splits(subset.train, subset.val, images), {}, {}
        for evaluator in run.evaluators if len(images) else ():
            title = function(evaluator).__name__
            for name, value in reported(evaluator, model, splits):
                if name in numbers:
                    raise ValueError(f"{title} reports {name!r}, as another evaluator does; expected another name")
                if not numbers and not (0 <= value < math.inf if lower else 0 <= value <= 1):
                    expected = "a finite number of at least 0" if lower else "a number from 0 to 1"
                    raise ValueError(f"{title} reports {name}={value:.4g} first; expected {expected} to judge it")
                if not numbers and isinstance(value, PerImage):
                    values = packed(value, len(images), f"{title} reports {name}", lower)
                numbers[name] = float(value)
                known = len(numbers) == 1 or not declaration(evaluator).lower_is_better  # which direction is better
                if declaration(evaluator).probe and known and re.fullmatch(rf"{title}(_\d+)?", name):
                    probes[name] = None
            if not numbers:
                raise ValueError(f"{title} judges the run and has given no number; expected at least one pair (name, number)")
        return numbers, values

    on_test: dict = {"test": None, "test_reads": 0}
    chosen_numerics = evaluation_numerics(model, numerics, subset.val)
    with cached_features(), NumericsContext(model, chosen_numerics).active():
        numbers, values = val_numbers, _ = measure(subset.val)
        if test is not None:
            with sealed_test_images(None):
                reads, images = test.reads, test.open()
            numbers, values = measure(images)
            majority = images.labels.bincount().max().item() / len(images)
            on_test = {"test": numbers, "test_images": len(images), "test_majority": majority, "test_reads": test.reads - reads}
            if trains_classifier(run):
                on_test["reliability"] = reliability(model, images)
                on_test["confusion"] = confusion(model, images) if len(images.spec.classes) <= MOST_CLASSES else None
    chosen = [what for e in run.evaluators if (what := choice_of(e))] + (["early stop"] if run.early_stop else [])
    return {
        "score": next(iter(numbers), None),
        "evaluated": chosen_numerics.kernel or "rule",
        "val": val_numbers,
        "val_images": len(subset.val),
        "probes": list(probes),
        "lower_is_better": lower or None,
        "chosen_on_val": {"what": ", ".join(chosen), "labels": len(subset.val)} if chosen and len(subset.val) else None,
        "correct": None,
        "contributions": None,
    } | values | on_test


def reported(evaluator: Any, model: nn.Module, splits: Splits) -> Iterator[tuple[str, Any]]:
    """Yield the pairs (name, number) that an evaluator gives for a model and images. Raise ValueError if it gives something
    else, and if it changes the saved tensors of the model.
    """
    title = function(evaluator).__name__
    before = versions(model)
    found = evaluator(model, splits)
    if isinstance(found, dict) or not isinstance(found, Iterable):
        found = [found]
    for pair in found:
        pairs = isinstance(pair, tuple | list) and len(pair) == 2
        if not (pairs and isinstance(pair[0], str) and is_number(pair[1])):
            raise ValueError(f"{title} gave {pair!r:.60}; expected pairs (name, number), such as yield 'my_score', 0.5")
        if not math.isfinite(pair[1]):
            raise ValueError(f"{title} gave {pair!r:.60}; expected a finite number; perhaps the run has diverged")
        yield pair[0], pair[1]
    if before != versions(model):
        raise ValueError(f"{title} has changed the model, which others are still to judge; change a copy: copy.deepcopy(model)")


def is_number(value: Any) -> bool:
    """Return whether a value that an evaluator gives is a number, also a tensor or an array with one element."""
    try:
        return hasattr(value, "__float__") and isinstance(float(value), float)
    except (TypeError, ValueError, RuntimeError):  # an array with several elements
        return False


def versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return for each saved tensor of a model which object it is, and how often it was changed in place."""
    saved = model.state_dict(keep_vars=True).values()
    return [(id(one), -1 if one.is_inference() else one._version) for one in saved if isinstance(one, torch.Tensor)]


def evaluation_numerics(model: nn.Module, numerics: Numerics, images: Images) -> Numerics:
    """Return how a trained model is evaluated. `numerics` are the options of its training, and `images` are validation images.

    The kernel "native" is used if it gives every one of these images the class that PyTorch gives it, and if no logit differs
    by more than 1e-3 of the largest one. Otherwise, where PyTorch computes all blocks anyway, and for all other options, the
    evaluation uses the defaults. The precision is always fp32.
    """
    native = Numerics(kernel=numerics.kernel)
    if numerics.kernel != "native" or not len(images):
        return DEFAULT
    context = NumericsContext(model, native)
    if not context.compiled:  # a model without blocks, which may not even give logits
        return DEFAULT
    with frozen(model) as reference:
        for pixels, _ in images.batches(BATCH, device=reference.device):
            expected = model(pixels.to(reference))
            with context.active():
                found = model(pixels.to(reference))
            close = (found - expected).abs().max() <= LOGIT_TOLERANCE * expected.abs().max()
            if not close or not torch.equal(found.argmax(-1), expected.argmax(-1)):
                return DEFAULT
    return native if context.native_calls else DEFAULT


def packed(score: PerImage, count: int, source: str, lower: bool = False) -> dict:
    """Return the value of each image as text, in a dict of fields of the record (results) of a run. The field `correct` has one
    bit for each image: whether it is right. The field `contributions` has its value, a number of 4 bytes, if this is more than
    that. `score` has one value for each image. Booleans (or the integers 0 and 1) say which images are right, unless lower
    numbers are better (`lower`); for other values `score.right` may say it. `count` is the number of images, and `source` names
    the score in error messages.

    Raises ValueError if the number of values is not the number of images.
    """
    values = score.values
    if len(values) != count:
        raise ValueError(f"{source} with {len(values)} values for {count} images; expected one for each, in their order")
    if score.right is not None and len(score.right) != count:
        raise ValueError(f"{source} with {len(score.right)} values of `right` for {count} images; expected one for each")
    bits = packing.pack_bits(values) if ((values == 0) | (values == 1)).all() else None
    says_right = values.dtype.kind in "biu" and not lower
    right = packing.pack_bits(score.right) if score.right is not None else bits if says_right else None
    found = {} if right is None else {"correct": right}
    return found if found and right == bits else {"contributions": packing.pack_floats(values)} | found


def test_part(data: Dataset) -> dict:
    """Return which images of a cross-validation are the test images of a run, and to which groups they belong, as fields of the
    record (saved results) of the run. `data` is the data set of the run. The dict is empty for a data set without folds and
    groups.
    """
    found: dict = {}
    if data.fold is not None:
        mask = [False] * data.fold.pool
        for index in data.fold.index.tolist():
            mask[index] = True
        found = {"pool_images": data.fold.pool, "test_index": packing.pack_bits(mask)}
    return found if data.test_groups is None else found | {"test_groups": data.test_groups.tolist()}
