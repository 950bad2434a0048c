"""How should a small ViT know where its patches are: learned positions, fixed waves, or positions inside attention?

Paper     Dosovitskiy et al. 2020 (learned positions), arXiv:2010.11929. Vaswani et al. 2017 (waves), arXiv:1706.03762. Liu et
          al. 2021 (relative bias), arXiv:2103.14030. Heo et al. 2024 (rotary positions in two dimensions), arXiv:2403.13298.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, deformed digits,
          2,400 steps; the class token is the feature. Arms: learned positions, the 2-D sines that `SinCos2d` has by default, a
          relative bias inside attention, rotary positions inside attention with fixed directions (axial) and with learned ones
          (mixed), and no positions. The arms with positions inside attention add none to the tokens; two more arms have both.
          Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000 validation images. Cost: 288 runs to
          choose the rates and 176 runs to compare, some 75 minutes on two CPU cores.

Expected  No positions is worse by ten points at 1,000 labels. The 2-D sines are within half a point of learned positions. The
          relative bias and both kinds of rotary positions alone are within half a point of learned positions, since the class
          token does not learn from them where a patch is. Together with learned positions, the relative bias and the mixed
          rotary positions are better by half a point at 1,000 labels and by one to two at 100; they cannot be told apart.
          Written before the runs.

Found     No arm is shown to be better than learned positions. The 2-D sines are within 0.29 points of them (-0.10 [-0.42, 0.23]
          at 100 labels, -0.29 [-0.75, 0.18] at 1,000), as expected. No positions is worse by 13.06 points [11.00, 15.12] at
          100 labels and by 12.23 [11.31, 13.14] at 1,000. Against the expectation, the relative bias alone is worse by 6.22
          points [4.83, 7.62] and by 7.13 [6.25, 8.01]. Rotary positions alone are inconclusive at 100 labels (axial 0.12
          points [-0.50, 0.74], mixed 0.33 [-0.37, 1.04]). At 1,000 labels they are worse: axial by 0.79 points [0.59, 0.99],
          mixed by 0.54 [0.24, 0.85], which is fragile. In addition to learned positions, and also against the expectation,
          neither is shown to help: the relative bias -0.14 points [-0.59, 0.32] and 0.00 [-0.18, 0.17], the mixed rotary
          positions 0.40 [0.07, 0.73] and 0.02 [-0.23, 0.26]. The small CNN has the highest mean, 95.86% and 98.62%; learned
          positions reach 92.91% and 96.93%.

Limits    Only the learning rate was tuned, with trials of 600 steps. The relative bias and the 2-D sines were still improving
          after 2,400 steps, so they may come closer in longer runs. One patch size, 16 patches, a class token; with
          `pool=MeanTokens` a relative bias reaches the output in another way. The blocks of arms with positions inside
          attention were computed by PyTorch, those of the other arms by the native kernel, with the same results up to
          rounding. Other programs ran beside the training, so the seconds cannot be compared between arms. Verdicts are about
          new seeds and new test images.
"""

from functools import partial

from smallvit import Attention, RelativeBias, Rotary, SinCos2d, Tune, ablate, mnist_baseline

learned = mnist_baseline().vary(steps=2_400)
inside = learned.vary(position=None)
bias = partial(Attention, position=RelativeBias)
mixed = partial(Attention, position=partial(Rotary, mixed=True))

RUNS = ablate(
    {
        "learned positions": learned,
        "2-D sines": learned.vary(position=SinCos2d),
        "relative bias": inside.vary(attention=bias),
        "rotary, axial": inside.vary(attention=partial(Attention, position=Rotary)),
        "rotary, mixed": inside.vary(attention=mixed),
        "learned and relative bias": learned.vary(attention=bias),
        "learned and rotary, mixed": learned.vary(attention=mixed),
        "no positions": inside,
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
)
