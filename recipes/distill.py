"""Can a CNN teach a ViT when labels are few: with all its outputs, with its predicted class, or through an extra token?

Paper     Touvron et al. 2021 (DeiT), arXiv:2012.12877. Hinton et al. 2015, arXiv:1503.02531.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 digits. Arms: a ViT from scratch; the same ViT, taught by another
          ViT, by a small CNN, by the class that the CNN predicts (hard labels), and by this class through a distillation
          token. Every teacher has the same labels and the same number of steps as its student and no others; its cost is
          counted in the student's costs. Teacher and student see the same augmented images. "Twice the steps" is training
          from scratch for the steps of teacher and student together. Each arm and the small CNN get 8 trials to choose a
          learning rate, on 3,000 validation images; the teachers have the rate 0.002.

Expected  At both numbers of labels the soft teacher closes half of the gap between ViT and CNN, the hard teacher (predicted
          class) less. The token adds nothing: it is made for two losses that disagree, and these two agree on almost every
          image. A ViT taught by another ViT gains a little at 100 labels, only because the targets are soft. No student is
          better than the CNN. Written before the runs. With a tuned learning rate for each arm and 2,400 steps instead of 800:
          at 100 labels no teacher is shown to help. At 1,000 labels the CNN's outputs and another ViT help by half a point,
          both by the same amount, and hard labels by less. Twice the steps help more than any teacher, by one point at 100
          labels and by more than half a point at 1,000. Written before those runs.
"""

from functools import partial

from smallvit import Distill, DistilledTokens, SmallCNN, Tune, ablate, imagenet_vit_s, mnist_baseline

scratch = mnist_baseline().vary(steps=2_400)
cnn = scratch.vary(model=SmallCNN)
soft, hard = Distill, partial(Distill, kind="hard")

RUNS = ablate(
    {
        "scratch": scratch,
        "twice the steps": scratch.vary(steps=2 * scratch.steps),
        "taught by a ViT": scratch.vary(objective=soft, teacher=scratch),
        "taught by a CNN": scratch.vary(objective=soft, teacher=cnn),
        "taught by a CNN, hard labels": scratch.vary(objective=hard, teacher=cnn),
        "taught by a CNN, hard labels, token": scratch.vary(
            objective=partial(hard, token=True), teacher=cnn, pool=DistilledTokens
        ),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    extra_references=imagenet_vit_s(scratch, patch=7, scratch=False),
)
