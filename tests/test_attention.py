"""Attention and LocalityAttention: the equations entry by entry, sizes, masks, kernels, dropout and error messages."""

import copy
import inspect
import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import assert_close, option_id, slow_after

from smallvit import Attention, AttentionOutput, LocalityAttention, attention
from smallvit.attention import attend

LSA = [
    partial(LocalityAttention, mask_self=m, temperature=t)
    for m, t in product((True, False), ("per head", "per layer", "fixed"))
]
EVERY = [
    Attention,
    partial(Attention, head_dim=3),
    partial(Attention, qkv_bias=False),
    partial(Attention, qk_norm=True),
    *LSA,
    partial(LocalityAttention, head_dim=3, qkv_bias=False),
]
every = pytest.mark.parametrize("make", EVERY, ids=option_id)
both = pytest.mark.parametrize("make", [Attention, LocalityAttention])
B, N, D, HEADS = 2, 4, 8, 2


def randomized(make, dtype=torch.float64, std=0.5):
    """A module with random parameters, the temperatures of the heads included."""
    module = make(D, HEADS).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def tokens(n=N, dtype=torch.float64):
    return torch.randn(B, n, D, dtype=dtype)


def values_of(module, x):
    return module.qkv(x).unflatten(-1, (3, -1))[:, :, 2]


def oracle(module, x, size=None, mask=None):
    """Vaswani et al. 2017, section 3.2, and Lee et al. 2021, section 4.2, entry by entry: output, attention maps, keys."""
    b, n, _ = x.shape
    e = module.proj.in_features // module.heads
    projected = module.qkv(x).reshape(b, n, 3, module.heads, e)
    maps, output, keys = x.new_zeros(b, module.heads, n, n), *(x.new_zeros(b, n, module.heads, e) for _ in range(2))
    for image, head in product(range(b), range(module.heads)):
        q, k, v = (projected[image, :, part, head] for part in range(3))
        if isinstance(getattr(module, "q_norm", None), nn.LayerNorm):
            q, k = normalized(q, module.q_norm), normalized(k, module.k_norm)
        keys[image, :, head] = k
        for i in range(n):
            weight = {}
            for j in range(n):
                allowed = mask is None or bool(mask[image, head, i, j])
                if allowed and not (i == j and getattr(module, "mask_self", False)) and (size is None or size[image, j] > 0):
                    logit = temperature(module, head, e) * sum(float(a) * float(c) for a, c in zip(q[i], k[j]))
                    weight[j] = math.exp(logit) * (1 if size is None else float(size[image, j]))
            for j in weight or {i: 1}:
                share = weight[j] / sum(weight.values()) if weight else 1
                maps[image, head, i, j] = share
                output[image, i, head] += share * v[j]
    return module.proj(output.reshape(b, n, -1)), maps, keys.mean(2)


def normalized(rows, norm):
    centered = rows - rows.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias


def temperature(module, head, e):
    kind = getattr(module, "temperature", "fixed")
    if kind == "per head":
        return float(module.scale[head])
    return math.exp(float(module.log_scale)) if kind == "per layer" else 1 / math.sqrt(e)


def applied_maps(module, n=N, size=None, mask=None):
    """The attention maps that a module really applies: its values are made one-hot, so that the output is the map itself."""
    x = torch.cat([tokens(n)[..., :4], torch.eye(n, 4, dtype=torch.float64).expand(B, -1, -1)], dim=-1)
    with torch.no_grad():
        module.qkv.bias.zero_()
        module.qkv.weight[:, 4:] = 0
        module.qkv.weight[2 * D :] = torch.eye(4, D, dtype=torch.float64).roll(4, 1).repeat(HEADS, 1)
        module.proj.weight.copy_(torch.eye(D))
        module.proj.bias.zero_()
    return module(x, size, mask).x.unflatten(-1, (HEADS, 4)).transpose(1, 2)[..., :n]


# The equations


def test_every_class_is_tested():
    found = [c for c in vars(attention).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    assert {c.__name__ for c in found} == {"Attention", "LocalityAttention"} and len(LSA) == 6


@every
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_output_saliency_map_and_key_follow_the_equations(make, sized, masked):
    module, x = randomized(make), tokens()
    size = torch.tensor([[1.0, 2.5, 0.0, 3.0], [0.0, 1.0, 1.0, 0.5]], dtype=torch.float64) if sized else None
    mask = torch.rand(B, HEADS, N, N) < 0.7 if masked else None
    if masked:
        mask |= torch.eye(N, dtype=torch.bool).roll(1, 1)  # every query may attend to the next token ...
        mask[..., [1, 3]] |= True  # ... and to tokens that are not removed
    with torch.no_grad():
        expected, maps, keys = oracle(module, x, size, mask)
        output = module(x, size, mask)
    assert_close(output.x, expected)
    assert_close(output.key(), keys)
    present = torch.ones(B, N, dtype=torch.float64) if size is None else (size > 0).double()
    assert_close(output.saliency(), (maps.mean(1) * present[..., None]).sum(1) / present.sum(1, keepdim=True))
    assert_close(output.saliency(1), maps[:, :, 0].mean(1))
    assert_close(output.saliency(2), maps[:, :, :2].mean((1, 2)))


@pytest.mark.parametrize("make", slow_after(2, [partial(Attention, qk_norm=True), LSA[0], LSA[1]]), ids=option_id)
def test_gradients_are_correct(make):
    module = randomized(make)
    x, size = tokens(3)[:1].requires_grad_(), torch.rand(1, 3, dtype=torch.float64).add(0.5)
    assert torch.autograd.gradcheck(lambda x, *_: module(x, size).x, (x, *module.parameters()))


SIZES = {"kept or removed": [1.0, 0.0, 1.0, 0.0], "merged": [1.0, 2.0, 0.0, 3.0], "fractions": [0.25, 0.5, 0.0, 0.75]}


def dynamicvit(q, k, v, size, mask=None):
    """Equations 10 and 11 of DynamicViT, with the gradient to sizes; a token's own size has no part in its own row."""
    exponential = (q @ k.transpose(-2, -1)).exp() * (1 if mask is None else mask)
    own = torch.where(size > 0, size, 1.0).detach()
    weight = exponential * torch.where(torch.eye(N, dtype=torch.bool), own[:, None, :, None], size[:, None, None, :])
    return weight / weight.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_gradient_to_sizes_follows_equations_10_and_11_of_dynamicvit(sizes, masked, fused):
    size = torch.tensor([SIZES[sizes]]).requires_grad_()
    q, k, v = torch.rand(1, HEADS, N, 3), 1 + torch.rand(1, HEADS, N, 3), torch.randn(1, HEADS, N, 3)
    k[:, :, size[0] == 0] *= 0.1  # removed tokens have smaller logits than present ones: see the next test
    for part in (q, k, v):
        part.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1]]).bool() if masked else None
    expected = dynamicvit(q, k, v, size, mask)
    output, _ = attend(q, k, v, size, mask, fused=fused)
    assert_close(output, expected, 1e-5)
    drawn = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad((out * drawn).sum(), (size, q, k, v)) for out in (output, expected))):
        assert_close(ours, theirs, 1e-5)
    detached, _ = attend(q, k, v, size.detach(), mask, fused=fused)
    present = (size[0] > 0).nonzero()[:, 0].tolist()
    assert_close(output[:, :, present], detached[:, :, present], 1e-5)  # the same output with and without a gradient to sizes


def test_gradient_to_a_removed_token_with_a_large_logit_is_capped_as_documented():
    size = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).requires_grad_()
    q, k, v = torch.ones(1, HEADS, N, 3), torch.zeros(1, HEADS, N, 3), torch.randn(1, HEADS, N, 3)
    k[:, :, 1] = 1.0  # the removed token's logit is 3, that of the others 0
    outputs = [function(q, k, v, size) for function in (lambda *given: attend(*given)[0], dynamicvit)]
    ours, theirs = (torch.autograd.grad(out[:, :, [0, 2, 3]].sum(), size)[0][0, 1] for out in outputs)
    assert theirs / ours == pytest.approx(math.exp(3), rel=1e-4)


def test_sizes_get_a_gradient_in_double_precision_too():
    module, x, size = randomized(Attention), tokens(), torch.ones(B, N, dtype=torch.float64, requires_grad=True)
    assert_close(module(x, size).x, module(x).x)


@both
def test_removed_token_affects_no_other_however_large_its_logit(make):
    module, x = randomized(make, torch.float32), tokens(dtype=torch.float32)
    x[:, 1] *= 1e3
    size, kept = torch.tensor([[1.0, 0.0, 1.0, 1.0]] * B), [0, 2, 3]
    output = module(x, size.requires_grad_()).x
    assert_close(output[:, kept], module(x[:, kept]).x, 1e-4)
    output[:, kept].square().sum().backward()
    assert size.grad.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


# The off setting, and what is learned


def test_locality_attention_switched_off_equals_attention():
    plain = randomized(Attention, torch.float32)
    off = LocalityAttention(D, HEADS, mask_self=False, temperature="fixed")
    off.load_state_dict(plain.state_dict())
    x, size, mask = tokens(5, torch.float32), torch.rand(B, 5), (torch.rand(5, 5) < 0.8) | torch.eye(5, dtype=torch.bool)
    for arguments in ((), (size,), (None, mask), (size, mask)):
        ours, theirs = off(x, *arguments), plain(x, *arguments)
        assert torch.equal(ours.x, theirs.x) and torch.equal(ours.saliency(), theirs.saliency())


def test_diagonal_mask_alone_equals_sdpa_with_a_masked_diagonal():
    module, x = randomized(partial(LocalityAttention, temperature="fixed")), tokens()
    q, k, v = module.qkv(x).reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=~torch.eye(N, dtype=torch.bool))
    assert_close(module(x).x, module.proj(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(("temperature", "name", "shape"), [("per head", "scale", (HEADS,)), ("per layer", "log_scale", ())])
def test_temperature_starts_as_in_attention_and_learns(temperature, name, shape):
    module = LocalityAttention(D, HEADS, mask_self=False, temperature=temperature)
    learned = getattr(module, name)
    assert learned.shape == shape
    plain = Attention(D, HEADS)
    plain.load_state_dict({key: value for key, value in module.state_dict().items() if key != name})
    x = tokens(dtype=torch.float32)
    assert_close(module(x).x, plain(x).x, 1e-6)
    module(x).x.square().sum().backward()
    assert learned.grad.abs().min() > 0


def test_temperature_per_layer_cannot_change_its_sign():
    module = randomized(partial(LocalityAttention, mask_self=False, temperature="per layer"))

    def order(log_scale):
        nn.init.constant_(module.log_scale, log_scale)
        torch.manual_seed(1)
        return applied_maps(module).argsort(-1)

    assert torch.equal(order(-3.0), order(1.0))


# Rows, diagonal, few tokens


@every
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_sum_to_1_and_the_masked_diagonal_is_exactly_0(make, n):
    if "head_dim" in getattr(make, "keywords", {}) or make(D, HEADS).qkv.bias is None:
        make = partial(make, head_dim=None, qkv_bias=True)
    module = randomized(make)
    maps = applied_maps(module, n)
    assert_close(maps.sum(-1), torch.ones(B, HEADS, n, dtype=torch.float64), 1e-12)
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    assert (diagonal == 0).all() if getattr(module, "mask_self", False) else (diagonal > 0).all()


def test_with_a_masked_diagonal_no_token_uses_its_own_value():
    module, x = randomized(LocalityAttention), tokens()
    with torch.no_grad():
        module.qkv.weight[: 2 * D, 4:] = 0  # channels 4 to 7 reach the values only
    other = x.clone()
    other[:, 1, 4:] = 1e3
    before, after = module(x).x, module(other).x
    assert torch.equal(before[:, 1], after[:, 1])
    assert (before[:, [0, 2, 3]] - after[:, [0, 2, 3]]).abs().amin(dim=(0, 2)).min() > 0


@every
def test_single_token_attends_to_itself(make):
    module, x = randomized(make), tokens(1)
    assert_close(module(x).x, module.proj(values_of(module, x)), 1e-12)
    assert torch.equal(module(x).saliency(), torch.ones(B, 1, dtype=torch.float64))


def test_with_a_masked_diagonal_two_tokens_swap_values():
    module, x = randomized(LocalityAttention), tokens(2)
    assert_close(module(x).x, module.proj(values_of(module, x).flip(1)), 1e-12)


@every
def test_one_module_takes_any_number_of_tokens_in_any_order(make):
    module = randomized(make)
    for n in (1, 2, 5, 9):
        order, x, size, mask = torch.randperm(n), tokens(n), torch.rand(B, n, dtype=torch.float64), torch.rand(n, n) < 0.8
        mask |= torch.eye(n, dtype=torch.bool)
        moved, output = module(x[:, order], size[:, order], mask[order][:, order]), module(x, size, mask)
        assert_close(moved.x, output.x[:, order], 1e-12)
        assert_close(moved.saliency(), output.saliency()[:, order], 1e-12)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", slow_after(2, [1, 2, 600]))
def test_half_precision_is_finite_and_close(make, dtype, n):
    module, x = randomized(make, torch.float32, std=0.3), tokens(n, torch.float32)
    size = torch.ones(B, n)
    size[:, 1::2] = 0
    for arguments in ((), (size,)):
        expected = module.float()(x, *arguments).x
        output = module.to(dtype)(x.to(dtype), *arguments)
        assert output.x.dtype == dtype
        assert_close(output.x.float(), expected, 0.05 * expected.abs().max())
        assert output.saliency().isfinite().all()
        output.x.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())


# Size: tokens that stand for several patches


@every
def test_sizes_of_one_equal_no_sizes(make):
    module, x = randomized(make, torch.float32), tokens(dtype=torch.float32)
    assert torch.equal(module(x, torch.ones(B, N)).x, module(x).x)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_if_all_others_are_removed_every_token_attends_to_the_one_left(make, dtype):
    module, x = randomized(make, dtype), tokens(dtype=dtype)
    size = torch.zeros(B, N, dtype=dtype)
    size[:, 2] = 1
    value = module.proj(values_of(module, x)[:, 2:3])
    assert_close(module(x, size).x, value.expand(-1, N, -1), 1e-12 if dtype == torch.float64 else 0.02 * value.abs().max())


@pytest.mark.parametrize("make", [Attention, *LSA], ids=option_id)
def test_token_of_size_k_counts_as_k_equal_tokens(make):
    module, x = randomized(make), tokens()
    size = torch.tensor([[1.0, 3.0, 1.0, 1.0]] * B, dtype=torch.float64)
    merged, apart = module(x, size).x, module(x[:, [0, 1, 1, 1, 2, 3]]).x[:, [0, 1, 4, 5]]
    rows = [0, 2, 3] if getattr(module, "mask_self", False) else [0, 1, 2, 3]  # a masked group ignores its own members
    assert_close(merged[:, rows], apart[:, rows], 1e-12)


# Masks


@both
def test_every_broadcastable_shape_of_a_mask_means_the_same(make):
    module, x = randomized(make), tokens()
    keys = torch.tensor([True, True, False, True])
    full = module(x, None, keys.expand(B, HEADS, N, N))
    for shape in ((N,), (1, N), (N, N), (B, 1, 1, N), (1, 1, N, N), (1, HEADS, 1, N)):
        output = module(x, None, keys.expand(shape))
        assert_close(output.x, full.x, 1e-12)
        assert_close(output.saliency(1), full.saliency(1), 1e-12)


@both
def test_mask_of_the_keys_of_each_image_is_explained(make):
    mask = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 5\) for 5 tokens; .*, is mask\[:, None, None, :\]"):
        make(8, 2)(torch.randn(3, 5, 8), mask=mask)
    make(8, 2)(torch.randn(3, 5, 8), mask=mask[:, None, None, :])


@both
def test_mask_of_three_axes_and_boolean_sizes_are_explained(make):
    mask, x = torch.ones(HEADS, 5, 5, dtype=torch.bool), torch.randn(HEADS, 5, 8)  # as many images as heads
    with pytest.raises(ValueError, match=r"mask has shape \(2, 5, 5\); .* for one mask per image use mask\[:, None\]"):
        make(8, HEADS)(x, mask=mask)
    make(8, HEADS)(x, mask=mask[:, None])
    with pytest.raises(ValueError, match=r"size is a boolean tensor of shape \(2, 5\); .* mask=keys\[:, None, None, :\]"):
        make(8, HEADS)(x, mask[:, 0])


@both
def test_key_that_is_masked_for_all_queries_has_no_effect(make):
    module, x = randomized(make), tokens()
    kept = torch.tensor([0, 1, 3])
    mask = torch.zeros(N, dtype=torch.bool).index_fill(0, kept, True)
    assert_close(module(x, None, mask).x[:, kept], module(x[:, kept]).x, 1e-12)
    assert torch.equal(module(x, None, torch.ones(N, N, dtype=torch.bool)).x, module(x).x)


@both
def test_causal_mask_hides_later_tokens(make):
    module, x = randomized(make), tokens()
    later, causal = x.clone(), torch.ones(N, N, dtype=torch.bool).tril()
    later[:, 2:] += 1
    before, after = module(x, None, causal).x, module(later, None, causal).x
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_token_whose_mask_hides_all_others_attends_to_itself():
    maps = applied_maps(randomized(LocalityAttention), mask=torch.eye(N, dtype=torch.bool))
    assert torch.equal(maps, torch.eye(N, dtype=torch.float64).expand(B, HEADS, N, N))


# Two kernels, one function


@pytest.mark.parametrize("shape", [None, (N,), (N, N), (1, N), (B, 1, 1, N), (B, HEADS, N, N)])
@pytest.mark.parametrize("sized", [False, True])
def test_fused_kernel_equals_the_explicit_one(shape, sized):
    q, k, v = (torch.randn(B, HEADS, N, 8).requires_grad_() for _ in range(3))
    size = torch.tensor([[1.0, 2.5, 0.0, 3.0], [0.0, 1.0, 1.0, 0.5]]) if sized else None
    mask = None if shape is None else (torch.rand(shape) < 0.5) | (torch.arange(N) == 3)
    results = []
    for fused in (True, False):
        out, attention_map = attend(0.3 * q, k, v, size, mask, fused=fused)
        assert (attention_map is None) == fused
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for fused, explicit in zip(*results):
        assert_close(fused, explicit, 1e-5)


@pytest.mark.parametrize(("dtype", "minimum"), [(torch.float32, 128), (torch.bfloat16, 512)])
def test_many_tokens_use_the_fused_kernel_unless_overridden(dtype, minimum):
    for n in (minimum - 1, minimum):
        q = torch.randn(1, 1, n, 2, dtype=dtype)
        used = {fused: attend(q, q, q, fused=fused)[1] is None for fused in (None, False, True)}
        assert used == {None: n == minimum, False: False, True: True}


@every
@pytest.mark.parametrize("n", [4, 130])
def test_module_gives_the_same_with_both_kernels(make, n):
    module, x, size = randomized(make, torch.float32, std=0.3), tokens(n, torch.float32), torch.rand(B, n)
    for arguments in ((), (size,)):
        results = []
        for module.fused in (None, False, True):
            output = module(x, *arguments)
            results.append((output.x, output.saliency(), output.saliency(1)))
        for ours, *others in zip(*results):
            for other in others:
                assert_close(ours, other, 1e-5)


# Dropout of the map


@both
@pytest.mark.parametrize("n", [4, 512])
def test_dropout_acts_on_the_map_in_training_only(make, n):
    module, x = randomized(partial(make, dropout=0.5), torch.float32), tokens(n, torch.float32)
    plain = make(D, HEADS)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x).x, plain.eval()(x).x)
    assert not torch.equal(module.train()(x).x, plain(x).x)
    assert torch.equal(module(x).saliency(), plain(x).saliency())


def test_dropped_entries_are_0_and_the_others_are_scaled_up():
    module, maps = randomized(partial(Attention, dropout=0.25)), []
    for training in (False, True):
        torch.manual_seed(1)
        maps.append(applied_maps(module.train(training)))
    kept, dropped = maps
    assert (dropped == 0).any() and (dropped != 0).any()
    assert_close(torch.where(dropped == 0, kept / 0.75, dropped), kept / 0.75, 1e-12)


# The output is not a tensor


@pytest.mark.parametrize(
    "use",
    [
        *(lambda out, x: out + 1, lambda out, x: x + out, lambda out, x: out + x, lambda out, x: out - x, lambda out, x: x - out),
        *(lambda out, x: out * 2, lambda out, x: 2 * out, lambda out, x: x * out, lambda out, x: out @ x, lambda out, x: x @ out),
        *(lambda out, x: out / 2, lambda out, x: -out, lambda out, x: out.shape, lambda out, x: out.mean()),
    ],
)
def test_output_used_as_a_tensor_raises_an_error_that_says_to_take_x(use):
    x = tokens(D)
    with pytest.raises((TypeError, AttributeError), match=r"AttentionOutput, not a tensor; .*attention\(x\)\.x"):
        use(Attention(D, HEADS).double()(x), x)


def test_output_is_still_a_named_tuple():
    output = Attention(D, HEADS).double()(tokens())
    x, *functions = output
    assert x is output.x is output[0] and len(functions) == 3 and output._replace(key=None).key is None
    assert not hasattr(output, "shape") and not hasattr(output, "other")
    plain = AttentionOutput(x.detach())
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert type(other) is AttentionOutput and torch.equal(other.x, plain.x) and other[1:] == (None, None, None)
    leaves, spec = torch.utils._pytree.tree_flatten(plain)
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is AttentionOutput


# Bad input


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda make: make(8, 3), "3 heads do not divide width 8; use heads=2 or 4, or give head_dim"),
        (lambda make: make(8, 0), "got heads=0, head_dim=None; expected at least one head"),
        (lambda make: make(8, -2), "got heads=-2"),
        (lambda make: make(8, 2, head_dim=0), "got heads=2, head_dim=0; expected at least one head of width 1"),
        (lambda make: make(8, 2)(torch.randn(1, 3, 8), None, torch.ones(3, 3)), "mask has dtype torch.float32; expected torch.bool"),
        (lambda make: LocalityAttention(8, 2, temperature="per token"), "temperature is 'per token'; expected 'per head', 'per l"),
    ],
)
@both
def test_bad_input_is_refused(make, wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong(make)
