"""Does a small ViT with few labels learn better with Muon, SAM or schedule-free AdamW than with AdamW?

Paper     Jordan et al. 2024 (Muon), kellerjordan.github.io/posts/muon. Liu et al. 2025 (its scale), arXiv:2502.16982. Foret et
          al. 2021 (SAM), arXiv:2010.01412. Defazio et al. 2024 (schedule-free), arXiv:2405.15682.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps. A step of SAM computes two gradients, so SAM is compared with AdamW
          at twice the steps, which costs as much. Schedule-free AdamW has a constant learning rate and its own average of the
          weights. Each arm and the small CNN, which is always trained with AdamW, get 8 trials to choose a learning rate from
          0.0005 to 0.02, on 3,000 validation images.

Expected  Muon is better at 1,000 labels, by half a point or less, because it learns faster; at 100 labels the difference is
          inconclusive. SAM is not shown to be better than AdamW at twice the steps, because
          the deformed digits leave little to overfit. Schedule-free AdamW is within half a point of AdamW, and below it.
          AdamW at twice the steps is better by half a point at 1,000 labels. Written before the runs.
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
