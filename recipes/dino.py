"""Does DINO help when labels are few: on the same digits at 10, 100 and 1,000 labels, and on all digits without their labels?

Paper   Caron et al. 2021, arXiv:2104.14294.
Data    MNIST, 10,000 test images; all digits are the 59,000 that are not for validation.
Cost    192 runs and 24 to start from, 110 minutes on two CPU cores that had other work beside.
Expect  On all digits a large gain at 10 and 100 labels, a small one at 1,000. On the same digits little at 10 and 100, where
        there is nothing to learn from but the deformations, which supervised training sees too. To be taught by the one that
        was fine-tuned adds a little. Written before the runs, after trials of the pretraining.
Came    On all digits as expected at 10 labels (88 against 67) and at 100 (96.9, taught 97.2, against 95.0). At 1,000 the gain
        is real but half a point, and training from scratch for as long gains more (98.3 against 98.0, frozen 98.2): there
        pretraining is not worth its cost. On the same digits it is worse than from scratch everywhere, which is the recipe's
        own doing: the short fine-tuning that keeps what was learned on all digits is too short for a start of 300 steps.
Chosen  On 5,000 training images held back by another seed, in some 50 trials of the pretraining, most of them of 300 to 1,000
        steps: batch 64, rate 0.003, momentum 0.97, KoLeo at 0.1, BatchNorm in the head, no local views, the strength of the
        deformations, 24 prototypes, 10 neighbours and their share. Fine-tuning in 13 trials at 100 labels: its rate, its
        length, and a rate that halves from block to block. Teaching in 5 trials: the teacher's first choice, not all it says.

Every arm has the same hybrid ViT of 16 tokens with two hidden layers behind its pool: those of a projection head, kept. "As
long" is supervised training for the steps of pretraining and of training from scratch together. "Then taught" starts from the
same pretraining and hears on all digits, without labels, what the fine-tuned model takes them for (SimCLR v2,
arXiv:2006.10029). Frozen arms are judged by a logistic regression on the labels. At the end the same features are probed with
all labels, and with 16 labels of each class, against their own random weights.
"""

from functools import partial

from smallvit import (
    DINO,
    Block,
    ConvStem,
    Distill,
    Pixels,
    Projected,
    Run,
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
scratch = Run(data=mnist, model=vit, augment=augment.digits(), steps=1_000, batch=32, lr=2e-3)

pretrained = Run(
    data=mnist,
    model=vit,
    objective=partial(DINO, layers=1, prototypes=24, momentum=0.97, koleo=0.1, neighbours=10, share=0.9, settle=0.2),
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
same = pretrained.vary(unlabelled=False, steps=300)
tuned = scratch.vary(init=pretrained, steps=300, lr=1e-3, layer_decay=0.5)
taught = tuned.vary(  # by the one that was fine-tuned, on all images
    teacher=tuned, unlabelled=True, objective=partial(Distill, kind="hard", weight=1.0), steps=500, batch=64, layer_decay=None
)
frozen = scratch.vary(init=pretrained, steps=0, augment=(), ema=0.0, evaluators=(linear_probe, knn))

# all 59,000 labels for the probes; a logistic regression of so many raw pixels would take long
known = frozen.vary(evaluators=(partial(linear_probe, strengths=(0.01, 0.1, 1.0)), knn, few_shot))
pixels = (knn, few_shot)

RUNS = ablate(
    {
        "scratch": scratch,
        "scratch as long": scratch.vary(steps=scratch.steps + pretrained.steps),
        "DINO on the same digits": tuned.vary(init=same),
        "DINO on all digits": tuned,
        "DINO on all digits, then taught": taught,
        "DINO on all digits (frozen)": frozen,
    },
    labels=[10, 100, 1_000],
    seeds=range(6),
    extra_references=imagenet_vit_s(scratch, scratch=False),
) + ablate(
    {
        "random weights (all labels)": known.vary(init=None),
        "raw pixels (all labels)": known.vary(init=None, model=Pixels, evaluators=pixels),
        "DINO on all digits (all labels)": known,
    },
    seeds=range(4),
    references=False,
)
