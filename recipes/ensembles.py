"""Is an ensemble better than one ViT that is trained for as long, and can one ViT learn what the ensemble knows?

Paper     Lakshminarayanan et al. 2017 (deep ensembles), arXiv:1612.01474. Hinton et al. 2015 (distillation),
          arXiv:1503.02531. Beyer et al. 2022 (one teacher, many augmented views, long training), arXiv:2106.05237.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 digits. The ensemble has 4 such ViTs, each with its own 32 digits
          in each step. It costs four times as much, so it is compared with one ViT that is trained for four times the
          steps. The students are one ViT that learns the mean probabilities of the ensemble, on digits that are deformed
          more (1.3 times) and mixed, for as many steps as the baseline and for four times as many. Each is compared with
          one ViT that is trained with the labels for as many steps. Their teacher has the learning rate 0.002, so it is
          another ensemble than the arm. Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000
          validation images.

Expected  The ensemble is better than the baseline by one point at 100 labels and by half a point at 1,000, but not better
          than one ViT with four times the steps. A student with 2,400 steps shows no difference from the baseline. One with
          four times the steps is better than a ViT trained with labels for as long, by less than half a point at 1,000
          labels, and is as good as the ensemble. No arm reaches the small CNN at 1,000 labels. Written before the runs.
"""

from functools import partial

from smallvit import DeepEnsemble, Distill, Tune, ablate, augment, mnist_baseline

MEMBERS = 4
scratch = mnist_baseline().vary(steps=2_400)
longer = scratch.vary(steps=MEMBERS * scratch.steps)
ensemble = scratch.vary(model=partial(DeepEnsemble, of=scratch.model, count=MEMBERS), batch=MEMBERS * scratch.batch)
views = (*augment.digits(1.3), augment.Mixup())
taught = {"teacher": ensemble, "objective": partial(Distill, weight=1.0, temperature=1.0), "augment": views}

RUNS = ablate(
    {
        "scratch": scratch,
        "four times the steps": longer,
        "ensemble of 4": ensemble,
        "taught by the ensemble": scratch.vary(**taught),
        "taught by the ensemble, four times the steps": longer.vary(**taught),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={
        "ensemble of 4": "four times the steps",
        "taught by the ensemble, four times the steps": "four times the steps",
    },
)
