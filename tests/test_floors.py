import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smallvit import Pixels, SmallCNN, initialise


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
    one, again, other = (initialise(SmallCNN((8, 8), 1, 5), seed).state_dict() for seed in (0, 0, 1))
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
