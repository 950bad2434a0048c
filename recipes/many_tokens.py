"""What accuracy is lost if merging or pruning halves the multiply-adds of a well-trained ViT with 196 tokens?

Paper     Bolya et al. 2022 (ToMe), arXiv:2210.09461. Liang et al. 2022 (EViT), arXiv:2202.07800. Rao et al. 2021 (DynamicViT),
          arXiv:2106.02034. Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328.

Setup     Data: MNIST with 1,000 labelled digits, 10,000 test images, 6 seeds; 196 patches of 2 pixels (shifted patches), width
          64, 4 blocks, deformed digits, the optimizer Muon, 1,500 steps of 32 digits. "Off the shelf" is this trained model
          with a reduction added and no further training. "As long again" is 1,500 more steps; the arms with a reduction train
          these steps with it and are compared with 1,500 more steps without it. So is a ViT of half the depth after 3,000 steps
          from scratch, the plain way to halve the cost. Every reduction is set to half of the multiply-adds by a closed
          formula; LTMP learns its thresholds for that budget, and nothing else, with AdamW. Each arm with more steps gets 4
          trials to choose a learning rate, on 1,000 validation images; the 1,500 steps before them have the rate 0.004, which
          was chosen in eight trials with another seed, as was Muon. Cost: 42 runs to choose the rates, 1.7 hours on a CPU core,
          and 54 runs to compare, 8 minutes on a GPU that did other work as well (NVIDIA H100).

Expected  Off the shelf, merging costs five points or more and EViT more than that. After as many steps with the reduction as
          without, ToMe and DynamicViT lose less than one point, EViT one point, and LTMP, which cannot change the other
          weights, five or more. The ViT of half the depth loses about as much as ToMe and is faster. In the recipe `tokens` the
          training was shorter, and the losses were larger. Written before the runs.

Found     Off the shelf, merging is worse by 4.80 points [2.93, 6.67] and EViT by 4.14 [2.05, 6.22], which is fragile; more was
          expected of EViT. After 1,500 more steps the losses are below one point, as expected, also that of LTMP, of which five
          points were expected. Compared with as many steps without a reduction (98.04%), ToMe is worse by 0.48 points [0.29,
          0.67], EViT by 0.38 [0.21, 0.55] and LTMP by 0.76 [0.44, 1.09]. Of DynamicViT no loss is shown: 0.05 points [-0.09,
          0.18]. Nor is one shown of the ViT of half the depth: 0.07 points [-0.11, 0.26]. Its mean was expected to be about
          that of ToMe, and is 97.96% against 97.56%; the two were not compared. The 1,500 more steps alone are inconclusive,
          0.24 points [0.06, 0.42]. So after 3,000 steps in all, half of the multiply-adds cost less than one point. No
          reduction was compared with half of the blocks; only DynamicViT has a mean as high (97.99%). No reduction saved time:
          on the GPU, which starts more operations for a reduced model, batches of 32 digits took longer with every reduction.

Limits    There are 6 seeds. Only the learning rate was tuned, with 4 trials of a quarter of the steps, and three arms have the
          lowest rate that was tried (`smallvit report` prints a warning). The temperature of LTMP and the way in which
          DynamicViT learns were chosen for the recipe `tokens`, with 49 patches. The times are those of a small model on a GPU
          that other processes used as well; on a CPU, and in larger models, reductions do save time (see the page on speed).
          Digits are mostly black, so merging is easier than on photos.
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
from smallvit.flops import match_budget

vit = partial(ViT, tokenizer=partial(ShiftedPatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=4)
half = partial(match_budget, vit, share=0.5)
merge = partial(Merge, r=half(Merge, "r", between=(0.0, 0.5)))
prune = partial(Prune, keep=half(Prune, "keep", between=(0.05, 1.0)))
learned = partial(LearnedPrune, keep=half(LearnedPrune, "keep", between=(0.05, 1.0)))

scratch = mnist_baseline().vary(model=vit, optimizer=Muon, steps=1_500, lr=4e-3, evaluators=(accuracy, cost))
off_the_shelf = scratch.vary(init=scratch, steps=0, augment=(), ema=0.0)
again = scratch.vary(init=scratch)
reduced = {
    "ToMe, as long again": again.vary(reduction=merge),
    "EViT, as long again": again.vary(reduction=prune),
    "DynamicViT, as long again": again.vary(reduction=learned, objective=partial(LearnToPrune, backbone=1.0)),
    "LTMP, as long again": again.vary(
        reduction=LearnedThresholds, objective=partial(LearnThresholds, budget=0.5), optimizer=AdamW, lr=0.03
    ),
    "half as deep, as long": scratch.vary(depth=2, steps=2 * scratch.steps),
}

RUNS = ablate(
    {
        "196 tokens": scratch,
        "ToMe off the shelf": off_the_shelf.vary(reduction=merge),
        "EViT off the shelf": off_the_shelf.vary(reduction=prune),
        "as long again": again,
        **reduced,
    },
    labels=[1_000],
    seeds=range(6),
    references=False,
    baseline={name: "as long again" for name in reduced},
    tune=Tune(
        {"lr": (6e-4, 8e-3)},
        trials=4,
        seeds=2,
        val=1_000,
        steps=0.25,
        common=False,
        own={"196 tokens": {"lr": [4e-3]}, "LTMP, as long again": {"lr": (5e-3, 1e-1)}},
    ),
)
