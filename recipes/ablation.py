"""Which technique helps a small ViT, with how many labelled digits: every technique, added to one tuned baseline?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: MNIST with 10, 100, 1,000 and 10,000 labelled digits, 10,000 test images, 8 seeds; 16 patches of 7 pixels,
          139,000 parameters, deformed digits, 2,400 steps of 32 digits. Each arm is the baseline with one change. Arms that
          learn from unlabelled digits use all training digits that are not used for validation. DINO, LeJEPA, MAE and
          data2vec are pretrained for 4,000 steps; label spreading learns for as many steps as the baseline from the labels
          that it spreads. Two arms train the baseline for two and for six times the steps, because some techniques cost as
          much. Each arm and the small CNN get 8 trials to choose a learning rate, on 3,000 validation images.

Expected  At 10 and at 100 labels the techniques that use unlabelled digits gain most: label spreading and DINO more than ten
          points at 10 labels, FixMatch two to four at 100. Of the techniques that use the labels alone, convolutions before the
          first block gain most, at every number of labels: one to three points. Muon gains about as much as twice the steps.
          Positions inside attention, other attentions, gated MLPs and initializations show no difference. With 10,000 labels
          no technique but more steps, convolutions and Muon is better than the baseline. The small CNN is better than every
          arm that uses the labels alone. Written before the runs.
"""

from functools import partial

from smallvit import (
    DINO,
    MAE,
    PEG,
    SAM,
    SSAT,
    Attention,
    Block,
    ConvShortcutBlock,
    ConvStem,
    ConvTokenizer,
    Data2Vec,
    DifferentialAttention,
    Distill,
    DrLoc,
    LeJEPA,
    LocalityAttention,
    MeanTokens,
    Merge,
    Muon,
    Prune,
    RelativeBias,
    Rotary,
    ScheduleFree,
    SemiSupervised,
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
    label_spreading,
    linear_probe,
    mimetic_start,
    mnist_baseline,
)

scratch = mnist_baseline().vary(steps=2_400)
block = partial(Block, mlp_ratio=2.0)

# pretraining without labels
without_labels = partial(scratch.vary, unlabelled=True, steps=4_000, batch=64, ema=0.0, evaluators=(linear_probe,))
views = {"augment": augment.digit_crops(local=0), "clip": 0.0}
dino = without_labels(objective=partial(DINO, prototypes=64, momentum=0.97, koleo=0.1), **views)

# labels and unlabelled digits at once
weak = augment.digits(0.3)
semi = partial(SemiSupervised, weak=weak, ratio=4)
mean_teacher = partial(semi, strong=weak, weight=8.0, ramp=0.4, momentum=0.99, threshold=0.0, hard=0.0, loss="squared")
spread = {"unlabelled": True, "pseudo_labels": partial(label_spreading, of="mean")}

TECHNIQUES = {
    "twice the steps": {"steps": 4_800},
    "six times the steps": {"steps": 14_400},
    "no deformations": {"augment": ()},
    "mixup": {"augment": (*augment.digits(), augment.Mixup())},
    "dropout": {"dropout": 0.1, "block": partial(block, dropout=0.1)},
    "stochastic depth": {"drop_path": 0.1},
    "shifted patches": {"tokenizer": partial(ShiftedPatchEmbed, patch=7)},
    "hybrid stem": {"tokenizer": partial(ConvStem, layers=3)},
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
    "taught by a CNN": {"objective": Distill, "teacher": scratch.vary(model=SmallCNN)},
    "DINO": {"init": dino},
    "LeJEPA": {"init": without_labels(objective=LeJEPA, **views)},
    "MAE": {"init": without_labels(objective=partial(MAE, ratio=0.5, normalise=False), augment=())},
    "data2vec": {"init": without_labels(objective=Data2Vec, augment=())},
    "DINO, labels spread": {"init": dino, **spread},
    "pseudo-labels": {"objective": partial(semi, ramp=0.4)},
    "mean teacher": {"objective": mean_teacher},
    "FixMatch": {"objective": partial(semi, strong=augment.strong_digits())},
}

RUNS = ablate(
    {"scratch": scratch, **{name: scratch.vary(**change) for name, change in TECHNIQUES.items()}},
    labels=[10, 100, 1_000, 10_000],
    tune=Tune({"lr": (3e-4, 6e-3)}, trials=8, seeds=4, val=3_000, steps=0.25, common=False),
    extra_references=imagenet_vit_s(scratch, patch=7, scratch=False),
)
