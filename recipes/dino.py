"""Does DINO help when labels are few: on the same digits at 10, 100 and 1,000 labels, and on all digits without their labels?

Paper     Caron et al. 2021 (DINO), arXiv:2104.14294.

Setup     Data: MNIST with 10, 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; "all digits" are the 59,000 that are
          not used for validation. Every arm is the same ViT with a convolutional stem, 16 tokens and 248,000 parameters. After
          its pool it has two hidden layers: those of DINO's projection head, which are kept after pretraining. Scratch is 2,400
          steps of 32 deformed digits. After 300 steps of pretraining on the same digits come all 2,400 steps with labels; after
          3,000 steps on all digits come 300. DINO on all digits costs roughly as much as six times the steps of scratch
          ("scratch as long"), so it is compared with these. "Frozen" is a logistic regression on the features of the labelled
          images. Each arm that is trained with labels gets 8 trials for each number of labels to choose its learning rate, on
          3,000 validation images of other seeds; pretraining has one setting. At the end the features are also probed with all
          labels, and with 16 labels per class, against random weights and raw pixels (4 seeds). "Longer" is the fine-tuning for
          all 2,400 steps; this arm was added after the results of the others were known. Three arms at 10 and 100 labels are
          also in the recipe `pseudo_labels`; these runs were made again, with equal results. Cost: 240 runs to choose the rates
          and 204 to compare, and 40 pretrainings; 18 hours of one CPU core, with other programs beside them.

Expected  First version: on all digits a large gain at 10 and 100 labels and a small one at 1,000. On the same digits little at
          10 and 100, because only the deformations can teach something new, and supervised training sees them too. Written
          before the runs of that version, after trials of the pretraining. This version, with a tuned learning rate for each
          arm, 2,400 steps instead of 1,000, and all of these steps after pretraining on the same digits: at 10 and 100 labels
          as in the recipe `pseudo_labels`, whose runs these arms repeat. At 1,000 labels six times the steps gain half a point,
          DINO on all digits is inconclusive against them, and so are its frozen features. At 10 labels the frozen features are
          worse than fine-tuning but better than six times the steps by ten points, and at 100 labels they are inconclusive.
          Pretraining on the same digits is inconclusive at 10 and 100 labels and gains 0.3 points at 1,000. Written before
          those runs. The arm with longer fine-tuning: at 1,000 labels better than 300 steps, about 98.5%, so inconclusive
          against six times the steps; at 10 and 100 labels about as 300 steps, or a little worse. Written before its runs.

Found     Without additional images DINO shows no gain: pretraining on the same digits is inconclusive at 10 labels (-0.31
          points [-2.03, 1.42]) and at 100 (-0.01 [-0.33, 0.30]), as expected, and also at 1,000, where a gain was expected and
          its mean is lower by 0.10 points [0.02, 0.18]. On all digits the gain over six times the steps is large at 10 labels,
          14.90 points [14.15, 15.64] (86.89%), and small at 100, 0.81 points [0.37, 1.26] (96.86%, fragile: a repetition would
          give this verdict in about 57 of 100 cases). At 1,000 labels it is a loss: worse than six times the steps by 0.50
          points [0.33, 0.66] (98.06% against 98.56%), where no difference was expected, and its mean is even below that of
          scratch (98.17%). More steps of fine-tuning are not enough: with all 2,400 the accuracy is 98.23%, less than expected,
          and worse than six times the steps by 0.33 points [0.19, 0.48] (fragile, about 79 of 100 cases). At 10 and 100 labels
          the longer fine-tuning is better than six times the steps by 15.18 points [14.42, 15.94] (87.17%) and by 0.72 points
          [0.30, 1.15] (96.77%, fragile), about as much as 300 steps, as expected. The frozen features are better than six times
          the steps by 5.21 points [3.57, 6.84] at 10 labels (77.20%), half of what was expected, and by 0.95 points [0.37,
          1.53] at 100 (97.00%, fragile), where no difference was expected; at 1,000 they are inconclusive (98.26%). They were
          not compared with fine-tuning: their mean is lower by almost ten points at 10 labels, and a little higher at 100 and
          1,000. Six times the steps gain 0.43 points [0.19, 0.67] over scratch at 100 labels and 0.39 [0.20, 0.59] at 1,000,
          both fragile; at 10 they are inconclusive. With all labels a linear probe of the features reaches 98.84%, and 87.23%
          with random weights; with 16 labels per class it reaches 97.28%, against 77.52% on raw pixels. These probes have too
          few seeds for a verdict.

Limits    The options of DINO were chosen on 5,000 labelled training images, held back by another seed, in some 50 trials, most
          of 300 to 1,000 steps: batch 64, learning rate 0.003, momentum 0.97, KoLeo at 0.1, BatchNorm in the head, no local
          crops, the strength of the deformations, 24 prototypes, 10 neighbors and their share. The length of the fine-tuning,
          300 steps, and a learning rate that halves from block to block were chosen at 100 labels. The learning rate of the
          longer fine-tuning at 100 labels is at the edge of its range. The 300 steps of pretraining on the same digits were not
          tuned either. At 1,000 labels DINO on all digits was still improving when its 300 steps ended (`smallvit report`
          prints a warning). It sees fewer images than six times the steps, but each of its steps costs more: it took 16% more
          time at 10 labels, and 13% and 26% less at 100 and 1,000 (medians of 8 seeds). Other programs ran beside, and the same
          pretraining took 526 and 968 seconds in two runs, so these times are rough. There are 8 seeds, and 4 for the probes
          with all labels. Verdicts are about new seeds and new test images.

Earlier   The first version trained for 1,000 steps with one learning rate for each kind of arm and 6 seeds. There, pretraining
          on the same digits was worse than scratch by 11.05, 6.87 and 6.46 points, probably because it was followed by only 300
          steps with labels. On all digits, 87.86% became 89.06% at 10 labels with 1,500 more steps in which the fine-tuned
          model taught all digits (SimCLR v2, arXiv:2006.10029); the recipe `pseudo_labels` compares this now.
"""

from functools import partial

from smallvit import (
    DINO,
    Block,
    ConvStem,
    Pixels,
    Projected,
    Run,
    Tune,
    ViT,
    ablate,
    augment,
    few_shot,
    imagenet_vit_s,
    knn,
    linear_probe,
    mnist,
)

block = partial(Block, mlp_ratio=2.0)
vit = partial(ViT, tokenizer=ConvStem, pool=Projected, block=block, dim=64, depth=4, heads=2)
scratch = Run(data=mnist, model=vit, augment=augment.digits(), steps=2_400, batch=32, lr=2e-3)

pretrained = Run(
    data=mnist,
    model=vit,
    objective=partial(DINO, layers=1, prototypes=24, momentum=0.97, koleo=0.1, neighbors=10, share=0.9, settle=0.2),
    augment=augment.digit_crops(local=0),
    unlabelled=True,
    steps=3_000,
    batch=64,
    lr=3e-3,
    weight_decay=0.04,
    clip=0.0,
    ema=0.0,
    evaluators=(knn,),
)
pretrained_on_same = pretrained.vary(unlabelled=False, steps=300)
fine_tuned = scratch.vary(init=pretrained, steps=300, lr=1e-3, layer_decay=0.5)
frozen = scratch.vary(init=pretrained, steps=0, augment=(), ema=0.0, evaluators=(linear_probe, knn))
AS_LONG, LONGER = "scratch as long", "DINO on all digits, longer"

# Probes with all 59,000 labels. Raw pixels get no logistic regression: it would take too long.
with_all_labels = frozen.vary(evaluators=(partial(linear_probe, strengths=(0.01, 0.1, 1.0)), knn, few_shot))
pixels = (knn, few_shot)

RUNS = ablate(
    {
        "scratch": scratch,
        AS_LONG: scratch.vary(steps=6 * scratch.steps),
        "DINO on the same digits": scratch.vary(init=pretrained_on_same),
        "DINO on all digits": fine_tuned,
        "DINO on all digits (frozen)": frozen,
        LONGER: fine_tuned.vary(steps=scratch.steps),
    },
    labels=[10, 100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={"DINO on all digits": AS_LONG, "DINO on all digits (frozen)": AS_LONG, LONGER: AS_LONG},
    references=["pixels, logistic regression", "random initialization"],
    extra_references=imagenet_vit_s(scratch, scratch=False),
) + ablate(
    {
        "random weights (all labels)": with_all_labels.vary(init=None),
        "raw pixels (all labels)": with_all_labels.vary(init=None, model=Pixels, evaluators=pixels),
        "DINO on all digits (all labels)": with_all_labels,
    },
    seeds=range(4),
    references=False,
)
