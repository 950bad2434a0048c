"""Does a small ViT with few labels learn better with Muon, SAM or schedule-free AdamW than with AdamW?

Paper     Jordan et al. 2024 (Muon), kellerjordan.github.io/posts/muon. Liu et al. 2025 (its scale), arXiv:2502.16982. Foret et
          al. 2021 (SAM), arXiv:2010.01412. Defazio et al. 2024 (schedule-free), arXiv:2405.15682.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps. A step of SAM computes two gradients, so SAM is compared with AdamW at twice
          the steps, which costs as much. Schedule-free AdamW has a constant learning rate and its own average of the weights.
          Each arm and the small CNN, which is always trained with AdamW, get 8 trials to choose a learning rate from 0.0005 to
          0.02, on 3,000 validation images. Cost: 192 runs to choose the rates and 128 runs to compare, less than an hour on two
          CPU cores with up to eight seeds trained together as one model and other programs beside them.

Expected  Muon is better at 1,000 labels, by half a point or less, because it learns faster; at 100 labels the difference is
          inconclusive. SAM is not shown to be better than AdamW at twice the steps, because
          the deformed digits leave little to overfit. Schedule-free AdamW is within half a point of AdamW, and below it.
          AdamW at twice the steps is better by half a point at 1,000 labels. Written before the runs.

Found     At 1,000 labels Muon is better than AdamW, by 0.76 points [0.57, 0.96] (97.69% against 96.93%), somewhat more than
          expected, and its mean is close to that of AdamW at twice the steps, which is better by 0.73 points [0.53, 0.92]. At
          100 labels Muon is inconclusive as expected, 0.90 points [0.25, 1.56]: the interval does not contain 0, but p is too
          large after the Holm correction. AdamW at twice the steps is better there, by 0.89 points [0.36, 1.42], which is
          fragile. SAM is not shown to be better than AdamW at twice the steps, as expected: 0.47 points less [0.07, 0.87] at
          100 labels, inconclusive, and worse by 0.72 points [0.55, 0.90] at 1,000, where it reaches 96.94%, as much as AdamW
          with as many steps and half the cost. Schedule-free AdamW is inconclusive, within 0.26 points of AdamW and below it,
          as expected (-0.26 [-0.81, 0.29] and -0.07 [-0.23, 0.09]). The small CNN has the highest mean, 95.86% and 98.63%.

Limits    Only the learning rate was tuned, with trials of a quarter of the steps; a single strength of SAM (rho 0.05) and the
          default weight decay of 0.05 were used. SAM was still improving at 1,000 labels (`smallvit report` prints a warning).
          Muon and AdamW at twice the steps were not compared with each other. A step of Muon computes more than one of AdamW,
          but other programs ran beside the training, so the seconds cannot be compared between arms. Verdicts are about new
          seeds and new test images.
"""

from functools import partial

from smallvit import SAM, Muon, ScheduleFree, Tune, ablate, mnist_baseline

adamw = mnist_baseline().vary(steps=2_400)

RUNS = ablate(
    {
        "AdamW": adamw,
        "Muon": adamw.vary(optimizer=Muon),
        "schedule-free AdamW": adamw.vary(optimizer=ScheduleFree, schedule="constant", ema=0.0),
        "AdamW, twice the steps": adamw.vary(steps=4_800),
        "SAM": adamw.vary(optimizer=partial(SAM, rho=0.05)),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (5e-4, 2e-2)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={"SAM": "AdamW, twice the steps"},
)
