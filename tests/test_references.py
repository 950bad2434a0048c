import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from smallvit import LeNet, Pixels, ResNet, SmallCNN, initialize
from smallvit.flops import footprint
from smallvit.objectives.dino import width


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_are_the_feature_and_nothing_is_learned(channels):
    model, x = Pixels((4, 6), channels, 10), torch.randn(3, channels, 4, 6)
    assert torch.equal(model.features(x), x.reshape(3, -1))
    assert not model.state_dict()
    with pytest.raises(ValueError, match="raw pixels give no logits; evaluate them with knn or linear_probe"):
        model(x)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("image", [(28, 28), (24, 40), (8, 8), (4, 5)])
def test_the_cnn_learns_with_every_weight_on_any_image(channels, image):
    model, x = SmallCNN(image, channels, 5), torch.randn(4, channels, *image)
    logits = model(x)
    assert logits.shape == (4, 5)
    F.cross_entropy(logits, torch.arange(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_logits_are_the_head_of_the_features():
    model, x = SmallCNN((8, 8), 1, 5, hidden=7).eval(), torch.randn(3, 1, 8, 8)
    assert model.features(x).shape == (3, 7)
    assert torch.equal(model(x), model.head(model.features(x)))


def test_the_cnn_is_the_one_of_its_description():
    model = SmallCNN((28, 28), 1, 10)
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert [(conv.out_channels, conv.kernel_size) for conv in convs] == [(16, (3, 3))] * 2 + [(32, (3, 3))] * 2
    assert sum(isinstance(part, nn.MaxPool2d) for part in model.modules()) == 2
    assert 115_000 < sum(p.numel() for p in model.parameters()) < 125_000


def test_making_the_cnn_leaves_no_trace_in_its_running_statistics():
    model = SmallCNN((8, 8), 1, 5)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert (part.running_mean == 0).all() and (part.running_var == 1).all() and part.num_batches_tracked == 0


def test_seeds_decide_the_weights():
    one, again, other = (initialize(SmallCNN((8, 8), 1, 5), seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].unique().numel() > 1 and name.endswith("weight")]
    assert len(drawn) == 4 + 2
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


def test_bad_images_are_named():
    with pytest.raises(ValueError, match="image 3 x 28 is too small for two poolings; expected at least 4 x 4"):
        SmallCNN((3, 28), 1, 5)
    for wrong in ((2, 1, 8, 12), (2, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"got images of shape .*; expected \(1, 8, 8\) each"):
            SmallCNN((8, 8), 1, 5)(torch.randn(wrong))


# LeNet


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("image", [(28, 28), (24, 40), (16, 16), (12, 13)])
def test_lenet_learns_with_every_weight_on_any_image(channels, image):
    model, x = LeNet(image, channels, 5), torch.randn(4, channels, *image)
    logits = model(x)
    assert logits.shape == (4, 5) and model.features(x).shape == (4, 84)
    assert torch.equal(logits, model.head(model.features(x)))
    F.cross_entropy(logits, torch.arange(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_lenet_has_the_number_of_parameters_that_everybody_counts():
    """(25 + 1) 6 + (6 * 25 + 1) 16 + (400 + 1) 120 + (120 + 1) 84 + (84 + 1) 10."""
    model = LeNet((28, 28), 1, 10)
    assert footprint(model, torch.zeros(1, 1, 28, 28))["params"] == 61_706
    state = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim > 1}
    assert list(state.values()) == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]


@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_lenet_is_the_one_of_its_description(activation, pooling):
    """LeCun et al. 1998, section II.B, one number at a time."""
    model = LeNet((12, 14), 2, 3, activation=activation, pooling=pooling).double().requires_grad_(False)
    x = torch.randn(1, 2, 12, 14, dtype=torch.float64)
    (w1, b1), (w2, b2), *rest = [(m.weight, m.bias) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    def squash(z):
        return math.tanh(z) if activation == "tanh" else max(z, 0.0)

    def seen(maps, weight, bias):
        rows, columns = len(maps[0]) - 4, len(maps[0][0]) - 4
        windows = torch.tensor(maps, dtype=weight.dtype).unfold(1, 5, 1).unfold(2, 5, 1)
        return [
            [[squash(((windows[:, i, j] * k).sum() + c).item()) for j in range(columns)] for i in range(rows)]
            for k, c in zip(weight, bias)
        ]

    def pooled(maps):
        take = max if pooling == "max" else lambda four: sum(four) / 4
        return [
            [
                [take([rows[2 * i + a][2 * j + b] for a in (0, 1) for b in (0, 1)]) for j in range(len(rows[0]) // 2)]
                for i in range(len(rows) // 2)
            ]
            for rows in maps
        ]

    maps = pooled(seen(pooled(seen(F.pad(x[0], (2, 2, 2, 2)).tolist(), w1, b1)), w2, b2))
    assert (len(maps), len(maps[0]), len(maps[0][0])) == (16, 1, 1)
    units = [value for rows in maps for row in rows for value in row]
    for at, (weight, bias) in enumerate(rest):
        units = [sum(w * u for w, u in zip(row, units)) + c for row, c in zip(weight.tolist(), bias.tolist())]
        units = units if at == 2 else [squash(u) for u in units]
    assert model(x)[0].tolist() == pytest.approx(units, abs=1e-10)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: LeNet((11, 28), 1, 5), "image 11 x 28 is too small for two 5x5 convolutions; expected at least 12 x 12"),
        (lambda: LeNet((28, 28), 1, 5, activation="gelu"), "activation is 'gelu'; expected one of 'tanh', 'relu'"),
        (lambda: LeNet((28, 28), 1, 5, pooling="sum"), "pooling is 'sum'; expected one of 'average', 'max'"),
        (lambda: LeNet((16, 16), 1, 5)(torch.randn(2, 1, 16, 20)), r"got images of shape .*; expected \(1, 16, 16\) each"),
        (lambda: LeNet((16, 16), 1, 5)(torch.randn(2, 3, 16, 16)), r"got images of shape .*; expected \(1, 16, 16\) each"),
    ],
)
def test_bad_choices_of_lenet_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


# ResNet


def stirred(model):
    """Every weight drawn, so that no branch stays at the 0 that it starts with."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("name", ["resnet18", "resnet10t"])
@pytest.mark.parametrize("channels", [1, 3])
def test_with_its_own_stem_it_is_timms(name, channels):
    mine = stirred(ResNet((28, 28), channels, 5, name=name, small_stem=False)).eval()
    theirs = timm.create_model(name, in_chans=channels, num_classes=5).eval()
    renamed = {name.replace("body.", "").replace("head.", "fc."): value for name, value in mine.state_dict().items()}
    theirs.load_state_dict(renamed)
    x = torch.randn(2, channels, 28, 28)
    assert torch.allclose(mine(x), theirs(x), atol=1e-5) and mine(x).std() > 1e-3
    assert torch.allclose(mine.features(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "resnet10t", "resnet50_gn"])
@pytest.mark.parametrize("image", [(28, 28), (32, 80), (63, 63)])
def test_a_small_image_keeps_its_size_up_to_the_first_stage(name, image):
    with torch.device("meta"):
        model = ResNet(image, 2, 5, name=name)
        seen = []
        model.body.layer1.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-2:]))
        assert model(torch.zeros(2, 2, *image)).shape == (2, 5)
    assert seen == [image] and model.body.conv1.kernel_size == (3, 3)


@pytest.mark.parametrize("image, knobs", [((64, 64), {}), ((28, 28), {"small_stem": False})])
def test_other_images_have_timms_stem(image, knobs):
    with torch.device("meta"):
        model = ResNet(image, 3, 5, **knobs)
    assert model.body.conv1.kernel_size == (7, 7) and isinstance(model.body.maxpool, nn.MaxPool2d)


def test_the_resnet_of_cifar_has_its_usual_size_and_leaves_timm_alone():
    model = ResNet((32, 32), 3, 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    macs = footprint(model.eval(), torch.zeros(1, 3, 32, 32))["macs"]
    assert macs == pytest.approx(0.556e9, rel=0.01)  # what pages on CIFAR print for it
    assert abs(model.body.conv1.weight.std() / math.sqrt(2 / (9 * 64)) - 1) < 0.1  # He et al., by the fan out, as timm's
    again = timm.create_model("resnet18", num_classes=10)
    assert again.conv1.kernel_size == (7, 7) and isinstance(again.maxpool, nn.MaxPool2d)


def test_a_resnet_learns_with_every_weight_and_takes_any_size():
    model = stirred(ResNet((8, 8), 1, 5)).train()
    for image in ((8, 8), (12, 9)):
        model.zero_grad()
        x = torch.randn(4, 1, *image)
        F.cross_entropy(model(x), torch.arange(4)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
    assert torch.equal(model.eval()(x), model.head(model.features(x))) and width(model) == 512


def test_the_global_seed_decides_a_resnets_weights_and_initialise_leaves_its_body():
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
def test_an_unknown_resnet_is_named_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"timm has no ResNet '{name}'; expected one of its names, such as .*{near}"):
        ResNet((28, 28), 1, 5, name=name)


def test_other_channels_are_named():
    with torch.device("meta"):
        model = ResNet((28, 28), 1, 5, name="resnet10t")
        for wrong in ((2, 3, 28, 28), (1, 28, 28)):
            with pytest.raises(ValueError, match=r"got images of shape .*; expected b 1 h w, the channels this CNN was"):
                model(torch.zeros(wrong))
