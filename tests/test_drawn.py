"""textured_shapes: the same images on every machine and at every size, classes in equal numbers, and no hint in single pixels."""

import hashlib

import numpy as np
import pytest

from smallvit import textured_shapes
from smallvit.data import drawn


def test_the_images_are_the_committed_ones():
    images, _ = drawn.draw(16, seed=0)
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == "7672a9381158866c"


def test_a_larger_set_begins_with_the_images_of_a_smaller_one():
    (small, _), (large, _) = drawn.draw(30, seed=0), drawn.draw(600, seed=0)
    assert (large[:30] == small).all()


def test_classes_are_equally_frequent_and_parts_share_no_image():
    dataset = textured_shapes(train=400, test=400)
    assert dataset.train.targets().sum(0).tolist() == [50] * 8
    train, test = ({image.tobytes() for image in drawn.draw(400, seed)[0]} for seed in drawn.SEEDS.values())
    assert len(train | test) == 800


def test_all_shapes_have_the_area_of_the_disc():
    axis = (np.arange(600) + 0.5) / 150 - 2
    x, y = np.meshgrid(axis, axis)
    areas = [(drawn.outline(np.full((1, 1), shape), x, y) < 0).mean() * 16 for shape in range(len(drawn.SHAPES))]
    assert areas == pytest.approx([np.pi] * 4, rel=0.01)


@pytest.mark.slow
def test_single_pixels_say_little_about_the_class():
    from sklearn.linear_model import LogisticRegression

    (train, labels), (test, truth) = drawn.draw(2_000, 0), drawn.draw(2_000, 1)
    flat = [images.reshape(len(images), -1) / 255 for images in (train, test)]
    accuracy = LogisticRegression(C=0.01, max_iter=200).fit(flat[0], labels).score(flat[1], truth)
    assert accuracy < 0.4  # chance: 0.125; a ViT with the tokenizer of CCT reached 0.8 with half as many images


@pytest.mark.parametrize("sizes", [{"train": 7}, {"test": 0}])
def test_too_few_images_are_refused(sizes):
    with pytest.raises(ValueError, match="expected at least 8 images, one of each class"):
        textured_shapes(**sizes)
