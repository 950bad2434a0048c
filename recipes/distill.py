"""Can a CNN teach a ViT when labels are few: by all that it says, by its first choice, through a token of its own?

Paper   Touvron et al. 2021 (DeiT), arXiv:2012.12877. Hinton et al. 2015, arXiv:1503.02531.
Data    MNIST: 100 and 1,000 labelled digits, 10,000 test images.
Cost    128 runs, the teachers among them: the reference's small CNNs and the baseline; some 40 minutes on two CPU cores.
Expect  At both numbers of labels the soft teacher gives the ViT half of what lies between it and the CNN, the hard one less.
        The token adds nothing: it is there for what two losses would tear apart, and these two agree on almost every image. A
        ViT taught by another one gains a little at 100 labels, from the softness alone. Nobody passes the CNN.
        Written before the runs.
Came    Next to nothing, though the CNN has much to teach. At 100 labels it is 6.1 points above the ViT (95.8, 89.7), and no
        teacher brings a gain that eight seeds could show. At 1,000 labels, 4.7 points below the CNN (98.3), another ViT brings
        0.6; the CNN 0.6 by all that it says, 0.4 by its first choice and 0.5 through the token, none of which outlasts paying
        for 8 comparisons: an eighth of what lies between, not half. A teacher speaks only of the images that the pupil has
        labels for.
Chosen  Nothing here: the ViT and its training are those of the recipe `hyperparameters`, weight and temperature DeiT's.

Every teacher has the labels and the steps of its pupil, no others; what it cost stands in the pupil's budget. All see the same
augmented images.
"""

from functools import partial

from smallvit import Block, Distill, DistilledTokens, PatchEmbed, Run, SmallCNN, ViT, ablate, augment, imagenet_vit_s, mnist

scratch = Run(
    data=mnist,
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=7), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=4),
    augment=augment.digits(),
    steps=800,
    batch=32,
    lr=2e-3,
)
cnn = scratch.vary(model=SmallCNN)
soft, hard = Distill, partial(Distill, kind="hard")

RUNS = ablate(
    {
        "scratch": scratch,
        "taught by a ViT": scratch.vary(objective=soft, teacher=scratch),
        "taught by a CNN": scratch.vary(objective=soft, teacher=cnn),
        "taught by a CNN's first choice": scratch.vary(objective=hard, teacher=cnn),
        "taught by a CNN's first choice through a token": scratch.vary(
            objective=partial(hard, token=True), teacher=cnn, pool=DistilledTokens
        ),
    },
    labels=[100, 1_000],
    extra_references=imagenet_vit_s(scratch, patch=7, scratch=False),
)
