"""What do merging and pruning cost in accuracy at half the multiply-adds, and save in time, with 16 and with 49 tokens?

Paper     Bolya et al. 2022 (ToMe), arXiv:2210.09461. Liang et al. 2022 (EViT), arXiv:2202.07800. Rao et al. 2021 (DynamicViT),
          arXiv:2106.02034. Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328.

Setup     Data: MNIST with 1,000 labelled digits, 10,000 test images, 6 seeds; 49 patches of 4 pixels, and 16 patches of 7
          pixels. It is the setup of the recipe `many_tokens`, which has 196 tokens: shifted patches, width 64, 4 blocks,
          deformed digits, the optimizer Muon, 1,500 steps of 32 digits. "Off the shelf" is this trained model with a reduction
          added and no further training. "As long again" is 1,500 more steps; arms with a reduction train these steps with it
          and are compared with 1,500 more steps without it. So is a ViT of half the depth after 3,000 steps from scratch, the
          plain way to halve the cost. Every reduction is set to half of the multiply-adds by a closed formula; LTMP learns its
          thresholds for that budget, and nothing else, with AdamW. Each arm with more steps gets 8 trials of half the steps to
          choose a learning rate, on 3,000 validation images. The 1,500 steps before them have the rate 0.004 of `many_tokens`;
          in eight trials with another seed it was the best rate for 49 tokens, and for 16 tokens all from 0.002 to 0.012 were
          within half a point. Cost: 160 runs to choose the rates and 138 to compare, 10 hours on one CPU core.

Expected  An earlier version of this recipe had one learning rate for all, AdamW, and 225 steps with the reduction in place of
          1,500; there every reduction was worse, by 1.2 to 4.2 points with 49 tokens and by 3.8 to 16 with 16, and off the
          shelf by more than ten. `many_tokens`, with as many steps again, found losses below one point. So with 49 tokens,
          after as many steps again, ToMe and EViT lose between half a point and one point and a half, DynamicViT less than one
          point, and LTMP, which cannot change the other weights, two or more. With 16 tokens every loss is at least twice that
          with 49, because a token stands for more of the digit. The ViT of half the depth loses less than any reduction. Off
          the shelf, still more than ten points are lost with 16 tokens, and five or more with 49. Pruning makes predictions
          faster with both numbers of tokens, merging only with 49; LTMP makes them slower. Written before the runs.

Found     With 49 tokens and as many steps again (97.99% without a reduction), ToMe is worse by 0.60 points [0.39, 0.80], as
          expected, and LTMP by 1.72 [0.82, 2.63], which is fragile; two or more were expected. EViT, 0.19 points less [-0.05,
          0.43], and DynamicViT, 0.25 less [0.02, 0.47], are inconclusive. With 16 tokens (97.65%), ToMe is worse by 0.96 points
          [0.67, 1.24] and LTMP by 9.04 [6.69, 11.40]. EViT, 0.36 less [0.09, 0.64], and DynamicViT, 2.72 less [0.84, 4.60], are
          inconclusive after the correction for 18 comparisons. So the losses of DynamicViT and LTMP are much larger with 16
          tokens, as expected, those of ToMe and EViT only somewhat. Of the ViT of half the depth no loss is shown: 0.07 points
          more [-0.13, 0.28] with 49 tokens and 0.03 less [-0.21, 0.27] with 16; its mean is higher than that of every
          reduction. Off the shelf, merging loses 4.38 points [3.00, 5.76] with 49 tokens, where five or more were expected, and
          21.25 [15.79, 26.72] with 16; EViT loses 10.58 [7.30, 13.85] and 21.60 [14.77, 28.44]. The speed was expected the
          other way round: merging makes predictions 1.5 times as fast with 49 tokens and 1.3 times with 16, EViT and DynamicViT
          1.2 times with 49 and not with 16, where they take longer. LTMP takes longer with both.

Limits    There are 6 seeds. Only the learning rate was tuned. Three arms have the lowest or the highest rate that was tried,
          and ToMe with 49 tokens was still improving at the end (`smallvit report` prints warnings). LTMP with 16 tokens is
          less accurate than logistic regression on pixels. The temperature of LTMP and the way in which DynamicViT learns were
          chosen for an earlier version, with 49 patches. The times are those of a small model on one CPU core, in batches of
          32, in the native kernel; it merges tokens itself, leaves pruning to PyTorch, and LTMP altogether. Other programs ran
          beside some of the runs.

Earlier   An earlier version of this recipe had one learning rate for each kind of arm, AdamW, 8 seeds, and 225 steps with the
          reduction after 1,500 steps without it (after 500 with 196 patches). There, every reduction was worse, except
          DynamicViT with 196 patches, which was inconclusive: by 1.25 to 4.18 points with 49 patches, and by 3.79 to 16.20 with
          16.
"""

from functools import partial

from smallvit import (
    AdamW,
    Block,
    LearnedPrune,
    LearnedThresholds,
    LearnThresholds,
    LearnToPrune,
    Merge,
    Muon,
    Prune,
    ShiftedPatchEmbed,
    Tune,
    ViT,
    ablate,
    accuracy,
    cost,
    mnist_baseline,
)  # fmt: skip
from smallvit.ablation import ArmRun
from smallvit.flops import match_budget

TUNE = Tune(
    {"lr": (3e-4, 8e-3)},
    trials=8,
    seeds=2,
    val=3_000,
    steps=0.5,
    common=False,
    own={
        "49 tokens": {"lr": [4e-3]},
        "16 tokens": {"lr": [4e-3]},
        "49 tokens, LTMP, as long again": {"lr": (5e-3, 1e-1)},
        "16 tokens, LTMP, as long again": {"lr": (5e-3, 1e-1)},
    },
)


def comparison(tokens: int, patch: int) -> list[ArmRun]:
    """Return the runs of a comparison with so many tokens and patches of `patch` pixels."""
    vit = partial(
        ViT, tokenizer=partial(ShiftedPatchEmbed, patch=patch), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=4
    )
    half = partial(match_budget, vit, share=0.5)
    merge = partial(Merge, r=half(Merge, "r", between=(0.0, 0.5)))
    prune = partial(Prune, keep=half(Prune, "keep", between=(0.05, 1.0)))
    learned = partial(LearnedPrune, keep=half(LearnedPrune, "keep", between=(0.05, 1.0)))

    scratch = mnist_baseline().vary(model=vit, optimizer=Muon, steps=1_500, lr=4e-3, evaluators=(accuracy, cost))
    off_the_shelf = scratch.vary(init=scratch, steps=0, augment=(), ema=0.0)
    again = scratch.vary(init=scratch)
    name = f"{tokens} tokens"
    as_long = f"{name}, as long again"
    reduced = {
        f"{name}, ToMe, as long again": again.vary(reduction=merge),
        f"{name}, EViT, as long again": again.vary(reduction=prune),
        f"{name}, DynamicViT, as long again": again.vary(reduction=learned, objective=partial(LearnToPrune, backbone=1.0)),
        f"{name}, LTMP, as long again": again.vary(
            reduction=LearnedThresholds, objective=partial(LearnThresholds, budget=0.5), optimizer=AdamW, lr=0.03
        ),
        f"{name}, half as deep, as long": scratch.vary(depth=2, steps=2 * scratch.steps),
    }
    return ablate(
        {
            name: scratch,
            f"{name}, ToMe off the shelf": off_the_shelf.vary(reduction=merge),
            f"{name}, EViT off the shelf": off_the_shelf.vary(reduction=prune),
            f"{name}, EViT by means off the shelf": off_the_shelf.vary(reduction=partial(prune, fuse="mean")),
            as_long: again,
            **reduced,
        },
        labels=[1_000],
        seeds=range(6),
        references=patch == 4,
        baseline=dict.fromkeys(reduced, as_long),
        tune=TUNE,
    )


RUNS = comparison(49, patch=4) + comparison(16, patch=7)
