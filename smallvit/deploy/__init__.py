"""Trained models in other programs: predictions, ONNX files, the Hugging Face Hub and scikit-learn."""

from typing import Any

__all__ = ["SmallViTClassifier"]


def __getattr__(name: str) -> Any:
    if name == "SmallViTClassifier":  # imported at first use, because it imports scikit-learn
        from .classifier import SmallViTClassifier

        return SmallViTClassifier
    raise AttributeError(f"smallvit.deploy has no {name!r}")
