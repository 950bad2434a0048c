"""Which built-in knowledge of images helps a small ViT with few labels: convolutions, shifted patches, or a better start?

Paper     Xiao et al. 2021 (convolutional stem), arXiv:2106.14881. Hassani et al. 2021 (CCT), arXiv:2104.05704. Lee, Lee, Song
          2021 (shifted patches, locality attention), arXiv:2112.13492. Zhang et al. 2024 (depth-wise convolution beside each
          block), arXiv:2407.19394. Trockman, Kolter 2023 (mimetic initialization), arXiv:2305.09828. Zheng et al. 2025 (impulse
          initialization), arXiv:2505.19985.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; deformed digits, 2,400 steps. All arms
          have 16 tokens, width 64 and 4 blocks. Two arms have a tokenizer with convolutions: the convolutional stem of the
          recipe `spt_lsa`, and the tokenizer of CCT with a hidden width of 32, because with 64 the model costs five times as
          much as the plain ViT. One arm has shifted patches, one has locality attention, and two have another initialization of
          the attention weights. One arm has a depth-wise convolution beside each block. The last one adds this convolution to
          the convolutional stem, and is compared with the convolutional stem. Each arm and the small CNN get 8 trials to choose
          a learning rate, on 3,000 validation images. Cost: 320 runs to choose the rates and 192 runs to compare, some two
          hours on two CPU cores.

Expected  The convolutional stem is better by one point at 1,000 labels and by three at 100. The tokenizer of CCT brings as
          much. The depth-wise convolution brings half of that, and added to the convolutional stem less than half a point.
          Shifted patches bring one to two points at 100 labels and a quarter of a point at 1,000. Locality attention and both
          starts of attention show no effect. Written before the runs.

Found     Convolutions in front of the blocks have the highest means. The convolutional stem is better by 3.01 points [2.37,
          3.65] at 100 labels and by 1.07 [0.77, 1.37] at 1,000, as expected. The tokenizer of CCT is better by 2.91 points
          [1.90, 3.92] and by 1.52 [1.24, 1.80], more than expected at 1,000 labels, for more than twice the multiply-adds; it
          was not compared with the convolutional stem. Shifted patches are better by 1.91 points [1.20, 2.62] at 100 labels,
          and inconclusive at 1,000 with 0.33 points [0.12, 0.54], as expected. The depth-wise convolution, 0.47 points [0.03,
          0.91] and 0.32 [0.13, 0.51], is inconclusive after the correction for 16 comparisons, and below the expected gain at
          both numbers of labels; added to the convolutional stem, 0.12 [-0.17, 0.41] and 0.10 [-0.07, 0.26]. No effect was
          expected of the last three. Locality attention is inconclusive (0.46 points [-0.11, 1.03] and 0.26 [0.05, 0.47]), and
          so are the two initializations of attention: mimetic 0.18 [-0.33, 0.69] and -0.03 [-0.35, 0.28], impulse 0.09 [-0.64,
          0.83] and -0.33 [-0.65, -0.01]. At 1,000 labels the intervals of locality attention and of impulse initialization
          leave out 0, before the correction. The small CNN has the highest mean, 95.86% and 98.60%. The best ViTs reach 95.83%
          with the convolutional stem and the depth-wise convolution at 100 labels, and 98.38% with the tokenizer of CCT at
          1,000.

Limits    Only the learning rate was tuned, with trials of 600 steps. The plain ViT at 1,000 labels was still improving after
          2,400 steps, so differences from it may shrink in longer runs. Both starts of attention were made for larger images,
          more patches and deeper models. Other programs ran beside the training, so the seconds cannot be compared between
          arms. Verdicts are about new seeds and new test images.
"""

from functools import partial

from smallvit import (
    ConvShortcutBlock,
    ConvStem,
    ConvTokenizer,
    LocalityAttention,
    ShiftedPatchEmbed,
    Tune,
    ablate,
    impulse_start,
    mimetic_start,
    mnist_baseline,
)

scratch = mnist_baseline().vary(steps=2_400)
convolutional = scratch.vary(tokenizer=partial(ConvStem, layers=3))
depthwise = partial(ConvShortcutBlock, mlp_ratio=2.0)

RUNS = ablate(
    {
        "scratch": scratch,
        "convolutional stem": convolutional,
        "CCT tokenizer": scratch.vary(tokenizer=partial(ConvTokenizer, layers=3, hidden=32)),
        "depth-wise convolution": scratch.vary(block=depthwise),
        "convolutional stem, depth-wise convolution": convolutional.vary(block=depthwise),
        "+SPT": scratch.vary(tokenizer=partial(ShiftedPatchEmbed, patch=7)),
        "+LSA": scratch.vary(attention=LocalityAttention),
        "mimetic start": scratch.vary(attention=mimetic_start),
        "impulse start": scratch.vary(attention=impulse_start),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={"convolutional stem, depth-wise convolution": "convolutional stem"},
)
