"""Do the techniques that help with 100 and 1,000 labels also help with 10 and with 10,000?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: MNIST with 10 and 10,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 digits. The arms are ten of the techniques that other recipes have
          shown to be better at 100 or at 1,000 labels: more steps, deformations (one arm is without them), mixup (which had
          helped without deformations, and is added to them here), shifted patches, the convolutional stem, the tokenizer of
          CCT, SwiGLU, Muon, MAE and FixMatch. MAE is pretrained for 4,000 steps on all training digits that are not used for
          validation, and FixMatch learns from them as well. FixMatch is compared with six times the steps, which cost as much;
          the others are compared with the baseline. Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000
          validation images. Cost: 384 runs to choose the rates, 45 minutes, 224 runs to compare and 8 pretraining runs, an hour
          and a half, in bf16 on two CPU cores with eight seeds trained together as one model and other programs beside them.

Expected  At 10 labels, one of each class, the baseline reaches 65%. Without deformations it is worse by 20 points. FixMatch is
          better than six times the steps by ten points or more, MAE by five than the baseline; the convolutional stem and the
          tokenizer of CCT by three. The draw of the labels decides so much that SwiGLU, Muon, mixup and shifted patches are
          inconclusive. At 10,000 labels the baseline reaches 97.6%. Six times the steps are better by 1.2 points, the tokenizer
          of CCT by 1.2, the convolutional stem and Muon by 0.8, MAE by 0.8, SwiGLU by 0.5. Deformations still help, by half a
          point; mixup and shifted patches show no difference. FixMatch is worse than six times the steps by one point. The
          small CNN has the highest mean, 99.0%. Written before the runs.

Found     With 10 labels, one of each class, FixMatch is better than six times the steps by 17.02 points [11.73, 22.31] and has
          the highest mean of all arms, 86.65%. The three other tokenizers gain much more than expected: the tokenizer of CCT is
          better than the baseline (63.79%) by 12.33 points [9.12, 15.54], the convolutional stem by 10.23 [7.45, 13.01] and
          shifted patches, which were expected to be inconclusive, by 8.66 [6.49, 10.84]. Six times the steps are better by 5.84
          points [3.84, 7.84], MAE by 4.70 [2.46, 6.94], as expected, but this is fragile. Without deformations the ViT is worse
          by 29.52 points [22.72, 36.33], more than expected, and has a lower mean than logistic regression on pixels (45.54%).
          SwiGLU (2.87 points [0.81, 4.93]), Muon (1.75 [-0.34, 3.84]) and mixup (1.07 [-1.20, 3.34]) are inconclusive, as
          expected. With 10,000 labels the baseline reaches 97.36%. Six times the steps are better by 1.72 points [1.37, 2.08],
          more than expected, the tokenizer of CCT by 1.45 [1.14, 1.76], the convolutional stem by 1.05 [0.66, 1.45], Muon by
          0.87 [0.47, 1.27] and MAE by 0.78 [0.36, 1.20]; the last two are fragile. Against the expectation, mixup is worse by
          0.86 points [0.62, 1.10]. A loss of half a point without deformations, as expected, is neither shown nor excluded:
          -0.39 points [-0.83, 0.05], inconclusive. SwiGLU (0.45 [0.08, 0.82]) and shifted patches (0.31 [-0.08, 0.69]) are
          inconclusive. FixMatch is worse than six times the steps by 1.40 points [1.09, 1.70]. The small CNN was expected to
          have the highest mean; six times the steps have it, with 99.09% against 99.05% (not compared).

Limits    Only the learning rate was tuned, with trials of a quarter of the steps, on 3,000 validation images for each of four
          seeds. At 10 labels these are 11,188 labelled images, a thousand times as many as a run has. In its short trials at
          10,000 labels FixMatch scored like scratch, so its rate was chosen before it made a difference. It sees the labelled
          digits a sixth as often as six times the steps do. With 10,000 labels the baseline and Muon were still improving at
          the end (`smallvit report` prints a warning), so a part of all gains there may be faster learning. Training shows each
          of 10,000 images fewer than eight times. Deformations and mixup make learning slower, so they may bring more in longer
          training, which was not tried. Two seeds share many of their 10,000 training images, for which the intervals are
          widened: the loss without deformations and the gain of shifted patches are shown for these training images only. The
          arms had been shown to be better at 100 or at 1,000 labels, so this says nothing about techniques that help at 10 or
          10,000 labels only. The seconds cannot be compared between arms. Verdicts are about new seeds and new test images.
"""

from functools import partial

from smallvit import (
    MAE,
    Block,
    ConvStem,
    ConvTokenizer,
    Muon,
    SemiSupervised,
    ShiftedPatchEmbed,
    Tune,
    ablate,
    augment,
    linear_probe,
    mnist_baseline,
)

scratch = mnist_baseline().vary(steps=2_400)
AS_LONG = "six times the steps"
mae = scratch.vary(
    objective=partial(MAE, ratio=0.5, normalize=False),
    augment=(),
    unlabelled=True,
    steps=4_000,
    batch=64,
    ema=0.0,
    evaluators=(linear_probe,),
)
fixmatch = partial(SemiSupervised, weak=augment.digits(0.3), strong=augment.strong_digits(), ratio=4)

RUNS = ablate(
    {
        "scratch": scratch,
        AS_LONG: scratch.vary(steps=6 * scratch.steps),
        "no deformations": scratch.vary(augment=()),
        "mixup": scratch.vary(augment=(*augment.digits(), augment.Mixup())),
        "shifted patches": scratch.vary(tokenizer=partial(ShiftedPatchEmbed, patch=7)),
        "convolutional stem": scratch.vary(tokenizer=partial(ConvStem, layers=3)),
        "CCT tokenizer": scratch.vary(tokenizer=partial(ConvTokenizer, layers=3, hidden=32)),
        "SwiGLU": scratch.vary(block=partial(Block, mlp_ratio=2.0, activation="swiglu")),
        "Muon": scratch.vary(optimizer=Muon),
        "MAE": scratch.vary(init=mae),
        "FixMatch": scratch.vary(objective=fixmatch),
    },
    labels=[10, 10_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={"FixMatch": AS_LONG},
)
