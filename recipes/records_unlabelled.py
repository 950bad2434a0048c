"""How good can one small ViT be with 10 or 100 labelled digits, if all other digits may be used without their labels?

Paper     Caron et al. 2021 (DINO), arXiv:2104.14294. Iscen et al. 2019 (label spreading), arXiv:1904.04717. Hinton et al. 2015
          (distillation), arXiv:1503.02531. Hassani et al. 2021 (CCT), arXiv:2104.05704. Zhu et al. 2003 (ICML, class mass
          normalization).

Setup     Data: MNIST with 10 and 100 labelled digits, 59,000 digits without labels (all training digits that are not used for
          validation), 10,000 test images, 8 seeds. Two arms have three stages. First, a ViT is pretrained by DINO on all digits
          in batches of 64. Then the labels are spread to all digits by its features, and the pretrained model learns them in
          1,500 steps of 64 digits, as in the recipe `pseudo_labels`. Last, a new model, the small ViT of the recipe `records`
          (tokenizer of CCT, Muon, 164,000 parameters), learns the classes that the second model predicts for 32 deformed digits
          a step, in 4,800 steps. In "small ViT", DINO is trained for 3,000 steps, and its ViT has 16 tokens. In "DINO with 49
          tokens", it has 49 tokens and is trained for 4,500 steps, and random erasing sets a rectangle to black in half of the
          views. "Two DINOs" has two stages: two such ViTs are pretrained at the same time, each by its own images of each step.
          The labels are spread by the features of both, the scores of each class are balanced, and the small ViT learns these
          labels directly. `augmented_accuracy` classifies each test image together with 16 deformed copies of it. Cost: 40 runs
          for each of the first two arms and 24 for the third, about one hour in bf16 on two CPU cores for each arm.

Expected  "small ViT": 98.4% at 100 labels and 97.5% at 10. The goals, 99.1 and 98.5%, which were set from results of other
          methods, are not reached: the spread labels are wrong for two of 100 digits, and the last model learns most of these
          mistakes. The deformed copies bring 0.1 points. Written before the runs of this arm. "DINO with 49 tokens": 98.5% at
          100 labels and 97.9% at 10, 0.3 points more than "small ViT" at both. The goals are not reached: the spread labels are
          wrong for 1.6 and 2.2 of 100 validation digits. Written before the runs of this arm, after those of the other. "Two
          DINOs": 98.7% at 100 labels and 98.1% at 10, with less variation over the seeds than the other arms, because seldom
          both DINOs join the wrong groups of digits. The goals are not reached: in one trial each, the labels that two DINOs
          spread to the training digits were wrong for 1.6 and 2.4 of 100. Written before the runs of this arm, after those of
          the others.

Found     At 100 labels the accuracy is 98.48% [97.96, 99.00] for "DINO with 49 tokens", as expected, and 98.23% [97.64, 98.82]
          for "small ViT", less than expected, where the intervals are for new seeds and new test images. At 10 labels "small
          ViT" has 97.64% [97.22, 98.06], a little more than expected, and "DINO with 49 tokens" 96.82% [94.35, 99.29], a point
          less than expected: the runs do not show the gain that was seen on validation digits with two seeds of DINO. The goals
          are not reached; with "DINO with 49 tokens" that for 10 labels lies inside the interval, which is wide. The deformed
          copies raise the means of "small ViT" to 98.30% and 97.75%, as expected, and those of "DINO with 49 tokens" to 98.66%
          and 96.95%. The seeds, which also draw the labelled digits, range from 97.36% to 98.86% and from 97.52% to 98.87% at
          100 labels, and from 97.26% to 98.43% and from 89.70% to 98.83% at 10. Most mistakes that many models share are one
          way to write a digit: sevens with a bar across the stem. Of the 210 test digits that at least six of the eight models
          of "small ViT" with 10 labels get wrong, 138 are sevens, and nearly all of these have a bar. One labelled seven does
          not show that both kinds are sevens. "DINO with 49 tokens" joins both kinds in two of eight models, which get 98.8%;
          five get 141 to 145 sevens wrong, and in one most sevens without a bar have become nines. With 100 labels, four of
          eight models of "small ViT" get at most 13 sevens wrong, and the others 79 to 144; of "DINO with 49 tokens", six get
          at most 22 wrong, and the others 137 and 145. "Two DINOs" has 98.04% [97.57, 98.50] at 10 labels and 98.61% [98.04,
          99.19] at 100, both as expected. The means miss the goals; the intervals reach both, at 10 labels only just. The
          deformed copies raise the means to 98.22% and 98.77%. The seeds range from 97.50% to 98.98% at 10 labels and from
          97.52% to 99.09% at 100. With 100 labels they vary as much as those of "small ViT" (SD 0.66), against the expectation.
          The labelled sevens explain most of the variation with 100 labels: in two of the eight draws none of the ten has a
          bar, in two one has, and in four three have. Without a bar, all three arms get 134 to 145 test sevens wrong. With one,
          "small ViT" gets 79 and 113 wrong, and the other arms at most 15. With three, every arm gets at most 22 wrong. Where
          at least one labelled seven has a bar, the accuracy of "two DINOs" is 98.8% to 99.1%.

Limits    The three stages of the first two arms were chosen among seven trials at 100 labels on 5,000 validation images with
          other seeds (`records_unlabelled.trials.jsonl`); none of them had 10 labels. For "DINO with 49 tokens", eight variants
          of DINO were pretrained with one other seed. Of each, the labels of eight draws of 10 and of 100 digits were spread to
          5,000 validation images: the DINO of "small ViT" got 97.0% and 98.0% right. Random erasing changed this by -0.7 and
          0.0 points with 3,000 steps, and by 0.0 and 0.2 with 9,000. 49 tokens and 4,500 steps got 96.7% and 98.0% without
          erasing, and 98.0% and 98.4% with it (97.7% and 98.4% with a second seed). The tokenizer of CCT got 97.9% and 98.5%
          (97.5% and 98.2% with the second seed), and less with 8,000 steps. Three rectangles in place of one got 94.8% at 10.
          Other stroke widths in the views changed 98.0% and 98.4% by -0.5 and 0.0 points, with one seed. For "two DINOs", the
          labels were spread by the features of several such ViTs with other seeds or tokenizers: two with 49 tokens got 98.2%
          and 98.8%, and with balanced classes 98.4% and 98.8%; three got 98.4% and 98.8%, both balanced. Four, two of them with
          the tokenizer of CCT, got 98.0% and 98.7% by features side by side, and 98.5% and 98.9% by the sum of their graphs of
          neighbors, which no arm uses. With one ViT, balancing gained 0.1 points at both. That the small ViT learns the spread
          labels directly was chosen in one draw of 100 labels: it got 98.7%, and 98.5% from a ViT that had learned the same
          labels first. These 5,000 images have far more labels than the runs. That sevens with a bar are the largest group of
          mistakes was seen on the test images of "small ViT", before these trials; they are also wrong among the validation
          images. Which labelled sevens have a bar was looked at after all runs. The learning rates are those of earlier recipes
          and were not tuned. FixMatch after DINO, with 2,400 steps, was worse than label spreading in the trials; longer
          training was not tried. The unlabelled digits are of the same kind as the labelled ones, with nearly equal numbers of
          each class. The goals come from results of other methods, with other draws of labelled digits; at 100 labels, a GAN
          was above the goal, at about 99.2% (Dai et al. 2017, arXiv:1705.09783). There are 8 seeds. The arms were trained by
          different versions of smallvit, perhaps on different processors, so they are not compared, and there is no verdict.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from smallvit import (
    DINO,
    Block,
    ConvStem,
    ConvTokenizer,
    DeepEnsemble,
    Distill,
    EachMember,
    Muon,
    Projected,
    Run,
    Supervised,
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


def small_vit(tokenizer: Callable, views: tuple[Callable, ...], steps: int) -> Run:
    """All three stages: a ViT is pretrained by DINO on these views, learns the spread labels, and teaches the small ViT."""
    vit = partial(ViT, tokenizer=tokenizer, pool=Projected, block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=2)
    pretrained = Run(
        data=mnist,
        model=vit,
        objective=partial(DINO, layers=1, prototypes=24, momentum=0.97, koleo=0.1, neighbors=10, share=0.9, settle=0.2),
        augment=views,
        unlabelled=True,
        steps=steps,
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
    return mnist_baseline().vary(
        tokenizer=partial(ConvTokenizer, layers=3, hidden=32),
        optimizer=Muon,
        lr=5e-3,
        objective=partial(Distill, kind="hard", weight=1.0),
        teacher=spread,
        unlabelled=True,
        steps=4_800,
        evaluators=(accuracy, partial(augmented_accuracy, augment=augment.digits(0.5), copies=16)),
    )


(crops,) = augment.digit_crops(local=0)
erased = replace(crops, first=(*crops.first, augment.RandomErasing(probability=0.5)))
small = small_vit(ConvStem, (crops,), 3_000)
with_49_tokens = small_vit(partial(ConvStem, layers=2), (erased,), 4_500)

one_dino = with_49_tokens.teacher.init
two_dinos = with_49_tokens.vary(
    objective=Supervised,
    teacher=one_dino.vary(
        model=partial(DeepEnsemble, of=one_dino.model, count=2),
        objective=partial(EachMember, of=one_dino.objective),
        batch=2 * one_dino.batch,
    ),
    pseudo_labels=partial(label_spreading, of="mean", balanced=True),
)
RUNS = (
    ablate({"small ViT": small}, labels=[10, 100], references=False)
    + ablate({"DINO with 49 tokens": with_49_tokens}, labels=[10, 100], references=False)
    + ablate({"two DINOs": two_dinos}, labels=[10, 100], references=False)
)
