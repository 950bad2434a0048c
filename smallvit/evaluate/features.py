"""The features of a frozen model as a transformer of scikit-learn.

It keeps scikit-learn's protocol without inheriting from it, so that nobody waits for scikit-learn who does not use it.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.data import DataSpec, Images

from .hooks import gathered, tap
from .splits import some


class FeatureExtractor:
    """The features of a frozen model as a scikit-learn transformer: images in, n d float32 out, alone or in a `Pipeline`.

    make_pipeline(FeatureExtractor(model, spec=spec), StandardScaler(), LogisticRegression()).fit(images, labels)

    `transform` takes `Images`, or an array or tensor n c h w or n h w (one channel). A model that is fed other pixels than it
    was trained on gives features that only look right, so an array needs a `spec`: the `DataSpec` of the data that the model
    was trained on, for uint8 or floats in [0, 1]; or "normalised", for floats that are already what the model sees. `Images`
    have their own, unless `spec` is given.

    `of`, `layers` and `norm` are those of `features`; `features` is a function `(model, x) -> b d` instead, for any
    `nn.Module`. The model learns nothing: `fit` looks at the first image to see that it fits and how wide the features are,
    and `transform` needs no `fit`. Clones, as cross-validation makes them, share the model.

    Raises   ValueError for tables and flattened images, pixels without `spec`, outside [0, 1] or with other channels than
             expected, and as `features` does.
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
        """Learn nothing; see that the first image fits, and how wide its features are."""
        self.n_features_out_ = self.read(X, only=1).shape[1]
        return self

    def transform(self, X) -> "numpy.ndarray":  # noqa: F821
        """The features of these images, n d, float32."""
        return self.read(X)

    def fit_transform(self, X, y=None) -> "numpy.ndarray":  # noqa: F821
        """The features of these images, n d, float32."""
        return self.fit(X).transform(X)

    def read(self, X, only: int | None = None) -> "numpy.ndarray":  # noqa: F821
        """The features of all images, or of the first `only`."""
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"the model is {self.model!r}; expected FeatureExtractor(model) with a torch.nn.Module")
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch is {self.batch!r}; expected how many images at a time, 1 or more")
        if self.features is not None and (self.of, self.layers, self.norm) != ("head", 1, "after"):
            raise ValueError("got features= beside of, layers or norm; expected a function, or a name, of the features")
        named = self.features is None
        tapped = tap(self.model, self.of, self.layers, self.norm) if named else partial(self.features, self.model)
        images, spec = understood(X, self.spec)
        return gathered(self.model, map(partial(normalised, spec=spec), images[:only].split(self.batch)), tapped)

    def get_feature_names_out(self, input_features=None) -> "numpy.ndarray":  # noqa: F821
        """`featureextractor0`, ...: one name for each column, after `fit`."""
        import numpy as np

        if not hasattr(self, "n_features_out_"):
            raise ValueError("how wide the features are is not known yet; call fit(images) first")
        return np.array([f"featureextractor{i}" for i in range(self.n_features_out_)], dtype=object)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """What it was made with."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params) -> "FeatureExtractor":
        """Change some of what it was made with. Raises ValueError for a name that is not there."""
        unknown = sorted(params.keys() - self.get_params().keys())
        if unknown:
            raise ValueError(f"FeatureExtractor has no {', '.join(unknown)}; expected some of {', '.join(self.get_params())}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        chosen = {name: value for name, value in self.get_params().items() if value is not defaults[name]}
        shown = (f"{k}={type(v).__name__ if isinstance(v, nn.Module | DataSpec) else repr(v)}" for k, v in chosen.items())
        return f"FeatureExtractor({', '.join(shown)})"

    def __sklearn_clone__(self) -> "FeatureExtractor":
        return type(self)(**self.get_params())  # not a copy of the model, which nothing here changes

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self):
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(two_d_array=False, three_d_array=True),
            requires_fit=False,
            no_validation=True,
        )


def understood(X, spec: DataSpec | str | None) -> tuple[Tensor, DataSpec | None]:
    """The images n c h w, uint8 or floating, and how to normalise them; None if they are."""
    import numpy as np

    if isinstance(X, Images):
        X, spec = X.images, X.spec if spec is None else spec
    if not isinstance(X, np.ndarray | Tensor) or X.ndim not in (3, 4):
        got = f"shape {tuple(X.shape)}" if isinstance(X, np.ndarray | Tensor) else f"a {type(X).__name__}"
        raise ValueError(f"got {got}; expected Images, or an array or tensor n c h w or n h w: reshape flattened images first")
    if not (isinstance(spec, DataSpec) or (isinstance(spec, str) and spec == "normalised")):
        raise ValueError(
            f"got pixels and spec={spec!r}; expected the DataSpec of the data that the model was trained on, or 'normalised'"
            " for floats that are already what the model sees"
        )
    some(X)
    images = X if isinstance(X, Tensor) else torch.from_numpy(np.ascontiguousarray(X))
    images = images[:, None] if images.ndim == 3 else images
    if isinstance(spec, str):
        if not images.is_floating_point():
            raise ValueError(f"got {images.dtype} with spec='normalised'; expected floats, or a DataSpec to normalise them")
        return images, None
    if images.shape[1] != spec.channels:
        raise ValueError(
            f"got images of shape {tuple(images.shape)}; expected n {spec.channels} h w, channels first, as in {spec.name}"
        )
    fits = images.dtype == torch.uint8 or (images.is_floating_point() and bool(((images >= 0) & (images <= 1)).all()))
    if not fits:
        lowest, highest = images.min().item(), images.max().item()
        raise ValueError(f"got {images.dtype} from {lowest} to {highest}; expected uint8, or floats in [0, 1]")
    return images, spec


def normalised(images: Tensor, spec: DataSpec | None) -> Tensor:
    """What the model sees."""
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    return pixels if spec is None else spec.normalise(pixels)
