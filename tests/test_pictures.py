"""Figures have the right panels and titles, and their pixels, points and numbers are those that the model computes."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from torch import nn
from toys import randomize, slow_after

import smallvit
from smallvit.data import DataSpec, Images
from smallvit.explain import (
    attention_figure,
    attention_maps,
    confusion_figure,
    feature_view,
    gallery,
    patch_attention,
    pictures,
    position_similarity,
    reconstruction_figure,
    rollout,
    token_map,
)
from smallvit.objectives import MAE
from smallvit.pooling import MeanTokens
from smallvit.positions import Learned, SinCos1d, SinCos2d
from smallvit.reduction import Merge
from smallvit.tokenizers import ConvTokenizer, PatchEmbed
from smallvit.vit import ViT

ROOT = Path(smallvit.__file__).parents[1]
BRIGHTEST = colormaps[pictures.HEAT](1.0)[:3]
SIZE = (8, 12)
TINY = partial(ViT, SIZE, 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))


def make_vit(**options) -> ViT:
    torch.manual_seed(0)  # every call gives equal weights
    return TINY(**options).eval()


def random_images(n=3, channels=1, size=SIZE, value=None) -> Images:
    mean, std = (0.5,) * channels, (0.25,) * channels
    spec = DataSpec(name="noise", channels=channels, size=size, classes=("a", "b"), mean=mean, std=std)
    noise = torch.randint(0, 256, (n, channels, *size), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return Images(noise if value is None else torch.full_like(noise, value), torch.zeros(n, dtype=torch.long), spec)


def titles(figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def drawn_array(ax) -> np.ndarray:
    """The pixels of the only image in these axes."""
    (image,) = ax.images
    return np.asarray(image.get_array())


def saved_bytes(figure, tmp_path) -> int:
    figure.savefig(tmp_path / "figure.png", dpi=50)
    return (tmp_path / "figure.png").stat().st_size


# attention_figure


@pytest.mark.parametrize("n, channels", slow_after(1, [(1, 3), (3, 1)]))
@pytest.mark.parametrize("block, number", slow_after(1, [(-1, 2), (0, 0)]))
def test_attention_figure_has_columns_for_each_head_their_mean_and_rollout(n, channels, block, number, tmp_path):
    model = ViT(SIZE, channels, 5, dim=16, depth=3, heads=4, tokenizer=partial(PatchEmbed, patch=2))
    figure = attention_figure(model, random_images(n, channels), block=block)
    assert len(figure.axes) == n * 7 and saved_bytes(figure, tmp_path) > 1000
    heads = [f"block {number}\nhead {head}" for head in range(4)]
    assert titles(figure) == ["image\n", *heads, f"block {number}\nmean", "all blocks\nroll-out"]
    assert model.training and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("options", [{}, {"reduction": partial(Merge, r=4)}, {"pool": MeanTokens}])
@pytest.mark.parametrize("query", [None, (1, 4)])
def test_attention_is_drawn_at_full_size_and_brighter_where_it_is_larger(options, query):
    model, images = make_vit(**options), random_images(2, value=0)
    x = images.spec.normalize(images.pixels())
    heads = patch_attention(model, x, block=2, query=query)
    expected = [*heads.unbind(1), heads.mean(1), rollout(model, x, query=query)]
    axes = np.array(attention_figure(model, images, query=query).axes).reshape(2, 5)
    for image in range(2):
        assert (drawn_array(axes[image, 0]) == 0).all()
        for ax, values in zip(axes[image, 1:], expected):
            drawn, values = drawn_array(ax), values[image].numpy()
            assert drawn.shape == (8, 12, 3)
            cells = drawn.reshape(4, 2, 6, 2, 3)
            assert (cells == cells[:, :1, :, :1]).all()  # each patch is one square
            light = cells[:, 0, :, 0].sum(-1).flatten()
            order = values.flatten().argsort()
            assert (np.diff(light[order]) >= 0).all() and light[order[0]] < light[order[-1]] == pytest.approx(sum(BRIGHTEST))
            (text,) = ax.texts
            assert float(text.get_text().removeprefix("max ").removesuffix("%")) == pytest.approx(100 * values.max(), rel=0.06)


def test_image_is_visible_behind_its_map_and_the_query_is_outlined():
    model = make_vit()
    dark, bright = (attention_figure(model, random_images(1, value=value), query=(1, 4)).axes for value in (0, 255))
    assert (drawn_array(bright[0]) == 1).all() and (drawn_array(dark[0]) == 0).all()
    assert all(drawn_array(ax).min() >= pictures.VISIBLE for ax in bright[1:])
    (box,) = dark[0].patches
    assert (*box.get_xy(), box.get_width(), box.get_height()) == (7.5, 1.5, 2, 2)
    assert not attention_figure(model, random_images(1)).axes[0].patches


def test_grid_that_does_not_tile_the_image_is_stretched_over_it():
    model = randomize(ViT((10, 7), 1, 5, dim=16, depth=1, heads=2, tokenizer=ConvTokenizer, pool=MeanTokens), 0.3)
    drawn = drawn_array(attention_figure(model, random_images(1, size=(10, 7), value=0)).axes[1])
    assert model.tokenizer.grid((10, 7)) == (3, 2) and drawn.shape == (10, 7, 3)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) == 6


def test_figures_of_a_timm_model(tmp_path):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(SIZE, 2, 1, 0, embed_dim=16, depth=2, num_heads=2)
    figure = attention_figure(model, random_images(2), block=-2)
    assert len(figure.axes) == 10 and "block 0\nhead 1" in titles(figure)
    assert len(attention_maps(model, torch.zeros(1, 1, *SIZE))) == 2
    assert saved_bytes(position_similarity(model), tmp_path) > 1000


# position_similarity


@pytest.mark.parametrize(
    "position", slow_after(2, [partial(Learned, on_prefix=False), SinCos2d, Learned, SinCos1d]), ids=["patches", "2d", "learned", "1d"]
)
@pytest.mark.parametrize("prefix", slow_after(1, [{"registers": 3}, {}, {"pool": MeanTokens}]))
def test_each_position_has_a_map_of_its_cosines_to_all_others(position, prefix, tmp_path):
    model = make_vit(position=position, **prefix)
    figure = position_similarity(model)
    page = drawn_array(figure.axes[0])
    assert page.shape == (4 * 4 + 3, 6 * 6 + 5) and np.isnan(page).sum() == page.size - 24**2
    table = model.position.table[-24:].detach().double()
    for row, column in ((0, 0), (3, 5), (1, 4)):
        own = page[5 * row : 5 * row + 4, 7 * column : 7 * column + 6]
        cosines = nn.functional.cosine_similarity(table[6 * row + column], table, dim=-1)
        np.testing.assert_allclose(own.flatten(), cosines.numpy(), atol=1e-7)
        assert own[row, column] == pytest.approx(1)
    labels = figure.axes[0].get_xticklabels(), figure.axes[0].get_yticklabels()
    assert ["".join(label.get_text() for label in axis) for axis in labels] == ["012345", "0123"] and "cosine" in figure.axes[1].get_ylabel()
    assert saved_bytes(figure, tmp_path) > 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_position_similarity_in_another_precision(dtype):
    expected = drawn_array(position_similarity(make_vit()).axes[0])
    found = drawn_array(position_similarity(make_vit().to(dtype)).axes[0])
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_position_similarity_for_another_image_size():
    page = drawn_array(position_similarity(make_vit(), image=(4, 4)).axes[0])
    assert page.shape == (5, 5) and np.isnan(page).sum() == 25 - 16


class Gain(nn.Module):
    """A user's position module whose positions depend on the image: it multiplies by 2."""

    def __init__(self, dim, grid, prefix):
        super().__init__()

    def forward(self, x, grid):
        return 2 * x


class Constant(Gain):
    """A user's position module that adds 1."""

    def forward(self, x, grid):
        return x + 1


class Nothing(Gain):
    """A user's position module that adds nothing."""

    def forward(self, x, grid):
        return x


def test_positions_of_a_user_are_what_they_add_to_zeros():
    assert np.nanmin(drawn_array(position_similarity(make_vit(position=Constant)).axes[0])) == pytest.approx(1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_vit(position=Gain), r"positions of this ViT \(Gain\) depend on the image"),
        (lambda: make_vit(position=Nothing), "positions of this ViT are all zero"),
        (lambda: make_vit(position=None), r"this ViT has no positions \(position=None\)"),
        (lambda: nn.Linear(2, 2), "this Linear has no table of positions"),
    ],
)
def test_models_without_positions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        position_similarity(make())


# feature_view


def clusters(n=60, d=8, k=3):
    """Features of k classes far apart, and their labels."""
    draw = np.random.default_rng(0)
    labels = np.arange(n) % k
    return (draw.normal(size=(n, d)) + 8 * draw.normal(size=(k, d))[labels]).astype(np.float32), labels


def points(figure) -> dict[str, np.ndarray]:
    """The drawn points of each class."""
    return dict(zip(legend(figure), (np.asarray(dots.get_offsets()) for dots in figure.axes[0].collections), strict=True))


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda array: array.tolist()], ids=["array", "tensor", "list"])
def test_features_are_projected_onto_their_first_two_principal_components(kind, tmp_path):
    x, labels = clusters()
    figure = feature_view(kind(x), kind(labels), classes=("cat", "dog", "eel"))
    assert legend(figure) == ["cat", "dog", "eel"] and list(points(figure)) == legend(figure)
    u, s, _ = np.linalg.svd((x - x.mean(0)).astype(float))
    share = 100 * s**2 / (s**2).sum()
    for axis, label in enumerate((figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel())):
        assert label == f"component {axis + 1}: {share[axis]:.0f}% of the variance"
        drawn = np.concatenate([points(figure)[name][:, axis] for name in legend(figure)])
        expected = np.concatenate([(u[:, axis] * s[axis])[labels == label] for label in range(3)])
        np.testing.assert_allclose(abs(drawn), abs(expected), rtol=1e-4, atol=1e-4)
    assert titles(figure) == ["60 images, 8 channels"] and saved_bytes(figure, tmp_path) > 1000


@pytest.mark.parametrize("method", slow_after(1, ["pca", "tsne"]))
def test_equal_features_give_equal_figures(method):
    x, labels = clusters()
    first, again = (points(feature_view(x, labels, method=method)) for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first) and list(first) == ["0", "1", "2"]
    if method == "tsne":  # clusters stay together
        for name, own in first.items():
            center, others = own.mean(0), np.concatenate([other for key, other in first.items() if key != name])
            assert np.linalg.norm(own - center, axis=1).max() < np.linalg.norm(others - center, axis=1).min()


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_constant_features_are_drawn(method, tmp_path):
    figure = feature_view(np.ones((5, 3)), [0, 0, 1, 1, 1], method=method)
    assert saved_bytes(figure, tmp_path) > 1000 and legend(figure) == ["0", "1"]
    if method == "pca":
        assert "0% of the variance" in figure.axes[0].get_xlabel()


@pytest.mark.parametrize("k", [1, 11, 21])
def test_every_class_has_its_own_color(k):
    figure = feature_view(*clusters(3 * k, k=k))
    found = {tuple(dots.get_facecolor()[0]) for dots in figure.axes[0].collections}
    assert len(found) == k == len(legend(figure))


@pytest.mark.parametrize(
    "x, labels, options, message",
    [
        (np.ones((4, 3)), [0, 1], {}, r"got features \(4, 3\) and labels \(2,\)"),
        (np.ones((4, 1)), [0] * 4, {}, "d at least 2"),
        (np.ones((2, 3)), [0] * 2, {}, "n at least 3"),
        (np.ones((4, 3)), [0] * 4, {"method": "umap"}, "method is 'umap'; expected 'pca' or 'tsne'"),
        (np.ones((4, 3)), [0, 1, 0, -1], {"classes": ("cat", "dog")}, "got labels like -1 and 1; expected .*, 0 to 1"),
        (np.ones((4, 3)), [0, 1, 0, 2], {"classes": ("cat", "dog")}, "got labels like 0 and 2; expected .*, 0 to 1"),
    ],
    ids=["labels", "channels", "images", "method", "below", "beyond"],
)
def test_wrong_features_labels_and_methods_are_refused(x, labels, options, message):
    with pytest.raises(ValueError, match=message):
        feature_view(x, labels, **options)


# confusion_figure


def test_confusion_figure_counts_images_in_rows_of_true_classes(tmp_path):
    labels, guesses = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]), torch.tensor([0, 0, 2, 1, 0, 2, 2, 2, 2])
    figure = confusion_figure(guesses, labels, ("ant", "bee", "cow"))
    (ax,) = figure.axes
    cells = {(*map(int, text.get_position()), text.get_text()) for text in ax.texts}  # column, row, number
    assert cells == {(0, 0, "2"), (2, 0, "1"), (1, 1, "1"), (0, 1, "1"), (2, 2, "4")}
    assert ax.get_title() == "2 of 9 wrong (22.2%)" and (ax.get_xlabel(), ax.get_ylabel()) == ("predicted", "true")
    for axis in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in axis] == ["ant", "bee", "cow"]
    right, wrong = (np.ma.masked_invalid(image.get_array()) for image in ax.images)
    np.testing.assert_allclose(right.diagonal(), [2 / 3, 1 / 2, 1])
    assert wrong[1, 0] == 1 / 2 and wrong[0, 2] == pytest.approx(1 / 3)
    assert wrong.mask.diagonal().all() and right[0, 1] is np.ma.masked
    assert saved_bytes(figure, tmp_path) > 1000


@pytest.mark.parametrize("guess", [0, 1])
def test_confusion_figure_of_all_correct_and_all_wrong_predictions(guess, tmp_path):
    figure = confusion_figure([guess] * 4, [0] * 4, ("a", "b", "c"))
    assert titles(figure) == [f"{4 * guess} of 4 wrong ({guess:.1%})"] and saved_bytes(figure, tmp_path) > 1000
    assert saved_bytes(confusion_figure([0], [0], np.array(["a"])), tmp_path) > 1000


@pytest.mark.parametrize(
    "guesses, labels, message",
    [
        ([], [], r"got guesses \(0,\) and labels \(0,\)"),
        ([0], [0, 1], r"got guesses \(1,\) and labels \(2,\)"),
        ([2], [0], "got guesses like 2 and 2; expected numbers of classes, 0 to 1"),
        ([0], [-1], "got labels like -1"),
        ([0.5], [0], "got guesses like 0.5"),
        (["b"], ["a"], r"got guesses like 'b'; expected numbers of classes, 0 to 1, such as classes.index\(name\)"),
    ],
    ids=["none", "lengths", "above", "below", "fraction", "names"],
)
def test_wrong_predictions_and_labels_are_refused(guesses, labels, message):
    with pytest.raises(ValueError, match=message):
        confusion_figure(guesses, labels, ("a", "b"))


# gallery


@pytest.mark.parametrize("n, columns, shape", [(7, 3, (3, 3)), (2, 10, (1, 2)), (4, 1, (4, 1))])
@pytest.mark.parametrize("channels", slow_after(1, [1, 3]))
def test_gallery_shows_images_in_reading_order_below_their_titles(n, columns, shape, channels, tmp_path):
    images = random_images(n, channels)
    names = [f"image {i}\nof many" for i in range(n)]
    figure = gallery(images, names, columns=columns)
    assert len(figure.axes) == shape[0] * shape[1] and titles(figure) == names
    for ax, pixels in zip(figure.axes, images.images):
        assert (drawn_array(ax) == pixels.permute(1, 2, 0).expand(-1, -1, 3).numpy() / 255).all()
    assert not any(ax.images for ax in figure.axes[n:]) and saved_bytes(figure, tmp_path) > 1000


def test_long_titles_of_a_gallery_stay_above_their_image():
    figure = gallery(random_images(3), ["lymphocyte (reactive), not monocyte", "a_file_name_without_spaces.png\nb\nc", "short"])
    figure.draw_without_rendering()
    for ax in figure.axes:
        title, image = ax.title.get_window_extent(), ax.get_window_extent()
        assert image.width * 1.05 > title.width and title.y1 <= figure.bbox.y1
    assert titles(figure)[2] == "short" and titles(figure)[0].split() == ["lymphocyte", "(reactive),", "not", "monocyte"]


@pytest.mark.parametrize(
    "kind",
    [lambda x: x, lambda x: x.numpy(), lambda x: (255 * x).byte(), lambda x: x.bfloat16(), lambda x: x.clone().requires_grad_()],
    ids=["floats", "array", "bytes", "bf16", "with a gradient"],
)
def test_gallery_accepts_several_types_and_rescales_floats(kind, caplog, tmp_path):
    pixels = torch.tensor([0.0, 1.0]).expand(1, 1, 2, 2)
    assert drawn_array(gallery(kind(pixels)).axes[0])[0].tolist() == [[0] * 3, [1] * 3]
    beyond = gallery(3 * pixels - 1)
    assert drawn_array(beyond.axes[0]).tolist() == drawn_array(gallery(pixels).axes[0]).tolist() and saved_bytes(beyond, tmp_path) > 200
    assert not caplog.records


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gallery(random_images(2), ["one"]), "got 1 titles for 2 images; expected one each"),
        (lambda: gallery(random_images(2), columns=0), "columns is 0; expected at least 1"),
        (lambda: gallery(random_images(2), columns=2.5), "columns is 2.5; expected at least 1, a whole number"),
        (lambda: confusion_figure([0], [0], 10), "classes is 10; expected the names of the classes"),
        (lambda: feature_view(*clusters(), classes=3), "classes is 3; expected the names of the classes"),
        (lambda: feature_view(np.full((9, 2), np.nan), range(9)), "got features that are NaN or infinite"),
        (lambda: gallery(random_images(0)), r"got pixels of shape \(0, 1, 8, 12\); expected b c h w, at least one"),
        (lambda: gallery(torch.zeros(8, 8)), r"got pixels of shape \(8, 8\); expected b c h w"),
        (lambda: gallery(torch.ones(1, 1, 8, 8, dtype=torch.int64)), r"pixels of int64; expected bytes \(uint8\), or floats"),
        (lambda: gallery(random_images(1, 2)), r"2 channels; expected gray \(1\) or color \(3\)"),
        (lambda: attention_figure(make_vit(), torch.zeros(1, 1, *SIZE)), "got a Tensor; expected Images"),
        (lambda: attention_figure(make_vit(), random_images(0)), "no images to look at"),
        (lambda: attention_figure(make_vit(), random_images(1), block=9), "block is 9; expected one of this model"),
        (lambda: reconstruction_figure(make_vit(), random_images()), "got a ViT; expected the MAE that was trained"),
        (lambda: reconstruction_figure(MAE(make_vit()), torch.zeros(1, 1, *SIZE)), "got a Tensor; expected Images"),
    ],
)
def test_wrong_images_and_models_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_names_of_classes_are_drawn_as_they_are(tmp_path):
    names, (x, labels) = ["_bg", "$5_$10", r"cost $\foo$"], clusters()
    points, cells = feature_view(x, labels, classes=names), confusion_figure([0, 1, 2], [0, 1, 1], names)
    images = gallery(random_images(3), names)
    ticks = [[label.get_text() for label in axis] for axis in (cells.axes[0].get_xticklabels(), cells.axes[0].get_yticklabels())]
    assert [legend(points), *ticks, titles(images)] == [names] * 4
    assert all(saved_bytes(figure, tmp_path) > 1000 for figure in (points, cells, images))


# reconstruction_figure


@pytest.mark.parametrize("channels", slow_after(1, [1, 3]))
@pytest.mark.parametrize("normalize", slow_after(1, [True, False]))
def test_reconstruction_shows_the_image_its_visible_patches_and_the_reconstruction(normalize, channels, tmp_path):
    model = ViT(SIZE, channels, 5, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=2))
    mae, images = MAE(model, normalize=normalize, decoder_dim=16), random_images(2, channels)
    figure = reconstruction_figure(mae, images, seed=3)
    assert titles(figure) == ["image", "visible", "reconstructed", "reconstructed, given\nmean and std"][: 3 + normalize]
    axes = np.array(figure.axes).reshape(2, -1)
    result = mae.reconstruct(images.spec.normalize(images.pixels()), seed=3)
    for image, row in enumerate(axes):
        raw = images.images[image].permute(1, 2, 0).expand(-1, -1, 3).numpy() / 255
        hidden = result.mask[image, 0].numpy()
        assert 0 < hidden.sum() < hidden.size
        np.testing.assert_allclose(drawn_array(row[0]), raw, atol=1e-6)
        np.testing.assert_allclose(drawn_array(row[1])[~hidden], raw[~hidden], atol=1e-6)
        assert len(np.unique(drawn_array(row[1])[hidden], axis=0)) == 1
        for ax, guess in zip(row[2:], (result.predicted, result.helped)):
            np.testing.assert_allclose(drawn_array(ax)[~hidden], raw[~hidden], atol=1e-6)
            guess = (0.25 * guess[image] + 0.5).clip(0, 1).permute(1, 2, 0).expand(-1, -1, 3).numpy()
            np.testing.assert_allclose(drawn_array(ax), guess, atol=1e-6)
    other = reconstruction_figure(mae, images, seed=4)
    assert (drawn_array(other.axes[1]) != drawn_array(axes[0, 1])).any() and saved_bytes(figure, tmp_path) > 1000


def test_constant_images_are_drawn(tmp_path):
    for value in (0, 255):
        assert saved_bytes(reconstruction_figure(MAE(make_vit()), random_images(1, value=value)), tmp_path) > 1000
        assert saved_bytes(attention_figure(make_vit(), random_images(1, value=value)), tmp_path) > 1000
        assert saved_bytes(gallery(random_images(1, value=value)), tmp_path) > 200


def test_pixels_beyond_0_and_1_are_drawn_from_the_smallest_to_the_largest_value():
    images, model = random_images(2), make_vit()
    spec = replace(images.spec, mean=(300.0,), std=(250.0,), dtype="float32")
    wide = Images(1000 * images.pixels() - 200, images.labels, spec)
    low, high = wide.images.aminmax()
    expected = ((wide.images - low) / (high - low)).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
    figures = [attention_figure(model, wide), reconstruction_figure(MAE(model), wide), token_map(model, wide)]
    for figure in (gallery(wide, columns=1), *figures):
        for ax, image in zip(np.array(figure.axes).reshape(2, -1)[:, 0], expected):
            np.testing.assert_allclose(drawn_array(ax), image, atol=0.003)  # a token map holds bytes


# Imports


@pytest.mark.slow
def test_figures_of_arrays_need_neither_torch_nor_a_display(tmp_path):
    x, labels = clusters()
    path = tmp_path / "data.json"
    path.write_text(json.dumps([x.tolist(), labels.tolist()]))
    code = f"""
import json, sys
import numpy as np
from smallvit.explain import confusion_figure, feature_view, gallery
assert not {{"torch", "matplotlib", "sklearn"}} & set(sys.modules)
x, labels = json.load(open({str(path)!r}))
for figure in (confusion_figure(labels, labels, "abc"), feature_view(x, labels), gallery(np.zeros((2, 1, 4, 4)))):
    figure.savefig({str(tmp_path / "figure.png")!r})
print("torch" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
