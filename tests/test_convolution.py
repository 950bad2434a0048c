"""The layers with channels last: equal to PyTorch's, also for several models at once, and still arranged as they should be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from toys import assert_close

from smallvit import ConvTokenizer, SmallCNN
from smallvit.convolution import BatchNorm2d, Conv2d, MaxPool2d

LAYERS = {
    "3x3": (Conv2d, nn.Conv2d, (4, 6, 3), {"padding": 1, "bias": False}),
    "stride, bias": (Conv2d, nn.Conv2d, (4, 6, 5), {"stride": 2, "padding": 2}),
    "groups, dilation": (Conv2d, nn.Conv2d, (4, 8, 3), {"groups": 2, "dilation": 2}),
    "pool 2": (MaxPool2d, nn.MaxPool2d, (2,), {}),
    "reflected": (Conv2d, nn.Conv2d, (4, 6, 3), {"padding": 1, "padding_mode": "reflect"}),
    "pool 3": (MaxPool2d, nn.MaxPool2d, (3,), {"stride": 2, "padding": 1}),
    "pool with options": (MaxPool2d, nn.MaxPool2d, (2,), {"stride": 2, "dilation": 2, "ceil_mode": True}),
    "norm": (BatchNorm2d, nn.BatchNorm2d, (4,), {}),
}
every = pytest.mark.parametrize("name", LAYERS)
K, B = 3, 5


def pairs(name, count=1):
    """Layers of this package with random weights, and PyTorch's with the same weights."""
    ours, theirs, positions, options = LAYERS[name]
    made = [ours(*positions, **options).double() for _ in range(count)]
    for layer in made:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    same = [theirs(*positions, **options).double() for _ in made]
    for one, other in zip(made, same):
        other.load_state_dict(one.state_dict())
    return made, same


def images(*shape):
    return torch.randn(*shape, 4, 9, 7, dtype=torch.float64)


@every
def test_a_layer_equals_that_of_pytorch(name):
    (ours,), (theirs,) = pairs(name)
    x = images(B).requires_grad_()
    results = [layer(x) for layer in (ours, theirs)]
    assert_close(*results)
    weights = torch.randn_like(results[1])
    gradients = [
        torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()]) for out, layer in zip(results, (ours, theirs))
    ]
    for one, other in zip(*gradients):
        assert_close(one, other)
    for one, other in zip(ours.buffers(), theirs.buffers()):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "shared"),
    [(name, False) for name in LAYERS] + [(name, True) for name in LAYERS if "pool" not in name],
)
def test_models_at_once_equal_models_of_pytorch_one_after_another(name, shared):
    ours, theirs = pairs(name, K)
    x = images(B).requires_grad_() if shared else images(K, B).requires_grad_()
    weights, buffers = stack_module_state(ours)
    base = copy.deepcopy(ours[0])

    def of(w, b, own):
        return functional_call(base, (w, b), (own,))

    out = vmap(of, in_dims=(0, 0, None if shared else 0))(weights, buffers, x)
    expected = torch.stack([layer(x if shared else x[index]) for index, layer in enumerate(theirs)])
    assert_close(out, expected)
    factor = torch.randn_like(expected)
    inputs = [x, *weights.values()]
    one = torch.autograd.grad((out * factor).sum(), inputs)
    own = [x, *(p for layer in theirs for p in layer.parameters())]
    other = torch.autograd.grad((expected * factor).sum(), own)
    assert_close(one[0], other[0])
    count = len(weights)
    for place in range(count):
        assert_close(one[1 + place], torch.stack(other[1 + place :: count]))
    for key, buffer in buffers.items():  # running statistics, changed in place
        assert_close(buffer, torch.stack([dict(layer.named_buffers())[key] for layer in theirs]))


class Arrangement(TorchDispatchMode):
    """Collects whether the images that PyTorch convolves, pools and normalizes forward have their channels last. Images of one
    channel are left out, which are arranged in both ways at once.
    """

    def __init__(self):
        super().__init__()
        self.found = {"convolution": [], "max_pool2d": [], "batch_norm": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for part, found in self.found.items():
            if part in str(func) and "backward" not in str(func) and args[0].shape[1] > 1:
                found.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda: ConvTokenizer((28, 28), 1, 16, hidden=8), lambda: SmallCNN((28, 28), 1, 10)])
@pytest.mark.parametrize("stacked", [False, True])
def test_channels_are_last_in_a_step(make, stacked):
    models, x = [make() for _ in range(K)], torch.randn(K, B, 1, 28, 28)
    weights, buffers = stack_module_state(models)

    def loss(w, b, own):
        return functional_call(models[0], (w, b), (own,)).square().mean()

    with Arrangement() as arrangement:
        value = vmap(loss)(weights, buffers, x).sum() if stacked else models[0](x[0]).square().mean()
        value.backward()
    found = arrangement.found
    assert len(found["convolution"]) >= 1 and len(found["max_pool2d"]) == 2
    assert len(found["batch_norm"]) == (4 if isinstance(models[0], SmallCNN) else 0)
    assert all(all(each) for each in found.values())


def test_other_transforms_of_pytorch_still_work():
    model = ConvTokenizer((8, 8), 1, 6, hidden=4).double()
    plain = ConvTokenizer((8, 8), 1, 6, hidden=4).double()
    plain.convs = nn.ModuleList(nn.Conv2d(c.in_channels, c.out_channels, 3, padding=1, bias=False).double() for c in model.convs)
    plain.pool = nn.MaxPool2d(3, stride=2, padding=1)
    plain.load_state_dict(model.state_dict())
    x, direction = torch.randn(3, 2, 1, 8, 8, dtype=torch.float64), torch.randn(3, 2, 1, 8, 8, dtype=torch.float64)
    for transform in (
        lambda m: vmap(grad(lambda own: m(own).square().sum()))(x),
        lambda m: vmap(vmap(m))(x[:, None]),
        lambda m: jvp(m, (x[0],), (direction[0],))[1],
        lambda m: jvp(vmap(m), (x,), (direction,))[1],
        lambda m: torch.func.hessian(lambda own: m(own).square().sum())(x[0, :1]),
    ):
        assert_close(transform(model), transform(plain))


def test_a_vmap_over_something_else_leaves_the_layers_as_they_are():
    for model in (ConvTokenizer((8, 8), 1, 6, hidden=4), SmallCNN((8, 8), 1, 3).eval()):
        x = torch.randn(2, 1, 8, 8)
        assert_close(vmap(lambda k, m=model, x=x: k * m(x))(torch.arange(3.0))[2], 2 * model(x), atol=1e-5)


def test_images_without_a_batch_are_computed_like_those_of_pytorch():
    x = torch.randn(1, 8, 8)
    layer = Conv2d(1, 2, 3)
    assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias), atol=1e-6)
    assert_close(vmap(MaxPool2d(2))(x[None]), F.max_pool2d(x[None], 2))


def test_running_statistics_are_never_lost():
    models, x = [BatchNorm2d(4) for _ in range(K)], torch.randn(K, B, 4, 3, 3)
    weights, buffers = stack_module_state(models)
    turned = {key: value.movedim(0, -1).contiguous() for key, value in buffers.items()}

    def of(w, b, own):
        return functional_call(models[0], (w, b), (own,))

    vmap(of, in_dims=(0, {key: value.ndim - 1 for key, value in turned.items()}, 0))(weights, turned, x)
    vmap(of)(weights, buffers, x)
    assert buffers["running_mean"].abs().max() > 0
    for key, value in turned.items():
        assert_close(value.movedim(-1, 0), buffers[key])
    with pytest.raises(RuntimeError, match="running_mean"):  # PyTorch's own error
        vmap(BatchNorm2d(4))(x)


def test_bf16_gives_bf16_also_for_several_models():
    def make():
        return nn.Sequential(Conv2d(1, 8, 3), BatchNorm2d(8), MaxPool2d(2), Conv2d(8, 8, 3))

    models, x = [make() for _ in range(2)], torch.randn(2, 4, 1, 12, 12)
    weights, buffers = stack_module_state(models)
    with torch.autocast("cpu", torch.bfloat16):
        out = vmap(lambda w, b, own: functional_call(models[0], (w, b), (own,)))(weights, buffers, x)
        alone = torch.stack([copy.deepcopy(model)(own) for model, own in zip(models, x)])
    assert out.dtype == alone.dtype == torch.bfloat16
    assert (out.float() - alone.float()).abs().max() < 0.05 * alone.float().abs().max()


def test_a_pool_before_the_relu_equals_the_usual_order():
    model, x = SmallCNN((28, 28), 1, 10).eval(), torch.randn(4, 1, 28, 28)
    convolutions = [layer for layer in model.body if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in model.body if isinstance(layer, nn.BatchNorm2d)]
    usual = x
    for number, (convolution, norm) in enumerate(zip(convolutions, norms)):
        usual = norm(F.conv2d(usual, convolution.weight, padding=1)).relu()
        usual = F.max_pool2d(usual, 2) if number % 2 else usual
    hidden = next(layer for layer in model.body if isinstance(layer, nn.Linear))
    assert_close(hidden(usual.flatten(1)).relu(), model.features(x), atol=1e-5)
