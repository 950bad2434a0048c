import inspect
import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smallvit import Attention, LocalityAttention, attention
from smallvit.attention import attend

CLASSES = [
    c
    for c in vars(attention).values()
    if inspect.isclass(c) and issubclass(c, nn.Module) and c.__module__ == attention.__name__
]
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


def spelled(make):
    knobs = ", ".join(f"{k}={v}" for k, v in make.keywords.items()) if isinstance(make, partial) else ""
    return f"{getattr(make, 'func', make).__name__}({knobs})"


every = pytest.mark.parametrize("make", EVERY, ids=spelled)
both = pytest.mark.parametrize("make", [Attention, LocalityAttention])
B, N, D, HEADS = 2, 4, 8, 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(make, dtype=torch.float64, std=0.5):
    """A module whose every parameter is drawn, the temperatures of the heads included."""
    module = make(D, HEADS).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def tokens(n=N, dtype=torch.float64):
    return torch.randn(B, n, D, dtype=dtype)


def oracle(module, x, size=None, mask=None):
    """Vaswani et al. 2017, section 3.2, and Lee et al. 2021, section 4.2, entry by entry: output, attention maps, keys."""
    b, n, _ = x.shape
    e = module.proj.in_features // module.heads
    projected = module.qkv(x).reshape(b, n, 3, module.heads, e)
    maps, mixed, keys = (
        x.new_zeros(b, module.heads, n, n),
        x.new_zeros(b, n, module.heads, e),
        x.new_zeros(b, n, module.heads, e),
    )
    for image, head in product(range(b), range(module.heads)):
        q, k, v = (projected[image, :, part, head] for part in range(3))
        if getattr(module, "q_norm", None) and isinstance(module.q_norm, nn.LayerNorm):
            q, k = normalised(q, module.q_norm), normalised(k, module.k_norm)
        keys[image, :, head] = k
        for i in range(n):
            weight = {}
            for j in range(n):
                seen = mask is None or bool(mask[image, head, i, j])
                if seen and not (i == j and getattr(module, "mask_self", False)) and (size is None or size[image, j] > 0):
                    logit = temperature(module, head, e) * sum(float(a) * float(c) for a, c in zip(q[i], k[j]))
                    weight[j] = math.exp(logit) * (1 if size is None else float(size[image, j]))
            for j in weight or {i: 1}:
                share = weight[j] / sum(weight.values()) if weight else 1
                maps[image, head, i, j] = share
                mixed[image, i, head] += share * v[j]
    return module.proj(mixed.reshape(b, n, -1)), maps, keys.mean(2)


def normalised(rows, norm):
    centred = rows - rows.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias


def temperature(module, head, e):
    kind = getattr(module, "temperature", "fixed")
    return {
        "per head": lambda: float(module.scale[head]),
        "per layer": lambda: math.exp(float(module.log_scale)),
        "fixed": lambda: 1 / math.sqrt(e),
    }[kind]()


def maps_of(module, n=N, size=None, mask=None):
    """The attention maps that a module really applies: its values are made one-hot, so that the output is the map itself."""
    x = torch.cat([tokens(n)[..., :4], torch.eye(n, 4, dtype=torch.float64).expand(B, -1, -1)], dim=-1)
    with torch.no_grad():
        module.qkv.bias.zero_()
        module.qkv.weight[:, 4:] = 0
        module.qkv.weight[2 * D :] = torch.eye(4, D, dtype=torch.float64).roll(4, 1).repeat(HEADS, 1)
        module.proj.weight.copy_(torch.eye(D))
        module.proj.bias.zero_()
    return module(x, size, mask).x.unflatten(-1, (HEADS, 4)).transpose(1, 2)[..., :n]


def close(one, other, by=1e-10):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= by


# The equations


def test_every_class_is_held_to_the_equations():
    assert {c.__name__ for c in CLASSES} == {"Attention", "LocalityAttention"}
    assert len(LSA) == 6


@every
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_output_saliency_and_key_follow_the_equations(make, sized, masked):
    module, x = perturbed(make), tokens()
    size = torch.tensor([[1.0, 2.5, 0.0, 3.0], [0.0, 1.0, 1.0, 0.5]], dtype=torch.float64) if sized else None
    mask = torch.rand(B, HEADS, N, N) < 0.7 if masked else None
    if masked:
        mask |= torch.eye(N, dtype=torch.bool).roll(1, 1)  # everybody may look at a next one ...
        mask[..., 3] |= True
        mask[..., 1] |= True  # ... that is not gone
    with torch.no_grad():
        expected, maps, keys = oracle(module, x, size, mask)
        got = module(x, size, mask)
    close(got.x, expected)
    close(got.key(), keys)
    there = torch.ones(B, N, dtype=torch.float64) if size is None else (size > 0).double()
    close(got.saliency(), (maps.mean(1) * there[..., None]).sum(1) / there.sum(1, keepdim=True))
    close(got.saliency(1), maps[:, :, 0].mean(1))
    close(got.saliency(2), maps[:, :, :2].mean((1, 2)))


@pytest.mark.parametrize("make", [partial(Attention, qk_norm=True), LSA[0], LSA[1]], ids=spelled)
def test_gradients_are_those_of_the_function(make):
    module = perturbed(make)
    x, size = tokens(3)[:1].requires_grad_(), torch.rand(1, 3, dtype=torch.float64).add(0.5)
    assert torch.autograd.gradcheck(lambda x, *_: module(x, size).x, (x, *module.parameters()))


LEARNED = {
    "kept or gone": [1.0, 0.0, 1.0, 0.0],
    "merged": [1.0, 2.0, 0.0, 3.0],
    "fractions": [0.25, 0.5, 0.0, 0.75],
}


@pytest.mark.parametrize("sizes", ["kept or gone", "merged", "fractions"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_the_gradient_to_sizes_is_that_of_equations_10_and_11_of_dynamicvit(sizes, masked, fused):
    """A token always sees itself, whatever its size (as one where it is gone): its own size has no part in its own row."""
    size = torch.tensor([LEARNED[sizes]]).requires_grad_()
    q, k, v = torch.rand(1, HEADS, N, 3), 1 + torch.rand(1, HEADS, N, 3), torch.randn(1, HEADS, N, 3)
    k[:, :, size[0] == 0] *= 0.1  # those that are gone are no louder than those that are there: see the next test
    for part in (q, k, v):
        part.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1]]).bool() if masked else None
    itself = torch.eye(N, dtype=torch.bool)
    exponential = (q @ k.transpose(-2, -1)).exp() * (1 if mask is None else mask)
    own = torch.where(size > 0, size, 1.0).detach()
    weight = exponential * torch.where(itself, own[:, None, :, None], size[:, None, None, :])
    expected = weight / weight.sum(-1, keepdim=True) @ v
    got, _ = attend(q, k, v, size, mask, fused=fused)
    close(got, expected, 1e-5)
    drawn = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad((out * drawn).sum(), (size, q, k, v)) for out in (got, expected))):
        close(ours, theirs, 1e-5)
    detached, _ = attend(q, k, v, size.detach(), mask, fused=fused)
    rows = [0, 2] if sizes == "kept or gone" else (size[0] > 0).nonzero()[:, 0].tolist()
    close(got[:, :, rows], detached[:, :, rows], 1e-5)  # those that are there see the same, learned or not


def test_sizes_learn_in_double_precision_too():
    module, x, size = perturbed(Attention), tokens(), torch.ones(B, N, dtype=torch.float64, requires_grad=True)
    close(module(x, size).x, module(x).x)


@both
def test_one_that_is_gone_drowns_nobody_however_loud_it_is(make):
    module, x = perturbed(make, torch.float32), tokens(dtype=torch.float32)
    x[:, 1] *= 1e3
    size = torch.tensor([[1.0, 0.0, 1.0, 1.0]] * B)
    kept = [0, 2, 3]
    got = module(x, size.requires_grad_()).x
    close(got[:, kept], module(x[:, kept]).x, 1e-4)
    got[:, kept].square().sum().backward()
    assert size.grad.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


# Off, and what is learned


def test_locality_attention_switched_off_is_attention():
    plain = perturbed(Attention, torch.float32)
    off = LocalityAttention(D, HEADS, mask_self=False, temperature="fixed")
    off.load_state_dict(plain.state_dict())
    x, size, mask = tokens(5, torch.float32), torch.rand(B, 5), torch.rand(5, 5) < 0.8
    for arguments in (
        (),
        (size,),
        (None, mask | torch.eye(5, dtype=torch.bool)),
        (size, mask | torch.eye(5, dtype=torch.bool)),
    ):
        ours, theirs = off(x, *arguments), plain(x, *arguments)
        assert torch.equal(ours.x, theirs.x)
        assert torch.equal(ours.saliency(), theirs.saliency())


def test_the_mask_alone_is_sdpa_with_a_masked_diagonal():
    module, x = perturbed(partial(LocalityAttention, temperature="fixed")), tokens()
    q, k, v = module.qkv(x).reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=~torch.eye(N, dtype=torch.bool))
    close(module(x).x, module.proj(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(("temperature", "name", "shape"), [("per head", "scale", (HEADS,)), ("per layer", "log_scale", ())])
def test_the_temperature_starts_as_in_attention_and_learns(temperature, name, shape):
    module = LocalityAttention(D, HEADS, mask_self=False, temperature=temperature)
    learned = getattr(module, name)
    assert learned.shape == shape
    plain = Attention(D, HEADS)
    plain.load_state_dict({key: value for key, value in module.state_dict().items() if key != name})
    x = tokens(dtype=torch.float32)
    close(module(x).x, plain(x).x, 1e-6)
    module(x).x.square().sum().backward()
    assert learned.grad.abs().min() > 0


def test_vit_pytorchs_temperature_is_one_logarithm_a_layer_that_cannot_change_its_sign():
    module = perturbed(partial(LocalityAttention, mask_self=False, temperature="per layer"))

    def order(log_scale):
        nn.init.constant_(module.log_scale, log_scale)
        torch.manual_seed(1)
        return maps_of(module).argsort(-1)

    assert torch.equal(order(-3.0), order(1.0))


# Rows, diagonal, small n


@every
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_sum_to_1_and_the_masked_diagonal_is_exactly_0(make, n):
    if "head_dim" in getattr(make, "keywords", {}) or make(D, HEADS).qkv.bias is None:
        make = partial(make, head_dim=None, qkv_bias=True)
    module = perturbed(make)
    maps = maps_of(module, n)
    close(maps.sum(-1), torch.ones(B, HEADS, n, dtype=torch.float64), 1e-12)
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    assert (diagonal == 0).all() if getattr(module, "mask_self", False) else (diagonal > 0).all()


def test_no_token_sees_its_own_value():
    module, x = perturbed(LocalityAttention), tokens()
    with torch.no_grad():
        module.qkv.weight[: 2 * D, 4:] = 0  # channels 4 to 7 reach the values only
    other = x.clone()
    other[:, 1, 4:] = 1e3
    before, after = module(x).x, module(other).x
    assert torch.equal(before[:, 1], after[:, 1])
    assert (before[:, [0, 2, 3]] - after[:, [0, 2, 3]]).abs().amin(dim=(0, 2)).min() > 0


@every
def test_a_token_alone_looks_at_itself(make):
    module, x = perturbed(make), tokens(1)
    value = module.qkv(x).unflatten(-1, (3, -1))[:, :, 2]
    close(module(x).x, module.proj(value), 1e-12)
    assert torch.equal(module(x).saliency(), torch.ones(B, 1, dtype=torch.float64))


def test_of_two_tokens_each_gets_the_other():
    module, x = perturbed(LocalityAttention), tokens(2)
    value = module.qkv(x).unflatten(-1, (3, -1))[:, :, 2]
    close(module(x).x, module.proj(value.flip(1)), 1e-12)


@every
def test_one_module_takes_any_number_of_tokens_in_any_order(make):
    module = perturbed(make)
    for n in (1, 2, 5, 9):
        order, x, size, mask = torch.randperm(n), tokens(n), torch.rand(B, n, dtype=torch.float64), torch.rand(n, n) < 0.8
        mask |= torch.eye(n, dtype=torch.bool)
        moved = module(x[:, order], size[:, order], mask[order][:, order])
        close(moved.x, module(x, size, mask).x[:, order], 1e-12)
        close(moved.saliency(), module(x, size, mask).saliency()[:, order], 1e-12)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 600])
def test_half_precision_is_finite(make, dtype, n):
    module, x = perturbed(make, torch.float32, std=0.3), tokens(n, torch.float32)
    size = torch.ones(B, n)
    size[:, 1::2] = 0
    for arguments in ((), (size,)):
        expected = module(x, *arguments).x
        got = module.to(dtype)(x.to(dtype), *arguments)
        assert got.x.dtype == dtype
        close(got.x.float(), expected, 0.05 * expected.abs().max())
        assert got.saliency().isfinite().all()
        got.x.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())
        module.float()


# Size: tokens that stand for several patches


@every
def test_sizes_of_one_are_no_sizes(make):
    module, x = perturbed(make, torch.float32), tokens(dtype=torch.float32)
    assert torch.equal(module(x, torch.ones(B, N)).x, module(x).x)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_when_all_others_are_gone_everybody_sees_the_one_that_is_left(make, dtype):
    module, x = perturbed(make, dtype), tokens(dtype=dtype)
    size = torch.zeros(B, N, dtype=dtype)
    size[:, 2] = 1
    value = module.proj(module.qkv(x).unflatten(-1, (3, -1))[:, 2:3, 2])
    close(module(x, size).x, value.expand(-1, N, -1), 1e-12 if dtype == torch.float64 else 0.02 * value.abs().max())


@pytest.mark.parametrize("make", [Attention, *LSA], ids=spelled)
def test_a_token_of_size_k_counts_as_k_equal_tokens(make):
    module, x = perturbed(make), tokens()
    size = torch.tensor([[1.0, 3.0, 1.0, 1.0]] * B, dtype=torch.float64)
    merged, apart = module(x, size).x, module(x[:, [0, 1, 1, 1, 2, 3]]).x[:, [0, 1, 4, 5]]
    rows = [0, 2, 3] if getattr(module, "mask_self", False) else [0, 1, 2, 3]  # a masked group does not see its own members
    close(merged[:, rows], apart[:, rows], 1e-12)


# Masks


@both
def test_every_broadcastable_shape_of_a_mask_says_the_same(make):
    module, x = perturbed(make), tokens()
    keys = torch.tensor([True, True, False, True])
    full = module(x, None, keys.expand(B, HEADS, N, N))
    for shape in ((N,), (1, N), (N, N), (B, 1, 1, N), (1, 1, N, N), (1, HEADS, 1, N)):
        got = module(x, None, keys.expand(shape))
        close(got.x, full.x, 1e-12)
        close(got.saliency(1), full.saliency(1), 1e-12)


@both
def test_a_key_that_nobody_may_see_is_as_if_it_were_not_there(make):
    module, x = perturbed(make), tokens()
    kept = torch.tensor([0, 1, 3])
    mask = torch.zeros(N, dtype=torch.bool).index_fill(0, kept, True)
    close(module(x, None, mask).x[:, kept], module(x[:, kept]).x, 1e-12)
    assert torch.equal(module(x, None, torch.ones(N, N, dtype=torch.bool)).x, module(x).x)


@both
def test_a_causal_mask_hides_what_comes_later(make):
    module, x = perturbed(make), tokens()
    later, causal = x.clone(), torch.ones(N, N, dtype=torch.bool).tril()
    later[:, 2:] += 1
    before, after = module(x, None, causal).x, module(later, None, causal).x
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_a_token_that_the_mask_leaves_alone_looks_at_itself():
    maps = maps_of(perturbed(LocalityAttention), mask=torch.eye(N, dtype=torch.bool))
    assert torch.equal(maps, torch.eye(N, dtype=torch.float64).expand(B, HEADS, N, N))


# Two kernels, one function


@pytest.mark.parametrize("shape", [None, (N,), (N, N), (1, N), (B, 1, 1, N), (B, HEADS, N, N)])
@pytest.mark.parametrize("sized", [False, True])
def test_the_fused_kernel_equals_the_explicit_one(shape, sized):
    q, k, v = (torch.randn(B, HEADS, N, 8).requires_grad_() for _ in range(3))
    size = torch.tensor([[1.0, 2.5, 0.0, 3.0], [0.0, 1.0, 1.0, 0.5]]) if sized else None
    mask = None if shape is None else (torch.rand(shape) < 0.5) | (torch.arange(N) == 3)
    results = []
    for fused in (True, False):
        out, seen = attend(0.3 * q, k, v, size, mask, fused=fused)
        assert (seen is None) == fused
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for fused, explicit in zip(*results):
        close(fused, explicit, 1e-5)


@pytest.mark.parametrize(("dtype", "from_here"), [(torch.float32, 128), (torch.bfloat16, 512)])
def test_many_tokens_take_the_fused_kernel_unless_told_otherwise(dtype, from_here):
    for n in (from_here - 1, from_here):
        q = torch.randn(1, 1, n, 2, dtype=dtype)
        taken = {fused: attend(q, q, q, fused=fused)[1] is None for fused in (None, False, True)}
        assert taken == {None: n == from_here, False: False, True: True}


@every
@pytest.mark.parametrize("n", [4, 130])
def test_a_module_told_which_kernel_to_take_says_the_same(make, n):
    module, x, size = perturbed(make, torch.float32, std=0.3), tokens(n, torch.float32), torch.rand(B, n)
    for arguments in ((), (size,)):
        said = []
        for module.fused in (None, False, True):
            mixed = module(x, *arguments)
            said.append((mixed.x, mixed.saliency(), mixed.saliency(1)))
        for other in said[1:]:
            for ours, theirs in zip(said[0], other):
                close(ours, theirs, 1e-5)


# Dropout of the map


@both
@pytest.mark.parametrize("n", [4, 512])
def test_dropout_acts_on_the_map_in_training_only(make, n):
    module, x = perturbed(partial(make, dropout=0.5), torch.float32), tokens(n, torch.float32)
    plain = make(D, HEADS)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x).x, plain.eval()(x).x)
    assert not torch.equal(module.train()(x).x, plain(x).x)
    assert torch.equal(module(x).saliency(), plain(x).saliency())


def test_dropped_entries_are_0_and_the_others_are_scaled_up():
    module = perturbed(partial(Attention, dropout=0.25)).eval()
    torch.manual_seed(1)
    kept = maps_of(module)
    torch.manual_seed(1)
    dropped = maps_of(module.train())
    assert (dropped == 0).any() and (dropped != 0).any()
    close(torch.where(dropped == 0, kept / 0.75, dropped), kept / 0.75, 1e-12)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda make: make(8, 3), "3 heads do not divide width 8; take heads=2 or 4, or give head_dim"),
        (lambda make: make(8, 0), "got heads=0, head_dim=None; expected at least one head"),
        (lambda make: make(8, -2), "got heads=-2"),
        (lambda make: make(8, 2, head_dim=0), "got heads=2, head_dim=0; expected at least one head, at least one wide"),
        (
            lambda make: make(8, 2)(torch.randn(1, 3, 8), None, torch.ones(3, 3)),
            "mask has dtype torch.float32; expected torch.bool",
        ),
    ],
)
@both
def test_bad_input_is_named(make, wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(make)


def test_an_unknown_temperature_is_named():
    with pytest.raises(ValueError, match="temperature is 'per token'; expected 'per head', 'per layer' or 'fixed'"):
        LocalityAttention(8, 2, temperature="per token")
