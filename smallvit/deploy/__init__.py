"""Trained models in other programs: predictions, ONNX files, the Hugging Face Hub and scikit-learn.

predict.py     Ensemble, load_all: several models together; image files into a table of predictions
onnx.py        export: one file (ONNX or torch.export) that turns the bytes of images into probabilities
resize.py      resizing as PIL does it, as part of such a file
hub.py         share: a folder with the weights and a model card, for other people or for the Hugging Face Hub
classifier.py  SmallViTClassifier: a run as an estimator of scikit-learn
"""

from importlib import import_module
from typing import Any

HOME = {
    "Ensemble": "predict",
    "SmallViTClassifier": "classifier",
    "export": "onnx",
    "load_all": "predict",
    "share": "hub",
}

__all__ = [*HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:  # each name is imported at first use, because its file imports other libraries
    if name not in HOME:
        raise AttributeError(f"smallvit.deploy has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{HOME[name]}"), name)
