"""Which training without labels helps a small ViT most: DINO, LeJEPA, MAE, data2vec, or a second task beside the labels?

Paper     Caron et al. 2021 (DINO), arXiv:2104.14294. Balestriero, LeCun 2025 (LeJEPA), arXiv:2511.08544. He et al. 2021 (MAE),
          arXiv:2111.06377. Baevski et al. 2022 (data2vec), arXiv:2202.03555. Das et al. 2023 (SSAT), arXiv:2310.20704. Liu et
          al. 2021 (DrLoc), arXiv:2106.03746.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, the mean of the
          patch tokens as the feature, deformed digits. Four arms are pretrained for 4,000 steps of 64 digits (LeJEPA: 128) on
          all digits without labels, and then trained for 2,400 steps with labels. Two arms have a second task in the 2,400
          steps with labels: the reconstruction of hidden patches (SSAT), and the distances between patches (DrLoc).
          "Scratch as long" is supervised training for 6,400 steps. Each arm and the small CNN get 8 trials to choose the
          learning rate of the training with labels, on 3,000 validation images; the pretraining has one setting.

Expected  DINO and LeJEPA are better by two points or more at 100 labels, and cannot be told apart. MAE is better by a point
          at 100 labels. At 1,000 labels no pretraining is better than supervised training for as long. Data2vec, SSAT and
          DrLoc show no effect. Written before the runs.
"""

from functools import partial

from smallvit import DINO, MAE, SSAT, Data2Vec, DrLoc, LeJEPA, MeanTokens, Tune, ablate, augment, linear_probe, mnist_baseline

scratch = mnist_baseline().vary(steps=2_400, pool=MeanTokens)
STEPS = 4_000  # of pretraining
without_labels = partial(scratch.vary, unlabelled=True, steps=STEPS, ema=0.0, evaluators=(linear_probe,))
views = {"augment": augment.digit_crops(local=0), "clip": 0.0}
pretrained = {
    "DINO": without_labels(objective=partial(DINO, prototypes=64, momentum=0.97, koleo=0.1), batch=64, **views),
    "LeJEPA": without_labels(objective=LeJEPA, batch=128, **views),
    "MAE": without_labels(objective=partial(MAE, ratio=0.5, normalise=False), batch=64, augment=()),
    "data2vec": without_labels(objective=Data2Vec, batch=64, augment=()),
}

RUNS = ablate(
    {
        "scratch": scratch,
        "scratch as long": scratch.vary(steps=scratch.steps + STEPS),
        **{name: scratch.vary(init=run) for name, run in pretrained.items()},
        "SSAT": scratch.vary(objective=partial(SSAT, weight=0.5, ratio=0.5)),
        "DrLoc": scratch.vary(objective=DrLoc),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
)
