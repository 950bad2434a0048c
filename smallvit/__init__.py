"""smallvit: train Vision Transformers on little data, and measure whether a technique helps.

Public names are imported from their modules at first use. So `import smallvit` takes no time, and a module such as
`smallvit.attention` needs only torch and einops.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

NAMES = {
    "vit": ("Block", "ViT"),
    "random_weights": ("initialize",),
    "tokenizers": ("ConvStem", "ConvTokenizer", "PatchEmbed", "Resized", "ShiftedPatchEmbed"),
    "positions": ("PEG", "Learned", "SinCos1d", "SinCos2d"),
    "attention_positions": ("Places", "RelativeBias", "Rotary"),
    "attention": ("Attention", "LocalityAttention", "AttentionOutput"),
    "attention_variants": ("DifferentialAttention", "SigmoidAttention", "TalkingHeadsAttention"),
    "attention_starts": ("impulse_start", "mimetic_start"),
    "block_variants": ("ConvShortcutBlock", "PEGBlock"),
    "reduction": ("LearnedPrune", "LearnedThresholds", "Merge", "LayerContext", "Prune"),
    "pooling": ("ClassToken", "DistilledTokens", "MeanTokens", "Projected", "SequencePool"),
    "ensemble": ("DeepEnsemble",),
    "references": ("LeNet", "Pixels", "ResNet", "SmallCNN"),
    "data": (
        "DataSpec", "Dataset", "Fold", "Images", "Preprocess", "Subset", "arrays", "at_size", "cifar10", "digits",
        "emnist", "fashion_mnist", "folder", "kmnist", "mnist", "qmnist", "svhn", "textured_shapes",
    ),
    "objectives": (
        "DINO", "MAE", "SSAT", "Data2Vec", "Distill", "DrLoc", "EachMember", "LeJEPA", "LearnThresholds", "LearnToPrune",
        "Objective", "SemiSupervised", "Supervised",
    ),
    "optimizers": ("AdamW", "Muon", "Optimizer", "SAM", "ScheduleFree"),
    "evaluate": (
        "FeatureExtractor", "Splits", "accuracy", "auc", "augmented_accuracy", "balanced_accuracy", "calibration", "cost",
        "evaluator", "features", "few_shot", "knn", "linear_probe", "log_loss", "macro_f1",
    ),
    "explain": (
        "attention_figure", "attention_maps", "confusion_figure", "feature_view", "gallery", "patch_attention",
        "position_similarity", "position_table", "reconstruction_figure", "rollout", "summary", "token_map", "token_shares",
    ),
    "pretrained": ("Weights", "apply", "from_timm", "like", "timm_attention", "timm_tokenizer", "to_timm"),
    "pseudo_labels": ("label_spreading",),
    "baselines": ("mnist_baseline",),
    "reference_runs": ("imagenet_vit_s",),
    "ablation": ("ArmRun", "ablate"),
    "ranges": ("Tune",),
    "run": ("Run", "describe", "difference", "fingerprint", "rebuild"),
    "record": ("read_records",),
    "recipe": ("carry_over", "load_recipe"),
    "train": ("TrainedModel", "fit", "load"),
    "numerics": ("Numerics", "native_kernel"),
    "report": ("html", "markdown", "records"),
    "verdicts": ("compare",),
    "deploy": ("Ensemble", "SmallViTClassifier", "export", "load_all", "share"),
}  # fmt: skip

# `augment` is a module that is used by its name: augment.digits(), augment.photos()
HOME = {name: module for module, names in NAMES.items() for name in names}

__all__ = [*HOME, "augment"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "augment":
        return import_module("smallvit.augment")
    if name not in HOME:
        raise AttributeError(f"smallvit has no {name!r}; it offers {', '.join(sorted(__all__))}")
    return getattr(import_module(f"smallvit.{HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
