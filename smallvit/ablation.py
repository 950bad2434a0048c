"""Arms: what stands in a comparison; every technique at every number of labels and every seed, and the references to beat."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from smallvit.augment import MultiCrop
from smallvit.components import function
from smallvit.evaluate import accuracy, few_shot, knn, linear_probe
from smallvit.objectives import Supervised
from smallvit.pretrained import VIT_S, Weights, enlarged, like
from smallvit.record import RANDOM
from smallvit.references import Pixels, SmallCNN
from smallvit.run import Run, fingerprint
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import ViT

FINE_TUNING = 300  # steps of what was trained elsewhere

# from nothing but the labels, whatever the baseline starts from and learns
SUPERVISED = {
    "init": None,
    "teacher": None,
    "pseudo_labels": None,
    "layer_decay": None,
    "objective": Supervised,
    "unlabelled": False,
}


def ablate(
    arms: dict[str, Run],
    *,
    labels: Iterable[int | None] = (None,),
    seeds: Iterable[int] = range(8),
    references: bool = True,
    extra_references: dict[str, Run] | None = None,
) -> list[Run]:
    """Every arm for every number of labels and every seed; the first arm is the baseline of all differences.

    The references stand in every comparison unless `references=False`: raw pixels under logistic regression and under kNN, a small CNN
    trained as the baseline is, and where an arm is judged by a probe the same probe of its random weights. `extra_references` are
    more of them, such as `imagenet_vit_s(baseline)`: they stand in the tables and get no verdict. Seeds come outermost within
    a number of labels, so that a half-finished recipe already compares all arms.

    Raises ValueError if two arms are the same run under two names, if an arm bears a reference's name or asks for another number of
    labels, and if a seed or a number of labels is given twice: one run is not two.
    """
    labels, seeds = several(labels, "labels"), several(seeds, "seeds")
    if not arms or not isinstance(arms, dict) or not all(isinstance(run, Run) for run in arms.values()):
        raise ValueError(f"ablate got the arms {arms!r}; expected a dict from names to runs, the baseline first")
    for name, run in arms.items():
        if run.labels not in (None, *labels):
            raise ValueError(
                f"arm {name!r} has labels={run.labels}, ablate labels={labels}; give the numbers of labels to ablate alone"
            )
    named = {name: (run, "technique" if at else "baseline") for at, (name, run) in enumerate(arms.items())}
    for kind, more in (("a reference", standard_references(list(arms.values())) if references else {}), ("a reference", extra_references or {})):
        for name, run in more.items():
            if name in named:
                other = "an arm" if name in arms else "a reference"
                raise ValueError(f"{name!r} is the name of {kind} and of {other}; give one of them another, or references=False")
            named[name] = (run, "reference")
    same: dict[str, str] = {}
    for name, (run, _) in named.items():
        other = same.setdefault(fingerprint(placed(run, None, 0)), name)
        if other != name:
            advice = "; one is a reference, leave the references out by references=False" if named[name][1] == "reference" else ""
            raise ValueError(
                f"the arms {other!r} and {name!r} are the same run; expected them to differ in at least one choice{advice}"
            )
    runs = [
        placed(replace(run, arm=name, role=role, baseline=next(iter(arms))), count, seed)
        for count in labels
        for seed in seeds
        for name, (run, role) in named.items()
    ]
    names = {fingerprint(run): run.arm for run in runs}
    for run in runs:
        name_dependencies(run, run.arm, names)
    return [called(run, names) for run in runs]


def name_dependencies(run: Run, arm: str, names: dict[str, str]):
    """Give what is trained before a run of that arm a name, unless it is an arm itself."""
    for field, before in run.dependencies.items():
        names.setdefault(fingerprint(before), f"{'start' if field == 'init' else 'teacher'} of {arm}")
        name_dependencies(before, arm, names)


def called(run: Run, names: dict[str, str]) -> Run:
    """The run by its name, and so all that is trained before it: by its arm's if it is one, so that it is trained once."""
    return replace(run, arm=names[fingerprint(run)], **{field: called(before, names) for field, before in run.dependencies.items()})


def placed(run: Run, labels: int | None, seed: int) -> Run:
    """The run at that seed and number of labels, and so what is trained before it, unless that has labels of its own.

    One that needs no label, nor anything before it, is one for all numbers of labels.
    """
    before = {
        field: placed(other, other.labels or (labels if depends_on_labels(other) else None), seed)
        for field, other in run.dependencies.items()
    }
    return replace(run, labels=labels, seed=seed, **before)


def depends_on_labels(run: Run) -> bool:
    """Whether the images depend on the number of labels, of this run or of one that is trained before it."""
    return not run.unlabelled or run.pseudo_labels is not None or any(depends_on_labels(other) for other in run.dependencies.values())


def several(values: Iterable, name: str) -> list:
    """The values as a list, each there once."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected several, such as {name}=[{values!r}]")
    values = list(values)
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} are {values}; expected at least one, and each once")
    return values


def standard_references(arms: list[Run]) -> dict[str, Run]:
    """What a ViT has to beat, on the data of the baseline, the first arm; where an arm is probed, also its random weights.

    The small CNN is trained as the baseline is, so there is none where the baseline is not trained.
    """
    baseline = arms[0]
    untrained = SUPERVISED | {"steps": 0, "augment": (), "ema": 0.0, "early_stop": 0}
    pixels = replace(baseline, model=Pixels, **untrained, evaluators=(knn,))
    few = next((e for run in arms for e in run.evaluators if function(e) is few_shot), None)
    asked = {name: knob for name, knob in getattr(few, "keywords", {}).items() if name in ("shots", "draws", "strength")}
    few = () if few is None else (partial(few_shot, **asked),)  # pixels have neither layers nor a class token
    references = {
        "pixels, logistic regression": replace(pixels, evaluators=(partial(linear_probe, standardise=False), *few)),
        "pixels, nearest neighbour": pixels,
    }
    if baseline.steps:
        seen = tuple(step for step in baseline.augment if not isinstance(step, MultiCrop))
        references["small CNN"] = replace(baseline, model=SmallCNN, augment=seen, **SUPERVISED, evaluators=(accuracy,))
    probed = next((run for run in arms if function(run.evaluators[0]) in (knn, linear_probe, few_shot)), None)
    return references if probed is None else references | {RANDOM: replace(probed, **untrained)}


def imagenet_vit_s(
    baseline: Run,
    *,
    name: str = VIT_S,
    file: str | None = None,
    patch: int = 4,
    upsampled: bool = False,
    scratch: bool = True,
) -> dict[str, Run]:
    """A ViT-S from ImageNet on the data of the baseline, as extra_references for `ablate`: fine-tuned, frozen, and from scratch.

    At the data's own resolution, the patch kernel and the positions resized; `upsampled=True` adds the images enlarged to what
    the weights were trained on (224 pixels, 196 patches). Fine-tuned are `FINE_TUNING` steps, with a rate that falls
    by a quarter from block to block, and as many from scratch, unless `scratch=False`. Frozen it is judged by a logistic
    regression on the labels. The arms say what the weights were trained on; `name` and `file` are those of `Weights`, and
    another name of timm's is another ViT.
    """
    kind = name.partition(".")[0]
    # the shape of the usual one is known, so that a recipe need not load timm
    shape = partial(ViT, dim=384, depth=12, heads=6) if kind == VIT_S.partition(".")[0] else like(name)
    vit, called = partial(shape, tokenizer=partial(PatchEmbed, patch=patch)), "ViT-S" if "_small_" in kind else kind
    weights, of = Weights(name=name, file=file), f"{called} from {trained_on(name)}"
    own = dict(
        model=partial(vit, drop_path=0.1),
        init=weights,
        augment=tuple(step for step in baseline.augment if not isinstance(step, MultiCrop)),
        schedule=None,
        steps=min(baseline.steps, FINE_TUNING),
        lr=5e-4,
        weight_decay=0.05,
        layer_decay=0.75,
        clip=1.0,
        ema=0.0,
        evaluators=None,
    )
    tuned = baseline.vary(**SUPERVISED | own)
    frozen = tuned.vary(model=vit, steps=0, augment=(), layer_decay=None, early_stop=0, evaluators=(linear_probe, knn))
    arms = {f"{of} (fine-tuned)": tuned, f"{of} (frozen)": frozen}
    if upsampled:
        large = enlarged(name)
        at = f"{of} at {large.keywords['size']} pixels"
        arms |= {f"{at} (fine-tuned)": tuned.vary(tokenizer=large), f"{at} (frozen)": frozen.vary(tokenizer=large)}
    return arms | ({f"{called} from scratch": tuned.vary(init=None, layer_decay=None)} if scratch else {})


def trained_on(name: str) -> str:
    """What the weights of that name were trained on, as its tag says; the name itself where it does not."""
    tag = name.partition(".")[2]
    said = {
        "augreg_in21k": "ImageNet-21k",
        "augreg_in1k": "ImageNet-1k",
        "fb_in1k": "ImageNet-1k",
        "dino": "ImageNet-1k by DINO",
    }
    return next((text for start, text in said.items() if tag.startswith(start)), name)
