"""Do other kinds of attention, gated MLPs, registers or conditional positions help a small ViT with few labels?

Paper     Ramapuram et al. 2024 (sigmoid attention), arXiv:2409.04431. Ye et al. 2024 (differential attention),
          arXiv:2410.05258. Shazeer et al. 2020 (talking heads), arXiv:2003.02436. Shazeer 2020 (SwiGLU, GEGLU),
          arXiv:2002.05202. Darcet et al. 2023 (registers), arXiv:2309.16588. Chu et al. 2021 (PEG), arXiv:2102.10882.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 digits. Each arm is the baseline with one change. The hidden width of
          the gated MLPs gives about as many parameters as the baseline has. Four registers are added to the 17 tokens. PEG
          replaces the learned positions. Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000 validation
          images.

Expected  No arm is better or worse than the baseline by more than half a point, with two exceptions: PEG is worse by one to two
          points at 100 labels, because a class token that attends to patches without positions has to learn more, and talking
          heads are better by up to half a point at 1,000 labels. Written before the runs.
"""

from functools import partial

from smallvit import (
    PEG,
    Block,
    DifferentialAttention,
    SigmoidAttention,
    TalkingHeadsAttention,
    Tune,
    ablate,
    mnist_baseline,
)

scratch = mnist_baseline().vary(steps=2_400)
block = partial(Block, mlp_ratio=2.0)

RUNS = ablate(
    {
        "scratch": scratch,
        "sigmoid attention": scratch.vary(attention=SigmoidAttention),
        "differential attention": scratch.vary(attention=DifferentialAttention),
        "talking heads": scratch.vary(attention=TalkingHeadsAttention),
        "SwiGLU": scratch.vary(block=partial(block, activation="swiglu")),
        "GEGLU": scratch.vary(block=partial(block, activation="geglu")),
        "four registers": scratch.vary(registers=4),
        "PEG": scratch.vary(position=PEG),
    },
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
)
