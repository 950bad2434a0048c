"""What do learned positions look like, and are they worth learning: against fixed sines, a smaller start, and none at all?

Paper   Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, figure 7 and appendix D.4. Vaswani et al. 2017, arXiv:1706.03762
        (sines).
Data    MNIST: 1,000 labelled digits, 10,000 test images; 49 patches of 4 pixels, so that the maps are 7 x 7.
Cost    64 runs; not run yet, some 20 minutes on two CPU cores by the time of a few steps.
Expect  2-D sines are best. Positions that start from 0.02 stay near no positions at all, many points behind those that start
        from N(0, 1): so few steps do not grow them. 1-D sines come between the two, since they tell the row badly. Learned
        positions show little of the grid after so few steps, and neighbours are hardly more alike than others.
        Written before the runs; the report says what came.
Chosen  Nothing here: batch and rate are those of the recipe `spt_lsa`, with fewer steps. Two arms were tried once at another
        seed, on validation images, after the expectation was written, and nothing was changed.

The pictures, once the runs are there, of the folder of any of them:

    from smallvit import load, position_similarity, position_table
    run, model = load("runs/explain/...")
    position_similarity(model).savefig("similarity.png")     # a 7 x 7 grid of maps: which positions are alike
    position_table(100, 16).savefig("sines.png")             # the sines themselves: place by channel; also (1_000, 160)

`smallvit shapes explain` says what comes out of each step of this model; `smallvit shapes vit_base_patch16_224` of the
paper's.
"""

from functools import partial

from smallvit import Block, Learned, PatchEmbed, Run, SinCos1d, SinCos2d, ViT, ablate, augment, imagenet_vit_s, mnist

learned = Run(
    data=mnist,
    model=partial(ViT, tokenizer=partial(PatchEmbed, patch=4), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=4),
    augment=augment.digits(),
    steps=600,
    batch=32,
    lr=2e-3,
)

RUNS = ablate(
    {
        "learned": learned,
        "learned from 0.02": learned.vary(position=partial(Learned, std=0.02)),
        "2-D sines": learned.vary(position=SinCos2d),
        "1-D sines": learned.vary(position=SinCos1d),
        "no positions": learned.vary(position=None),
    },
    labels=[1_000],
    yardsticks=imagenet_vit_s(learned, scratch=False),
)
