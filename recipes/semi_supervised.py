"""Do unlabelled digits help in the same training as the labelled ones: pseudo-labels, mean teacher, or FixMatch?

Paper     Lee 2013 (pseudo-labels), ICML workshop. Tarvainen, Valpola 2017 (mean teacher), arXiv:1703.01780. Sohn et al. 2020
          (FixMatch), arXiv:2001.07685. Berthelot et al. 2020 (distribution alignment), arXiv:1911.09785.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 labelled and 128 unlabelled digits. The unlabelled digits are all
          training digits that are not used for validation. A step with a weak and a strong view costs some six supervised
          steps, so FixMatch is compared with supervised training for six times the steps. Each arm and the small CNN get 8
          trials to choose a learning rate, on 3,000 validation images.

Expected  FixMatch is better than supervised training for as long: by two to four points at 100 labels, and by half a point at
          1,000. Distribution alignment adds a little at 100 labels. Pseudo-labels for the weak view alone bring less than a
          point. Mean teacher shows no effect. Written before the runs.
"""

from functools import partial

from smallvit import SemiSupervised, Tune, ablate, augment, mnist_baseline

scratch = mnist_baseline().vary(steps=2_400)
weak = augment.digits(0.3)
semi = partial(SemiSupervised, weak=weak, ratio=4)
fixmatch = partial(semi, strong=augment.strong_digits())
mean_teacher = partial(semi, strong=weak, weight=8.0, ramp=0.4, momentum=0.99, threshold=0.0, hard=0.0, loss="squared")
AS_LONG = "scratch as long"

RUNS = ablate(
    {
        "scratch": scratch,
        AS_LONG: scratch.vary(steps=6 * scratch.steps),
        "pseudo-labels": scratch.vary(objective=partial(semi, ramp=0.4)),
        "mean teacher": scratch.vary(objective=mean_teacher),
        "FixMatch": scratch.vary(objective=fixmatch),
        "FixMatch, aligned": scratch.vary(objective=partial(fixmatch, align=True)),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline=dict.fromkeys(("mean teacher", "FixMatch", "FixMatch, aligned"), AS_LONG),
)
