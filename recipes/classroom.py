"""What does the softmax before the cross-entropy cost the ViT that courses write, and what do larger models do in few steps?

Paper   Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929. LeCun et al. 1998 (LeNet-5).
Data    MNIST: 59,000 labelled digits (1,000 are held back, 100 in the second part), 10,000 test images.
Cost    60 runs, 12 of them only with weights at hand; 60 minutes on two CPU cores that had other work beside.
Expect  Without the softmax the exercise is better by one to three points: with it the loss cannot fall below 1.46, yet the
        largest logit still wins. LeNet-5 beats both by more than that, in less time. In 100 steps ViT-S is behind the model
        of width 512, both are far ahead of the exercise, which has hardly started, and far behind LeNet-5.
        Written before the runs.
Came    The softmax costs more than expected, 8.6 points, and scatters three times as far over the seeds (65 to 81): with it the
        gradient of a wrong answer that is sure is next to nothing, and a run that begins badly stays there. LeNet-5 is above
        both by 14 points and more, as expected, with 31 times the parameters, 3 times the products and less time. In 100
        steps ViT-S is behind the model of width 512, the exercise has hardly started (28), and LeNet-5 is ahead of all; but
        not far: the model of width 512 is a point and a half behind it, at 500 times the products.
Chosen  Of the exercise nothing but its length: 5 of the usual 20 epochs, as 20 with eight seeds would take hours. The rate of
        the larger models, for both alike, and that of LeNet-5 are common ones and were not tuned.

The exercise is a 7 x 7 grid of patches, width 8, 2 blocks, 2 heads, fixed sines, Adam at a constant 0.005, batches of 128, no
augmentation; the baseline has the softmax, as it is usually written. The second part gives every model the same 3,200 images,
each seen once, with six seeds: the larger models make 20 to 40 of them a second on one core, so the table's columns of
budgets belong to the verdicts. There they have patches of 7 pixels, a third of the tokens; the ReLU MLP of the one is 1,024
wide.
"""

from functools import partial

from smallvit import Block, LeNet, PatchEmbed, Run, SinCos1d, Supervised, ViT, ablate, imagenet_vit_s, mnist

EPOCH = 461  # steps of 128 in 59,000 images

exercise = Run(
    data=mnist,
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=4), position=SinCos1d, dim=8, depth=2, heads=2),
    steps=5 * EPOCH,
    batch=128,
    lr=0.005,
    schedule="constant",
    warmup=0.0,
    weight_decay=0.0,
    clip=0.0,
    ema=0.0,
)
lenet = exercise.vary(model=LeNet, lr=1e-3)

few = exercise.vary(steps=100, batch=32, val=100)
large = Run(
    data=mnist, model=partial(ViT, tokenizer=partial(PatchEmbed, patch=7)), val=100, steps=100, batch=32, lr=5e-4, ema=0.0
)  # fmt: skip

RUNS = ablate(
    {
        "exercise, softmax first": exercise.vary(objective=partial(Supervised, softmax_first=True)),
        "exercise": exercise,
        "LeNet-5": lenet,
    },
    references=False,
) + ablate(
    {
        "exercise, 100 steps": few,
        "LeNet-5, 100 steps": few.vary(model=LeNet, lr=1e-3),
        "width 512, 100 steps": large.vary(dim=512, depth=6, heads=4, block=partial(Block, mlp_ratio=2.0, activation="relu")),
        "ViT-S, 100 steps": large.vary(dim=384, depth=12, heads=6),
    },
    seeds=range(6),
    references=False,
    extra_references=imagenet_vit_s(large, patch=7, scratch=False),
)
