"""Data sets: training, validation and test images, the labelled subsets that a seed draws from them, and folds.

Shapes: n images in a data set, c channels, h x w pixels, k classes.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smallvit.rng import shuffled

from .folds import Fold, balanced_split, draw_folds, first_folds, held_out_part, random_order
from .images import DataSpec, HeldOut, Images, joined, with_moments
from .notes import note
from .repeats import same_pixels, warn_of_repeats

DTYPES = {"uint8": "uint8", "float": "float32"}  # of the stored images, for each value of the option `pixels`


@dataclass(frozen=True, eq=False)
class Subset:
    """The images of one training run: labelled training images and validation images. The positions of these images in the data
    set are stored too.

    `index` are the indices of `train` in the training images of the data set. `val_index` are the indices of `val` in the
    validation images of the data set or, if it has none, in its training images.
    """

    train: Images
    val: Images
    index: Tensor
    val_index: Tensor

    @property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the indices of the labelled images, as a hexadecimal string. Subsets with the same
        labelled images in the same order have the same hash.

        The attribute `index` is hashed as little-endian int64.
        """
        return hashlib.sha256(self.index.numpy().astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: a description, training images, held-out test images and, if there are any, validation images.

    folds         number of folds if all images are in `train` and `at_seed` takes the test images of a run from them; else 0
    pool_index    indices in `train` of the images that are divided into folds (the pool); None: all
    groups        group number of each training image, or None; images of one group are never on different sides of a split
    test_groups   group number of each test image, or None
    fold          which images of the data set are tested, if this is one fold of another data set; otherwise None
    skipped       number of image files that could not be read and were left out
    whole         the data set of which this is one fold, or None
    unlabelled    more training images, whose class is not known, for training without labels. Their labels are all 0 and are
                  never used. None: there are none
    """

    spec: DataSpec
    train: Images
    test: HeldOut
    val: Images | None = None
    folds: int = 0
    pool_index: Tensor | None = None
    groups: Tensor | None = None
    test_groups: Tensor | None = None
    fold: Fold | None = None
    skipped: int = 0
    whole: "Dataset | None" = None
    unlabelled: Images | None = None

    def __post_init__(self):
        name, advice = self.spec.name, "to leave out training images, use data.keep(chosen)"
        for groups, count, part in ((self.groups, len(self.train), "training"), (self.test_groups, self.test.count, "test")):
            if groups is not None and len(groups) != count:
                raise ValueError(f"{name} has groups of {len(groups)} {part} images, and {count} of these images; {advice}")
        last = -1 if self.pool_index is None or not len(self.pool_index) else int(self.pool_index.max())
        if last >= len(self.train):
            raise ValueError(f"{name} divides training image {last} into folds, and there are {len(self.train)}; {advice}")

    def keep(self, chosen: Tensor) -> "Dataset":
        """Return the data set with some of the training images only, with their groups. With folds, these are the images that
        are divided. `chosen` is a boolean tensor with a value for each of the images in `train`, True for those that stay.
        Without folds, pixels are still normalized by all training images.

        Raises    ValueError for another tensor, and for one fold of a data set.
        """
        if self.whole is not None:
            raise ValueError(f"{self.spec.name} is one fold of a data set; leave out images of the whole one, before at_seed")
        if chosen.dtype != torch.bool or chosen.shape != (len(self.train),):
            raise ValueError(
                f"chosen is {chosen.dtype} of shape {tuple(chosen.shape)}; expected torch.bool of shape ({len(self.train)},), "
                "a value for each training image"
            )
        pool = None
        if self.pool_index is not None:
            pool = (chosen.cumsum(0) - 1)[self.pool_index[chosen[self.pool_index]]]
        groups = None if self.groups is None else self.groups[chosen]
        return replace(self, train=self.train.take(chosen.nonzero()[:, 0]), groups=groups, pool_index=pool)

    @functools.cached_property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the pixels and labels of all images (training, test and validation), as a hexadecimal
        string.

        The hash depends only on the data, not on where the files are. All folds of a data set have the same hash, that of all
        its images. Groups are part of the data: another division of the same images into groups has another hash, and so
        has another part of the images that is divided into folds. So are images without labels.
        """
        if self.whole is not None:
            return self.whole.sha256
        parts = [self.train.sha256, self.test.sha256] + ([] if self.val is None else [self.val.sha256])
        parts += [hash_of_groups(groups) for groups in (self.groups, self.test_groups) if groups is not None]
        parts += [] if self.pool_index is None else [self.pool.sha256]
        parts += [] if self.unlabelled is None else ["unlabelled", self.unlabelled.sha256]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @functools.cached_property
    def pool(self) -> Images:
        """The images that are divided into folds: each is a test image once in a pass."""
        return self.train if self.pool_index is None else self.train.take(self.pool_index)

    def check_test_images(self):
        """Raise ValueError if there are no test images on which a run could be scored."""
        if not self.folds and not self.test.count:
            raise ValueError(
                f"{self.spec.name} has no test images (test=0.0), so no run can be scored on them; set test=0.2 or folds=5, or "
                "train without test images: smallvit.fit(run, folder, validation_only=True)"
            )

    @property
    def content(self) -> tuple[str, tuple[str, ...]]:
        """The hash of the images and labels, and the names of the classes."""
        return self.sha256, self.spec.classes

    @functools.cached_property
    def repeats(self) -> int:
        """Return the number of test images that also occur, with exactly the same pixels, among the training or validation
        images.
        """
        return self.test.among(self.train, *([] if self.val is None else [self.val]))

    def at_seed(self, seed: int) -> "Dataset":
        """Return the data set of one run, as a `Dataset` with training and test images. Without folds, this is the data set
        itself. With k folds, the run with the random seed `seed` tests fold `seed % k` of the division number `seed // k`.

        The k seeds of one division (a pass) test every image of the pool once. The pool are all images, or the part that
        `pool_index` names; then images outside of it are training images of all runs. The divisions are drawn by scikit-learn's
        StratifiedGroupKFold (StratifiedKFold without groups), with the number of the division as random state. Pixels are
        normalized by the training images of the fold.

        Raises    ValueError if the images of some division cannot be divided so that each fold has images of all classes.
        """
        if not self.folds:
            return self
        number, fold = divmod(seed, self.folds)
        if number not in self._divisions:
            divided = slice(None) if self.pool_index is None else self.pool_index
            groups = None if self.groups is None else self.groups[divided]
            self._divisions[number] = draw_folds(self.pool.labels, groups, self.folds, number, len(self.spec.classes))
        index = self._divisions[number][fold]
        test_index = index if self.pool_index is None else self.pool_index[index]
        is_test = torch.zeros(len(self.train), dtype=torch.bool)
        is_test[test_index] = True
        train_index = (~is_test).nonzero()[:, 0]
        train = self.train.take(train_index)
        if seed not in self._specs:
            self._specs[seed] = with_moments(self.spec, train)
        spec = self._specs[seed]
        groups, test_groups = (None, None) if self.groups is None else (self.groups[train_index], self.groups[test_index])
        test = HeldOut(self.train.take(test_index).with_spec(spec), self.pool)
        return replace(
            self, spec=spec, train=train.with_spec(spec), test=test, folds=0, pool_index=None, groups=groups,
            test_groups=test_groups, fold=Fold(self.folds, len(self.pool), index, test_index), whole=self,
            unlabelled=None if self.unlabelled is None else self.unlabelled.with_spec(spec),
        )  # fmt: skip

    @functools.cached_property
    def _divisions(self) -> dict[int, list[Tensor]]:
        """The divisions into folds that were drawn so far: a dict from the number of a division to the indices of the images of
        each fold.
        """
        return {}

    @functools.cached_property
    def _specs(self) -> dict[int, DataSpec]:
        """The descriptions of the folds that were used so far: a dict from seed to `DataSpec`, with the mean and standard
        deviation of the training images.
        """
        return {}

    @classmethod
    def from_arrays(
        cls, name: str, splits: dict[str, tuple], classes: tuple[str, ...], *, black: bool = False, digits: bool = False,
        pixels: str = "uint8", warn: bool = False,
    ) -> "Dataset":  # fmt: skip
        """Return a `Dataset` made from numpy arrays. `splits` is a dict that maps "train", "test" and optionally "val" to a
        pair (images, labels). `name` is the name of the data set, and `classes` holds the class names.

        Images are `n h w` or `n h w c`, uint8 or floats in [0, 1]; labels are integers, `n` or `n 1`. `black=True` says that
        the background is black: the mean for normalization is then 0. `digits` as in `DataSpec`, `pixels` as in `arrays`. With
        `warn=True`, warns about identical images in different splits and about identical images with different labels.

        Raises    ValueError for fewer than 2 classes, for missing or unknown splits, or naming the split whose images or
                  labels do not fit.
        """
        if not {"train", "test"} <= splits.keys() <= {"train", "test", "val"}:
            raise ValueError(f"{name}: expected the splits train, test and, if there is one, val, got {[*splits]}")
        tensors = {split: to_pixels(images, f"{name}, {split} images", pixels) for split, (images, _) in splits.items()}
        spec = unnormalized(name, classes, tensors["train"].shape, digits, DTYPES[pixels])
        images = {split: as_images(tensors[split], labels, spec, split) for split, (_, labels) in splits.items()}
        if warn:
            named = [replace(one, files=tuple(f"{split} image {k}" for k in range(len(one)))) for split, one in images.items()]
            sides = [split for split, one in images.items() for _ in range(len(one))]
            warn_of_repeats(name, functools.reduce(joined, named), sides)
        spec = with_moments(spec, images["train"])
        if black:
            spec = replace(spec, mean=(0.0,) * spec.channels)
        images = {split: one.with_spec(spec) for split, one in images.items()}
        return cls(spec, images["train"], HeldOut(images["test"]), images.get("val"))

    @classmethod
    def from_parts(cls, images: Images, parts: dict[str, slice], groups: Tensor | None = None, skipped: int = 0) -> "Dataset":
        """Return a `Dataset` with fixed training and test images. `images` are all images, and `parts` says which of them are
        the parts "train", "test" and optionally "val". `groups` is the group number of each image, or None. `skipped` is the
        number of image files that could not be read.

        Warns about identical images in different parts and about identical images with different labels.
        """
        sides = [part for part, where in parts.items() for _ in range(len(images))[where]]
        warn_of_repeats(images.spec.name, images, sides)
        spec = with_moments(images.spec, images.take(parts["train"]))
        found = {part: images.take(where).with_spec(spec) for part, where in parts.items()}
        train_groups, test_groups = (None, None) if groups is None else (groups[parts["train"]], groups[parts["test"]])
        data = cls(
            spec, found["train"], HeldOut(found["test"]), found.get("val"), groups=train_groups, test_groups=test_groups,
            skipped=skipped,
        )  # fmt: skip
        return data.with_repeats_together()

    @classmethod
    def from_pool(
        cls, images: Images, groups: Tensor | None, *, folds: int | None, test: float | None, skipped: int = 0
    ) -> "Dataset":
        """Return a `Dataset` whose test images are drawn from `images`: by cross-validation with `folds` folds, or as a fixed
        part, the share `test` of all images (0.0: no test images). With both, the same fixed part is divided into folds, and
        the other images are training images of every run. `groups` is the group number of each image; if it is None, identical
        images are one group. `skipped` is the number of image files that could not be read.

        Warns about identical images in different groups and about identical images with different labels.

        Raises    ValueError if a class has too few images or groups, and for folds of a part without images.
        """
        warn_of_repeats(images.spec.name, images, groups)
        groups = same_pixels(images) if groups is None else groups
        if folds is not None:
            pool_index, divided = None, slice(None)
            if test is not None:
                divided = pool_index = held_out_part(images.labels, groups, test, images.spec).nonzero()[:, 0]
                if not len(pool_index):
                    raise ValueError(f"{images.spec.name}: test={test} leaves no images for folds={folds}; remove one of them")
            first = first_folds(images.labels[divided], None if groups is None else groups[divided], folds, images.spec, test)
            spec = with_moments(images.spec, images)
            images = images.with_spec(spec)
            no_images = HeldOut(images.take(slice(0)))
            whole = cls(spec, images, no_images, folds=int(folds), pool_index=pool_index, groups=groups, skipped=skipped)
            whole._divisions[0] = first
            return whole
        is_test = held_out_part(images.labels, groups, test, images.spec)
        train_index, test_index = (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]
        train = images.take(train_index)
        spec = with_moments(images.spec, train)
        train_groups, test_groups = (None, None) if groups is None else (groups[train_index], groups[test_index])
        held_out = HeldOut(images.take(test_index).with_spec(spec))
        return cls(spec, train.with_spec(spec), held_out, groups=train_groups, test_groups=test_groups, skipped=skipped)

    def with_repeats_together(self) -> "Dataset":
        """Return the same data set with identical training images in one group, if they have no groups and the validation
        images are drawn from them. So none of them is a validation image while a copy is a training image.
        """
        if self.groups is not None or self.val is not None:
            return self
        return replace(self, groups=same_pixels(self.train))

    def with_unlabelled(self, images: Images) -> "Dataset":
        """Return the same data set with more training images, whose class is not known. Training without labels uses them.

        The mean and the standard deviation that normalize the pixels stay those of the training images with labels. Warns about
        images that are identical to a test image.
        """
        tested = HeldOut(self.pool) if self.folds else self.test
        if count := tested.among(images):
            note(
                f"{self.spec.name}: test images that are identical to an image without a label: {count:,}; remove the images "
                "without a label, or the score may be too high"
            )
        return replace(self, unlabelled=images.with_spec(self.spec))

    def subset(self, *, labels: int | None, val: int | None, seed: int) -> Subset:
        """Draw the images of one training run and return them as a `Subset`. The option `labels` is the number of labelled
        images, divided among the classes as equally as possible. The option `val` is the number of validation images. The
        option `seed` is the random seed.

        labels   number of labelled training images; None: all training images that are not used for validation
        val      number of validation images; None: all of the data set's own, or, if it has none, a fifth of the training
                 images, at most 1,000

        The classes take turns, in an order drawn by the seed, and each class gives its images in a shuffled order. So the first
        images of a large subset are a smaller subset: every prefix is class-balanced, and the first 100 of 1,000 labels are the
        subset with labels=100. A data set without validation images gives some training images: those at the end of each
        class's order, in proportion to the class sizes, with `val=None` never the only image of a class. They are never
        labelled, and are the same for every `labels`. The own validation images of a data set are shuffled, and the first `val`
        are taken. Where images have groups, whole groups are used for validation, so that the number of validation images may
        differ a little from `val`.

        Raises    ValueError if there are fewer images than requested, if a class has too few images for a balanced subset, or
                  if the data set is still divided into folds: `at_seed` takes one.
        """
        if self.folds:
            raise ValueError(
                f"{self.spec.name} is divided into {self.folds} folds, and the test images are among the training images; "
                f"take the fold of a run first: data.at_seed({seed}).subset(...)"
            )
        source = self.train if self.val is None else self.val
        for name, count, most in (("labels", labels, len(self.train)), ("val", val, len(source))):
            if count is not None and (not isinstance(count, Integral) or not 0 <= count <= most):
                raise ValueError(f"{name}={count!r}: expected None or a number from 0 to {most}, the number of images")
        if self.val is None:
            held_out = min(1000, len(self.train) // 5) if val is None else val
            order, val_index = balanced_split(self.train.labels, held_out, seed, "subset", self.groups, keep_one=val is None)
        else:
            order, _ = balanced_split(self.train.labels, 0, seed, "subset")
            val_index = random_order(len(self.val), seed, "val")[:val].clone()
        self._check_class_sizes(labels, order, seed)
        return Subset(self.train.take(order[:labels]), source.take(val_index), order[:labels], val_index)

    def _check_class_sizes(self, labels: int | None, order: Tensor, seed: int) -> None:
        """Raise ValueError if a class has too few training images for a random class-balanced subset of `labels` labelled
        images. With `labels=None`, one image per class is enough. `order` holds the indices of the training images that the
        subset may use. `seed` is the random seed, which decides which classes get one image more than others.
        """
        k = len(self.spec.classes)
        if labels is not None and labels < k:
            raise ValueError(f"labels={labels} leaves classes without a training image: expected at least {k}, one for each")
        left = torch.bincount(self.train.labels[order], minlength=k).tolist()
        turns = shuffled(list(range(k)), seed, "subset/class")
        most = min(left[label] * k + turn for turn, label in enumerate(turns))
        for turn, label in enumerate(turns):
            needed = 1 if labels is None else labels // k + (turn < labels % k)
            if left[label] < needed:
                name, held_out = self.spec.classes[label], len(self.train) - len(order)
                raise ValueError(
                    f"labels={labels} needs {needed} training images of class {name!r}, which has {left[label]} besides the "
                    f"{held_out} validation images; the largest balanced subset here has {most} labels"
                )


def loaded(loader: Callable) -> Dataset:
    """Return the data set that the function `loader` returns. Raise ValueError if it returns something else."""
    data = loader()
    if not isinstance(data, Dataset):
        name = getattr(getattr(loader, "func", loader), "__name__", "the data loader")
        raise ValueError(f"{name} returned a {type(data).__name__}; expected a Dataset, as folder(path) and arrays(path) do")
    return data


def current_content(data: Callable[[], Dataset]) -> tuple[str, tuple[str, ...]] | None:
    """Return the hash of the images and labels of a data set as they are now, and the names of its classes, or None if they
    cannot be loaded any more. The function `data` loads the data set.
    """
    try:
        return data().content
    except Exception:  # the loader of a user may raise any error
        return None


def hash_of_groups(groups: Tensor) -> str:
    """Return a SHA-256 hash of a division of images into groups. `groups` is the group number of each image; only which images
    have equal numbers counts.
    """
    _, first, number = np.unique(groups.numpy(), return_index=True, return_inverse=True)
    return hashlib.sha256(first[number].astype("<i8").tobytes()).hexdigest()


def unnormalized(
    name: str, classes: tuple[str, ...], shape: tuple[int, ...], digits: bool = False, dtype: str = "uint8"
) -> DataSpec:
    """Return the description of a data set before its mean and standard deviation are known: they are 0 and 1. `name`,
    `classes`, `digits` and `dtype` are fields of the description, and `shape` is the shape of the images (n, c, h, w).

    Raises ValueError for fewer than 2 classes, and for two with the same name.
    """
    if len(classes) < 2:
        raise ValueError(f"{name}: expected at least 2 classes, got {list(classes)}")
    if len(set(classes)) < len(classes):
        raise ValueError(f"{name}: expected another name for each class, got {list(classes)}")
    _, c, h, w = shape
    moments = {"mean": (0.0,) * c, "std": (1.0,) * c}
    return DataSpec(name=name, channels=c, size=(h, w), classes=classes, digits=digits, dtype=dtype, **moments)


def as_images(pixels: Tensor, labels: np.ndarray, spec: DataSpec, part: str) -> Images:
    """Return `Images` from pixels (n, c, h, w), labels (n) or (n, 1) and a description. `part` is the name of the images
    in error messages, such as "train".

    Raises    ValueError if the labels are no integers, one for each image, or if pixels or labels do not fit the description.
    """
    n = len(pixels)
    check_is_array(labels, f"{spec.name}, {part} labels")
    if labels.dtype.kind not in "iu" or labels.shape not in ((n,), (n, 1)):
        raise ValueError(f"{spec.name}, {part} labels: expected {n} integers, got {labels.dtype} {labels.shape}")
    try:
        return Images(pixels, torch.from_numpy(labels.astype(np.int64).reshape(n)), spec)
    except ValueError as error:
        raise ValueError(f"{spec.name}, {part}: {error}") from error


def check_is_array(array: Any, name: str):
    """Raise ValueError for what is no numpy array. `name` describes it in the error message."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name}: expected a numpy array, got a {type(array).__name__}; use np.asarray")


def to_pixels(array: np.ndarray, name: str, pixels: str = "uint8") -> Tensor:
    """Return images as a tensor (n, c, h, w). `array` is a numpy array (n, h, w) or (n, h, w, c), and `name` describes it in
    error messages. With `pixels="uint8"` the result is uint8, from uint8 or from floats in [0, 1], which are rounded. With
    "float" it is float32: 8 and 16 bits are divided by 255 and 65535, and floats keep their values.
    """
    check_is_array(array, name)
    array = array[..., None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or not array.size:
        raise ValueError(f"{name}: expected n h w or n h w c with 1, 3 or 4 channels and at least one image, got {array.shape}")
    is_float, keep = array.dtype.kind == "f", pixels == "float"
    if is_float:
        fits = np.abs(array) <= np.finfo(np.float32).max if keep else (array >= 0) & (array <= 1)
        wrong = np.argwhere(~fits)  # also NaN
        if len(wrong):
            expected = "finite floats up to 3.4e38 (float32)" if keep else "floats in [0, 1]"
            raise ValueError(f"{name}: expected {expected}, but image {wrong[0][0]} has {array[tuple(wrong[0])]}")
    elif array.dtype not in ((np.uint8, np.uint16) if keep else (np.uint8,)):
        expected = "uint8, uint16 or floats" if keep else 'uint8 or floats in [0, 1] (16 bits: pixels="float")'
        raise ValueError(f"{name}: expected {expected}, got {array.dtype}")
    if keep:
        array = array.astype(np.float32) / np.float32(1 if is_float else np.iinfo(array.dtype).max)
    elif is_float:
        array = np.rint(array * 255).astype(np.uint8)
    # a copy, whose strides are the usual ones: with others, which only gray images can have, convolutions may round differently
    return torch.from_numpy(np.array(array.transpose(0, 3, 1, 2), order="C"))
