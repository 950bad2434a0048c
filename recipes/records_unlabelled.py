"""How good can one small ViT be with 10 or 100 labelled digits, if all other digits may be used without their labels?

Paper     Caron et al. 2021 (DINO), arXiv:2104.14294. Iscen et al. 2019 (label spreading), arXiv:1904.04717. Hinton et al. 2015
          (distillation), arXiv:1503.02531. Hassani et al. 2021 (CCT), arXiv:2104.05704.

Setup     Data: MNIST with 10 and 100 labelled digits, 59,000 digits without labels (all training digits that are not used for
          validation), 10,000 test images, 8 seeds. First, DINO is pretrained on all digits for 3,000 steps of 64. Then the
          labels are spread to all digits by its features, and the pretrained model learns them in 1,500 steps of 64, as in the
          recipe `pseudo_labels`. Last, a new model, the small ViT of the recipe `records` (tokenizer of CCT, Muon, 164,000
          parameters), learns the classes that the second model predicts for 32 deformed digits a step, in 4,800 steps. This way
          was chosen among seven trials at 100 labels on 5,000 validation images with other seeds
          (`records_unlabelled.trials.jsonl`). `augmented_accuracy` classifies each test image together with 16 deformed copies
          of it. Cost: 40 runs, an hour in bf16 on two CPU cores with up to four seeds trained together as one model.

Expected  98.4% at 100 labels and 97.5% at 10. The goals, 99.1 and 98.5%, which were set from results of other methods, are not
          reached: the spread labels are wrong for two of 100 digits, and the last model learns most of these mistakes. The
          deformed copies bring 0.1 points. Written before the runs.

Found     The accuracy is 98.23% [97.64, 98.82] at 100 labels, less than expected, and 97.64% [97.22, 98.06] at 10, a little
          more, where the interval is for new seeds and new test images. The goals are not reached, as expected, and lie outside
          the intervals. At 100 labels the seeds, which also draw the labelled digits, range from 97.36% to 98.86% (SD 0.66),
          and at 10 from 97.26% to 98.43% (SD 0.40). The deformed copies raise the means to 98.30% and 97.75%, as expected. Much
          of what is missing at 10 labels is one way to write a digit: of the 210 test digits that at least six of the eight
          models get wrong, 138 are sevens, and nearly all of these have a bar across the stem. One labelled seven does not show
          that both are sevens. Of the models with 100 labels, four get at most 13 sevens wrong, and the others 79 to 144.

Limits    One way, chosen among seven trials at 100 labels; at 10 labels nothing was tried. The trials were made with 5,000
          labelled validation images, far more labels than the runs have. The learning rates are those of earlier recipes and
          were not tuned. Nothing is compared, so there is no verdict, and nothing says which part is needed. FixMatch after
          DINO, with 2,400 steps, was worse than label spreading in the trials; longer training was not tried. The unlabelled
          digits are of the same kind as the labelled ones, with nearly equal numbers of each class. The goals come from results
          of other methods, with other draws of labelled digits; that for 100 labels is not above all of them: a GAN reached
          about 99.2% (Dai et al. 2017, arXiv:1705.09783). There are 8 seeds.
"""

from functools import partial

from smallvit import (
    DINO,
    Block,
    ConvStem,
    ConvTokenizer,
    Distill,
    Muon,
    Projected,
    Run,
    ViT,
    ablate,
    accuracy,
    augment,
    augmented_accuracy,
    knn,
    label_spreading,
    mnist,
    mnist_baseline,
)

vit = partial(ViT, tokenizer=ConvStem, pool=Projected, block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=2)
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
spread = Run(
    data=mnist,
    model=vit,
    init=pretrained,
    augment=augment.digits(),
    pseudo_labels=partial(label_spreading, of="mean"),
    unlabelled=True,
    steps=1_500,
    batch=64,
    lr=1e-3,
)
small_vit = mnist_baseline().vary(
    tokenizer=partial(ConvTokenizer, layers=3, hidden=32),
    optimizer=Muon,
    lr=5e-3,
    objective=partial(Distill, kind="hard", weight=1.0),
    teacher=spread,
    unlabelled=True,
    steps=4_800,
    evaluators=(accuracy, partial(augmented_accuracy, augment=augment.digits(0.5), copies=16)),
)

RUNS = ablate({"small ViT": small_vit}, labels=[10, 100], references=False)
