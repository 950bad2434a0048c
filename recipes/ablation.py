"""Which technique helps a small ViT that learns from labelled digits alone: every technique, added to one tuned baseline?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: MNIST with 100 and 1,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels, 139,000
          parameters, deformed digits, 2,400 steps of 32 digits. Each arm is the baseline with one change. Two arms train the
          baseline for two and for six times the steps, because some techniques cost as much. Each arm and the small CNN get 8
          trials to choose a learning rate, on 3,000 validation images. Techniques that learn from unlabelled digits are
          compared in the recipes `self_supervised` and `semi_supervised`, and 10 and 10,000 labels are in `few_and_many`. Cost:
          1,056 runs to choose the rates, in five minutes, and 560 runs to compare. Most of them took another five minutes on a
          GPU (NVIDIA H100); the rest took an hour and a half on two CPU cores.

Expected  At each number of labels convolutions before the first block gain most: one to three points. Muon gains about as much
          as twice the steps. Positions inside attention, other attentions, gated MLPs and initializations show no difference.
          The small CNN is better than every arm. Written before the runs.

Found     Five arms are shown to be better than the ViT from scratch (93.25% at 100 labels and 96.95% at 1,000). At 100 labels
          convolutions have the largest mean gains, as expected: three of them before the first block 2.41 points [1.80, 3.01]
          (1.09 [0.83, 1.35] at 1,000), the tokenizer of CCT 2.30 [1.50, 3.10] (1.40 [1.12, 1.69]). At 1,000 labels six times
          the steps have the largest, 1.49 [1.27, 1.70] (1.88 [1.34, 2.41] at 100). No test compares them. At 1,000 labels Muon
          gains 0.72 points [0.55, 0.88] and twice the steps 0.83 [0.64, 1.03], about as much, as expected; at 100 labels both
          are inconclusive. Worse are training without deformations, by 25.99 points [24.28, 27.70] at 100 labels and by 5.94
          [5.40, 6.48] at 1,000, and at 1,000 labels PEG by 0.79 [0.59, 0.99], token merging by 1.03 [0.71, 1.35], and mixup and
          dropout by 0.71 [0.40, 1.02] and 0.76 [0.47, 1.05], both fragile. Positions inside attention, other attentions, SwiGLU
          and the initializations are inconclusive, as expected. The small CNN has a higher mean than every arm, 95.83% at 100
          labels and 98.63% at 1,000; no test was made.

Limits    This recipe was planned with 156 comparisons: also with 10 and 10,000 labels, and with eight arms that learn from
          unlabelled digits. The others were left out because they take too long, and because other recipes have most of them.
          Fewer comparisons make a verdict easier to reach, and this was decided after most of these results were known. With
          the correction for all 156, mixup and dropout would be inconclusive at 1,000 labels, and the other verdicts the same.
          Only the learning rate was tuned, in runs of a quarter of the steps, and a technique has the options of its paper or
          those of an earlier recipe. At 100 labels the baseline and fourteen other arms have the highest rate that was tried,
          so their accuracy may be too low. Nine arms were still improving at 1,000 labels (`smallvit report` prints a warning),
          so a part of their differences may be slower learning. Most runs were trained on a GPU, where the convolutions of
          three arms were computed in TF32, and the last ten arms, partly, on a CPU. So the seconds of different arms cannot be
          compared.
"""

from functools import partial

from smallvit import (
    PEG,
    SAM,
    SSAT,
    Attention,
    Block,
    ConvShortcutBlock,
    ConvStem,
    ConvTokenizer,
    DifferentialAttention,
    Distill,
    DrLoc,
    LocalityAttention,
    MeanTokens,
    Merge,
    Muon,
    Prune,
    RelativeBias,
    Rotary,
    ScheduleFree,
    SequencePool,
    ShiftedPatchEmbed,
    SigmoidAttention,
    SinCos2d,
    SmallCNN,
    TalkingHeadsAttention,
    Tune,
    ablate,
    augment,
    imagenet_vit_s,
    impulse_start,
    mimetic_start,
    mnist_baseline,
)

scratch = mnist_baseline().vary(steps=2_400)
block = partial(Block, mlp_ratio=2.0)

TECHNIQUES = {
    "twice the steps": {"steps": 4_800},
    "six times the steps": {"steps": 14_400},
    "no deformations": {"augment": ()},
    "mixup": {"augment": (*augment.digits(), augment.Mixup())},
    "dropout": {"dropout": 0.1, "block": partial(block, dropout=0.1)},
    "stochastic depth": {"drop_path": 0.1},
    "shifted patches": {"tokenizer": partial(ShiftedPatchEmbed, patch=7)},
    "convolutional stem": {"tokenizer": partial(ConvStem, layers=3)},
    "CCT tokenizer": {"tokenizer": partial(ConvTokenizer, layers=3, hidden=32)},
    "2-D sines": {"position": SinCos2d},
    "PEG": {"position": PEG},
    "relative bias": {"attention": partial(Attention, position=RelativeBias)},
    "rotary positions": {"attention": partial(Attention, position=partial(Rotary, mixed=True))},
    "locality attention": {"attention": LocalityAttention},
    "sigmoid attention": {"attention": SigmoidAttention},
    "differential attention": {"attention": DifferentialAttention},
    "talking heads": {"attention": TalkingHeadsAttention},
    "mimetic initialization": {"attention": mimetic_start},
    "impulse initialization": {"attention": impulse_start},
    "depth-wise convolution": {"block": partial(ConvShortcutBlock, mlp_ratio=2.0)},
    "SwiGLU": {"block": partial(block, activation="swiglu")},
    "mean of the tokens": {"pool": MeanTokens},
    "sequence pooling": {"pool": SequencePool},
    "token merging": {"reduction": partial(Merge, r=2)},
    "token pruning": {"reduction": partial(Prune, keep=0.7)},
    "Muon": {"optimizer": Muon},
    "SAM": {"optimizer": partial(SAM, rho=0.05)},
    "schedule-free AdamW": {"optimizer": ScheduleFree, "schedule": "constant", "ema": 0.0},
    "SSAT": {"objective": partial(SSAT, weight=0.5, ratio=0.5)},
    "DrLoc": {"objective": DrLoc},
    "distilled from a CNN": {"objective": Distill, "teacher": scratch.vary(model=SmallCNN)},
}

RUNS = ablate(
    {"scratch": scratch, **{name: scratch.vary(**change) for name, change in TECHNIQUES.items()}},
    labels=[100, 1_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    extra_references=imagenet_vit_s(scratch, patch=7, scratch=False),
)
