"""Which parts does the best small ViT need: convolutions, Muon, deformations, long training?

Paper     Hassani et al. 2021 (CCT), arXiv:2104.05704. Jordan et al. 2024 (Muon), kellerjordan.github.io/posts/muon. Shazeer
          2020 (SwiGLU), arXiv:2002.05202.

Setup     Data: MNIST with 1,000 labelled digits, 10,000 test images, 8 seeds; 100 were planned as well. The baseline is the ViT
          of the recipe `records` with half of its steps: the tokenizer of CCT, Muon, 16 tokens, width 64, 4 blocks, 4,800 steps
          of 32 deformed digits. In four arms one part is taken away: patches of 7 pixels in place of the tokenizer, AdamW in
          place of Muon, no deformations, and a quarter of the steps. In one arm SwiGLU is added in place of the plain MLP. Each
          arm and the small CNN get 8 trials to choose a learning rate from 0.0005 to 0.02, on 3,000 validation images. Cost:
          112 runs to choose the rates and 72 runs to compare, in bf16 with eight seeds trained together, some 45 minutes on two
          CPU cores.

Expected  The baseline reaches 95.8% at 100 labels and 98.5% at 1,000. Every part is needed at 1,000 labels: the ViT is worse
          without deformations by two points, without convolutions by 0.7, with a quarter of the steps by 0.6, and with AdamW by
          0.2, which is inconclusive. At 100 labels it is worse without deformations by 12 points and without convolutions by
          two, and the other two are inconclusive. SwiGLU gains less than on a plain ViT, 0.2 points, and is inconclusive. The
          small CNN, which is trained for as long, has the same mean as the baseline. Written before the runs. 10 and 10,000
          labels were added when the results at 1,000 were known. Expected before their runs: 78% at 10 labels, with losses of
          35 points without deformations, of 10 without convolutions and of four with a quarter of the steps; and 99.2% at
          10,000, with losses of 0.6 points without deformations, of 0.4 with a quarter of the steps and of 0.25 without
          convolutions. AdamW and SwiGLU are inconclusive at both. The small CNN reaches 68% at 10 labels and 99.15% at 10,000.

Found     The baseline reaches 98.53%, as expected. Only two parts are shown to be needed, against the expectation of three.
          Without deformations the ViT is worse by 1.36 points [1.07, 1.64], less than the expected two. With a quarter of the
          steps it is worse by 0.25 points [0.08, 0.41], which is fragile (a repetition would show it in fewer than 80 of 100
          cases), and less than half of what was expected. Without convolutions it reaches 98.36%, 0.17 points less [-0.07,
          0.41], inconclusive, and less than expected. With AdamW in place of Muon it reaches 98.44%, 0.09 points less [-0.07,
          0.24], inconclusive as expected, and SwiGLU adds 0.04 points [-0.06, 0.13], inconclusive and less than expected. So no
          loss is shown here without convolutions, or without Muon. Added to a plain ViT with AdamW and half of the steps, each
          of them is better (recipes `inductive_bias` and `optimizers`). The small CNN has the highest mean, 98.68%.

Limits    One number of labels and one length. Each part was taken away alone, never two at once, so nothing says what is left
          without both convolutions and Muon. Only the learning rate was tuned, with trials of a quarter of the steps. Other
          programs ran beside the training, so the seconds cannot be compared between arms. Verdicts are about new seeds and new
          test images.
"""

from functools import partial

from smallvit import AdamW, Block, ConvTokenizer, Muon, PatchEmbed, Tune, ablate, mnist_baseline

plain = mnist_baseline().vary(steps=4_800)
best = plain.vary(tokenizer=partial(ConvTokenizer, layers=3, hidden=32), optimizer=Muon)

RUNS = ablate(
    {
        "all parts": best,
        "without convolutions": best.vary(tokenizer=partial(PatchEmbed, patch=7)),
        "AdamW for Muon": best.vary(optimizer=AdamW),
        "without deformations": best.vary(augment=()),
        "a quarter of the steps": best.vary(steps=1_200),
        "SwiGLU added": best.vary(block=partial(Block, mlp_ratio=2.0, activation="swiglu")),
    },
    labels=[10, 100, 1_000, 10_000],
    tune=Tune({"lr": (5e-4, 2e-2)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
)
