import inspect
import math
from itertools import product

import pytest
import torch
from torch import nn

from smallvit import ClassToken, MeanTokens, SequencePool, pooling

EVERY = [ClassToken, MeanTokens, SequencePool]
every = pytest.mark.parametrize("make", EVERY)
weighted = pytest.mark.parametrize("make", [MeanTokens, SequencePool])
B, N, D = 2, 5, 6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(make):
    module = make(D).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    return module


def tokens(n=N):
    return torch.randn(B, n, D, dtype=torch.float64)


def sizes(n=N):
    return torch.rand(B, n, dtype=torch.float64) * 3


def oracle(module, x, size, prefix):
    """A mean of tokens, weighed by their sizes and, in CCT (Hassani et al. 2021, section 3.2), by exp of a learned score."""
    if isinstance(module, ClassToken):
        return torch.stack([image[0] for image in x])
    pooled = torch.zeros(B, D, dtype=torch.float64)
    for image in range(B):
        weight = {}
        for i in range(prefix, x.shape[1]):
            weight[i] = 1.0 if size is None else float(size[image, i])
            if isinstance(module, SequencePool):
                row = zip(module.score.weight[0].tolist(), x[image, i].tolist())
                weight[i] *= math.exp(sum(w * v for w, v in row) + float(module.score.bias))
        for i, d in product(weight, range(D)):
            pooled[image, d] += weight[i] / sum(weight.values()) * x[image, i, d]
    return pooled


def close(one, other, by=1e-10):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= by


def test_every_class_is_held_to_the_equations():
    assert [c for c in vars(pooling).values() if inspect.isclass(c) and issubclass(c, nn.Module)] == EVERY
    assert [make.class_tokens for make in EVERY] == [1, 0, 0]


@every
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_the_feature_follows_the_equations(make, sized, prefix):
    module, x, size = perturbed(make), tokens(), sizes() if sized else None
    close(module(x, size, prefix), oracle(module, x, size, prefix))


@every
def test_sizes_of_one_are_no_sizes(make):
    module, x = perturbed(make), tokens()
    close(module(x, torch.ones(B, N), 1), module(x, None, 1), 1e-14)


@weighted
def test_a_token_of_size_k_counts_as_k_equal_tokens_and_one_of_size_0_as_none(make):
    module, x = perturbed(make), tokens()
    size = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]] * B, dtype=torch.float64)
    x[:, 3] = 1e3
    close(module(x, size, 1), module(x[:, [0, 1, 1, 1, 2, 4]], None, 1), 1e-12)


@weighted
def test_the_prefix_and_the_order_do_not_matter(make):
    module, x, size = perturbed(make), tokens(), sizes()
    order = torch.cat([torch.tensor([0, 1]), 2 + torch.randperm(N - 2)])
    other = x[:, order].clone()
    other[:, :2] += 7
    close(module(other, size[:, order], 2), module(x, size, 2), 1e-12)


def test_the_class_token_is_the_first_whatever_stands_behind_it():
    x = tokens()
    assert torch.equal(ClassToken(D)(x, sizes(), 3), x[:, 0])


def test_sequence_pool_with_equal_scores_is_the_mean_and_with_a_dominant_one_that_token():
    module, x = perturbed(SequencePool), tokens()
    nn.init.zeros_(module.score.weight)
    close(module(x, None, 1), MeanTokens(D)(x, None, 1), 1e-14)
    x[..., 0] = torch.tensor([0, 0, 0, 1.0, 0], dtype=torch.float64)
    nn.init.constant_(module.score.weight[0, :1], 1e3)
    close(module(x, None, 1), x[:, 3], 1e-14)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_and_stays_half(make, dtype):
    module, x, size = perturbed(make), tokens(), sizes()
    size[:, 2] = 0
    for given in (None, size):
        expected = module.double()(x, given, 1)
        got = module.to(dtype)(x.to(dtype), None if given is None else given.to(dtype), 1)
        assert got.dtype == dtype
        close(got.double(), expected, 0.1)
