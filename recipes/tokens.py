"""What do merging and pruning cost in accuracy at half the multiply-adds, and buy in time, on patches of 2, 4 and 7 pixels?

Paper   Bolya et al. 2022 (ToMe), arXiv:2210.09461. Liang et al. 2022 (EViT), arXiv:2202.07800. Rao et al. 2021 (DynamicViT),
        arXiv:2106.02034. Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328.
Data    MNIST: 1,000 labelled digits, 10,000 test images; 196, 49 and 16 patches.
Cost    264 runs, 70 minutes on two CPU cores.
Expect  At 196 patches most of the digit is black, so merging the equal ones off the shelf costs little and saves time; at 16
        patches every one counts, accuracy goes and the clock shows no gain. A little training closes most of the gap.
        Written before the runs, after trials at 49 patches.
Came    At half the multiply-adds no mean comes within a tenth of a point of its baseline's, at any patch size, tuned or not;
        all are worse but DynamicViT at 196 patches, which is inconclusive. Off the shelf all lose ten points and more, at 196
        patches too, where the expectation was wrong. Nearest come DynamicViT at 196 and 49 patches and EViT, tuned, at 16. The
        ViT of half the depth loses less than any of them at 49 and 16 patches, and is faster. Pruning saves time everywhere,
        merging from 49 patches on; LTMP, on batches of 32, loses time everywhere. The numbers are in the report.
Chosen  Rates, the share of the other weights in DynamicViT's, and LTMP's temperature, on validation images, in some 25 trials
        of two other seeds at 49 patches.

Each patch size has its own baseline, with shifted patches, since a plain ViT needs more steps than this machine has time for;
at 196 patches even that one is cut short. Off the shelf is the baseline with the reduction put in and not one step of training;
tuned is 15% more steps with it, beside as many without. Every arm is set to half the baseline's multiply-adds by the closed
form (LTMP learns its thresholds to that budget). The plain answer to "half the compute" stands beside them: a ViT of half the
depth.
"""

from functools import partial

from smallvit import (
    Block,
    LearnedPrune,
    LearnedThresholds,
    LearnThresholds,
    LearnToPrune,
    Merge,
    Prune,
    Run,
    ShiftedPatchEmbed,
    ViT,
    ablate,
    accuracy,
    augment,
    cost,
    mnist,
)  # fmt: skip
from smallvit.flops import match_budget


def arms(patch: int, steps: int) -> dict[str, Run]:
    """The arms of one patch size, the baseline first."""
    vit = partial(
        ViT, tokenizer=partial(ShiftedPatchEmbed, patch=patch), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=2
    )
    half = partial(match_budget, vit, share=0.5)
    merge = partial(Merge, r=half(Merge, "r", between=(0.0, 0.5)))
    prune = partial(Prune, keep=half(Prune, "keep", between=(0.05, 1.0)))
    learned = partial(LearnedPrune, keep=half(LearnedPrune, "keep", between=(0.05, 1.0)))

    name = f"patch {patch}"
    scratch = Run(data=mnist, model=vit, augment=augment.digits(), steps=steps, batch=32, lr=2e-3, evaluators=(accuracy, cost))
    shelf = scratch.vary(init=scratch, steps=0, augment=(), ema=0.0)
    tuned = scratch.vary(init=scratch, steps=steps * 3 // 20, lr=1e-3)
    return {
        name: scratch,
        f"{name}, half as deep": scratch.vary(depth=2),
        f"{name}, ToMe off the shelf": shelf.vary(reduction=merge),
        f"{name}, EViT off the shelf": shelf.vary(reduction=prune),
        f"{name}, EViT by means off the shelf": shelf.vary(reduction=partial(prune, fuse="mean")),
        f"{name}, nothing, tuned": tuned,
        f"{name}, ToMe tuned": tuned.vary(reduction=merge),
        f"{name}, EViT tuned": tuned.vary(reduction=prune),
        f"{name}, DynamicViT": tuned.vary(reduction=learned, objective=partial(LearnToPrune, backbone=1.0)),
        f"{name}, LTMP": tuned.vary(reduction=LearnedThresholds, objective=partial(LearnThresholds, budget=0.5), lr=0.03),
    }


RUNS = [
    run
    for patch, steps in ((4, 1_500), (7, 1_500), (2, 500))
    for run in ablate(arms(patch, steps), labels=[1_000], references=patch == 4)
]
