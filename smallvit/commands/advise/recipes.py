"""The recipe files that `smallvit advise` writes: the trials of each group of options, the comparison, and the final training.

You can read, change and run all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe_template import data_text
from .options import Group, Option
from .plan import BATCH, Plan

if TYPE_CHECKING:
    from ..inspection import Inspection

ADVICE, PLAIN, CNN = "advice", "plain ViT", "small CNN"  # names of arms
FROZEN, FINE_TUNED = "ViT-S from ImageNet-21k (frozen)", "ViT-S from ImageNet-21k (fine-tuned)"  # as in `imagenet_vit_s`
IMAGES_TO_LEARN = (0.25, 0.5)  # shares of the training images in the learning curve


def trial_recipe(images: "Inspection", plan: Plan, group: Group, chosen: Sequence[Option]) -> str:
    """Return the text of a recipe that tries the options of a group, together with the options that were chosen before.
    `images` is what was found in the folder of images.
    """
    of_trials = replace(images, folds=None, test=plan.share)
    names = ", ".join(option.name for option in chosen) or "none"
    head = (
        f'"""Which option of the set {group.name} is best? Options chosen before: {names}.\n\n'
        "Setup     The options are compared on validation images. The images on which the chosen ViT is tested are not used\n"
        '          here.\n"""'
    )
    arms = ["arms = {", *(f'    "{option.name}": {arm_code("best", option)},' for option in group.options), "}"]
    runs = ["RUNS = sv.ablate(arms, seeds=range(1), references=False)"]
    parts = [head, IMPORTS, data_text(of_trials, plan.folder), scratch_text(images, plan.steps, plan.val), best_text(chosen)]
    return "\n\n".join([*parts, "\n".join(arms), "\n".join(runs)]) + "\n"


IMPORTS = "from functools import partial\n\nimport smallvit as sv"


def scratch_text(images: "Inspection", steps: int, val: int) -> str:
    """Return the lines of a recipe that define the plain ViT, `scratch`."""
    score = ["    evaluators=(sv.balanced_accuracy, sv.accuracy),  # classes count the same"] * images.unequal
    lines = [
        f"patch = {images.patch}  # side of a patch in pixels",
        "scratch = sv.Run(",
        "    data=data,",
        f"    val={val}," + "  # no training images are set aside for validation" * (not val),
        "    model=partial(",
        "        sv.ViT,",
        "        tokenizer=partial(sv.PatchEmbed, patch=patch),",
        "        block=partial(sv.Block, mlp_ratio=2.0),",
        "        dim=64,",
        "        depth=4,",
        "        heads=4,",
        "    ),",
        f"    steps={steps:_},",
        f"    batch={BATCH},",
        "    lr=2e-3,",
        *score,
        ")",
    ]
    return "\n".join(lines)


def best_text(chosen: Sequence[Option], name: str = "best") -> str:
    """Return the lines of a recipe that define the run with all options that were chosen."""
    changes = merged(chosen)
    start = changes.pop("init", None)
    if not changes:
        lines = [f"{name} = scratch"]
    else:
        lines = [f"{name} = scratch.vary(", *(f"    {field}={code}," for field, code in changes.items()), ")"]
    if start:
        lines.append(f"{name} = {name}.vary(init={start.format(run=name)})")
    return "\n".join(lines)


def merged(chosen: Sequence[Option]) -> dict[str, str]:
    """Return the code of all settings that some options change, by the name of the setting."""
    return {field: code for option in chosen for field, code in option.changes.items()}


def arm_code(name: str, option: Option) -> str:
    """Return the code of an arm (variant) of the trials: the run `name` with one option."""
    if not option.changes:
        return name
    return f"{name}.vary({', '.join(f'{field}={code}' for field, code in option.changes.items())})".replace("{run}", name)


def final_recipe(images: "Inspection", plan: Plan, chosen: Sequence[Option]) -> str:
    """Return the text of the recipe that tests the chosen ViT, compared with the plain ViT and a small CNN with the same
    augmentation. If the plan has a learning curve, the recipe also has runs with fewer images.
    """
    judged = replace(images, folds=plan.folds, test=plan.share)
    names = ", ".join(option.name for option in chosen if option.changes)
    what = f"the chosen options ({names})" if names else "no option: none was better in the trials"
    part = (
        f"The test images are {plan.share:.0%} of the images; no trial has used them. A pass tests each of them once, with a\n"
        "          model that was trained on all images outside its fold."
        if plan.folds
        else "The test images are those of the folder; no trial has used them."
    )
    head = (
        f'"""Do the options that smallvit advise has chosen help on the images in {folder_name(plan)}?\n\n'
        f"Setup     {ADVICE}: a small ViT with {what}.\n          {part}\n"
        '"""'
    )
    arms = arms_of(chosen)
    control = ADVICE if ADVICE in arms else PLAIN
    lines = ["arms = {", *(f'    "{name}": {code},' for name, code in arms.items()), "}"]
    imagenet = [name for name in (FROZEN, FINE_TUNED) if name in (plan.imagenet or ())]
    if imagenet:
        lines.append(f"imagenet = {imagenet_code(chosen)}")
        lines += [f'arms["{name}"] = imagenet["{name}"]' for name in imagenet]
    controls = ", ".join(f'"{name}": "{control}"' for name in (CNN, *imagenet))
    several = f"    labels=[{', '.join(f'{size:_}' for size in plan.sizes)}, None],"
    seeds = f"    seeds=range({plan.passes})," + f"  # passes of {plan.folds} folds" * bool(plan.folds)
    runs = [
        "RUNS = sv.ablate(",
        "    arms,",
        *[several] * bool(plan.sizes),
        seeds,
        f"    baseline={{{controls}}},  # these arms are compared with the recommended ViT",
        '    references=["pixels, logistic regression", "pixels, nearest neighbor"],',
        ")",
    ]
    if plan.sizes:
        runs += [
            "# With fewer images, only one arm is trained, in two passes, to estimate the gain from more images.",
            "RUNS = [",
            "    one",
            "    for one in RUNS",
            f'    if one.labels is None or (one.arm == "{control}" and one.seed < {2 * (plan.folds or 1)})',
            "]",
        ]
    parts = [head, IMPORTS, data_text(judged, plan.folder), scratch_text(images, plan.final_steps, 0)]
    if ADVICE in arms:
        parts.append(best_text(chosen, ADVICE))
    return "\n\n".join([*parts, "\n".join(lines), "\n".join(runs)]) + "\n"


def folder_name(plan: Plan) -> str:
    """Return the name of the folder of images, without characters that are not allowed in a docstring."""
    return Path(plan.folder).name.replace("\\", "/").replace('"', "'")


def arms_of(chosen: Sequence[Option]) -> dict[str, str]:
    """Return a dict from each arm (variant) of the test to its code. Without chosen options there is no arm `advice`."""
    changes = merged(chosen)
    augmentation = f", augment={changes['augment']}" if "augment" in changes else ""
    arms = {PLAIN: "scratch"} | ({ADVICE: ADVICE} if changes else {})
    return arms | {CNN: f"scratch.vary(model=sv.SmallCNN{augmentation})"}


def imagenet_code(chosen: Sequence[Option]) -> str:
    """Return the code of the runs with weights from ImageNet. They have the same augmentation as the chosen ViT."""
    augment = merged(chosen).get("augment", "()")
    return f"sv.imagenet_vit_s(scratch.vary(augment={augment}), patch=patch, scratch=False)"


def last_recipe(images: "Inspection", plan: Plan, chosen: Sequence[Option], kept: str = ADVICE) -> str:
    """Return the text of the recipe of the model that is given to the user: the arm (variant) `kept`, trained on all images, or
    on those in train/ if the folder has test images.
    """
    everything = replace(images, folds=None, test=0.0 if plan.share else None)
    trained = f"on all images in {folder_name(plan)}, so there are no test images"
    if not plan.share:
        trained = f"on the images in {folder_name(plan)}/train, and tested on those in {folder_name(plan)}/test"
    head = f'"""The model of smallvit advise: trained {trained}."""'
    parts = [head, IMPORTS, data_text(everything, plan.folder), scratch_text(images, plan.final_steps, 0)]
    code = arms_of(chosen).get(kept) or f'{imagenet_code(chosen)}["{kept}"]'
    if kept == ADVICE:
        parts.append(best_text(chosen, ADVICE))
    runs = f'RUNS = [sv.ArmRun(run={code}, arm="{kept}", role="baseline")]'
    return "\n\n".join([*parts, runs]) + "\n"


def options_of(groups: Sequence[Group], chosen: Mapping[str, str]) -> list[Option]:
    """Return the chosen options of the groups that were tried, as a list without those that change nothing."""
    found = []
    for group in groups:
        if group.name in chosen:
            found += [option for option in group.options if option.name == chosen[group.name] and option.changes]
    return found
