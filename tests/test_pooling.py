"""Pools: the equations entry by entry, sizes and prefix tokens, and DeiT's class and distillation token with a head each."""

import inspect
import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from toys import TINY_VIT, assert_close, tiny_vit

from smallvit import DINO, MAE, LearnToPrune, attention_maps, features, initialize, pooling, rollout
from smallvit.augment import Batch
from smallvit.data import DataSpec, Images
from smallvit.flops import closed_form, footprint
from smallvit.pooling import ClassToken, DistilledTokens, MeanTokens, Projected, SequencePool, TwoHeads
from smallvit.reduction import LearnedPrune, Merge, Prune

EVERY = [ClassToken, MeanTokens, SequencePool, DistilledTokens]
every = pytest.mark.parametrize("make", EVERY)
weighted = pytest.mark.parametrize("make", [MeanTokens, SequencePool])
B, N, D = 2, 5, 6


def randomized(make):
    """A pool in double precision whose every parameter is drawn from N(0, 1)."""
    module = make(D).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    return module


def tokens(n=N):
    return torch.randn(B, n, D, dtype=torch.float64)


def sizes(n=N):
    return torch.rand(B, n, dtype=torch.float64) * 3


def oracle(module, x, size, prefix):
    """A mean of tokens, weighted by their sizes and, in CCT (Hassani et al. 2021, section 3.2), by exp of a learned score."""
    if module.class_tokens:
        return torch.stack([torch.cat([image[i] for i in range(module.class_tokens)]) for image in x])
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


def test_every_class_is_tested():
    found = [c for c in vars(pooling).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    assert found == [*EVERY[:3], Projected, DistilledTokens, TwoHeads]
    assert [make.class_tokens for make in EVERY] == [1, 0, 0, 2]


@every
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_feature_follows_the_equations(make, sized, prefix):
    module, x, size = randomized(make), tokens(), sizes() if sized else None
    assert_close(module(x, size, prefix), oracle(module, x, size, prefix))


@weighted
def test_token_of_size_k_counts_as_k_equal_tokens_and_one_of_size_0_as_none(make):
    module, x = randomized(make), tokens()
    size = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]] * B, dtype=torch.float64)
    x[:, 3] = 1e3
    assert_close(module(x, size, 1), module(x[:, [0, 1, 1, 1, 2, 4]], None, 1), 1e-12)


def test_sequence_pool_with_equal_scores_is_the_mean_and_with_one_large_score_that_token():
    module, x = randomized(SequencePool), tokens()
    nn.init.zeros_(module.score.weight)
    assert_close(module(x, None, 1), MeanTokens(D)(x, None, 1), 1e-14)
    x[..., 0] = torch.tensor([0, 0, 0, 1.0, 0], dtype=torch.float64)
    nn.init.constant_(module.score.weight[0, :1], 1e3)
    assert_close(module(x, None, 1), x[:, 3], 1e-14)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_and_stays_half(make, dtype):
    module, x, size = randomized(make), tokens(), sizes()
    size[:, 2] = 0
    for given in (None, size):
        expected = module.double()(x, given, 1)
        feature = module.to(dtype)(x.to(dtype), None if given is None else given.to(dtype), 1)
        assert feature.dtype == dtype
        assert_close(feature.double(), expected, 0.1)


@pytest.mark.parametrize("make", [ClassToken, MeanTokens, SequencePool])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_projected_equals_its_pool_followed_by_its_layers(make, layers):
    """A layer is a matrix product, BatchNorm over the batch, and GELU."""
    module = randomized(partial(Projected, pool=make, hidden=3, layers=layers))
    x, size = torch.randn(7, N, D, dtype=torch.float64), torch.rand(7, N, dtype=torch.float64)
    expected = module.pool(x, size, 1)
    for linear, norm in zip(module.layers[::3], module.layers[1::3]):
        z = expected @ linear.weight.T
        z = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() * norm.weight + norm.bias
        expected = z * (1 + torch.erf(z / 2**0.5)) / 2
    assert_close(module.train()(x, size, 1), expected)
    head = module.make_head(4)
    assert module.class_tokens == make.class_tokens and (head.in_features, head.out_features) == (expected.shape[1], 4)
    with pytest.raises(ValueError, match="training batch of one image; expected at least two"):
        module(x[:1])
    assert module.eval()(x[:1]).shape == (1, expected.shape[1])


# Two tokens with a head each

VIT = partial(TINY_VIT, (8, 8), 1, 5, depth=3)
TWO = partial(VIT, pool=DistilledTokens)
SPEC = DataSpec(name="noise", channels=1, size=(8, 8), classes=tuple("abcde"), mean=(0.5,), std=(0.25,))


@pytest.fixture
def data():
    return Images(torch.randint(256, (7, 1, 8, 8), dtype=torch.uint8), torch.arange(7) % 5, SPEC)


def test_each_head_reads_one_token_and_the_logits_are_the_mean_of_both():
    heads, x = TwoHeads(D, 3).double(), torch.randn(B, 2 * D, dtype=torch.float64)
    parts = [x[:, :D] @ heads.from_labels.weight.T, x[:, D:] @ heads.from_teacher.weight.T]
    parts = [part + head.bias for part, head in zip(parts, (heads.from_labels, heads.from_teacher))]
    for logits, expected in zip(heads.apart(x), parts):
        assert_close(logits, expected)
    assert_close(heads(x), sum(parts) / 2)
    model, x = TWO(), torch.randn(B, 1, 8, 8)
    assert model.features(x).shape == (B, 32) and torch.equal(model(x), model.head(model.features(x)))


def test_with_the_distillation_token_as_a_register_the_logits_are_those_of_the_class_token():
    two, one, x = TWO(), VIT(registers=1), torch.randn(B, 1, 8, 8)
    state = two.state_dict()
    state = {name.replace(".from_labels", ""): value for name, value in state.items() if ".from_teacher" not in name}
    one.load_state_dict(state)
    assert torch.equal(one(x), two.head.apart(two.features(x))[0])


def test_distillation_token_and_its_head_change_no_other_initial_weight():
    one, two = (initialize(make(), seed=3).state_dict() for make in (VIT, TWO))
    assert torch.equal(one["head.weight"], two["head.from_labels.weight"])
    assert torch.equal(one["prefix"], two["prefix"][:1])
    shared = one.keys() & two.keys() - {"prefix", "position.table"}
    assert len(shared) == len(one) - 4 and all(torch.equal(one[name], two[name]) for name in shared)
    wide = initialize(tiny_vit((8, 8), 1, 100, dim=64, depth=1, pool=DistilledTokens), seed=3)
    for head in (wide.head.from_labels, wide.head.from_teacher):
        assert abs(head.weight.std() / 0.02 - 1) < 0.1 and (head.bias == 0).all()
    assert not torch.equal(wide.head.from_labels.weight, wide.head.from_teacher.weight)


def test_features_of_two_tokens_have_the_usual_names(data):
    model = TWO(registers=1).eval()
    tokens = model.tokens(SPEC.normalize(data.images / 255))[0].detach()
    mean = tokens[:, 3:].mean(1)
    for of, expected in {
        "head": tokens[:, :2].flatten(1),
        "class token": tokens[:, 0],
        "mean": mean,
        "both": torch.cat([tokens[:, 0], mean], dim=1),
    }.items():
        assert_close(torch.from_numpy(features(model, data, of=of)), expected, 1e-5)


@pytest.mark.parametrize("reduction", [partial(Merge, r=3), partial(Prune, keep=0.6), partial(LearnedPrune, layers=(1,))])
def test_both_tokens_survive_a_reduction_and_get_gradients(reduction):
    model, x = TWO(reduction=reduction).train(), torch.randn(3, 1, 8, 8)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, result: seen.append((given[0], *result)))
    model(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert all(head.weight.grad.abs().max() > 0 for head in (model.head.from_labels, model.head.from_teacher))
    assert all((part.abs().max() > 0) for part in model.prefix.grad)
    for _, _, size in seen:
        assert size is None or (size[:, :2] == 1).all()
    left = [x.shape[1] if size is None else (size > 0).sum(1).max() for _, x, size in seen]
    assert left[-1] < seen[0][0].shape[1]


def test_attention_maps_include_and_rollout_excludes_both_tokens():
    model, x = TWO().eval(), torch.randn(2, 1, 8, 8)
    assert attention_maps(model, x)[0].shape[-2:] == (18, 18)
    assert rollout(model, x).shape == (2, 4, 4)


def test_macs_and_parameters_include_both_heads():
    model = TWO()
    assert closed_form(model)["head"] == 2 * 16 * 5
    counted = footprint(model, torch.zeros(1, 1, 8, 8))
    assert counted["macs"] == sum(closed_form(model).values())
    more = counted["params"] - footprint(VIT(), torch.zeros(1, 1, 8, 8))["params"]
    assert more == (16 * 5 + 5) + 16 + 16  # head, token, position


def test_other_objectives_accept_the_model_or_refuse_it_clearly():
    batch = Batch(torch.randn(4, 1, 8, 8), torch.eye(5)[:4])
    for made in (MAE(TWO()), LearnToPrune(TWO(reduction=partial(LearnedPrune, layers=(1,))))):
        assert made.train()(batch, 0.0)["loss"].isfinite()
    with pytest.raises(ValueError, match="ViT has no features"):
        DINO(TWO())


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: TWO(norm_after_pool=True), "DistilledTokens makes its own head; expected norm_after_pool=False"),
        (lambda: Projected(D, hidden=0), "got hidden=0, layers=2; expected hidden of at least 1"),
        (lambda: Projected(D, layers=-1), "got hidden=256, layers=-1; expected"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()
