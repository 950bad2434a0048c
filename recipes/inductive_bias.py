"""Which built-in knowledge of images helps a small ViT with few labels: convolutions, shifted patches, or a better start?

Paper     Xiao et al. 2021 (convolutional stem), arXiv:2106.14881. Hassani et al. 2021 (CCT), arXiv:2104.05704. Lee, Lee, Song
          2021 (shifted patches, locality attention), arXiv:2112.13492. Zhang et al. 2024 (depth-wise convolution beside each
          block), arXiv:2407.19394. Trockman, Kolter 2023 (mimetic initialization), arXiv:2305.09828. Zheng et al. 2025 (impulse
          initialization), arXiv:2505.19985.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; deformed digits, 2,400 steps. All arms
          have 16 tokens, width 64 and 4 blocks. Arms: two tokenizers with convolutions (the hybrid stem of the recipe
          `spt_lsa`, and the tokenizer of CCT with a hidden width of 32, because 64 costs nine times as much as the ViT),
          shifted patches, locality attention, two other starts of the weights of attention, a depth-wise convolution
          beside each block, and this convolution added to the hybrid stem, which is compared with the hybrid stem. Each arm and
          the small CNN get 8 trials to choose a learning rate, on 3,000 validation images.

Expected  The hybrid stem is better by one point at 1,000 labels and by three at 100. The tokenizer of CCT brings as much. The
          depth-wise convolution brings half of that, and added to the hybrid stem less than half a point. Shifted patches bring
          one to two points at 100 labels and a quarter of a point at 1,000. Locality attention and both starts of attention
          show no effect. Written before the runs.
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
hybrid = scratch.vary(tokenizer=partial(ConvStem, layers=3))
depthwise = partial(ConvShortcutBlock, mlp_ratio=2.0)

RUNS = ablate(
    {
        "scratch": scratch,
        "hybrid stem": hybrid,
        "CCT tokenizer": scratch.vary(tokenizer=partial(ConvTokenizer, layers=3, hidden=32)),
        "depth-wise convolution": scratch.vary(block=depthwise),
        "hybrid stem, depth-wise convolution": hybrid.vary(block=depthwise),
        "+SPT": scratch.vary(tokenizer=partial(ShiftedPatchEmbed, patch=7)),
        "+LSA": scratch.vary(attention=LocalityAttention),
        "mimetic start": scratch.vary(attention=mimetic_start),
        "impulse start": scratch.vary(attention=impulse_start),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    baseline={"hybrid stem, depth-wise convolution": "hybrid stem"},
)
