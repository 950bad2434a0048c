"""Evaluators: from a frozen model to named numbers.

Contract: `evaluator(model, splits)` yields `(name, float)` and scores `splits.test`; the first name is the one an arm is judged
by. It is deterministic and leaves the model bit for bit as it was. `fit` calls it with validation images in the place of the
test images first, and with the test images once, last. An evaluator that chooses something on `splits.val` says what in its
attribute `chooses`; the report then counts those labels too. Only `cost`, which reads a clock, is not deterministic.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from smallvit import compute
from smallvit.data import Images

Named = Iterator[tuple[str, float]]


class Splits(NamedTuple):
    """The labelled images an evaluator may learn from, those it may choose on (may be empty), and those it scores."""

    train: Images
    val: Images
    test: Images


def accuracy(model: nn.Module, splits: Splits) -> Named:
    """`accuracy`: the share of images whose largest logit is the right one; `nll`: mean negative log-likelihood, in nats."""
    scored, right, surprise = some(splits.test), 0, 0.0
    with frozen(model) as device:
        for images, labels in scored.batches(device=device):
            logits = model(images).float()
            right += (logits.argmax(-1) == labels).sum().item()
            surprise += F.cross_entropy(logits, labels, reduction="sum").item()
    yield "accuracy", right / len(scored)
    yield "nll", surprise / len(scored)


def knn(model: nn.Module, splits: Splits, *, ks: tuple[int, ...] = (1, 5, 20)) -> Named:
    """`knn_1`, ...: k nearest labelled images by cosine of the features, one vote each; ties go to the smaller class index.

    A k beyond the number of labelled images is left out.
    """
    from sklearn.neighbors import NearestNeighbors

    if min(ks, default=0) < 1:
        raise ValueError(f"ks is {ks}; expected whole numbers from 1 on")
    ks = tuple(k for k in ks if k <= len(splits.train))
    if not ks:
        raise ValueError(f"knn has {len(splits.train)} labelled images; expected at least as many as the smallest k")
    search = NearestNeighbors(n_neighbors=max(ks), metric="cosine", algorithm="brute").fit(features(model, splits.train))
    neighbours = torch.from_numpy(search.kneighbors(features(model, splits.test), return_distance=False))
    votes = F.one_hot(splits.train.labels[neighbours], len(splits.train.spec.classes))
    for k in ks:
        # argmax of equal counts is not specified; the small slope settles it
        slope = torch.linspace(0.5, 0, votes.shape[-1])
        guess = (votes[:, :k].sum(1) + slope).argmax(-1)
        yield f"knn_{k}", (guess == splits.test.labels).double().mean().item()


def linear_probe(
    model: nn.Module, splits: Splits, *, strengths: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0), standardise: bool = True
) -> Named:
    """`linear_probe`: accuracy of an L2 logistic regression on the frozen features; `linear_probe_c`: its inverse strength C.

    Features are standardised on the labelled images alone; `standardise=False` keeps them as they are, which suits features of
    one scale, such as pixels. C is the one of `strengths` that scores best on the validation images, the smaller of equals;
    without validation images it is 1.

    Raises   RuntimeError if the solver does not converge: such a number is not the probe's.
    """
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = features(model, splits.train), features(model, splits.test)
    val = features(model, splits.val) if len(splits.val) else None

    def fit(strength: float):
        scale = [StandardScaler()] if standardise else []
        probe = make_pipeline(*scale, LogisticRegression(C=strength, max_iter=2_000))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            try:
                return probe.fit(train, splits.train.labels.numpy())
            except ConvergenceWarning as warning:
                raise RuntimeError(
                    f"the linear probe with C={strength:g} did not converge in 2,000 iterations; try smaller C"
                ) from warning

    def score(probe, x, images: Images) -> float:
        return float((probe.predict(x) == images.labels.numpy()).mean())

    probes = {strength: fit(strength) for strength in (sorted(strengths) if val is not None else [1.0])}
    chosen = max(probes, key=lambda strength: score(probes[strength], val, splits.val)) if val is not None else 1.0
    yield "linear_probe", score(probes[chosen], test, splits.test)
    yield "linear_probe_c", chosen


linear_probe.chooses = "C of the linear probe"


def cost(model: nn.Module, splits: Splits, *, batch: int = 32, repeats: int = 9) -> Named:
    """What a forward pass costs, on the device and threads at hand, and what a reduction in the model buys.

    `macs` for one image: of a model that reduces tokens by the closed form where there is one, else by torch's count, which is
    `flops / 2`; where they depend on the image, the mean over the scored images (at most 1,000) and `macs_sd`. `tokens`: how
    many leave the last block, the mean. `ms`: median milliseconds for a batch of `batch` images. `speedup`: over the same model
    unreduced with its fastest attention kernel, side by side; below 1 the reduction loses time. Times are what they are: they
    alone are not deterministic.
    """
    images = next(iter(some(splits.test).batches(min(batch, len(splits.test)))))[0]
    with frozen(model) as device:
        images = images.to(device)
        if not compute.reduces(model):
            yield "macs", float(compute.footprint(model, images)["macs"])
            yield "ms", compute.milliseconds([lambda: model(images)], repeats)[0]
            return
        size = tuple(images.shape[-2:])
        if tokens := compute.tokens_per_layer(model, size):
            flops = float(compute.counted(model, images[:1]))
            yield "macs", sum(compute.closed_form(model, image=size).values()) if compute.has_closed_form(model) else flops / 2
            yield "flops", flops
            yield "tokens", float(tokens[-1][1])
        else:
            scored = next(x for x, _ in splits.test.batches(1_000, device=device))
            macs = torch.tensor(compute.macs_of_each(model, scored), dtype=torch.float64)
            yield "macs", macs.mean().item()
            yield "macs_sd", macs.std(correction=0).item()
            yield "tokens", compute.seen_tokens(model, scored)[:, -1, 1].double().mean().item()
        ms, times = compute.speedup(model, images, repeats)
        yield "ms", ms
        yield "speedup", times


def features(model: nn.Module, images: Images) -> "numpy.ndarray":  # noqa: F821
    """What `model.features` says of each image, n d, float32, on the CPU."""
    with frozen(model) as device:
        return torch.cat([model.features(x).float().cpu() for x, _ in some(images).batches(device=device)]).numpy()


def some(images: Images) -> Images:
    """The images, of which there is at least one."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images


@contextmanager
def frozen(model: nn.Module):
    """The model in evaluation mode without gradients, its mode restored after; yields its device."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield next(model.parameters(), torch.empty(0)).device
    finally:
        for module, mode in modes.items():
            module.training = mode
