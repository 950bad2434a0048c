"""What a folder of images holds, as far as a recipe depends on it: classes, sizes, color modes, broken files and groups."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from smallvit.baselines import fitting_patch
from smallvit.words import how_many

FEWEST = 5  # files that a message lists
UNEQUAL = 1.5  # the largest class has so many times the images of the smallest one
LARGE = 2_000  # images from which a fixed test part replaces folds
LARGEST = 64  # pixels of a side that is kept
FEWEST_TOKENS, MOST_TOKENS = 16, 64  # of an image that keeps its size, or whose size is chosen by the user
PATCH = 8  # pixels of a side of a patch, for images that are resized
PATCHES = 36  # of such an image
SMALLEST_SIZE, LARGEST_SIZE = 16, 1_024  # pixels of a side that --size allows

# words before a number that name what several images may be of: living beings, and things that may also be the image itself
BEINGS = ("patient", "subject", "person", "participant", "donor", "animal", "mouse")
THINGS = ("case", "plate", "slide", "scan", "video", "session", "plant", "tree")
# regular expressions whose first pair of parentheses is the group of an image
TWO_NUMBERS = r"([^_ -]*\d[^_ -]*)[_ -].*\d.*"  # P07_img3: a word with a number, and another number
NUMBERED = r"(.*)[_ -]\d+"


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found in a folder of images, and what a recipe for it should use.

    counts     part ("train", "test", "val", or "pool" if there are no parts) -> class -> number of images that can be read
    sizes      number of images of each (height, width)
    modes      number of images of each color mode of the file, such as "RGB"
    paged      number of TIFF files with several pages, of which only the first one is read
    broken     file -> why it cannot be read
    channels   1 if all images are gray, 4 if some are transparent in places, otherwise 3
    floats     True if some images have more than 8 bits a channel
    unit       True if all pixels are in [0, 1], as all images of 8 and 16 bits are
    size       (height, width) to which images are resized
    patch      side of the patches in pixels
    folds      number of folds; None if there is a test part
    test       share of the images that is held out for testing; None if there are folds or a test part
    group_by   regular expression for the group of an image, or "" if the file names show no groups
    groups     number of these groups, and `example` is one of them
    grouped    True if the images can be split by these groups
    digits     True if mirroring an image changes its label
    """

    counts: dict[str, dict[str, int]]
    sizes: Counter
    modes: Counter
    paged: int
    broken: dict[str, str]
    channels: int
    floats: bool
    unit: bool
    size: tuple[int, int]
    patch: int
    folds: int | None
    test: float | None
    group_by: str
    groups: int
    example: str
    grouped: bool
    digits: bool

    @property
    def classes(self) -> list[str]:
        """The names of the classes as a list."""
        return [*next(iter(self.counts.values()))]

    @property
    def unequal(self) -> bool:
        """Whether the largest class has at least 1.5 times as many images for training as the smallest one."""
        counts = next(iter(self.counts.values())).values()
        return max(counts) >= UNEQUAL * min(counts)

    @property
    def smallest(self) -> int:
        """The number of training images that a run has of the smallest class."""
        count = min(next(iter(self.counts.values())).values())
        return count - (-(-count // self.folds) if self.folds else round(count * (self.test or 0)))

    @property
    def training(self) -> int:
        """The number of training images that a run has, with its validation images."""
        count = sum(next(iter(self.counts.values())).values())
        return count - (count // self.folds if self.folds else round(count * (self.test or 0)))


def inspect_images(
    top: Path, digits: bool = False, group_by: str | None = None, size: int | None = None, patches: int = MOST_TOKENS
) -> Inspection:
    """Read all images in a folder and return what was found.

    top       the folder
    digits    True if mirroring an image changes its label
    group_by  regular expression for the group of an image in its file name; "" means that there are no groups, and None that
              they are guessed
    size      side of the images in pixels, about: of other shapes than squares, the area is that of a square with this side.
              None: by the sizes of the files
    patches   largest number of patches of an image, about, if `size` is given

    Raises ValueError for a folder without classes, for a class without two images that can be read, for a `group_by` that does
    not match the file names or gives a class only one group, for a `group_by` if the folder has a test part, for a `size` that
    is too small or too large, and if a package is missing that an image needs.
    """
    from tqdm import tqdm

    from smallvit.data.decode import MissingPackage, read_image
    from smallvit.data.files import find_images, groups_by_name

    if size is not None and not SMALLEST_SIZE <= size <= LARGEST_SIZE:
        raise ValueError(f"--size is {size}; expected the side of the images in pixels, {SMALLEST_SIZE} to {LARGEST_SIZE:,}")
    found = find_images(top)
    if group_by and "pool" not in found.parts:
        parts = " and ".join(f"{part}/" for part in found.parts)
        raise ValueError(
            f"got --group-by, but {top} is already divided into {parts}; expected no --group-by there, or one folder for each "
            "class, which smallvit divides by groups"
        )
    sizes, modes, broken, paged = Counter(), Counter(), {}, 0
    gray, transparent, low, high = True, False, 0.0, 1.0
    for file in tqdm(found.files, "images", leave=False, disable=len(found.files) < LARGE):
        try:
            pixels, mode, several = read_image(top / file, None, "RGBA", "float", name=file)
        except MissingPackage:
            raise
        except ValueError as error:
            broken[file] = str(error)
            continue
        sizes[pixels.shape[:2]] += 1
        modes[mode] += 1
        paged += several
        color = pixels[..., :3]
        gray = gray and bool((color == color[..., :1]).all())
        transparent = transparent or bool(pixels[..., 3].min() < 1)
        low, high = min(low, float(color.min())), max(high, float(color.max()))
    counts = {
        part: {
            name: sum(label == index and file not in broken for file, label in files.items())
            for index, name in enumerate(found.classes)
        }
        for part, files in found.parts.items()
    }
    check_counts(top, counts, broken)
    readable = {file: label for part in found.parts.values() for file, label in part.items() if file not in broken}
    given = bool(group_by)
    if "pool" not in counts:
        group_by, names = "", {}
    elif group_by is None:
        group_by, names = groups_of(readable)
    else:
        names = dict(zip(readable, groups_by_name([*readable], group_by))) if group_by else {}
    of_class = groups_in_classes(readable, names) if names else {}
    fewest, label = min(((len(groups), label) for label, groups in of_class.items()), default=(0, 0))
    grouped = fewest >= 2
    if given and names and not grouped:
        raise ValueError(
            f"with --group-by {group_by!r}, class {found.classes[label]!r} in {top} has one group, {min(of_class[label])!r}; "
            "expected at least 2 groups in each class, because all images of a group stay on one side of a split: add images "
            "of other groups, correct the pattern, or use --group-by '' if images of one group may be on both sides"
        )
    smallest, total = fewest if grouped else min(counts[next(iter(counts))].values()), len(readable)
    pool, large = "pool" in counts, total >= LARGE and smallest >= 5
    shape, patch = fitting_size(sizes) if size is None else chosen_size(sizes, size, patches)
    return Inspection(
        counts=counts,
        sizes=sizes,
        modes=modes,
        paged=paged,
        broken=broken,
        channels=4 if transparent else 1 if gray else 3,
        floats="float" in modes,
        unit=low >= 0 and high <= 1,
        size=shape,
        patch=patch,
        folds=min(5, smallest) if pool and not large else None,
        test=0.2 if pool and large else None,
        group_by=group_by,
        groups=len({*names.values()}),
        example=next(iter(names.values()), ""),
        grouped=grouped,
        digits=digits,
    )


def check_counts(top: Path, counts: dict[str, dict[str, int]], broken: dict[str, str]):
    """Raise ValueError if there is only one class, or if a class has too few images that can be read: fewer than 2 if they must
    still be split, otherwise none in some part. `counts` has the numbers of images of each part and class, and `broken` the
    files that cannot be read.
    """
    for part, of_class in counts.items():
        needed = 2 if part == "pool" else 1
        if len(of_class) < 2:
            raise ValueError(f"{top} has one class, {next(iter(of_class))!r}; expected a folder for each of at least 2 classes")
        for name, count in of_class.items():
            if count < needed:
                first = next(iter(broken.values()), "")
                also = f"; {how_many(len(broken), 'file')} cannot be read, such as {first}" if broken else ""
                raise ValueError(
                    f"class {name!r} in {top} has {how_many(count, 'image')} that can be read; expected at least "
                    f"{needed}{also}; add images, or move the class out of the folder"
                )


def fitting_size(sizes: Counter) -> tuple[tuple[int, int], int]:
    """Return the size (height, width) to which images are resized, and the side of the patches, in pixels. `sizes` counts the
    images of each size.

    Images that all have one size of at most 64 pixels a side keep it, if patches of at least 2 pixels give 16 to 64 tokens.
    Others are resized to about 36 patches of 8 pixels, with the proportions of the median image.
    """
    if len(sizes) == 1:
        (size,) = sizes
        patch = fitting_patch(size)
        fits = patch > 1 and FEWEST_TOKENS <= size[0] * size[1] // patch**2 <= MOST_TOKENS
        if fits and max(size) <= LARGEST and not (size[0] % patch or size[1] % patch):
            return size, patch
    return in_patches(sizes, PATCHES**0.5, PATCH)


def chosen_size(sizes: Counter, side: int, patches: int) -> tuple[tuple[int, int], int]:
    """Return the size (height, width) to which images are resized, and the side of the patches, in pixels, if the user has
    chosen the `side` of the images. `sizes` counts the images of each size, of which the median proportions are kept.

    Squares that all have this side keep it if 16 to `patches` square patches fit. Otherwise both sides are multiples of the
    patch, so they are only about the chosen one. The patches have 2, 4, 6 and so on pixels, and there are about 16 to `patches`
    of them. Of these, those are taken of which a multiple is nearest to the side.
    """
    if [*sizes] == [(side, side)]:
        patch = fitting_patch((side, side), patches)
        if patch > 1 and FEWEST_TOKENS <= (side // patch) ** 2 <= patches:
            return (side, side), patch
    most, least = math.isqrt(patches), math.isqrt(FEWEST_TOKENS)
    possible = [patch for patch in range(2, side, 2) if least <= round(side / patch) <= most]
    patch = min(possible, key=lambda patch: (abs(round(side / patch) * patch - side), patch))
    return in_patches(sizes, side / patch, patch)


def in_patches(sizes: Counter, along: float, patch: int) -> tuple[tuple[int, int], int]:
    """Return the size (height, width) in pixels of images of `along` x `along` patches, about, with the proportions of the
    median image, and the side of a `patch`. `sizes` counts the images of each size.
    """
    ratio = median(width / height for height, width in sizes.elements()) ** 0.5
    rows, columns = (min(max(round(along * factor), 2), 16) for factor in (1 / ratio, ratio))
    return (patch * rows, patch * columns), patch


def groups_of(files: dict[str, int]) -> tuple[str, dict[str, str]]:
    """Return a regular expression that reads the group of an image, such as a patient, from its file name, and a dict from file
    to group. `files` is a dict from file to class. Return ("", {}) if the names show no groups.

    Names show groups if an expression matches all of them, and a group has 1.5 images or more on average. Names without a word
    such as patient show groups if each class has at least 5, with 20 images or fewer on average: `P07_img3` is an image of
    `P07`, but `cat_1`, `cat_2` are the first and second cat, and no group. The names `scan1`, `scan2` in each class, without
    a second image of a scan in a class, are numbers of the images, too.
    """
    from smallvit.data.files import groups_by_name

    named = {rf"(?i).*?({word}[_ -]?\d+)(?:\D.*)?": word for word in (*BEINGS, *THINGS)}
    for pattern in (*named, TWO_NUMBERS, NUMBERED):
        try:
            names = dict(zip(files, groups_by_name([*files], pattern)))
        except ValueError:  # some names do not match
            continue
        count = len({*names.values()})
        in_classes = [len(groups) for groups in groups_in_classes(files, names).values()]
        if named.get(pattern) in THINGS and sum(in_classes) == len(files):  # the images of each class are numbered
            continue
        has_word = pattern in named
        shown = count > len({*files.values()}) if has_word else min(in_classes) >= 5 and len(files) <= 20 * count
        if shown and count * 1.5 <= len(files):
            return pattern, names
    return "", {}


def groups_in_classes(files: dict[str, int], names: dict[str, str]) -> dict[int, set[str]]:
    """Return the groups of each class as a dict from class to a set of names. `files` is a dict from file to class, and `names`
    a dict from file to group.
    """
    found = defaultdict(set)
    for file, label in files.items():
        found[label].add(names[file])
    return found
