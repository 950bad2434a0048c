"""What do merging and pruning cost in accuracy at half the multiply-adds, and save in time, on patches of 2, 4 and 7 pixels?

Paper     Bolya et al. 2022 (ToMe), arXiv:2210.09461. Liang et al. 2022 (EViT), arXiv:2202.07800. Rao et al. 2021 (DynamicViT),
          arXiv:2106.02034. Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328.

Setup     Data: MNIST with 1,000 labelled digits, 10,000 test images, 8 seeds; 196, 49 and 16 patches. Each patch size has its
          own baseline, with shifted patches, because a plain ViT needs more steps than this machine has time for; with 196
          patches even this baseline gets fewer steps. "Off the shelf" is the trained baseline with the reduction added and no
          further training; "tuned" is 15% more steps with the reduction, next to an arm with as many steps without it. Every
          reduction is set to half of the baseline's multiply-adds by a closed formula (LTMP learns its thresholds for that
          budget). The plain way to halve the cost is an arm too: a ViT of half the depth. Cost: 264 runs, 70 minutes on two CPU
          cores.

Expected  With 196 patches most of the image is black, so merging equal patches off the shelf costs little and saves time. With
          16 patches every one counts: accuracy falls and no time is saved. A little training closes most of the gap. Written
          before the runs, after trials with 49 patches.

Found     At about half the multiply-adds every reduction is worse than its baseline, at any patch size, tuned or not, except
          DynamicViT with 196 patches, which is inconclusive (0.89 points less [-0.42, 2.19]). Off the shelf all lose more
          than ten points, also with 196 patches, where the expectation was wrong: merging loses 11.74 points there, 11.15
          with 49 and 27.57 with 16 patches. Tuning recovers more than half of the loss, as expected. The smallest losses are
          those of DynamicViT with 196 and with 49 patches (1.25 points) and of tuned EViT with 16 (3.79 points). The ViT of
          half the depth is faster than every reduction, and inconclusive at all patch sizes after the correction for 27
          comparisons: 0.77 points less [0.15, 1.40] with 49 patches and 0.88 less [0.21, 1.55] with 16, both smaller
          losses than that of any reduction, and 2.13 less [0.24, 4.03] with 196. Pruning saves time everywhere, also with
          16 patches, against the expectation; merging saves time from 49 patches on; LTMP takes more time everywhere, on
          batches of 32.

Limits    Chosen on validation images, in some 25 trials of two other seeds with 49 patches: the learning rates, how fast the
          other weights learn in DynamicViT (`backbone`), and the temperature of LTMP. Each kind of arm has one learning rate,
          and the runs are short (500 steps with 196 patches, 1,500 otherwise): seven arms, among them the baseline with 196
          patches, were still improving at the end (`smallvit report` prints a warning). So the verdicts are about this setting
          and not about the techniques in general. Times are those of a small model on a CPU. There are 8 seeds. Verdicts are
          about new seeds and new test images. The records do not say which images each run got right, so the intervals use an
          upper bound and may be too wide.
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
    """Return the arms of one patch size by name; the first is the baseline."""
    vit = partial(
        ViT, tokenizer=partial(ShiftedPatchEmbed, patch=patch), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=2
    )
    half = partial(match_budget, vit, share=0.5)
    merge = partial(Merge, r=half(Merge, "r", between=(0.0, 0.5)))
    prune = partial(Prune, keep=half(Prune, "keep", between=(0.05, 1.0)))
    learned = partial(LearnedPrune, keep=half(LearnedPrune, "keep", between=(0.05, 1.0)))

    name = f"patch {patch}"
    scratch = Run(data=mnist, model=vit, augment=augment.digits(), steps=steps, batch=32, lr=2e-3, evaluators=(accuracy, cost))
    off_the_shelf = scratch.vary(init=scratch, steps=0, augment=(), ema=0.0)
    tuned = scratch.vary(init=scratch, steps=steps * 3 // 20, lr=1e-3)
    return {
        name: scratch,
        f"{name}, half as deep": scratch.vary(depth=2),
        f"{name}, ToMe off the shelf": off_the_shelf.vary(reduction=merge),
        f"{name}, EViT off the shelf": off_the_shelf.vary(reduction=prune),
        f"{name}, EViT by means off the shelf": off_the_shelf.vary(reduction=partial(prune, fuse="mean")),
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
