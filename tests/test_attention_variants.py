"""Differential, sigmoid and talking-heads attention, and the mimetic start: equations, timm's layers, sizes, masks, other slots."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from timm.layers.diff_attention import DiffAttention
from timm.models.cait import TalkingHeadAttn
from torch import nn
from toys import TINY_VIT, assert_close, option_id, randomize, slow_after, tiny_vit, training_of

from smallvit import (
    MAE,
    Attention,
    DifferentialAttention,
    DistilledTokens,
    LayerContext,
    LearnedPrune,
    LearnedThresholds,
    LocalityAttention,
    MeanTokens,
    Merge,
    Prune,
    RelativeBias,
    Rotary,
    Run,
    SigmoidAttention,
    TalkingHeadsAttention,
    attention_maps,
    describe,
    fingerprint,
    initialize,
    mimetic_start,
    native,
    rebuild,
    timm_attention,
)
from smallvit.attention_starts import factors
from smallvit.augment import Batch
from smallvit.flops import closed_form, counted
from smallvit.train.stack import Stack
from smallvit.vit import Block, Blocks, ViT

B, N, D, HEADS = 2, 5, 16, 2
EVERY = [DifferentialAttention, SigmoidAttention, TalkingHeadsAttention]
every = pytest.mark.parametrize("make", EVERY, ids=option_id)
SIZE = torch.tensor([[1.0, 2.5, 0.0, 3.0, 1.0], [1.0, 1.0, 0.5, 0.0, 4.0]], dtype=torch.float64)


def randomized(make, dtype=torch.float64, std=0.4, dim=D, heads=HEADS):
    return randomize(make(dim, heads).to(dtype), std)


def tokens(n=N, dtype=torch.float64):
    return torch.randn(B, n, D, dtype=dtype)


def softmax(logits, size, mask):
    """A softmax in which keys count `size` times, entry by entry."""
    rows = torch.zeros_like(logits)
    for i, j in product(range(logits.shape[0]), range(logits.shape[1])):
        if mask is None or mask[i, j]:
            rows[i, j] = logits[i, j].exp() * (1 if size is None else size[j])
    return rows / rows.sum(1, keepdim=True)


def oracle(module, x, size=None, mask=None):
    """The equations of the papers for each image and head: output and maps."""
    b, n, _ = x.shape
    outputs, maps = [], []
    for image in range(b):
        q, k, v = (module.qkv.weight @ x[image].T + module.qkv.bias[:, None]).T.chunk(3, dim=1)
        s, e = None if size is None else size[image], D // HEADS
        logits = [q[:, h * e : (h + 1) * e] @ k[:, h * e : (h + 1) * e].T / math.sqrt(e) for h in range(HEADS)]
        values = [v[:, h * e : (h + 1) * e] for h in range(HEADS)]
        if isinstance(module, DifferentialAttention):
            half = e // 2
            pairs = [(q[:, i : i + half] @ k[:, i : i + half].T) / math.sqrt(half) for i in range(0, D, half)]
            one, two = (sum(a * c for a, c in zip(module.lambda_queries[i], module.lambda_keys[i])) for i in range(2))
            factor = one.exp() - two.exp() + module.lambda_init
            made = [softmax(pairs[2 * h], s, mask) - factor * softmax(pairs[2 * h + 1], s, mask) for h in range(HEADS)]
            mixed = [m @ value for m, value in zip(made, values)]
            normed = [y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * module.norm.weight for y in mixed]
            heads = [(1 - module.lambda_init) * y for y in normed]
        elif isinstance(module, SigmoidAttention):
            total, weight = (n, torch.ones(n)) if s is None else (s.sum(), s)
            allowed = 1.0 if mask is None else mask.double()
            made = [allowed * weight / (1 + total * (-logit).exp()) for logit in logits]
            heads = [m @ value for m, value in zip(made, values)]
        else:
            mixed = [sum(module.mix_logits[g, h] * logits[h] for h in range(HEADS)) for g in range(HEADS)]
            plain = [softmax(logit, s, mask) for logit in mixed]
            made = [sum(module.mix_maps[g, h] * plain[h] for h in range(HEADS)) for g in range(HEADS)]
            heads = [m @ value for m, value in zip(made, values)]
        outputs.append(module.proj(torch.cat(heads, dim=1)))
        maps.append(torch.stack(made))
    return torch.stack(outputs), torch.stack(maps)


# What all of them do


@every
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_map_follow_the_equations(make, sized, masked):
    module, x = randomized(make), tokens()
    mask = (torch.rand(N, N) < 0.6) | torch.tensor([True, False, False, False, True]) if masked else None
    size = SIZE if sized else None
    with torch.no_grad():
        expected, maps = oracle(module, x, size, mask)
        output = module(x, size, mask)
    assert_close(output.x, expected)
    assert_close(output.map(), maps)
    assert output.key().shape == (B, N, D // HEADS)
    assert (output.saliency() >= 0).all() and output.saliency().shape == (B, N)
    if sized:
        assert (output.saliency()[SIZE == 0] == 0).all()


@every
@pytest.mark.parametrize("n", [1, 2, 7])
def test_any_number_of_tokens_in_any_order(make, n):
    module, x, order = randomized(make), tokens(n), torch.randperm(n)
    size = torch.rand(B, n, dtype=torch.float64)
    for sizes, moved in ((None, None), (size, size[:, order])):
        assert_close(module(x[:, order], moved).x, module(x, sizes).x[:, order])
        assert_close(module(x[:, order], moved).saliency(), module(x, sizes).saliency()[:, order])
    assert_close(module(x, torch.ones(B, n, dtype=torch.float64)).x, module(x).x)


@every
def test_token_of_size_k_counts_as_k_equal_tokens_and_removed_ones_not_at_all(make):
    module, x = randomized(make), tokens(4)
    size = torch.tensor([[1.0, 3.0, 1.0, 1.0]] * B, dtype=torch.float64)
    merged, apart = module(x, size).x, module(x[:, [0, 1, 1, 1, 2, 3]]).x[:, [0, 1, 4, 5]]
    assert_close(merged, apart, 1e-12)
    x[:, 2], size[:, 2] = 1e3, 0.0
    kept = [0, 1, 3]
    assert_close(module(x, size).x[:, kept], module(x[:, kept], size[:, kept]).x, 1e-12)


@every
def test_masked_key_has_no_effect_and_every_shape_of_a_mask_means_the_same(make):
    module, x = randomized(make), tokens()
    mask = torch.tensor([True, True, False, True, True])
    full = module(x, None, mask.expand(B, HEADS, N, N)).x
    for shape in ((N,), (N, N), (B, 1, 1, N), (1, HEADS, 1, N)):
        assert_close(module(x, None, mask.expand(shape)).x, full, 1e-12)
    changed = x.clone()
    changed[:, 2] += 10
    kept = [0, 1, 3, 4]
    assert torch.equal(module(changed, None, mask).x[:, kept], module(x, None, mask).x[:, kept])
    with pytest.raises(ValueError, match=r"mask has dtype torch.float32; expected torch.bool"):
        module(x, None, torch.ones(N, N))
    with pytest.raises(ValueError, match=r"size is a boolean tensor of shape .*; expected the number of patches in each token"):
        module(x, torch.ones(x.shape[:2], dtype=torch.bool))


@pytest.mark.slow
@every
def test_gradients_are_correct(make):
    module, x = randomized(make, dim=8), torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    size = torch.rand(1, 3, dtype=torch.float64).add(0.5)
    assert torch.autograd.gradcheck(lambda x, *_: module(x, size).x, (x, *module.parameters()))


@every
def test_sizes_get_a_gradient_also_that_of_a_removed_token(make):
    module, x = randomized(make), tokens(3)[:1]
    learned = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    output = module(x, learned)
    kept = [0, 2]
    assert_close(output.x[:, kept], module(x, learned.detach()).x[:, kept], 1e-12)
    (gradient,) = torch.autograd.grad(output.x[:, kept].square().sum(), learned)
    assert gradient.isfinite().all() and gradient.abs().min() > 0


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_and_close(make, dtype):
    module, x = randomized(make, torch.float32, 0.1), tokens(40, torch.float32)
    expected = module(x).x
    output = module.to(dtype)(x.to(dtype)).x
    assert output.dtype == dtype
    assert_close(output.float(), expected, 0.05 * expected.abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(module.float()(x).x.float(), expected, 0.05 * expected.abs().max())


@every
def test_dropout_acts_in_training_only(make):
    module, plain, x = randomized(partial(make, dropout=0.5), torch.float32), make(D, HEADS), tokens(dtype=torch.float32)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x).x, plain(x).x) and not torch.equal(module.train()(x).x, plain(x).x)


@every
def test_every_option_has_an_effect_and_is_written_to_records(make):
    options = {
        DifferentialAttention: dict(lambda_init=0.5, qkv_bias=False, dropout=0.5),
        SigmoidAttention: dict(head_dim=4, qkv_bias=False, qk_norm=True, dropout=0.5),
        TalkingHeadsAttention: dict(
            mix_logits=False, mix_maps=False, head_dim=4, qkv_bias=False, qk_norm=True, dropout=0.5
        ),
    }  # fmt: skip
    default = Run(steps=1).vary(attention=make)
    for name, value in options[make].items():
        run = default.vary(attention=partial(make, **{name: value}))
        assert rebuild(describe(run)) == run and fingerprint(run) != fingerprint(default)
        torch.manual_seed(0)
        module, x = randomized(partial(make, **{name: value}), torch.float32), tokens(dtype=torch.float32)
        torch.manual_seed(0)
        other = randomized(make, torch.float32)
        same = {key: t.shape for key, t in module.state_dict().items()} == {key: t.shape for key, t in other.state_dict().items()}
        assert not same or not torch.allclose(module(x).x, other(x).x, atol=1e-4)


# With other slots

REDUCTIONS = [
    partial(Merge, r=3),
    partial(Prune, keep=0.6),
    partial(LearnedThresholds, merge=0.5, prune=0.5),
    partial(LearnedPrune, keep=0.6),
    None,
]


@every
@pytest.mark.parametrize("reduction", slow_after(3, REDUCTIONS), ids=option_id)
def test_models_with_every_reduction_train_and_take_other_image_sizes(make, reduction):
    model = tiny_vit(attention=make, reduction=reduction, registers=2, pool=DistilledTokens)
    for image in ((12, 12), (8, 20), (2, 2)):
        logits = model.train()(torch.randn(3, 1, *image))
        model.zero_grad()
        logits.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert model.eval()(torch.randn(1, 1, *image)).isfinite().all()


@every
def test_models_reconstruct_hidden_patches_and_show_their_maps(make):
    model = randomize(tiny_vit(attention=make, pool=MeanTokens))
    images = torch.rand(2, 1, 12, 12)
    MAE(model, decoder_dim=16, decoder_depth=1)(Batch(images, torch.eye(5)[:2]), 0.0)["loss"].backward()
    maps = attention_maps(model, images)
    assert [m.shape for m in maps] == [(2, 2, 36, 36)] * 2


@every
def test_multiply_adds_are_those_that_torch_counts(make):
    with torch.inference_mode():
        for options in ({}, {"reduction": partial(Merge, r=4)}):
            model = tiny_vit(attention=make, heads=4, **options)
            macs = closed_form(model)
            assert macs["blocks"] + macs["embed"] + macs["head"] == counted(model, torch.rand(1, 1, 12, 12)) / 2 - macs["reduction"]


@every
def test_native_kernel_leaves_them_to_pytorch(make, capsys):
    if reason := native.reason_against():
        pytest.skip(reason)
    native.blocks.note.cache_clear()
    blocks = Blocks([Block(32, 1, make, None, 0.0)])
    assert native.native_blocks(nn.ModuleList([blocks])) == []
    assert f"{make.__name__} computes its logits in another way" in capsys.readouterr().err


@pytest.mark.parametrize("make", [*EVERY, mimetic_start], ids=lambda make: make.__name__)
def test_runs_are_trained_in_a_stack_as_alone(make):
    run = Run(model=partial(TINY_VIT, attention=make), labels=50, val=20, steps=2, batch=8)
    stack = Stack([training_of(run, seed) for seed in (0, 1)])  # compares losses and gradients with those of each run alone
    stack.train_step()
    assert all(member.step == 1 for member in stack.members)


@every
def test_timm_models_can_use_them(make):
    made = timm_attention(make)(D, HEADS, qkv_bias=True)
    plain = make(D, HEADS)
    plain.load_state_dict(made.state_dict())
    x, causal = tokens(dtype=torch.float32), torch.ones(N, N, dtype=torch.bool).tril()
    assert torch.equal(made(x), plain(x).x) and torch.equal(made(x, is_causal=True), plain(x, None, causal).x)


# Differential attention


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layer", [0, 3])
def test_differential_attention_equals_that_of_timm(fused, layer):
    theirs, ours = DiffAttention(D, HEADS, qkv_bias=True, depth=layer), DifferentialAttention(D, HEADS)
    theirs.fused_attn = ours.fused = fused
    randomize(theirs, 0.3)
    state = theirs.state_dict()
    ours.load_state_dict({
        "lambda_queries": torch.stack([state.pop("lambda_q1"), state.pop("lambda_q2")]),
        "lambda_keys": torch.stack([state.pop("lambda_k1"), state.pop("lambda_k2")]),
        **{name.replace("sub_norm", "norm"): tensor for name, tensor in state.items()},
    })  # fmt: skip
    ours.set_context(LayerContext(layer=layer))
    x = tokens(dtype=torch.float32)
    assert_close(ours(x).x, theirs(x), 1e-5)
    assert_close(ours(x, None, torch.rand(N, N) < 2).x, theirs(x), 1e-5)


def test_lambda_follows_the_index_of_the_block_unless_it_is_set():
    models = [tiny_vit(attention=make, depth=3) for make in (DifferentialAttention, partial(DifferentialAttention, lambda_init=0.8))]
    starts = [[block.attention.lambda_init for block in model.blocks] for model in models]
    assert starts[0] == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3), 0.8 - 0.6 * math.exp(-0.6)]) and starts[1] == [0.8] * 3
    assert [m.lambda_init for m in copy.deepcopy(models[0]).modules() if hasattr(m, "lambda_init")] == starts[0]


def test_two_equal_groups_cancel_in_the_norm():
    module, x = randomized(DifferentialAttention), tokens()
    with torch.no_grad():
        for rows in (module.qkv.weight[: 2 * D], module.qkv.bias[: 2 * D]):
            groups = rows.unflatten(0, (-1, 2, D // HEADS // 2))
            groups[:, 1] = groups[:, 0]
        module.norm.eps = 0.0
        one, two = (module.lambda_queries * module.lambda_keys).sum(-1).exp()
        factor = one - two + module.lambda_init
        map_ = module(x).map()
        assert_close(map_.sum(-1), (1 - factor).expand(B, HEADS, N), 1e-12)
        v = module.qkv(x)[..., 2 * D :].unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads = map_ / (1 - factor) @ v
        normed = heads / heads.square().mean(-1, keepdim=True).sqrt() * module.norm.weight * (1 - factor).sign()
        expected = module.proj((1 - module.lambda_init) * normed.transpose(1, 2).flatten(2))
    assert_close(module(x).x, expected, 1e-9)


def test_width_that_two_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"got 4 heads for width 20; expected that 2 \* heads divides it"):
        DifferentialAttention(20, 4)


# Sigmoid attention


def test_sigmoid_weights_of_equal_logits_and_of_a_very_low_bias():
    module, x = randomized(SigmoidAttention), tokens()
    v = module.qkv(x)[..., 2 * D :]
    with torch.no_grad():
        module.qkv.weight[:D], module.qkv.bias[:D] = 0, 0
    assert_close(module(x).x, module.proj(v.mean(1, keepdim=True) * N / (N + 1)).expand(-1, N, -1), 1e-12)
    module = randomized(SigmoidAttention)
    size, few = torch.full((B, N), 1e9, dtype=torch.float64), torch.ones(B, N, dtype=torch.float64)
    q, k = module.qkv(x)[..., : 2 * D].unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
    unnormalized = (q @ k.mT * module.scale).exp()  # the numerator of a softmax
    assert torch.allclose(module(x, size).map() * N, unnormalized, rtol=1e-5)
    assert_close(module(x, few).map(), module(x).map(), 1e-12)


def test_gradient_of_sigmoid_attention_in_the_sizes_is_exact():
    """Learned pruning and thresholds learn from it."""
    module, x = randomized(SigmoidAttention), tokens()
    size = torch.rand(B, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).add_(0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda size: module(x, size).x, size)


def test_sigmoid_attention_adds_up_over_sets_of_keys():
    module, x, first = randomized(SigmoidAttention), tokens(), torch.arange(N) < 2
    bias = module.proj.bias
    assert_close(module(x, None, first).x + module(x, None, ~first).x - bias, module(x).x, 1e-12)


def test_merging_of_equal_patches_is_exact_through_the_whole_model():
    """All patches are equal and positions are off, so merging any of them changes nothing."""
    images = torch.rand(2, 1, 1, 1).expand(2, 1, 12, 12)
    plain = randomize(tiny_vit(attention=SigmoidAttention, position=None).double(), 0.2)
    merged = tiny_vit(attention=SigmoidAttention, position=None, reduction=partial(Merge, r=8)).double()
    merged.load_state_dict(plain.state_dict())
    assert merged.tokens(images.double())[0].shape[1] < plain.tokens(images.double())[0].shape[1]
    assert_close(merged(images.double()), plain(images.double()), 1e-12)


# Talking heads


def test_talking_heads_equal_timm():
    theirs, ours = randomize(TalkingHeadAttn(D, HEADS, qkv_bias=True), 0.3), TalkingHeadsAttention(D, HEADS)
    state = theirs.state_dict()
    ours.load_state_dict({name: state[name] for name in state if not name.startswith("proj_")} | {
        "mix_logits": state["proj_l.weight"], "mix_maps": state["proj_w.weight"],
    })  # fmt: skip
    nn.init.zeros_(theirs.proj_l.bias)
    nn.init.zeros_(theirs.proj_w.bias)
    x = tokens(dtype=torch.float32)
    assert_close(ours(x).x, theirs(x), 1e-5)


@pytest.mark.parametrize("n", [5, 130])
def test_talking_heads_start_as_attention_and_are_attention_when_switched_off(n):
    plain, x, size = randomized(Attention, torch.float32), tokens(n, torch.float32), torch.rand(B, n)
    for options, same in ((dict(mix_logits=False, mix_maps=False), torch.equal), ({}, partial(torch.allclose, atol=1e-5))):
        module = TalkingHeadsAttention(D, HEADS, **options)
        missing = module.load_state_dict(plain.state_dict(), strict=False).missing_keys
        assert missing == ["mix_logits", "mix_maps"][: 0 if options else 2]
        for sizes in (None, size, size.clone().requires_grad_()):
            ours, theirs = module(x, sizes), plain(x, sizes)
            assert same(ours.x, theirs.x) and same(ours.saliency(), theirs.saliency()) and same(ours.map(), theirs.map())


def test_rows_of_mixed_maps_sum_to_the_factors_of_their_head():
    module = randomized(TalkingHeadsAttention)
    sums = module(tokens(), SIZE).map().sum(-1)
    assert_close(sums, module.mix_maps.sum(1)[None, :, None].expand_as(sums), 1e-12)


# Mimetic start


def products(module):
    """The products of the query and key maps of each head, and of the value and output maps."""
    dim = module.qkv.in_features
    q, k, v = module.qkv.weight.detach().double().view(3, module.heads, -1, dim)
    return q.mT @ k, v.flatten(0, 1).T @ module.proj.weight.detach().double().T


def drawn(dim, heads, seed=0, **options):
    module = mimetic_start(dim, heads, **options)
    return initialize(module, seed)


def test_factors_are_the_best_approximation_with_fixed_signs():
    matrix = torch.randn(3, 12, 12, dtype=torch.float64)
    left, right = factors(matrix, 12)
    assert_close(left @ right.mT, matrix, 1e-12)
    left, right = factors(matrix, 5)
    values = torch.linalg.svdvals(matrix)
    assert_close((left @ right.mT - matrix).square().sum((1, 2)), values[:, 5:].square().sum(1), 1e-12)
    for side in (left, right):
        assert_close(side.mT @ side, torch.diag_embed(values[:, :5]), 1e-12)
    assert (left.gather(1, left.abs().argmax(1, keepdim=True)) > 0).all()
    flipped = factors(matrix.mT.contiguous().mT, 5)  # another layout in memory
    assert_close(flipped[0], left, 1e-9)


def test_products_of_the_weights_are_noise_and_a_multiple_of_the_identity():
    query_key, value_proj = products(drawn(64, 1))
    eye = torch.eye(64, dtype=torch.float64)
    for product_, sign, strength in ((query_key[0], 1, 0.7), (value_proj, -1, 0.4)):
        noise = (product_ - sign * strength * eye) / strength * 8  # 8: the square root of the width
        assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1
        assert abs(product_.trace() / 64 - sign * strength) < 0.1
    _, exact = products(drawn(64, 4, value_proj=(0.0, 0.3)))
    assert_close(exact, -0.3 * eye, 1e-6)


def test_heads_differ_and_have_the_rank_of_their_width():
    query_key, _ = products(drawn(16, 4))
    assert (torch.linalg.svdvals(query_key)[:, 4:] < 1e-6).all() and (torch.linalg.svdvals(query_key)[:, :4] > 0.5).all()
    assert (query_key[0] - query_key[1]).abs().max() > 0.1


def test_equal_attention_to_all_gives_minus_the_mean_of_the_tokens():
    module, x = drawn(16, 4, value_proj=(0.0, 0.4)), torch.randn(2, 5, 16)
    with torch.no_grad():
        module.qkv.weight[:16] = 0
    assert_close(module(x).x, -0.4 * x.mean(1, keepdim=True).expand(2, 5, 16), 1e-5)


def test_only_qkv_and_proj_differ_and_all_other_weights_are_those_of_the_baseline():
    plain, ours = (initialize(tiny_vit(attention=make), 3).state_dict() for make in (Attention, mimetic_start))
    assert plain.keys() == ours.keys()
    changed = {name for name in plain if not torch.equal(plain[name], ours[name])}
    assert changed == {f"blocks.{i}.attention.{part}.weight" for i in range(2) for part in ("qkv", "proj")}
    other = initialize(tiny_vit(attention=mimetic_start, registers=3, pool=MeanTokens), 3).state_dict()
    assert all(torch.equal(other[name], ours[name]) for name in changed)
    assert not torch.equal(initialize(tiny_vit(attention=mimetic_start), 4).state_dict()["blocks.0.attention.qkv.weight"], ours["blocks.0.attention.qkv.weight"])


def test_part_that_is_none_keeps_the_weights_of_the_baseline():
    models = [
        initialize(tiny_vit(attention=make), 0).blocks[0].attention
        for make in (Attention, partial(mimetic_start, query_key=None), partial(mimetic_start, value_proj=None), mimetic_start)
    ]
    (qk, v), (qk1, v1), (qk2, v2), (qk3, v3) = ((m.qkv.weight[:32], m.qkv.weight[32:]) for m in models)
    assert torch.equal(qk, qk1) and torch.equal(v, v2) and torch.equal(v1, v3)
    assert not torch.equal(qk, qk2) and not torch.equal(v, v1) and not torch.equal(qk, qk3)


def test_module_is_the_attention_itself_and_a_copy_starts_again_alone():
    model = initialize(tiny_vit(attention=partial(mimetic_start, attention=TalkingHeadsAttention)), 0)
    attention = model.blocks[0].attention
    assert type(attention) is TalkingHeadsAttention and torch.equal(attention.mix_maps, torch.eye(2))
    new = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    initialize(new, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(new.blocks[0].attention.qkv.weight, attention.qkv.weight)
    for make in (Attention, partial(mimetic_start)):
        assert native.reason_against_block(Block(32, 2, make, None, 0.0)) is None
    with torch.device("meta"):
        assert ViT((8, 8), 1, 2, dim=16, heads=2, attention=mimetic_start).head.weight.is_meta


def test_mimetic_initialization_needs_no_vit():
    torch.manual_seed(0)
    module = mimetic_start(64, 4)
    value, proj = module.qkv.weight[128:], module.proj.weight
    assert float((proj @ value).trace()) / 64 == pytest.approx(-0.4, abs=0.05)
    assert not module.qkv.bias.any() and not module.proj.bias.any()


def test_mimetic_values_go_with_locality_attention_and_its_queries_do_not():
    values = partial(mimetic_start, attention=LocalityAttention, query_key=None)
    attention = initialize(tiny_vit(attention=values), 0).blocks[0].attention
    assert type(attention) is LocalityAttention and (attention.scale == 8**-0.5).all()
    assert products(attention)[1].trace() / 16 == pytest.approx(-0.4, abs=0.2)
    run = Run(steps=1).vary(attention=values)
    assert rebuild(describe(run)) == run
    with pytest.raises(ValueError, match=r"LocalityAttention keeps tokens from attending to themselves.*query_key=None"):
        mimetic_start(16, 2, attention=LocalityAttention)
    drawn(16, 2, attention=partial(LocalityAttention, mask_self=False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(attention=DifferentialAttention), "DifferentialAttention has no linear maps qkv and proj as Attention has"),
        (dict(attention=partial(Attention, head_dim=4)), "the heads of Attention are 8 wide together; expected 16"),
        (dict(query_key=(0.0, 0.7)), "query_key has no noise"),
        (dict(query_key=0.7), "query_key is 0.7; expected None or two numbers"),
        (dict(value_proj=(0.4, -0.4)), "value_proj is .0.4, -0.4.; expected None or two numbers of at least 0"),
    ],
)
def test_start_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        mimetic_start(16, 2, **options)


@pytest.mark.parametrize("position", [RelativeBias, Rotary])
@pytest.mark.parametrize("attention", [SigmoidAttention, partial(mimetic_start, attention=Attention)], ids=["sigmoid", "mimetic"])
def test_positions_inside_attention_tell_moved_patches_apart(attention, position):
    """Without any positions, a model gives the same result if the patches of an image change places."""
    inner = attention.keywords["attention"] if isinstance(attention, partial) else attention
    located = partial(inner, position=position)
    located = partial(mimetic_start, attention=located) if isinstance(attention, partial) else located
    images = torch.randn(3, 1, 8, 8)
    moved = images.roll(4, -1)
    for slot, told_apart in ((attention, False), (located, True)):
        model = randomize(tiny_vit(attention=slot, position=None, pool=MeanTokens), 0.4).eval()
        assert torch.allclose(model(images), model(moved), atol=1e-5) is not told_apart


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*is deprecated")
@pytest.mark.parametrize(
    "make",
    slow_after(1, [
        SigmoidAttention, partial(Attention, position=partial(RelativeBias, std=0.5, hidden=8)), LocalityAttention,
        TalkingHeadsAttention, DifferentialAttention, partial(Attention, position=Rotary),
    ]),
    ids=option_id,
)  # fmt: skip
def test_exported_and_traced_models_take_images_of_any_size(make):
    """Also of sizes with so many tokens that another kernel would be chosen."""
    model = randomize(tiny_vit(attention=make, depth=1), 0.4).eval()
    sides = {axis: 2 * torch.export.Dim(f"side{axis}", min=2, max=20) for axis in (2, 3)}
    exported = torch.export.export(model, (torch.randn(2, 1, 12, 8),), dynamic_shapes=(sides,)).module()
    traced = torch.jit.trace(model, torch.randn(2, 1, 12, 8))
    for size in ((8, 8), (12, 16), (24, 28)):
        images = torch.randn(2, 1, *size)
        for own in (exported, traced):
            assert_close(own(images), model(images), 1e-5)
