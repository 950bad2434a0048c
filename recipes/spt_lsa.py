"""Do shifted patches and locality attention help when labels are scarce, and which part of them?

Paper     Lee, Lee, Song 2021, arXiv:2112.13492: shifted patch tokenization (SPT) and locality self-attention (LSA).

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps. The paper changes several things at once, so each change has its own arm.
          For SPT: its LayerNorm without the shift, and a plain convolution with the same receptive field (13 pixels around
          patches of 7, whose half is 3), which is compared with SPT. For LSA: the diagonal mask without the learned
          temperature, and the temperature without the mask. The convolutional stem, three convolutions of stride 2, shows what
          a little convolution does for the same number of tokens. Each arm and the small CNN get 8 trials to choose a learning
          rate, on 3,000 validation images. Cost: 320 runs to choose the rates and 384 runs to compare, some two and a half
          hours on two CPU cores that had other work.

Expected  SPT gains accuracy at 100 labels, and the gain is gone at 10,000. A convolution with the same receptive field gives
          most of it. LSA gains little. Written before the runs. With a tuned learning rate for each arm and 2,400 steps instead
          of 1,500, at 100 and 1,000 labels: the convolutional stem stays better, by about a point at 1,000 labels. SPT gains a
          point or less, and is not shown to be better than a convolution with the same receptive field. LSA and its two parts
          show no effect. The small CNN stays above every ViT. Written before those runs.

Found     SPT is better by 1.67 points [0.94, 2.41] at 100 labels, more than the point that was expected, but this verdict is
          fragile; at 1,000 labels 0.22 points [0.03, 0.42] are inconclusive after the correction for 32 comparisons. As
          expected, SPT is not shown to be better than the convolution with the same receptive field: the convolution is 1.21
          points [0.36, 2.07] and 0.25 points [0.02, 0.48] below SPT, both inconclusive. Nor is it shown which part of SPT
          matters: its LayerNorm alone is inconclusive, with 1.25 points [0.18, 2.32] and 0.14 [-0.10, 0.37]. SPT and LSA
          together are better by 1.86 points [1.32, 2.39] at 100 labels and by 0.52 [0.36, 0.68] at 1,000. LSA alone shows no
          effect (0.24 points [-0.01, 0.48] and 0.13 [-0.09, 0.36]), and neither does its mask or its temperature alone, as
          expected. The convolutional stem gains most: it is better by 2.95 points [2.20, 3.70] at 100 labels and by 1.03 [0.82,
          1.25] at 1,000, as expected. The small CNN has the highest mean at both, 95.81% and 98.59%, against 95.79% and 97.98%
          for the convolutional stem. With one learning rate for all arms the verdicts are the same, except that SPT and LSA
          together are inconclusive at 1,000 labels (0.28 points [0.09, 0.47]).

Limits    Only the learning rate was tuned; batch size, width and depth are those of `mnist_baseline()`. Some arms were still
          improving after 2,400 steps (`smallvit report` prints a warning), so their differences may shrink in longer runs.
          There are 8 seeds. 10,000 labels, which the earlier version had, were not run again. Other programs ran beside the
          training, so the seconds cannot be compared between arms. Verdicts are about new seeds and new test images.

Earlier   An earlier version of this recipe trained for 1,500 steps with one learning rate, 0.002, that was chosen on test
          images, with 10,000 labels too. At 100 labels: 91.75% for scratch, and differences of 2.07 points for SPT
          (inconclusive), 2.08 for SPT and LSA (better) and 3.65 for the convolutional stem (better). At 1,000 labels: 0.46 for
          SPT and 0.63 for SPT and LSA (both inconclusive), and 1.69 for the convolutional stem (better). LSA alone had no
          effect. At 10,000 labels only the convolutional stem was better, by 1.72 points. SPT at 100 labels and SPT with LSA at
          1,000, then inconclusive, are now better, because the seeds vary less with tuned rates and longer training."""

from functools import partial

from smallvit import ConvStem, LocalityAttention, PatchEmbed, ShiftedPatchEmbed, Tune, ablate, mnist_baseline

patch = 7
scratch = mnist_baseline().vary(steps=2_400)
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
        "convolutional stem": scratch.vary(tokenizer=partial(ConvStem, layers=3)),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25),
    baseline={"+SPT, convolution instead": "+SPT"},
)
