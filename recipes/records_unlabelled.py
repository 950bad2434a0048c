"""How good can one small ViT be with 10 or 100 labelled digits, if all other digits may be used without their labels?

Paper     Caron et al. 2021 (DINO), arXiv:2104.14294. Iscen et al. 2019 (label spreading), arXiv:1904.04717. Hinton et al. 2015
          (distillation), arXiv:1503.02531. Hassani et al. 2021 (CCT), arXiv:2104.05704.

Setup     Data: MNIST with 10 and 100 labelled digits, 59,000 digits without labels (all training digits that are not used for
          validation), 10,000 test images, 8 seeds. First, a ViT with 49 tokens is pretrained by DINO on all digits for
          4,500 steps of 64; random erasing sets a rectangle to black in half of the views. Then the labels are spread to all
          digits by its features, and the pretrained model learns them in 1,500 steps of 64, as in the recipe `pseudo_labels`.
          Last, a new model, the small ViT of the recipe `records` (tokenizer of CCT, Muon, 164,000 parameters), learns the
          classes that the second model predicts for 32 deformed digits a step, in 4,800 steps. `augmented_accuracy` classifies
          each test image together with 16 deformed copies of it. Cost: 40 runs, COST.

Expected  98.5% at 100 labels and 97.9% at 10, 0.3 points more than the earlier version at both. The goals, 99.1 and 98.5%,
          which were set from results of other methods, are not reached: the spread labels are wrong for 1.6 and 2.2 of 100
          validation digits, and the last model learns most of these mistakes. Written before the runs of this version.

Found     Not run yet.

Limits    The three stages were chosen among seven trials at 100 labels on 5,000 validation images with other seeds
          (`records_unlabelled.trials.jsonl`). For this version, eight variants of DINO were pretrained with one other seed. Of
          each, the labels of eight draws of 10 and of 100 digits were spread to 5,000 validation images: those of the earlier
          version got 97.0% and 98.0% right. Random erasing changed this by -0.7 and 0.0 points with 3,000 steps, and by 0.0 and
          0.2 with 9,000. 49 tokens and 4,500 steps got 96.7% and 98.0% without erasing, and 98.0% and 98.4% with it (97.7% and
          98.4% with a second seed). The tokenizer of CCT got 97.9% and 98.5% (97.5% and 98.2% with the second seed), and less
          with 8,000 steps. Three rectangles in place of one got 94.8% at 10. These images have far more labels than the runs.
          That sevens with a bar are the largest group of mistakes was seen on the test images of the earlier version, before
          these trials; they are also wrong among the validation images. The learning rates are those of earlier recipes and
          were not tuned. Nothing is compared, so there is no verdict, and nothing says which part is needed. FixMatch after
          DINO, with 2,400 steps, was worse than label spreading in the trials; longer training was not tried. The unlabelled
          digits are of the same kind as the labelled ones, with nearly equal numbers of each class. The goals come from results
          of other methods, with other draws of labelled digits; that for 100 labels is not above all of them: a GAN reached
          about 99.2% (Dai et al. 2017, arXiv:1705.09783). There are 8 seeds.

Earlier   In an earlier version, the ViT of DINO had 16 tokens, and was pretrained for 3,000 steps without random erasing. Its
          accuracy was 98.23% [97.64, 98.82] at 100 labels and 97.64% [97.22, 98.06] at 10. Of the 210 test digits that at least
          six of the eight models with 10 labels got wrong, 138 were sevens, nearly all of them with a bar across the stem: one
          labelled seven does not show that both kinds are sevens. Of the models with 100 labels, four got at most 13 sevens
          wrong, and the others 79 to 144.
"""

from dataclasses import replace
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

stem = partial(ConvStem, layers=2)
vit = partial(ViT, tokenizer=stem, pool=Projected, block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=2)
(crops,) = augment.digit_crops(local=0)
erased = replace(crops, first=(*crops.first, augment.RandomErasing(probability=0.5)))
pretrained = Run(
    data=mnist,
    model=vit,
    objective=partial(DINO, layers=1, prototypes=24, momentum=0.97, koleo=0.1, neighbors=10, share=0.9, settle=0.2),
    augment=(erased,),
    unlabelled=True,
    steps=4_500,
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
