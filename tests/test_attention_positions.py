"""Positions inside attention: relative bias and rotary positions, and the places of tokens through every reduction."""

import inspect
import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, RelPosBias, RelPosMlp, RotaryEmbeddingCat, RotaryEmbeddingMixed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from toys import assert_close, default_dtype, option_id, randomize, slow_after, slow_but, tiny_vit

from smallvit import (
    DINO,
    MAE,
    Attention,
    Block,
    Learned,
    LearnedPrune,
    LearnedThresholds,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Places,
    Prune,
    RelativeBias,
    Rotary,
    Run,
    Supervised,
    ViT,
    attention_maps,
    attention_positions,
    fingerprint,
    initialize,
    native,
    patch_attention,
    rebuild,
    rollout,
    timm_attention,
    to_timm,
)
from smallvit.attention_positions import look_up, places_of
from smallvit.augment import Batch
from smallvit.evaluate import frozen
from smallvit.explain.tokens import trace, track_patches
from smallvit.flops import closed_form, counted
from smallvit.optim import decay_groups
from smallvit.pretrained.convert import NAMES, replace_parts
from smallvit.run import describe

POSITIONS = {
    "table": partial(RelativeBias, std=0.5),
    "network": partial(RelativeBias, std=0.5, hidden=8),
    "axial": Rotary,
    "mixed": partial(Rotary, mixed=True, origin="center"),
    "grid": partial(Rotary, temperature="grid"),
}
every = pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
REDUCTIONS = {
    "merge": partial(Merge, r=4),
    "prune": partial(Prune, layers=(0, 1)),
    "prune, mean": partial(Prune, keep=0.5, fuse="mean", layers=(0, 1)),
    "learned": partial(LearnedPrune, layers=(0, 1)),
    "thresholds": partial(LearnedThresholds, merge=0.2, prune=0.8),
}
GRID, P, HEADS, E = (3, 4), 2, 2, 8
N = P + GRID[0] * GRID[1]


def made(position, prefix=P, grid=GRID, dtype=torch.float64):
    return position(HEADS, E, grid, prefix).to(dtype)


def places(grid=GRID, batch=None):
    whole = places_of(grid, torch.device("cpu"))
    return whole if batch is None else whole._replace(at=whole.at.expand(batch, -1, -1))


def logits(module, at, q=None, k=None, prefix=P):
    """What is added up before the softmax, for tokens at the given places."""
    n = prefix + at.at.shape[-2]
    torch.manual_seed(1)
    q, k = (torch.randn(2, HEADS, n, E, dtype=torch.float64) if x is None else x for x in (q, k))
    q, k, bias = module(q, k, at)
    return q @ k.mT + (0 if bias is None else bias)


def attended(inside, slot=Attention, **options):
    return tiny_vit((12, 12), attention=partial(slot, position=inside), **options)


def test_every_class_is_tested():
    found = {c for c in vars(attention_positions).values() if inspect.isclass(c) and issubclass(c, torch.nn.Module)}
    assert found == {getattr(make, "func", make) for make in POSITIONS.values()}


# Formulas: parity with timm


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (1, 1)])
def test_table_equals_that_of_timm(prefix, grid):
    theirs, ours = RelPosBias(grid, HEADS, prefix_tokens=prefix), made(RelativeBias, prefix, grid, torch.float32)
    copy_table(theirs.relative_position_bias_table, ours)
    q = torch.randn(2, HEADS, prefix + math.prod(grid), E)
    assert torch.equal(ours(q, q, places(grid))[2], theirs.get_bias())


@torch.no_grad()
def copy_table(table, ours):
    """Fill a `RelativeBias` with a table of timm, (offsets, heads), whose last three rows belong to the class token."""
    table.normal_()
    offsets = ours.table[0].numel()
    ours.table.copy_(table[:offsets].T.unflatten(1, ours.table.shape[1:]))
    if ours.among.numel():
        for row, part in enumerate((ours.from_prefix, ours.to_prefix, ours.among)):
            part.copy_(table[offsets + row].reshape(part.shape))


def test_network_equals_that_of_swin_v2_in_timm():
    theirs, ours = RelPosMlp((3, 4), HEADS, hidden_dim=8, mode="swin").eval(), made(partial(RelativeBias, hidden=8), 0)
    randomize(theirs, 0.5)
    with torch.no_grad():
        for mine, weight in zip((ours.weight1, ours.bias1, ours.weight2), theirs.parameters(), strict=True):
            mine.copy_(weight)
    q = torch.randn(1, HEADS, 12, E, dtype=torch.float64)
    assert_close(ours(q, q, places())[2], theirs.double().get_bias().double() - 8, 1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_rotation_and_attention_equal_those_of_timm(mixed):
    ours = made(partial(Rotary, mixed=mixed, temperature=10.0), 1)
    if mixed:
        theirs = RotaryEmbeddingMixed(dim=HEADS * E, depth=1, num_heads=HEADS, temperature=10.0)
        theirs.freqs.data[:, 0] = ours.frequencies.data
        table = theirs.get_embed(GRID)[0].double()
    else:
        theirs = RotaryEmbeddingCat(dim=E, temperature=10.0, in_pixels=False, feat_shape=GRID, grid_indexing="xy")
        table = theirs.get_embed(GRID).double()
    q, k = torch.randn(2, 2, HEADS, 13, E, dtype=torch.float64)
    for before, after in zip((q, k), ours(q, k, places())):
        assert torch.equal(after[:, :, :1], before[:, :, :1])
        assert_close(after[:, :, 1:], apply_rot_embed_cat(before[:, :, 1:], table), 1e-6)
    module = Attention(HEADS * E, HEADS, position=lambda heads, head_dim, grid=GRID, prefix=1: ours).double()
    whole = AttentionRope(HEADS * E, HEADS, num_prefix_tokens=1).double()
    whole.load_state_dict({name: value for name, value in module.state_dict().items() if "position" not in name})
    x = torch.randn(2, 13, HEADS * E, dtype=torch.float64)
    assert_close(module(x, places=places()).x, whole(x, rope=table), 1e-6)


MODELS = {
    "axial": ("vit_small_patch16_rope_224", None, partial(Rotary, temperature=100.0)),
    "mixed": ("vit_small_patch16_rope_mixed_224", None, partial(Rotary, mixed=True)),
    "mixed, learned": ("vit_small_patch16_rope_mixed_ape_224", partial(Learned, on_prefix=False), partial(Rotary, mixed=True)),
    "relative": (partial(VisionTransformerRelPos, rel_pos_type="bias", class_token=True, global_pool="token", init_values=1.0), None, RelativeBias),
}


@pytest.mark.parametrize("name, position, inside", MODELS.values(), ids=MODELS)
def test_whole_models_of_timm_with_their_weights(name, position, inside):
    build = partial(timm.create_model, name, init_values=1.0) if isinstance(name, str) else name
    theirs = build(img_size=28, patch_size=7, in_chans=1, embed_dim=32, depth=2, num_heads=2, num_classes=10).eval()
    randomize(theirs)
    slots = dict(tokenizer=partial(PatchEmbed, patch=7), block=partial(Block, layer_scale=1.0), position=position)
    ours = ViT((28, 28), 1, 10, dim=32, depth=2, heads=2, attention=partial(Attention, position=inside), **slots).eval()
    state, prefix = {}, theirs.cls_token[0]
    for key, value in theirs.state_dict().items():
        key = replace_parts(key.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma"), NAMES.items())
        state[key] = value[0] if key == "position.table" else value
    state |= {"prefix": prefix}
    del state["cls_token"]
    if "rope.freqs" in state:
        for layer, frequencies in enumerate(state.pop("rope.freqs").unbind(1)):
            state[f"blocks.{layer}.attention.position.frequencies"] = frequencies
    for key in [key for key in state if "rel_pos" in key]:
        layer = int(key.split(".")[1])
        copy_table(theirs.blocks[layer].attn.rel_pos.relative_position_bias_table, ours.blocks[layer].attention.position)
        del state[key]
    missing = ours.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and all(inside is RelativeBias and ".position." in key for key in missing.missing_keys)
    x = torch.randn(3, 1, 28, 28)
    assert_close(ours(x), theirs(x), 1e-5)
    if not isinstance(name, str):
        return
    x = torch.randn(3, 1, 42, 35)  # another grid
    bigger = build(img_size=(42, 35), patch_size=7, in_chans=1, embed_dim=32, depth=2, num_heads=2, num_classes=10).eval()
    if position is None:
        bigger.load_state_dict(theirs.state_dict())
        assert_close(ours(x), bigger(x), 1e-5)


# Off


@pytest.mark.parametrize("slot", [Attention, partial(Attention, qk_norm=True), LocalityAttention])
@pytest.mark.parametrize("position", [RelativeBias, Rotary, partial(Rotary, mixed=True)], ids=option_id)
def test_zero_equals_attention_without_positions_bit_for_bit(slot, position):
    plain, other = slot(16, 2), slot(16, 2, position=partial(position, grid=GRID, prefix=P))
    other.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for tensor in [*other.position.parameters(), *other.position.buffers()]:
            tensor.zero_()
    x, size, mask = torch.randn(2, N, 16), torch.rand(2, N) + 0.5, torch.rand(N, N) < 0.8
    for inputs in ((x,), (x, size), (x, None, mask), (x, size, mask)):
        for at in (places(), places(batch=2)):
            found, expected = other(*inputs, *[None] * (3 - len(inputs)), at), plain(*inputs)
            assert torch.equal(found.x, expected.x) and torch.equal(found.map(), expected.map())
            assert torch.equal(found.saliency(1), expected.saliency(1)) and torch.equal(found.key(), expected.key())


def test_std_of_zero_starts_without_a_bias_and_the_option_keeps_fingerprints():
    assert all((p == 0).all() for p in RelativeBias(2, 8, GRID, P, std=0).parameters())
    at_start = RelativeBias(2, 8, GRID, P, std=0, hidden=4)
    assert (at_start.table_for(GRID) == 0).all()
    at_start.table_for(GRID).sum().backward()
    assert at_start.weight2.grad.any()  # so that the network can learn
    for slot in (Attention, LocalityAttention):
        assert fingerprint(Run(model=partial(ViT, attention=partial(slot, position=None)))) == fingerprint(
            Run(model=partial(ViT, attention=slot))
        )
    run = Run(model=partial(ViT, attention=partial(LocalityAttention, position=partial(Rotary, temperature="grid"))))
    assert fingerprint(rebuild(describe(run))) == fingerprint(run) != fingerprint(Run(model=ViT))


def test_other_weights_of_a_model_do_not_depend_on_positions_inside_attention():
    plain = initialize(tiny_vit(), 3).state_dict()
    for position in POSITIONS.values():
        other = initialize(attended(position), 3).state_dict()
        assert all(torch.equal(other[name], value) for name, value in plain.items())


# Invariants


@every
def test_order_of_tokens_and_origin_of_places_do_not_matter(position):
    module, order = made(position), torch.randperm(12)
    tokens = torch.cat([torch.arange(P), P + order])
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, HEADS, N, E, dtype=torch.float64)
    at = places()._replace(at=places().at.double())
    expected = logits(module, at, q, k)
    moved = logits(module, at._replace(at=at.at[order]), q[:, :, tokens], k[:, :, tokens])
    assert_close(moved, expected[:, :, tokens][..., tokens])
    shifted = logits(module, at._replace(at=at.at + 5), q, k)
    assert_close(shifted[:, :, P:, P:], expected[:, :, P:, P:])
    fractional = at._replace(at=torch.rand(2, 12, 2, dtype=torch.float64) * 2)
    shifted = fractional._replace(at=fractional.at + torch.tensor([0.3, -1.7]))
    assert_close(*(logits(module, each, q, k)[:, :, P:, P:] for each in (fractional, shifted)))


@every
def test_equal_queries_and_keys_give_logits_that_depend_on_the_offset_alone(position):
    module = made(position)
    q, k = (torch.randn(1, HEADS, 1, E, dtype=torch.float64).expand(-1, -1, N, -1) for _ in range(2))
    found = logits(module, places(), q, k)[0, :, P:, P:].reshape(HEADS, *GRID, *GRID)
    assert_close(found[:, 1:, 1:, 1:, 1:], found[:, :-1, :-1, :-1, :-1])
    assert (found[:, 0, 0] - found[:, :1, :1, 0, 0]).abs().max() > 0.01


@pytest.mark.parametrize("position", ["table", "network"])
def test_whole_places_of_each_image_are_looked_up_exactly(position):
    module = made(POSITIONS[position])
    whole, each = (module(*torch.zeros(2, 2, HEADS, N, E), at)[2] for at in (places(), places(batch=2)))
    assert whole.shape == (1, HEADS, N, N) and each.shape == (2, HEADS, N, N)
    assert_close(each, whole.expand(2, -1, -1, -1), 1e-6)  # places are float32


def test_interpolation_of_a_table():
    table = torch.randn(HEADS, 5, 7, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([[[0.0, 0.0], [1.25, 2.5]]], dtype=torch.float64)
    found = look_up(table, at)[0, :, 1, 0]  # row 1.25, column 2.5 from the middle of the table
    knots = table[:, 3:5, 5:7]
    assert_close(found, (knots * torch.tensor([[0.75 * 0.5] * 2, [0.25 * 0.5] * 2])).sum((1, 2)))
    (gradient,) = torch.autograd.grad(found[0], table)
    assert_close(gradient[0, 3:5, 5:7].sum(), gradient.sum()) and gradient.sum() == pytest.approx(1.0)
    row, column = torch.meshgrid(torch.arange(-2.0, 3).double(), torch.arange(-3.0, 4).double(), indexing="ij")
    affine = (0.3 * row - 0.7 * column + 2).expand(1, -1, -1)
    at = torch.rand(1, 6, 2, dtype=torch.float64) * 2
    offset = at[0, :, None] - at[0, None]
    assert_close(look_up(affine, at)[0, 0], 0.3 * offset[..., 0] - 0.7 * offset[..., 1] + 2)


def test_offsets_beyond_the_table_take_its_border_and_a_network_computes_them():
    module, wide = made(RelativeBias, 0), (3, 9)
    bias = module(*torch.zeros(2, 1, HEADS, 27, E), places(wide))[2][0].reshape(HEADS, *wide, *wide)
    assert (bias[:, 0, 8, 0, :6] == bias[:, 0, 8, 0, :1]).all() and (bias[:, 0, 8, 0, 0] == module.table[:, 2, -1]).all()
    crop = module(*torch.zeros(2, 1, HEADS, 4, E), places((2, 2)))[2][0]
    assert torch.equal(crop[:, 0, 3], module.table[:, 1, 2])  # a crop: offsets keep their unit
    network = made(partial(RelativeBias, std=0.5, hidden=8), 0)
    assert network.table_for(wide).shape == (HEADS, 5, 17)
    assert_close(network.table_for(wide)[:, :, 5:12], network.table_for(GRID))
    assert len(network.table_for(wide)[0, 0].unique()) == 17


def test_mirrored_image_and_table_give_the_mirrored_result():
    model = attended(partial(RelativeBias, std=0.5), position=None, pool=MeanTokens, tokenizer=partial(PatchEmbed, patch=2))
    x, mirrored = torch.randn(2, 1, 12, 12), attended(RelativeBias, position=None, pool=MeanTokens)
    mirrored.load_state_dict(model.state_dict())
    assert_close(mirrored(x), model(x))
    with torch.no_grad():
        mirrored.tokenizer.proj.weight.copy_(model.tokenizer.proj.weight.flip(-1))
        for block in mirrored.blocks:
            block.attention.position.table.copy_(block.attention.position.table.flip(2))
    assert_close(mirrored(x.flip(-1)), model(x), 1e-5)
    assert (model(x.flip(-1)) - model(x)).abs().max() > 1e-3


def test_rotation_keeps_lengths_and_is_a_group():
    module = made(partial(Rotary, mixed=True), 0)
    q = torch.randn(1, HEADS, 1, E, dtype=torch.float64).expand(-1, -1, 3, -1)
    a, b = torch.rand(2, 1, 3, 2, dtype=torch.float64)
    turned = module(q, q, Places(a, GRID))[0]
    assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    assert_close(module(turned, q, Places(b, GRID))[0], module(q, q, Places(a + b, GRID))[0])
    assert torch.equal(module(q, q, Places(a * 0, GRID))[0], q)


def test_mixed_frequencies_start_from_the_waves_of_the_axial_form():
    axial, mixed = made(Rotary), made(partial(Rotary, mixed=True))
    columns, rows = mixed.frequencies
    assert_close((columns**2 + rows**2).sqrt(), torch.tensor(axial.waves).double().repeat(2).expand(HEADS, -1), 1e-6)
    first, second = torch.stack([columns, rows], -1).unflatten(1, (2, -1)).unbind(1)
    assert (first * second).sum(-1).abs().max() < 1e-6
    with torch.no_grad():
        mixed.frequencies.copy_(axial.frequencies.expand(-1, HEADS, -1))
    assert torch.equal(logits(mixed, places()), logits(axial, places()))
    at = places()._replace(at=places().at * torch.tensor([1.0, 0.0]))  # all columns equal
    q = torch.randn(1, HEADS, N, E, dtype=torch.float64)
    assert torch.equal(axial(q, q, at)[0][..., : E // 2], q[..., : E // 2])


@pytest.mark.parametrize(("side", "expected"), [(4, [4.3, 3.5, 3.2]), (7, [10.9, 7.8, 6.8]), (14, [30.6, 18.8, 15.4])])
def test_temperature_of_the_grid_turns_the_slowest_wave_by_1(side, expected):
    for head_dim, temperature in zip((16, 32, 64), expected):
        waves = Rotary(1, head_dim, (2, side), 0, temperature="grid").waves
        assert waves[0] == 1 and waves[-1] * (side - 1) == pytest.approx(1)
        assert waves[1] ** -(head_dim / 4) == pytest.approx(temperature, abs=0.05)
    assert Rotary(1, 4, (3, 3), 0, temperature="grid").waves == [1] and Rotary(1, 8, (1, 1), 0, temperature="grid").waves == [1, 1]


def test_origin_matters_to_prefix_tokens_only():
    x = torch.randn(2, 1, 12, 12)
    for prefix, equal in ((0, True), (1, False)):
        corner, center = (
            attended(partial(Rotary, origin=o), pool=MeanTokens, registers=prefix) for o in ("corner", "center")
        )
        center.load_state_dict(corner.state_dict())
        assert ((center(x) - corner(x)).abs().max() < 1e-5) == equal
    module = made(partial(Rotary, origin="center"))  # all corners are equally far from the prefix tokens
    with torch.no_grad():
        module.frequencies.copy_(torch.rand(2, 1, 1).expand(2, 1, 4))
    q = torch.randn(1, HEADS, 1, E, dtype=torch.float64).expand(-1, -1, N, -1)
    corners = logits(module, places(), q, q)[0, :, 0, P:].reshape(HEADS, *GRID)
    assert_close(corners[:, 0, 0], corners[:, -1, -1])


def test_angles_are_computed_in_float32():
    module, at = Rotary(2, 16, (14, 14), 0, mixed=True), Places(torch.rand(1, 9, 2) * 13, (14, 14))
    q = torch.randn(1, 2, 9, 16)
    found, exact = module(q.bfloat16(), q.bfloat16(), at)[0], module.double()(q.bfloat16().double(), q.double(), at)[0]
    assert found.dtype == torch.bfloat16 and ((found - exact).abs() / (exact.abs() + 1)).max() < 1e-2


def test_fixed_frequencies_are_exact_if_they_are_made_while_half_precision_is_the_default():
    expected = Rotary(2, 16, (14, 14), 0).frequencies
    with default_dtype(torch.bfloat16):
        found = Rotary(2, 16, (14, 14), 0).frequencies
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_fixed_frequencies_keep_their_precision_in_a_model_of_half_precision():
    """After `bfloat16()`, and back; a model of double precision has all digits that it can have."""
    module = Rotary(2, 16, (14, 14), 0)
    before = module.frequencies.clone()
    assert torch.equal(module.bfloat16().frequencies, before) and torch.equal(module.float().frequencies, before)
    assert module.double().frequencies.dtype == torch.float64
    with torch.device("meta"):
        empty = Rotary(2, 16, (14, 14), 0).bfloat16()
    assert empty.to_empty(device="cpu").frequencies.dtype == torch.float32


@every
def test_gradients_are_correct(position):
    module = randomize(LocalityAttention(4, 1, position=partial(position, grid=(2, 2), prefix=1)).double())
    x, at = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True), Places(torch.rand(1, 3, 2).double(), (2, 2))
    assert torch.autograd.gradcheck(lambda x, *_: module(x, None, None, at).x, (x, *module.parameters()))


# Kernels, maps and saliency


@every
@pytest.mark.parametrize("slot", [Attention, partial(Attention, qk_norm=True), LocalityAttention], ids=option_id)
def test_both_kernels_and_the_map_agree(position, slot):
    module = randomize(slot(16, 2, position=partial(position, grid=GRID, prefix=P)), 0.3)
    x, size, mask = torch.randn(2, N, 16), torch.rand(2, N) + 0.5, torch.rand(N, N) < 0.8
    for at in (places(), places(batch=2)):
        outputs = []
        for module.fused in (False, True):
            outputs.append(module(x, size, mask, at))
        with_gradient = module(x, size.clone().requires_grad_(), mask | torch.eye(N, dtype=torch.bool), at)
        assert_close(outputs[0].x, outputs[1].x, 1e-5)
        assert_close(outputs[0].map(), outputs[1].map(), 1e-6)
        values = module.qkv(x).unflatten(-1, (3, 2, 8))[:, :, 2].transpose(1, 2)
        assert_close(module.proj((outputs[1].map() @ values).transpose(1, 2).flatten(2)), outputs[1].x, 1e-5)
        for output in (*outputs, with_gradient):
            assert_close(output.saliency(2), output.map()[:, :, :2].mean((1, 2)), 1e-6)
        if slot is not LocalityAttention:
            assert torch.equal(outputs[0].key(), outputs[1].key())
            key = module.qkv(x).unflatten(-1, (3, 2, 8))[:, :, 1]
            norm = getattr(module, "k_norm", lambda k: k)
            assert_close(outputs[0].key(), norm(key).mean(2), 1e-6)  # not turned


def test_explanations_include_positions():
    x = torch.randn(2, 1, 12, 12)
    for position in POSITIONS.values():
        model = randomize(attended(position, reduction=partial(Merge, r=6), registers=1), 0.2)
        with frozen(model):
            sharp = [block.attention(*inputs).map() for block, inputs in zip(model.blocks, attention_inputs(model, x))]
        for found, expected in zip(attention_maps(model, x), sharp):
            assert_close(found, expected, 1e-6)
        assert patch_attention(model, x).shape == (2, 2, 6, 6) and rollout(model, x).shape == (2, 6, 6)
        assert len(trace(model, x).groups[0, -1].unique()) == 24


def attention_inputs(model, x):
    """What each attention of a model is called with."""
    inputs = []
    hooks = [b.attention.register_forward_pre_hook(lambda _, given: inputs.append(given)) for b in model.blocks]
    with frozen(model):
        model(x)
    for hook in hooks:
        hook.remove()
    return inputs


# Places through reductions


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("training", [False, True])
def test_each_token_is_at_the_mean_place_of_its_patches(reduction, training):
    torch.manual_seed(0)
    model = randomize(attended(Rotary, reduction=reduction, depth=4, registers=1), 0.2).train(training)
    x, grid, found = torch.randn(3, 1, 12, 12), (6, 6), []
    hooks = [b.attention.register_forward_pre_hook(lambda _, given: found.append(given[1::2])) for b in model.blocks]
    if training:
        found_contents = contents_of_training(model, x)
    else:
        with frozen(model):
            found_contents = track_patches(model, x, 36, lambda contents: contents)
    for hook in hooks:
        hook.remove()
    whole = places(grid).at
    first = getattr(model.blocks[0].reduction, "first", False)
    for (_, at), contents in zip(found if first else found[1:], found_contents, strict=False):
        members = contents[:, 2:]  # after the prefix tokens: how much of each patch is in each token, times the size
        total = members.sum(-1, keepdim=True)
        present = total[..., 0] > 0
        expected = (members @ whole / total.where(total > 0, 1))[present]
        assert_close(at.at.expand(3, -1, -1)[present], expected, 1e-4)
        assert at.at.isfinite().all() and (at.at >= 0).all() and (at.at <= 5.001).all() and not at.at.requires_grad
        assert present.any() and at.grid == grid
    if reduction.func is Merge:
        for size, at in found[1:]:
            assert_close((size[:, 2:, None] * at.at).sum(1), whole.sum(0).expand(3, -1), 1e-3)


def contents_of_training(model, x):
    """As `track_patches`, which needs evaluation, with the same random draws in the second call of each reduction."""
    found, marks = [], F.pad(torch.eye(36), (0, 0, 2, 0)).expand(len(x), -1, -1)

    def save(module, inputs, output):
        nonlocal marks
        tokens, *others = inputs
        torch.random.set_rng_state(states.pop())
        again, size = module.forward(torch.cat([tokens, marks], -1), *others)
        marks = again[..., tokens.shape[-1] :]
        found.append((marks if size is None else marks * size[..., None]).detach())

    states, hooks = [], []
    for block in model.blocks:
        hooks.append(block.reduction.register_forward_pre_hook(lambda *_: states.append(torch.random.get_rng_state())))
        hooks.append(block.reduction.register_forward_hook(save))
    model.tokens(x)
    for hook in hooks:
        hook.remove()
    return found


def test_hidden_patches_and_crops_have_their_own_places():
    model, seen = attended(Rotary), []
    model.blocks[0].attention.register_forward_pre_hook(lambda _, given: seen.append(given[3]))
    keep = torch.tensor([[0, 7, 35], [5, 6, 30]])
    model.tokens(torch.randn(2, 1, 12, 12), keep=keep)
    assert seen[0].at.tolist() == [[[0, 0], [1, 1], [5, 5]], [[0, 5], [1, 0], [5, 0]]]
    model(torch.randn(2, 1, 4, 6))
    assert seen[1].grid == (2, 3) and seen[1].at.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize(("position", "exact"), [(partial(RelativeBias, std=0), True), (POSITIONS["table"], False), (Rotary, False)])
def test_merging_equal_tokens_is_exact_only_where_places_do_not_matter(position, exact):
    x, at = torch.randn(1, 4, 16, dtype=torch.float64), torch.tensor([[[0.0, 0], [0, 1], [1, 0], [1, 1]]])
    merged, size = torch.cat([at[:, :2], at[:, 2:].mean(1, keepdim=True)], 1), torch.tensor([[1.0, 1, 1, 2]]).double()
    module = Attention(16, 2, position=partial(position, grid=(2, 2), prefix=1)).double()
    apart, one = module(torch.cat([x, x[:, 3:]], 1), None, None, Places(at, (2, 2))).x, module(x, size, None, Places(merged, (2, 2))).x
    assert ((apart[:, :3] - one[:, :3]).abs().max() < 1e-10) == exact


# With the other slots


@every
@pytest.mark.parametrize("reduction", slow_but((REDUCTIONS["prune"],), [None, *REDUCTIONS.values()]), ids=["none", *REDUCTIONS])
def test_positions_train_with_every_reduction_and_precision(position, reduction):
    for slot in (Attention, LocalityAttention) if reduction in (None, REDUCTIONS["prune"]) else (Attention,):
        model = attended(position, slot, reduction=reduction, registers=1, pool=MeanTokens)
        x = torch.randn(3, 1, 12, 12)
        for half in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                F.cross_entropy(model.train()(x).float(), torch.tensor([0, 2, 1])).backward()
                assert model.eval()(x).isfinite().all() and model(torch.randn(2, 1, 8, 16)).isfinite().all()
        for name, parameter in model.named_parameters():
            if ".position." in name:  # no prefix token of the last block is read, and LSA masks a class token's own logit
                unused = name.startswith("blocks.1.") or name.endswith("among")
                assert parameter.grad.isfinite().all() and (unused or parameter.grad.abs().max() > 0), name
        assert model.to(torch.bfloat16)(x.bfloat16()).isfinite().all()


@every
def test_one_patch_and_no_prefix(position):
    model = attended(position, pool=MeanTokens)
    assert model(torch.randn(2, 1, 2, 2)).isfinite().all()
    tiny = tiny_vit((2, 2), attention=partial(Attention, position=position))
    assert tiny(torch.randn(2, 1, 2, 2)).isfinite().all()


@every
def test_objectives_that_hide_patches_or_crop(position):
    x, targets = torch.rand(4, 1, 12, 12), torch.eye(5)[[0, 1, 2, 3]]
    assert MAE(attended(position), decoder_dim=16)(Batch(x, targets), 0.5)["loss"].isfinite()
    batch = Batch(x, targets, views=(torch.rand(8, 1, 12, 12), torch.rand(4, 1, 4, 6)))
    assert DINO(attended(position))(batch, 0.5)["loss"].isfinite()


@every
@pytest.mark.parametrize("reduction", slow_after(1, [partial(Merge, r=4), None]), ids=["merge", "none"])
def test_stacked_models_equal_single_ones(position, reduction):
    models = [randomize(attended(position, reduction=reduction)) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    x = torch.randn(3, 2, 1, 12, 12)

    def loss(weights, buffers, x):
        return torch.func.functional_call(models[0], (weights, buffers), (x,)).square().mean()

    gradients, values = torch.func.vmap(torch.func.grad_and_value(loss))(weights, buffers, x)
    for index, model in enumerate(models):
        value = model(x[index]).square().mean()
        value.backward()
        assert_close(values[index], value, 1e-5)
        for name, parameter in model.named_parameters():
            assert_close(gradients[name][index], parameter.grad, 1e-4)


@pytest.mark.slow
@every
def test_exported_program_gives_equal_logits(position):
    for reduction in (None, partial(Merge, r=4)):
        model = randomize(attended(position, reduction=reduction, depth=2)).eval()
        batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
        program = torch.export.export(model, (torch.randn(2, 1, 12, 12),), dynamic_shapes=batch).module()
        x = torch.randn(5, 1, 12, 12)
        assert_close(program(x), model(x), 1e-5)


def test_multiply_adds_and_weight_decay():
    x, plain = torch.randn(1, 1, 12, 12), tiny_vit()
    for position in POSITIONS.values():
        model = attended(position)
        network = getattr(model.blocks[0].attention.position, "weight2", None)
        extra = 0 if network is None else 2 * 121 * (network.numel() + 2 * network.shape[1])  # 2 blocks
        assert counted(model, x) == counted(plain, x) + 2 * extra
        assert sum(closed_form(model).values()) == sum(closed_form(plain).values()) + extra
        groups, _ = decay_groups(Supervised(model), 0.1)
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        inside = [p for block in model.blocks for p in block.attention.position.parameters()]
        assert not decayed & {id(p) for p in inside}


def test_native_kernel_leaves_attention_with_positions_to_pytorch(capsys):
    if native.reason_against():
        pytest.skip("no compiler")
    for position, name in ((RelativeBias, "RelativeBias"), (Rotary, "Rotary")):
        model = tiny_vit(dim=32, heads=2, attention=partial(Attention, position=position)).eval()
        assert native.reason_against_block(model.blocks[0]) == f"its attention has positions ({name})"
        assert model.blocks[0].attention.as_plain() is None and native.native_blocks(model) == []
        assert f"PyTorch computes 2 of 2 blocks: its attention has positions ({name})" in capsys.readouterr().err
        model.blocks[1] = tiny_vit(dim=32, heads=2).blocks[1].eval()  # the kernel computes this one
        x = torch.randn(2, 1, 12, 12)
        expected = model(x)
        ((blocks, call),) = native.native_blocks(model)
        blocks._compiled_call_impl = call
        assert_close(model(x), expected, 1e-5)


class Old(torch.nn.Module):
    """An attention from outside, with the call of version 0.2."""

    def __init__(self, dim, heads):
        super().__init__()
        self.inner = Attention(dim, heads)

    def forward(self, x, size=None, mask=None):
        return self.inner(x, size, mask)


class OldBlock(Block):
    def forward(self, x, size=None, mask=None):
        return super().forward(x, size, mask)


def test_attention_with_the_old_call_works_also_beside_one_with_positions():
    x, made = torch.randn(2, 1, 12, 12), iter((Old, partial(Attention, position=partial(Rotary, grid=(6, 6), prefix=1))))
    assert tiny_vit(attention=Old)(x).isfinite().all()
    mixed = tiny_vit(attention=lambda dim, heads: next(made)(dim, heads), reduction=partial(Merge, r=4))
    assert mixed(x).isfinite().all() and [mixed.blocks[i].attention.__class__ for i in (0, 1)] == [Old, Attention]


# In models of timm


@pytest.mark.parametrize("make", [Attention, LocalityAttention])
@pytest.mark.parametrize("position", [Rotary, partial(Rotary, mixed=True), partial(RelativeBias, std=1.0)], ids=option_id)
def test_positions_work_in_a_timm_model_of_one_size(make, position):
    placed = partial(position, grid=(4, 4), prefix=1)
    torch.manual_seed(0)
    theirs = timm_attention(partial(make, position=placed))(16, 2, qkv_bias=True)
    ours = make(16, 2, position=placed)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 17, 16)
    assert torch.equal(theirs(x), ours(x, places=places_of((4, 4), x.device)).x)
    model = timm.models.VisionTransformer(
        img_size=28, patch_size=7, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2, pos_embed="none",
        attn_layer=timm_attention(partial(make, position=placed)),
    )  # fmt: skip
    maps = attention_maps(model, torch.randn(2, 1, 28, 28))
    assert maps[0].shape == (2, 2, 17, 17)
    shuffled = [0, *reversed(range(1, 17))]  # without positions, the outputs of the patches would only change their places
    assert (theirs(x[:, shuffled]) - theirs(x)[:, shuffled]).abs().max() > 1e-4
    with pytest.raises(ValueError, match="got 10 tokens; expected 1 prefix tokens and 4 x 4 patches"):
        theirs(x[:, :10])


class Placed(Rotary):
    """Positions that know their grid without an option."""

    def __init__(self, heads, head_dim, grid=(2, 2), prefix=1):
        super().__init__(heads, head_dim, grid, prefix)


def test_grid_of_positions_may_be_a_default():
    x = torch.randn(1, 5, 16)
    for position in (Placed, partial(Placed, prefix=1)):
        made = timm_attention(partial(Attention, position=position))(16, 2)
        assert made(x).shape == x.shape
    with pytest.raises(ValueError, match=r"grid of Rotary is 4; expected a pair, \(rows, columns\)"):
        timm_attention(partial(Attention, position=partial(Rotary, grid=4, prefix=1)))(16, 2)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: tiny_vit(position=Rotary), "Rotary works inside attention; expected attention=partial"),
        (lambda: attended(Learned), "Learned is added to the tokens, not used inside attention; expected ViT"),
        (lambda: Attention(8, 2, position=Rotary), "Rotary needs the grid; use it in a ViT, or partial"),
        (lambda: attended(RelativeBias).blocks[0].attention(torch.randn(1, 5, 16)), "has positions .RelativeBias. and got no places"),
        (lambda: attended(Rotary, block=OldBlock), "Rotary needs to know where the tokens are, and a OldBlock does not"),
        (lambda: attended(Rotary, dim=12), "heads have a width of 6; expected a width divisible by 4, such as 8"),
        (lambda: attended(partial(Rotary, origin="middle")), "origin is 'middle'; expected 'corner' or 'center'"),
        (lambda: attended(partial(Rotary, temperature=0.5)), "temperature is 0.5; expected 1 or more, or 'grid'"),
        (lambda: to_timm(attended(Rotary, pool=MeanTokens)), "positions inside attention"),
        (lambda: timm_attention(partial(Attention, position=Rotary))(16, 2), "Rotary needs the grid"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()
