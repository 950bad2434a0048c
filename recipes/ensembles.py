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
          validation images. Cost: 192 runs to choose the rates and 136 runs to compare, some 6 hours on one CPU core that
          shared its processor with other work.

Expected  The ensemble is better than the baseline by one point at 100 labels and by half a point at 1,000, but not better
          than one ViT with four times the steps. A student with 2,400 steps shows no difference from the baseline. One with
          four times the steps is better than a ViT trained with labels for as long, by less than half a point at 1,000
          labels, and is as good as the ensemble. No arm reaches the small CNN at 1,000 labels. Written before the runs.

Found     Training one ViT for four times the steps is better than the baseline by 1.59 points [1.08, 2.11] at 100 labels and by
          1.39 [1.15, 1.63] at 1,000. The ensemble costs as many steps and is not better than this ViT, as expected: it is
          inconclusive at 100 labels, -0.26 [-0.57, 0.06], and worse by 0.82 points [0.59, 1.05] at 1,000 (97.47% against
          98.29%). Its mean is above that of the baseline, as expected: 94.25% against 92.92% at 100 labels, and 97.47%
          against 96.90% at 1,000. This difference was not tested. The students are a surprise. They were expected to be as
          good as a ViT that learns from the labels for as long, or better, and are worse: with 2,400 steps by 0.81 points
          [0.18, 1.44] at 100 labels and by 0.78 [0.61, 0.95] at 1,000, and with four times the steps by 0.72 [0.27, 1.16] and
          1.03 [0.81, 1.25]. At 100 labels both of these verdicts are fragile. The student with four times the steps is near
          the ensemble that it learns from (97.26% and 97.47% at 1,000 labels), but not near the ViT that learned from the
          labels. No arm reaches the small CNN, as expected; at 100 labels the CNN has 95.80% and the best arm 94.51%. Judged
          by the negative log-likelihood of the test images, the order is another one at 100 labels: the ensemble has the
          lowest of all arms, and its student with four times the steps the next. At 1,000 labels, four times the steps are
          best there too.

Limits    Only the learning rate was tuned, in runs of a quarter of the steps. The students differ from the other arms in three
          ways: their targets, stronger deformations, and mixed digits. No arm changes only one of them, so it is not shown
          which one harms. The paper on long teaching trains for up to 10,000 epochs and the teacher there is a larger model
          that was pretrained; here it is an ensemble of the same small ViT, and 9,600 steps. Members of an ensemble that are
          trained for 9,600 steps each could be better than one of them, at 16 times the cost of the baseline.
"""

from functools import partial

from smallvit import DeepEnsemble, Distill, Tune, ablate, augment, mnist_baseline

MEMBERS = 4
scratch = mnist_baseline().vary(steps=2_400)
longer = scratch.vary(steps=MEMBERS * scratch.steps)
ensemble = scratch.vary(model=partial(DeepEnsemble, of=scratch.model, count=MEMBERS), batch=MEMBERS * scratch.batch)
views = (*augment.digits(1.3), augment.Mixup())
distilled = {"teacher": ensemble, "objective": partial(Distill, weight=1.0, temperature=1.0), "augment": views}

RUNS = ablate(
    {
        "scratch": scratch,
        "four times the steps": longer,
        "ensemble of 4": ensemble,
        "distilled from the ensemble": scratch.vary(**distilled),
        "distilled from the ensemble, four times the steps": longer.vary(**distilled),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={
        "ensemble of 4": "four times the steps",
        "distilled from the ensemble, four times the steps": "four times the steps",
    },
)
