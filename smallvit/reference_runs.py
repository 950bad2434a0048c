"""Runs of reference models, for orientation beside the arms of a comparison: raw pixels, a small CNN, a pretrained ViT-S."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from smallvit.augment import MultiCrop
from smallvit.components import function
from smallvit.evaluate import accuracy, declaration, knn, linear_probe, probe_metric
from smallvit.objectives import Supervised
from smallvit.optimizers import AdamW
from smallvit.pretrained import VIT_S, Weights, enlarged, like
from smallvit.record import RANDOM
from smallvit.references import Pixels, SmallCNN
from smallvit.run import Run
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import ViT

FINE_TUNING = 300  # steps for models with external weights

# settings of a run that learns from its labels only, whatever the baseline does
SUPERVISED = {
    "init": None,
    "teacher": None,
    "pseudo_labels": None,
    "layer_decay": None,
    "optimizer": AdamW,
    "objective": Supervised,
    "unlabelled": False,
}


def standard_references(arms: list[Run]) -> dict[str, Run]:
    """Return the runs of the standard reference models, such as a small CNN, as a dict from name to run. `arms` are the runs of
    the comparison. The first one is the baseline, whose data set the reference models use.

    They are raw pixels under two classifiers; a small CNN with the training settings of the baseline, if the baseline is
    trained; and an untrained model, if an arm is judged by a probe.

    The references have the score of the baseline, such as its balanced accuracy. Raw pixels have an accuracy if classifiers on
    features do not have this score.
    """
    baseline = arms[0]
    judge = baseline.evaluators[0]
    untrained = SUPERVISED | {"steps": 0, "augment": (), "ema": 0.0, "early_stop": 0}
    neighbor, linear = with_metric_of(judge, knn), with_metric_of(judge, linear_probe_of_pixels)
    pixels = replace(baseline, model=Pixels, **untrained, evaluators=(neighbor,))
    probes = (linear, *probes_for_pixels(arms))
    references = {"pixels, logistic regression": replace(pixels, evaluators=probes), "pixels, nearest neighbor": pixels}
    if baseline.steps:
        transforms = tuple(transform for transform in baseline.augment if not isinstance(transform, MultiCrop))
        evaluators = evaluators_of_model(judge)
        references["small CNN"] = replace(baseline, model=SmallCNN, augment=transforms, **SUPERVISED, evaluators=evaluators)
    probed = next((run for run in arms if declaration(run.evaluators[0]).probe), None)
    return references if probed is None else references | {RANDOM: replace(probed, **untrained)}


linear_probe_of_pixels = partial(linear_probe, standardize=False)


def evaluators_of_model(judge: Callable) -> tuple[Callable, ...]:
    """Return the evaluators of a trained reference model, so that it has the score of the baseline. `judge` is the evaluator by
    which the baseline is judged. If only a probe has this score, the reference model is judged by its accuracy.
    """
    return tuple(dict.fromkeys([judge, accuracy])) if declaration(judge).head else (accuracy,)


def with_metric_of(judge: Callable, probe: Callable) -> Callable:
    """Return `probe` with the score of the evaluator `judge`, such as the balanced accuracy, if probes have this score."""
    metric = probe_metric(judge)
    return probe if metric is None else partial(probe, metric=metric)


def probes_for_pixels(arms: list[Run]) -> tuple[partial, ...]:
    """Return the probes (classifiers on frozen features) that the runs `arms` use and that can also classify raw pixels, as a
    tuple. Options that cannot apply to raw pixels, such as a layer of the model, are removed.
    """
    found = {}
    for evaluator in (evaluator for run in arms for evaluator in run.evaluators):
        names = declaration(evaluator).pixel_options
        if names:
            chosen = {name: value for name, value in getattr(evaluator, "keywords", {}).items() if name in names}
            found.setdefault(function(evaluator), partial(function(evaluator), **chosen))
    return tuple(found.values())


def imagenet_vit_s(
    baseline: Run,
    *,
    name: str = VIT_S,
    file: str | None = None,
    patch: int = 4,
    upsampled: bool = False,
    scratch: bool = True,
) -> dict[str, Run]:
    """Return runs of additional reference models, as a dict from name to run: a ViT-S pretrained on ImageNet, once fine-tuned
    and once frozen, and the same model trained from scratch. `baseline` is the run whose data set they use.

    The option `name` is the name of the model in timm. `patch` is the patch size in pixels. `upsampled` adds the model on
    enlarged images. `scratch=False` leaves out the model that is trained from scratch.

    Pass the result to `ablate` as `extra_references`. The images keep their resolution; the patch kernel and the positions
    are resized. Enlarged images have the size of pretraining (224 pixels, 196 patches). Fine-tuning takes at most 300 steps,
    with a learning rate that falls by a quarter from block to block. Training from scratch takes as many steps. Frozen features
    are judged by logistic regression. All have the score of the baseline, as the standard references do. For a baseline without
    training steps, only frozen models are returned. `name` and `file` are those of `Weights`. The names of the arms say what
    the weights were trained on.
    """
    kind = name.partition(".")[0]
    # the shape of the default model is written here, so that a recipe need not import timm
    shape = partial(ViT, dim=384, depth=12, heads=6) if kind == VIT_S.partition(".")[0] else like(name)
    vit, title = partial(shape, tokenizer=partial(PatchEmbed, patch=patch)), "ViT-S" if "_small_" in kind else kind
    arm = f"{title} from {training_data(name)}"
    settings = dict(
        model=partial(vit, drop_path=0.1),
        init=Weights(name=name, file=file),
        augment=tuple(transform for transform in baseline.augment if not isinstance(transform, MultiCrop)),
        schedule="cosine",
        steps=min(baseline.steps, FINE_TUNING),
        lr=5e-4,
        weight_decay=0.05,
        layer_decay=0.75,
        clip=1.0,
        ema=0.0,
        evaluators=evaluators_of_model(baseline.evaluators[0]),
    )
    tuned = baseline.vary(**SUPERVISED | settings)
    probes = (with_metric_of(baseline.evaluators[0], linear_probe), knn)
    frozen = tuned.vary(model=vit, steps=0, augment=(), layer_decay=None, early_stop=0, evaluators=probes)
    arms = {f"{arm} (fine-tuned)": tuned, f"{arm} (frozen)": frozen}
    if upsampled:
        large = enlarged(name)
        title_large = f"{arm} at {large.keywords['size']} pixels"
        arms[f"{title_large} (fine-tuned)"] = tuned.vary(tokenizer=large)
        arms[f"{title_large} (frozen)"] = frozen.vary(tokenizer=large)
    arms |= {f"{title} from scratch": tuned.vary(init=None, layer_decay=None)} if scratch else {}
    return {name: run for name, run in arms.items() if baseline.steps or name.endswith("(frozen)")}


def training_data(name: str) -> str:
    """Return the name of the data set on which a pretrained timm model was trained, such as ImageNet-21k. `name` is the name of
    the model. If the data set is unknown, return the name of the model.
    """
    tag = name.partition(".")[2]
    known = {
        "augreg_in21k": "ImageNet-21k",
        "augreg_in1k": "ImageNet-1k",
        "fb_in1k": "ImageNet-1k",
        "dino": "ImageNet-1k by DINO",
    }
    return next((text for start, text in known.items() if tag.startswith(start)), name)
