"""textured_shapes: color images of shapes that this file draws, so that nothing has to be downloaded."""

import functools

import numpy as np

from .dataset import Dataset

SHAPES, TEXTURES = ("disc", "square", "triangle", "cross"), ("stripes", "checks")
CLASSES = tuple(f"{shape} of {texture}" for shape in SHAPES for texture in TEXTURES)
SIZE = 32  # height and width in pixels
CHUNK = 250  # images that are drawn together
SEEDS = {"train": 0, "test": 1}


@functools.cache
def textured_shapes(train: int = 20_000, test: int = 10_000) -> Dataset:
    """Return a data set of `train` training and `test` test images, in color, 32 x 32 pixels. Nothing is downloaded.

    An image shows a disc, a square, a triangle or a cross, filled with stripes or with checks: 8 classes, equally frequent.
    To tell them apart, a model needs the whole outline and the fine pattern inside it. Everything else is random: the position,
    the size and the angle of the shape, the four colors, the width and the angle of both patterns, the pattern of the
    background, a bar that hides a part of the image, the light and the noise. So single pixels and colors say little
    about the class.

    A larger data set begins with the images of a smaller one. The images are the same on all machines, because the drawing uses
    no function that processors round differently, but for the sine and cosine of a few angles.

    Raises ValueError if `train` or `test` is smaller than 8.
    """
    for name, count in (("train", train), ("test", test)):
        if count < len(CLASSES):
            raise ValueError(f"{name} is {count}; expected at least {len(CLASSES)} images, one of each class")
    splits = {part: draw(count, SEEDS[part]) for part, count in (("train", train), ("test", test))}
    return Dataset.from_arrays("textured_shapes", splits, CLASSES)


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` images, uint8 `n h w c`, and their class numbers, `n`."""
    chunks = [draw_chunk(seed, number) for number in range(-(-count // CHUNK))]
    images, labels = (np.concatenate(parts)[:count] for parts in zip(*chunks))
    return images, labels


def draw_chunk(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images with the numbers `number * CHUNK` to `(number + 1) * CHUNK`, and their classes, as `draw` does."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number)))

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        """Random numbers, `n 1 1` or `n *shape`, from raw bits, since only these stay the same in later versions of numpy."""
        shape = shape or (1, 1)
        numbers = (bits.random_raw(CHUNK * int(np.prod(shape))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        return np.float32(low) + np.float32(high - low) * numbers.reshape(CHUNK, *shape)

    def turned(x: np.ndarray, y: np.ndarray, most: float = np.pi) -> tuple[np.ndarray, np.ndarray]:
        """The coordinates in a system that is turned by a random angle of at most `most`, each `n h w`."""
        angle = uniform(-most, most).astype(np.float64)
        cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        return x * cosine + y * sine, y * cosine - x * sine

    def pattern(checks: np.ndarray) -> np.ndarray:
        """Stripes, or checks where `checks` is 1, as the share of the second color, `n h w 1`."""
        width = uniform(2.5, 4.0)  # of a stripe, in pixels
        across, along = (triangle_wave(side / (2 * width) + uniform(0, 1)) for side in turned(columns, rows))
        crossed = np.minimum(np.maximum(across, -along), np.maximum(-across, along))  # positive where the signs are equal
        return soft_step(2 * width * np.where(checks, crossed, across))

    def colored(share: np.ndarray, light: float) -> np.ndarray:
        """Two random colors, mixed by `share`, as `n h w c`. The second one is lighter, by `light` on average."""
        first = uniform(0, 0.4, 1, 1, 3)
        return first + uniform(0, 2 * light, 1, 1, 3) * share

    labels = np.arange(number * CHUNK, (number + 1) * CHUNK) % len(CLASSES)
    shape, texture = np.divmod(labels[:, None, None], len(TEXTURES))
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(np.float32) + np.float32((1 - SIZE) / 2)
    radius = uniform(10, 13)
    x, y = turned(columns - uniform(-3, 3), rows - uniform(-3, 3), 0.35)
    inside = soft_step(-radius * outline(shape, x / radius, y / radius))
    image = colored(pattern(uniform(0, 1) < 0.5), 0.1)
    image += inside * (colored(pattern(texture), 0.5) - image)
    bar = soft_step(uniform(1, 2) - abs(turned(columns - uniform(-8, 8), rows - uniform(-8, 8))[0]))
    image += bar * (uniform(0, 1, 1, 1, 3) - image)
    light = uniform(0.6, 1.0) + uniform(-0.3, 0.3) * turned(columns, rows)[0] / SIZE
    image = image * light[..., None] + uniform(-0.05, 0.05, SIZE, SIZE, 3)
    return np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8), labels


def outline(shape: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how far points lie outside a shape, `n h w`; inside it is negative. `x` and `y` are their coordinates, and
    `shape` is the index of the shape in SHAPES, `n 1 1`. All shapes have the area of a disc of radius 1.
    """
    disc = np.sqrt(x * x + y * y) - 1
    square = np.maximum(abs(x), abs(y)) - np.sqrt(np.pi) / 2
    triangle = np.maximum(-y, np.sqrt(0.75) * abs(x) + y / 2) - np.sqrt(np.pi / np.sqrt(27))
    length = np.sqrt(9 * np.pi / 20)  # half that of the two bars of the cross, which are a third as wide as long
    bars = (np.maximum(abs(a) - length, abs(b) - length / 3) for a, b in ((x, y), (y, x)))
    return np.choose(shape, [disc, square, triangle, np.minimum(*bars)])


def triangle_wave(phase: np.ndarray) -> np.ndarray:
    """Return a wave of period 1 that rises and falls linearly between -0.5 and 0.5."""
    return 2 * abs(phase - np.floor(phase) - 0.5) - 0.5


def soft_step(distance: np.ndarray) -> np.ndarray:
    """Return 0 where a distance to an edge, in pixels, is below -0.5, 1 where it is above 0.5, linear between, `n h w 1`."""
    return np.clip(distance + 0.5, 0, 1)[..., None]
