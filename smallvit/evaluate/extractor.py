"""The features of a frozen model as a scikit-learn transformer.

This file imports scikit-learn, so `smallvit.evaluate` imports it when it is first needed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from torch import Tensor, nn

from smallvit.data import DataSpec, Images, Preprocess
from smallvit.data.images import Rows

from .hooks import Array, feature_reader, read_batches
from .splits import require_images


class FeatureExtractor(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A scikit-learn transformer that converts images to the features of a trained model, a float32 array of shape (images,
    features). The object can be a step of a scikit-learn pipeline.

    make_pipeline(FeatureExtractor(model, spec=spec), StandardScaler(), LogisticRegression()).fit(images, labels)

    `transform` takes `Images`, or an array or tensor of shape (n, c, h, w) or, for one channel, (n, h, w).

    spec              how an array is normalized. The `DataSpec` of the data that the model was trained on, for uint8 pixels or
                      floats in [0, 1] (with `dtype="float32"` also uint16, and any floats); or "normalized", for floats that
                      are normalized already. It is required for arrays, since wrongly normalized pixels give wrong features
                      without an error. `Images` use their own spec, unless one is given here.
    of, layers, norm  the place where the features are read, as in `features`.
    features          a function `(model, x) -> b d` instead of a place, for any `nn.Module`.
    batch             the number of images in a batch.

    The model is not trained. `fit` only reads the first image, checks that it fits, and remembers the number of features;
    `transform` needs no `fit`. Clones, for example in cross-validation, share the model.

    Raises   ValueError for tables and flattened images, for arrays without `spec`, for pixels that `Preprocess` refuses or with
             another number of channels than the spec, and as `features` does.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        of: str = "head",
        layers: int = 1,
        norm: str = "after",
        batch: int = 1024,
        features: Callable[[nn.Module, Tensor], Tensor] | None = None,
        spec: DataSpec | str | None = None,
    ):
        self.model, self.of, self.layers, self.norm = model, of, layers, norm
        self.batch, self.features, self.spec = batch, features, spec

    def fit(self, X, y=None) -> "FeatureExtractor":
        """Check that the first image of `X` is valid for the model, and store the number of features. Nothing is trained, and
        `y` is ignored. scikit-learn requires this method.
        """
        self._n_features_out = self.read(X, limit=1).shape[1]
        return self

    def transform(self, X) -> Array:
        """Return the features of the images `X`, a float32 array of shape (images, features)."""
        return self.read(X)

    def read(self, X, limit: int | None = None) -> Array:
        """Return the features of the images `X`, a float32 array of shape (images, features). If `limit` is given, only the
        first `limit` images are read. Raise ValueError for invalid options of the extractor.
        """
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"the model is {self.model!r}; expected FeatureExtractor(model) with a torch.nn.Module")
        if not isinstance(self.batch, Integral) or self.batch < 1:
            raise ValueError(f"batch is {self.batch!r}; expected the number of images in a batch, 1 or more")
        if self.features is None:
            reader = feature_reader(self.model, self.of, self.layers, self.norm)
        elif (self.of, self.layers, self.norm) == ("head", 1, "after"):
            reader = partial(self.features, self.model)
        else:
            raise ValueError("got features= together with of, layers or norm; expected a function or a named place, not both")
        images, spec = as_images(X, self.spec)
        stop = len(images) if limit is None else limit
        batches = (images[start : min(start + self.batch, stop)] for start in range(0, stop, self.batch))
        return read_batches(self.model, map(partial(normalize, spec=spec), batches), reader)

    def __repr__(self, **options) -> str:
        """Return the class and the arguments that differ from their defaults, without the layers of the model."""
        defaults = type(self)().get_params()
        changed = {name: value for name, value in self.get_params().items() if value is not defaults[name]}
        words = (f"{k}={type(v).__name__ if isinstance(v, nn.Module | DataSpec) else repr(v)}" for k, v in changed.items())
        return f"FeatureExtractor({', '.join(words)})"

    def __sklearn_clone__(self) -> "FeatureExtractor":
        """Return a new transformer that shares the model, which is never changed."""
        return type(self)(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        """Return True, since `transform` needs no `fit`."""
        return True

    def __sklearn_tags__(self):
        """Return scikit-learn's tags: a transformer of image arrays that needs neither targets nor `fit`."""
        tags = super().__sklearn_tags__()
        tags.requires_fit, tags.no_validation = False, True
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags


def as_images(X: Any, spec: DataSpec | str | None) -> tuple[Tensor | Rows, DataSpec | None]:
    """Return images as one tensor (images, channels, height, width), and the `DataSpec` (a description of the data set) with
    the mean and standard deviation to normalize them. `X` is an `Images` object, an array or a tensor. `spec` is a `DataSpec`,
    None for that of the `Images` object, or "normalized" if `X` is normalized already; then the second result is None. Images
    in a memory-mapped file (`Rows`) are not read.

    Raises ValueError for anything but images, and for another number of channels than the spec has.
    """
    import numpy as np

    if isinstance(X, Images):
        X, spec = X.images, X.spec if spec is None else spec
    if not isinstance(X, np.ndarray | Tensor | Rows) or len(X.shape) not in (3, 4):
        given = f"shape {tuple(X.shape)}" if isinstance(X, np.ndarray | Tensor) else f"a {type(X).__name__}"
        raise ValueError(f"got {given}; expected Images, or an array or tensor n c h w or n h w; reshape flattened images")
    if not (isinstance(spec, DataSpec) or (isinstance(spec, str) and spec == "normalized")):
        raise ValueError(
            f"got pixels and spec={spec!r}; expected the DataSpec of the data that the model was trained on, or 'normalized'"
            " for floats that are normalized already"
        )
    require_images(X)
    if isinstance(X, np.ndarray) and X.dtype.kind not in "biufc":
        raise ValueError(f"got an array of type {X.dtype}; expected pixels as numbers, uint8 or floats: convert it with astype")
    images = torch.from_numpy(np.ascontiguousarray(X)) if isinstance(X, np.ndarray) else X
    images = images[:, None] if len(images.shape) == 3 else images
    if isinstance(spec, str):
        if not images.dtype.is_floating_point:
            raise ValueError(f"got {images.dtype} with spec='normalized'; expected floats, or a DataSpec to normalize them")
        return images, None
    if images.shape[1] != spec.channels:
        raise ValueError(
            f"got images of shape {tuple(images.shape)}; expected n {spec.channels} h w, channels first, as in {spec.name}"
        )
    return images, spec


def normalize(images: Tensor, spec: DataSpec | None) -> Tensor:
    """Return images (images, channels, height, width) of any size as normalized float tensors. `spec` holds the mean and
    standard deviation. If `spec` is None, the images are normalized already.

    Raises ValueError for pixels that `Preprocess` refuses.
    """
    if spec is None:
        return images.float()
    return replace(Preprocess.from_spec(spec), size=(images.shape[2], images.shape[3]))(images)
