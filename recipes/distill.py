"""Can a CNN teach a ViT when labels are few: with all its outputs, with its predicted class, or through an extra token?

Paper     Touvron et al. 2021 (DeiT), arXiv:2012.12877. Hinton et al. 2015, arXiv:1503.02531.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds. Arms: a ViT from scratch; the same ViT
          taught by another ViT, by a small CNN, by the class that the CNN predicts, and by that class through a distillation
          token. Every teacher has the same labels and the same number of steps as its student and no others; its cost is
          counted in the student's costs. Teacher and student see the same augmented images. Cost: 128 runs, including the
          teachers, which are the small CNNs of the references and the baseline; some 40 minutes on two CPU cores.

Expected  At both numbers of labels the soft teacher closes half of the gap between ViT and CNN, the hard teacher (predicted
          class) less. The token adds nothing: it is made for two losses that disagree, and these two agree on almost every
          image. A ViT taught by another ViT gains a little at 100 labels, only because the targets are soft. No student is
          better than the CNN. Written before the runs.

Found     Almost nothing is gained, although the CNN is much better. At 100 labels the CNN is 6.09 points above the ViT (95.78%
          against 89.69%), and no teacher brings a gain that eight seeds could show. At 1,000 labels the CNN is 4.66 points
          above the ViT (98.31%). There another ViT as teacher is better by 0.58 points [0.39, 0.77]; the CNN brings 0.64 points
          with all its outputs, 0.40 with its predicted class and 0.53 through the token, all inconclusive after the correction
          for 8 comparisons. This is an eighth of the gap, not half. A likely reason: the teacher labels only images for which
          the student already has labels.

Limits    Nothing was chosen here: the weight and temperature of the distillation are DeiT's, and the ViT and its training are
          those of the recipe `hyperparameters`, which takes its learning rate from `spt_lsa`, where it was chosen on test
          images. The runs are short (800 steps), with one learning rate for all arms and 8 seeds. Only one ViT and one CNN were
          tried.
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
