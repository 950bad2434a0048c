"""How should a small ViT know where its patches are: learned positions, fixed waves, or positions inside attention?

Paper     Dosovitskiy et al. 2020 (learned positions), arXiv:2010.11929. Vaswani et al. 2017 (waves), arXiv:1706.03762. Liu et
          al. 2021 (relative bias), arXiv:2103.14030. Heo et al. 2024 (rotary positions in two dimensions), arXiv:2403.13298.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, deformed digits,
          2,400 steps; the class token is the feature. Arms: learned positions, the 2-D sines that `SinCos2d` has by default, a
          relative bias inside attention, rotary positions inside attention with fixed directions (axial) and with learned ones
          (mixed), and no positions. The arms with positions inside attention add none to the tokens; two more arms have both.
          Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000 validation images.

Expected  No positions is worse by ten points at 1,000 labels. The 2-D sines are within half a point of learned positions. The
          relative bias and both kinds of rotary positions alone are within half a point of learned positions, since the class
          token does not learn from them where a patch is. Together with learned positions, the relative bias and the mixed
          rotary positions are better by half a point at 1,000 labels and by one to two at 100; they cannot be told apart.
          Written before the runs.
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
