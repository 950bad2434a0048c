"""Reference models: raw pixels, a small CNN, LeNet-5 and timm's ResNets."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from toys import randomize, slow_after, slow_but

from smallvit import LeNet, Pixels, ResNet, SmallCNN, initialize
from smallvit.flops import footprint
from smallvit.objectives.dino import feature_width


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_are_the_features_and_nothing_is_learned(channels):
    model, x = Pixels((4, 6), channels, 10), torch.randn(3, channels, 4, 6)
    assert torch.equal(model.features(x), x.reshape(3, -1))
    assert not model.state_dict()
    with pytest.raises(ValueError, match="raw pixels give no logits; evaluate them with knn or linear_probe"):
        model(x)


def assert_trains(model, x):
    """Every parameter gets a finite gradient other than zero."""
    model.zero_grad()
    F.cross_entropy(model(x), torch.arange(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    ("make", "width", "image"),
    [
        *((SmallCNN, 64, image) for image in ((28, 28), (24, 40), (8, 8), (4, 5))),
        *((LeNet, 84, image) for image in ((28, 28), (24, 40), (16, 16), (12, 13))),
    ],
)
def test_every_weight_of_a_cnn_trains_and_logits_are_the_head_of_the_features(make, width, image, channels):
    model, x = make(image, channels, 5), torch.randn(4, channels, *image)
    assert_trains(model, x)
    assert model.eval()(x).shape == (4, 5) and model.features(x).shape == (4, width)
    assert torch.equal(model(x), model.head(model.features(x)))


def test_small_cnn_has_the_documented_layers():
    model = SmallCNN((28, 28), 1, 10)
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert [(conv.out_channels, conv.kernel_size) for conv in convs] == [(16, (3, 3))] * 2 + [(32, (3, 3))] * 2
    assert sum(isinstance(part, nn.MaxPool2d) for part in model.modules()) == 2
    assert 115_000 < sum(p.numel() for p in model.parameters()) < 125_000


def test_new_cnn_has_fresh_running_statistics():
    model = SmallCNN((8, 8), 1, 5)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert (part.running_mean == 0).all() and (part.running_var == 1).all() and part.num_batches_tracked == 0


def test_seed_determines_the_weights():
    one, again, other = (initialize(SmallCNN((8, 8), 1, 5), seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].unique().numel() > 1 and name.endswith("weight")]
    assert len(drawn) == 4 + 2
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


# LeNet


def test_lenet_has_the_well_known_number_of_parameters():
    """(25 + 1) 6 + (6 * 25 + 1) 16 + (400 + 1) 120 + (120 + 1) 84 + (84 + 1) 10."""
    model = LeNet((28, 28), 1, 10)
    assert footprint(model, torch.zeros(1, 1, 28, 28))["params"] == 61_706
    state = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim > 1}
    assert list(state.values()) == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]


@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_lenet_follows_its_paper(activation, pooling):
    """LeCun et al. 1998, section II.B, computed one number at a time."""
    model = LeNet((12, 14), 2, 3, activation=activation, pooling=pooling).double().requires_grad_(False)
    x = torch.randn(1, 2, 12, 14, dtype=torch.float64)
    (w1, b1), (w2, b2), *rest = [(m.weight, m.bias) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    def activate(z):
        return math.tanh(z) if activation == "tanh" else max(z, 0.0)

    def convolved(maps, weight, bias):
        rows, columns = len(maps[0]) - 4, len(maps[0][0]) - 4
        windows = torch.tensor(maps, dtype=weight.dtype).unfold(1, 5, 1).unfold(2, 5, 1)
        return [
            [[activate(((windows[:, i, j] * k).sum() + c).item()) for j in range(columns)] for i in range(rows)]
            for k, c in zip(weight, bias)
        ]

    def pooled(maps):
        reduce = max if pooling == "max" else lambda four: sum(four) / 4
        return [
            [
                [reduce([rows[2 * i + a][2 * j + b] for a in (0, 1) for b in (0, 1)]) for j in range(len(rows[0]) // 2)]
                for i in range(len(rows) // 2)
            ]
            for rows in maps
        ]

    maps = pooled(convolved(pooled(convolved(F.pad(x[0], (2, 2, 2, 2)).tolist(), w1, b1)), w2, b2))
    assert (len(maps), len(maps[0]), len(maps[0][0])) == (16, 1, 1)
    units = [value for rows in maps for row in rows for value in row]
    for layer, (weight, bias) in enumerate(rest):
        units = [sum(w * u for w, u in zip(row, units)) + c for row, c in zip(weight.tolist(), bias.tolist())]
        units = units if layer == 2 else [activate(u) for u in units]
    assert model(x)[0].tolist() == pytest.approx(units, abs=1e-10)


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: SmallCNN((3, 28), 1, 5), "image 3 x 28 is too small for two poolings; expected at least 4 x 4"),
        (lambda: SmallCNN((8, 8), 1, 5)(torch.randn(2, 1, 8, 12)), r"got images of shape .*; expected \(1, 8, 8\) each"),
        (lambda: SmallCNN((8, 8), 1, 5)(torch.randn(2, 3, 8, 8)), r"got images of shape .*; expected \(1, 8, 8\) each"),
        (lambda: LeNet((11, 28), 1, 5), "image 11 x 28 is too small for two 5x5 convolutions; expected at least 12 x 12"),
        (lambda: LeNet((28, 28), 1, 5, activation="gelu"), "activation is 'gelu'; expected one of 'tanh', 'relu'"),
        (lambda: LeNet((28, 28), 1, 5, pooling="sum"), "pooling is 'sum'; expected one of 'average', 'max'"),
        (lambda: LeNet((16, 16), 1, 5)(torch.randn(2, 1, 16, 20)), r"got images of shape .*; expected \(1, 16, 16\) each"),
        (lambda: LeNet((16, 16), 1, 5)(torch.randn(2, 3, 16, 16)), r"got images of shape .*; expected \(1, 16, 16\) each"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()


# ResNet


@pytest.mark.parametrize(("name", "channels"), slow_after(2, [("resnet18", 1), ("resnet10t", 3), ("resnet18", 3), ("resnet10t", 1)]))
def test_resnet_with_the_full_stem_equals_timm(name, channels):
    mine = randomize(ResNet((28, 28), channels, 5, name=name, small_stem=False)).eval()
    theirs = timm.create_model(name, in_chans=channels, num_classes=5).eval()
    renamed = {name.replace("body.", "").replace("head.", "fc."): value for name, value in mine.state_dict().items()}
    theirs.load_state_dict(renamed)
    x = torch.randn(2, channels, 28, 28)
    assert torch.allclose(mine(x), theirs(x), atol=1e-5) and mine(x).std() > 1e-3
    assert torch.allclose(mine.features(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "resnet10t", "resnet50_gn"])
@pytest.mark.parametrize("image", slow_but(((63, 63),), [(28, 28), (32, 80), (63, 63)]))
def test_small_image_keeps_its_size_up_to_the_first_stage(name, image):
    with torch.device("meta"):
        model = ResNet(image, 2, 5, name=name)
        seen = []
        model.body.layer1.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-2:]))
        assert model(torch.zeros(2, 2, *image)).shape == (2, 5)
    assert seen == [image] and model.body.conv1.kernel_size == (3, 3)


@pytest.mark.parametrize("image, options", [((64, 64), {}), ((28, 28), {"small_stem": False})])
def test_large_images_and_small_stem_false_use_the_stem_of_timm(image, options):
    with torch.device("meta"):
        model = ResNet(image, 3, 5, **options)
    assert model.body.conv1.kernel_size == (7, 7) and isinstance(model.body.maxpool, nn.MaxPool2d)


def test_resnet_for_cifar_has_its_usual_size_and_changes_nothing_in_timm():
    model = ResNet((32, 32), 3, 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    macs = footprint(model.eval(), torch.zeros(1, 3, 32, 32))["macs"]
    assert macs == pytest.approx(0.556e9, rel=0.01)  # the usual figure for CIFAR
    assert abs(model.body.conv1.weight.std() / math.sqrt(2 / (9 * 64)) - 1) < 0.1  # He initialization by the fan out, as in timm
    again = timm.create_model("resnet18", num_classes=10)
    assert again.conv1.kernel_size == (7, 7) and isinstance(again.maxpool, nn.MaxPool2d)


def test_every_weight_of_a_resnet_trains_on_any_image_size():
    model = randomize(ResNet((8, 8), 1, 5)).train()
    for image in ((8, 8), (12, 9)):
        x = torch.randn(4, 1, *image)
        assert_trains(model, x)
    assert torch.equal(model.eval()(x), model.head(model.features(x))) and feature_width(model) == 512


def test_global_seed_determines_the_weights_of_a_resnet_and_initialize_keeps_its_body():
    def made(seed):
        torch.manual_seed(seed)
        return ResNet((8, 8), 1, 5, name="resnet10t")

    one, again, other = (made(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].ndim > 1]
    assert len(drawn) > 10 and not any(torch.equal(one[name], other[name]) for name in drawn)
    kept = initialize(made(0), seed=5).state_dict()
    assert all(torch.equal(one[name], kept[name]) for name in one if name.startswith("body."))


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet81", "resnet18"), ("Resnet50", "resnet50"), ("resnet18.a1_in1k", "resnet18"), ("vit_tiny", "resnet18, resnet34")],
)
def test_unknown_resnet_name_raises_an_error_with_the_nearest_names(name, near):
    with pytest.raises(ValueError, match=f"timm has no ResNet '{name}'; expected one of its names, such as .*{near}"):
        ResNet((28, 28), 1, 5, name=name)


def test_resnet_refuses_other_numbers_of_channels():
    with torch.device("meta"):
        model = ResNet((28, 28), 1, 5, name="resnet10t")
        for wrong in ((2, 3, 28, 28), (1, 28, 28)):
            with pytest.raises(ValueError, match=r"got images of shape .*; .* needs b 1 h w"):
                model(torch.zeros(wrong))
