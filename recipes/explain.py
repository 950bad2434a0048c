"""What do learned positions look like, and are they worth learning: against fixed sines, a smaller start, and none at all?

Paper   Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, figure 7 and appendix D.4. Vaswani et al. 2017, arXiv:1706.03762
        (sines).
Data    MNIST: 1,000 labelled digits, 10,000 test images; 49 patches of 4 pixels, so that the maps are 7 x 7.
Cost    64 runs, some 25 minutes on two CPU cores.
Expect  2-D sines are best. Positions that start from 0.02 stay near no positions at all, many points behind those that start
        from N(0, 1): so few steps do not grow them. 1-D sines come between the two, since they tell the row badly. Learned
        positions show little of the grid after so few steps, and neighbours are hardly more alike than others.
        Written before the runs.
Came    Otherwise. Learned positions that start from N(0, 1) are best (86.8), 1-D sines 3.6 points behind, positions from 0.02
        11.7, 2-D sines last but for none at all, 17.5 behind; without positions 41.7. After so few steps it counts how far
        apart places are told: those more than three patches apart have a mean cosine of 0.0 from N(0, 1), 0.6 with 1-D sines
        and 0.8 with 2-D ones, most of whose waves are so long that they hardly move over 7 places (with `temperature=10` in
        place of 10,000 one seed came from 76 to 84 on validation images). Of the grid there is nothing to see in positions
        from N(0, 1), neighbours included (0.0); those from 0.02 are short still (0.3), but neighbours are alike (0.2).
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
    extra_references=imagenet_vit_s(learned, scratch=False),
)
