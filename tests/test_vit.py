import inspect
import io
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smallvit
from smallvit import (
    Attention,
    Block,
    ClassToken,
    ConvStem,
    ConvTokenizer,
    DistilledTokens,
    LayerContext,
    Learned,
    LeNet,
    LocalityAttention,
    MeanTokens,
    PatchEmbed,
    Pixels,
    Projected,
    Resized,
    ResNet,
    SequencePool,
    ShiftedPatchEmbed,
    SinCos1d,
    SinCos2d,
    SmallCNN,
    ViT,
    attention,
    initialize,
    pooling,
    positions,
    references,
    tokenizers,
)
from smallvit.vit import DropPath, LayerScale, rates


def classes(module):
    """Its public ones."""
    found = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    return [c for c in found if c.__module__ == module.__name__ and c.__name__ in smallvit.__all__]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(one, other, by=1e-10):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= by


# Every combination of slots

SETTINGS = {
    PatchEmbed: [dict(patch=4), dict(patch=7)],
    ShiftedPatchEmbed: [dict(patch=4), dict(patch=7)],
    ConvStem: [dict(layers=2), dict(layers=3)],
    ConvTokenizer: [dict(kernel=3), dict(kernel=7)],
    Resized: [dict(size=16, tokenizer=partial(PatchEmbed, patch=4)), dict(size=12, tokenizer=ConvStem)],
}
WRAPPERS = {Resized, Projected}  # they hold another tokenizer, another pool: combined with each other, not with all
COMBINATIONS = [
    ((tokenizer, tuple(knobs.items())), position, attend, pool, norm_first)
    for tokenizer in classes(tokenizers)
    for knobs in SETTINGS[tokenizer]
    for position in [*classes(positions), None]
    for attend in classes(attention)
    for pool in classes(pooling)
    for norm_first in (True, False)
    if (tokenizer in WRAPPERS) == (pool in WRAPPERS)
]
IMAGES = [(28, 28), (24, 40)]


def spelled(combination):
    (tokenizer, knobs), position, attend, pool, norm_first = combination
    parts = [tokenizer, position, attend, pool]
    words = [getattr(part, "__name__", "None") for part in parts] + ["pre" if norm_first else "post"]
    return "-".join(words) + f"-{knobs[0][1]}"


def test_as_many_combinations_as_there_are_slot_classes():
    counts = [len(classes(module)) for module in (tokenizers, positions, attention, pooling)]
    assert counts == [5, 3, 2, 5] and len(WRAPPERS) == 2
    assert len(COMBINATIONS) == 544 == 2 * (4 * 4 + 1 * 1) * (3 + 1) * 2 * 2
    assert len({spelled(combination) for combination in COMBINATIONS}) == 544


def combined(combination, image, channels):
    (tokenizer, knobs), position, attend, pool, norm_first = combination
    return ViT(
        image,
        channels,
        3,
        dim=8,
        depth=2,
        heads=2,
        tokenizer=partial(tokenizer, **dict(knobs)),
        position=position,
        attention=attend,
        pool=pool,
        block=partial(Block, norm_first=norm_first, mlp_ratio=2),
    )


def refusal(combination, image):
    """The documented error, or None: patches of 7 tile 28 x 28 but not 24 x 40."""
    patch = dict(combination[0][1]).get("patch", 1)
    if image[0] % patch or image[1] % patch:
        return f"patches of {patch} pixels do not tile an image of {image[0]} x {image[1]}"


@pytest.mark.parametrize("at", range(len(COMBINATIONS)), ids=[spelled(combination) for combination in COMBINATIONS])
def test_every_combination_of_slots_learns_on_every_image(at):
    combination, channels = COMBINATIONS[at], (1, 3, 4)[at % 3]
    refused = 0
    for built, other in (IMAGES, reversed(IMAGES)):
        if message := refusal(combination, built):
            refused += 1
            with pytest.raises(ValueError, match=message):
                combined(combination, built, channels)
            continue
        model = combined(combination, built, channels)
        for image in (built, other):
            x = torch.randn(2, channels, *image)
            if message := refusal(combination, image):
                refused += 1
                with pytest.raises(ValueError, match=message):
                    model(x)
                continue
            logits = model(x)
            assert logits.shape == (2, 3)
            model.zero_grad()
            F.cross_entropy(logits, torch.tensor([0, 2])).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad.isfinite().all(), name
                idle = name == "pool.score.bias" or not parameter.numel()  # a softmax does not feel a shift of its scores
                assert idle or parameter.grad.abs().max() > 0, name
    assert refused == (2 if dict(combination[0][1]).get("patch") == 7 else 0)


EXPORTED = [
    dict(tokenizer=partial(PatchEmbed, patch=4), position=Learned, attention=Attention, pool=DistilledTokens, registers=2),
    dict(tokenizer=partial(ShiftedPatchEmbed, patch=4), position=SinCos2d, attention=LocalityAttention, pool=MeanTokens),
    dict(
        tokenizer=ConvStem, position=SinCos1d, attention=partial(LocalityAttention, temperature="per layer"), pool=SequencePool
    ),
    dict(
        tokenizer=ConvTokenizer,
        position=None,
        attention=partial(Attention, qk_norm=True),
        pool=ClassToken,
        norm_after_pool=True,
    ),
    dict(
        tokenizer=partial(Resized, tokenizer=partial(PatchEmbed, patch=4), size=8),
        position=Learned,
        attention=Attention,
        pool=partial(Projected, pool=ClassToken),
    ),
]


def test_the_exported_models_have_every_slot_class_among_them():
    used = {getattr(slot, "func", slot) for slots in EXPORTED for slot in slots.values() if isinstance(slot, Callable)}
    assert used == {c for module in (tokenizers, positions, attention, pooling) for c in classes(module)}


@pytest.mark.parametrize("slots", EXPORTED, ids=["PatchEmbed", "ShiftedPatchEmbed", "ConvStem", "ConvTokenizer", "Resized"])
@pytest.mark.parametrize("image", [(16, 8), pytest.param((8, 8), marks=pytest.mark.slow)])
def test_an_exported_model_gives_the_same_logits_for_any_batch(slots, image):
    model = ViT((8, 8), 1, 3, dim=8, depth=1, heads=2, **slots).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, *image),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for b in (1, 5):
        x = torch.randn(b, 1, *image)
        close(loaded(x), model(x), 1e-6)


# Every constructor argument matters

GENERATOR = torch.Generator().manual_seed(0)
X, TOKENS = torch.randn(2, 1, 28, 28, generator=GENERATOR), torch.randn(2, 50, 8, generator=GENERATOR)


class Halve(nn.Module):
    """The least reduction: the first half of the tokens stays, with sizes 1, 2, 3 and so on."""

    def __init__(self, place):
        super().__init__()
        self.place, self.seen = place, None

    def forward(self, x, size, key, saliency):
        self.seen = size, key().shape, saliency(1).shape
        kept = x.shape[1] // 2
        return x[:, :kept], (1.0 + torch.arange(kept)).expand(len(x), -1)


MAKE: dict[type, Callable] = {
    **{c: lambda c, **knobs: (c((28, 28), 1, 8, **knobs), (X,)) for c in classes(tokenizers)},
    **{c: lambda c, **knobs: (c(8, (7, 7), 1, **knobs), (TOKENS, (7, 7))) for c in classes(positions)},
    **{c: lambda c, **knobs: (c(8, 2, **knobs), (TOKENS,)) for c in classes(attention)},
    **{c: lambda c, **knobs: (c(8, **knobs), (TOKENS,)) for c in classes(pooling)},
    Block: lambda c, **knobs: (c(8, 2, Attention, None, 0.0, **knobs), (TOKENS,)),
    ViT: lambda c, **knobs: (c((28, 28), 1, 3, **knobs), (X,)),
    SmallCNN: lambda c, **knobs: (c((28, 28), 1, 3, **knobs), (X,)),
    LeNet: lambda c, **knobs: (c((28, 28), 1, 3, **knobs), (X,)),
    ResNet: lambda c, **knobs: (c((28, 28), 1, 3, **knobs), (X,)),
    Pixels: lambda c, **knobs: (c((28, 28), 1, 3, **knobs), (X,)),
}
BASE = {
    PatchEmbed: dict(patch=7),
    ShiftedPatchEmbed: dict(patch=7),
    Resized: dict(tokenizer=partial(PatchEmbed, patch=4), size=16),
    ViT: dict(dim=8, depth=2, heads=2, pool=MeanTokens),
}
OTHER = {
    PatchEmbed: dict(patch=4, kernel=13, linear=True),
    ShiftedPatchEmbed: dict(patch=4, shift="1px cardinal", norm=False, pad=0.5),
    Resized: dict(tokenizer=partial(PatchEmbed, patch=8), size=20, interpolation="bilinear"),
    ConvStem: dict(layers=2),
    ConvTokenizer: dict(kernel=5, layers=1, hidden=8),
    Learned: dict(on_prefix=False, std=0.2),
    SinCos2d: dict(temperature=10),
    SinCos1d: dict(temperature=10),
    Attention: dict(head_dim=2, qkv_bias=False, qk_norm=True, dropout=0.5),
    LocalityAttention: dict(mask_self=False, temperature="fixed", head_dim=2, qkv_bias=False, dropout=0.5),
    ClassToken: {},
    MeanTokens: {},
    SequencePool: {},
    Projected: dict(pool=ClassToken, hidden=16, layers=1),
    DistilledTokens: {},
    Block: dict(mlp_ratio=2, activation="relu", norm_first=False, dropout=0.5, layer_scale=0.1),
    ViT: dict(
        dim=16,
        depth=3,
        heads=4,
        tokenizer=partial(PatchEmbed, patch=7),
        position=SinCos2d,
        attention=LocalityAttention,
        reduction=Halve,
        pool=ClassToken,
        block=partial(Block, activation="relu"),
        registers=2,
        dropout=0.5,
        drop_path=0.5,
        norm_after_pool=True,
    ),
    SmallCNN: dict(width=8, hidden=32),
    LeNet: dict(activation="relu", pooling="max"),
    ResNet: dict(name="resnet10t", small_stem=False),
    Pixels: {},
}


def test_the_table_has_every_argument_of_every_public_class():
    public = {Block, ViT, *(c for module in (tokenizers, positions, attention, pooling, references) for c in classes(module))}
    assert set(OTHER) == set(MAKE) == public
    assert len(public) == 21
    for c in public:
        knobs = [name for name, p in inspect.signature(c).parameters.items() if p.kind == p.KEYWORD_ONLY]
        assert list(OTHER[c]) == knobs, c


def behaviour(c, **knobs):
    """What a class does from the weights that are its own: shapes, values, and the output in training."""
    torch.manual_seed(0)
    module, inputs = MAKE[c](c, **BASE.get(c, {}) | knobs)
    initialize(module, seed=0)
    torch.manual_seed(0)
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    return {**module.state_dict(), "output": output.detach()}


@pytest.mark.parametrize(
    ("c", "name"), [(c, name) for c in OTHER for name in OTHER[c]], ids=lambda part: getattr(part, "__name__", part)
)
def test_every_argument_matters(c, name):
    before, same, after = behaviour(c), behaviour(c), behaviour(c, **{name: OTHER[c][name]})
    assert before.keys() == same.keys() and all(torch.equal(before[key], same[key]) for key in before)
    if (c, name) == (PatchEmbed, "linear"):  # another way to compute the same: see test_tokenizers
        assert before.keys() == after.keys() and all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)
        return
    differs = before.keys() != after.keys() or any(
        before[key].shape != after[key].shape or not torch.allclose(before[key], after[key], atol=1e-6) for key in before
    )
    assert differs


class Gate(nn.Module):
    """A class from elsewhere that starts at zero on purpose."""

    def __init__(self, dim, heads):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x, size=None, mask=None):
        return attention.AttentionOutput(self.proj(x))


class Drawn(Gate):
    def reset_parameters(self):
        nn.init.normal_(self.proj.weight)


def test_a_class_from_elsewhere_keeps_its_weights_unless_it_says_how_to_draw_them():
    def weights_of(c, **knobs):
        torch.manual_seed(len(knobs))
        model = initialize(ViT((8, 8), 1, 3, dim=8, depth=2, heads=2, attention=c, **knobs), seed=0)
        return model.blocks[1].attention.proj.weight, model.blocks[1].mlp[0].weight

    assert (weights_of(Gate)[0] == 0).all()
    assert torch.equal(weights_of(Drawn)[0], weights_of(Drawn, registers=3)[0]) and (weights_of(Drawn)[0] != 0).all()
    assert torch.equal(weights_of(Gate)[1], weights_of(Attention)[1])


# The block


def block(dtype=torch.float64, attention=Attention, reduction=None, drop_path=0.0, **knobs):
    made = Block(8, 2, attention, reduction, drop_path, **knobs).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made.requires_grad_(False)


def layernorm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize("make", [Attention, LocalityAttention])
def test_a_block_is_its_formula(norm_first, activation, layer_scale, make):
    made = block(norm_first=norm_first, activation=activation, layer_scale=layer_scale, mlp_ratio=1.5, attention=make)
    x, size, mask = torch.randn(2, 5, 8).double(), torch.rand(2, 5).double(), torch.rand(5, 5) < 0.8
    mask |= torch.eye(5, dtype=torch.bool)
    first, second = (1, 1) if layer_scale is None else (made.branch1[1].factor, made.branch2[1].factor)

    def attend(x):
        return first * made.attention(x, size, mask).x

    def mlp(x):
        hidden = x @ made.mlp[0].weight.T + made.mlp[0].bias
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 if activation == "gelu" else hidden.clamp(min=0)
        assert hidden.shape[-1] == 12
        return second * (hidden @ made.mlp[3].weight.T + made.mlp[3].bias)

    if norm_first:
        y = x + attend(layernorm(x, made.norm1))
        y = y + mlp(layernorm(y, made.norm2))
    else:
        y = layernorm(x + attend(x), made.norm1)
        y = layernorm(y + mlp(y), made.norm2)
    got, unchanged = made(x, size, mask)
    close(got, y)
    assert unchanged is size


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_reduction_stands_between_the_branches_and_may_ask_for_keys_and_saliency(norm_first):
    made, x, size = block(norm_first=norm_first, reduction=Halve(LayerContext())), torch.randn(2, 6, 8).double(), torch.ones(2, 6)
    plain = block(norm_first=norm_first)
    plain.load_state_dict(made.state_dict())
    got, after = made(x, size)
    close(got, plain(x)[0][:, :3], 1e-12)
    assert torch.equal(after, torch.tensor([[1.0, 2.0, 3.0]] * 2))
    given, key, saliency = made.reduction.seen
    assert given is size and key == (2, 6, 4) and saliency == (2, 6)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_reduction_that_is_first_stands_before_attention_and_asks_for_nothing(norm_first):
    class First(nn.Module):
        first = True

        def forward(self, x, size):
            return x[:, ::2], torch.full((len(x), x.shape[1] // 2), 3.0, dtype=x.dtype)

    made, x = block(norm_first=norm_first, reduction=First()), torch.randn(2, 6, 8).double()
    plain = block(norm_first=norm_first)
    plain.load_state_dict(made.state_dict())
    size = torch.full((2, 3), 3.0).double()
    got, after = made(x)
    assert torch.equal(got, plain(x[:, ::2], size)[0]) and torch.equal(after, size)


def test_layer_scale_starts_at_its_value_and_none_is_the_identity():
    assert torch.equal(LayerScale(4, 0.1).factor, torch.full((4,), 0.1))
    x = torch.randn(2, 3, 4)
    assert LayerScale(4, None)(x) is x
    assert not list(LayerScale(4, None).parameters())


def test_drop_path_takes_whole_images_keeps_the_mean_and_is_off_in_eval():
    drop, x = DropPath(0.2), torch.ones(20_000, 2, 3)
    out = drop(x)
    assert ((out == 0) | (out == 1 / 0.8)).all()
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean() - 1) < 0.02
    assert drop.eval()(x) is x
    assert DropPath(0.0).train()(x) is x


def test_drop_path_leaves_out_each_branch_of_a_block_on_its_own():
    made, x = block(drop_path=0.5), torch.randn(1, 3, 8).double().expand(200, -1, -1)
    change = (made.train()(x)[0] - x).flatten(1)
    kinds, counts = (change * 1e6).round().unique(dim=0, return_counts=True)
    assert len(kinds) == 4 and counts.min() > 25
    assert any((kind == 0).all() for kind in kinds)
    close(made.eval()(x)[0], made(x[:1])[0].expand(200, -1, -1))


def test_dropout_acts_on_both_branches_and_inside_the_mlp_in_training_only():
    made, x = block(dropout=0.5), torch.randn(2, 4, 8).double()
    plain = block()
    plain.load_state_dict(made.state_dict())
    assert torch.equal(made.eval()(x)[0], plain.eval()(x)[0])
    dropouts = [part for part in made.train().modules() if isinstance(part, nn.Dropout)]
    assert len(dropouts) == 3 and all(part.p == 0.5 for part in dropouts)
    for only in dropouts:
        for part in dropouts:
            part.p = 0.5 if part is only else 0.0
        assert not torch.equal(made(x)[0], plain(x)[0])


def test_drop_path_rises_over_the_blocks_as_in_timm_or_is_given_for_each():
    from timm.layers import calculate_drop_path_rates

    for rate, depth in product((0.0, 0.1, 0.3), (1, 2, 5)):
        assert rates(rate, depth) == pytest.approx(calculate_drop_path_rates(rate, depth))
    model = ViT((8, 8), 1, 3, dim=8, depth=3, heads=2, drop_path=[0.3, 0.0, 0.2])
    assert [made.branch1[2].rate for made in model.blocks] == [made.branch2[2].rate for made in model.blocks] == [0.3, 0.0, 0.2]


# The model


def small(**knobs):
    return ViT((8, 8), 1, 3, **dict(dim=8, depth=2, heads=2) | knobs)


def test_logits_are_the_head_of_the_features_and_features_the_pool_of_the_tokens():
    model, x = small(registers=2), torch.randn(2, 1, 8, 8)
    tokens, size = model.tokens(x)
    assert tokens.shape == (2, 1 + 2 + 4, 8) and size is None
    close(tokens.mean(-1), torch.zeros(2, 7), 1e-6)  # the last norm
    assert torch.equal(model.features(x), tokens[:, 0])
    assert torch.equal(model(x), model.head(model.features(x)))


def test_the_norm_may_stand_behind_the_pool():
    model, x = small(pool=MeanTokens, norm_after_pool=True).double(), torch.randn(2, 1, 8, 8).double()
    tokens = model.tokens(x)[0]
    close(model.features(x), layernorm(tokens.mean(1), model.norm))
    before = small(pool=MeanTokens).double()
    before.load_state_dict(model.state_dict())
    close(before.features(x), layernorm(tokens, model.norm).mean(1))


@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool, DistilledTokens])
def test_registers_are_seen_by_the_blocks_and_read_by_no_pool(pool):
    model, x = small(pool=pool, registers=3), torch.randn(2, 1, 8, 8)
    assert model.prefix.shape == (pool.class_tokens + 3, 8)
    plain, without = small(pool=pool, registers=3, depth=0), model(x)
    before = plain(x)
    for changed in (model, plain):
        nn.init.normal_(changed.prefix[-3:])
    assert not torch.equal(model(x), without)
    assert torch.equal(plain(x), before)


def test_tokens_are_prefix_then_patches_plus_positions():
    model, x = small(depth=0, registers=1, norm_after_pool=True), torch.randn(2, 1, 8, 8)
    expected = torch.cat([model.prefix.expand(2, -1, -1), model.tokenizer(x)], dim=1) + model.position.table
    assert torch.equal(model.tokens(x)[0], expected)
    assert small(position=None).position is None


def test_a_reduction_is_made_for_each_layer_and_its_sizes_reach_the_pool():
    def every_second(place):
        return Halve(place) if place.layer % 2 else None

    model, x = small(depth=4, reduction=every_second, pool=MeanTokens), torch.randn(2, 1, 32, 32)
    places = [LayerContext(layer, 4, 8, 0, False, 2 * 2) for layer in (1, 3)]
    assert [made.reduction and made.reduction.context for made in model.blocks] == [None, places[0], None, places[1]]
    tokens, size = model.tokens(x)
    assert tokens.shape == (2, 64 // 4, 8) and size.shape == (2, 16)
    assert model.blocks[1].reduction.seen[0] is None
    assert torch.equal(model.blocks[3].reduction.seen[0][0], 1.0 + torch.arange(32))
    close(model.features(x), (tokens * size[..., None]).sum(1) / size.sum(1, keepdim=True), 1e-6)


def test_a_mask_reaches_every_block():
    model, x = small(pool=MeanTokens, depth=3).double(), torch.randn(1, 1, 8, 8).double()
    other = x.clone()
    other[..., 4:, 4:] += 1  # the last of four patches
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:3, 3] = False
    assert torch.equal(model.tokens(x, mask)[0][:, :3], model.tokens(other, mask)[0][:, :3])
    assert not torch.equal(model.tokens(x)[0][:, :3], model.tokens(other)[0][:, :3])
    assert not torch.equal(model(x, mask), model(x))


def test_the_model_runs_under_autocast_and_in_half_precision():
    model, x = small(attention=LocalityAttention, tokenizer=partial(ShiftedPatchEmbed, patch=4)), torch.randn(2, 1, 8, 8)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        close(model(x).float(), expected, 0.05)
    close(model.bfloat16()(x.bfloat16()).float(), expected, 0.05)


# How weights start

ARMS = {
    "other tokenizer": dict(tokenizer=partial(ShiftedPatchEmbed, patch=4)),
    "other attention": dict(attention=LocalityAttention),
    "mean pool": dict(pool=MeanTokens),
    "sequence pool": dict(pool=SequencePool),
    "other positions": dict(position=SinCos2d),
    "no positions": dict(position=None),
    "registers": dict(registers=3),
    "deeper": dict(depth=5),
    "other block": dict(block=partial(Block, norm_first=False, layer_scale=0.1, dropout=0.1, activation="relu")),
    "rates": dict(drop_path=0.1, dropout=0.1),
    "qk-norm": dict(attention=partial(Attention, qk_norm=True)),
    "all": dict(tokenizer=ConvTokenizer, attention=LocalityAttention, pool=SequencePool, position=None, registers=1, depth=3),
}


@pytest.mark.parametrize("arm", ARMS)
def test_arms_start_with_identical_weights_wherever_they_share_a_layer(arm):
    base, other = initialize(small(), seed=7).state_dict(), initialize(small(**ARMS[arm]), seed=7).state_dict()
    shared = {name for name in base.keys() & other.keys() if base[name].shape == other[name].shape}
    assert all(torch.equal(base[name], other[name]) for name in shared)
    assert shared >= {"head.weight", "blocks.0.attention.qkv.weight", "blocks.1.mlp.3.weight"}
    unlike = {name.rsplit(".", 1)[0] for name in base.keys() - shared}
    assert unlike <= {"prefix", "position", "tokenizer.proj"}
    if "position.table" in base.keys() & other.keys():
        assert torch.equal(base["position.table"][-4:], other["position.table"][-4:])  # the patches, whatever the prefix


def test_seeds_differ_in_every_drawn_tensor_and_agree_with_themselves():
    one, again, other = (initialize(small(**ARMS["sequence pool"]), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].numel() > 8 and one[name].unique().numel() > 1]
    assert len(drawn) == 1 + 1 + 2 * 4 + 1  # positions, patches, four maps in each block, head (and no prefix)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert not torch.equal(one["blocks.0.attention.qkv.weight"], one["blocks.1.attention.qkv.weight"])


def test_the_global_generator_is_left_alone_by_a_seed_and_used_without():
    model, state = small(), torch.get_rng_state()
    initialize(model, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    first = initialize(model).head.weight.clone()
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(initialize(model).head.weight, first)


@pytest.mark.parametrize("arm", ["other tokenizer", "other block", "qk-norm", "all"])
def test_nothing_of_the_weights_before_is_left(arm):
    model = small(**ARMS[arm])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, seed=0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    fresh = initialize(small(**ARMS[arm]), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values()))


def test_weights_start_as_documented():
    model = ViT((28, 28), 1, 100, dim=64, depth=1, heads=4, registers=31)
    for drawn, std in ((model.position.table, 1.0), (model.prefix, 0.02), (model.head.weight, 0.02)):
        assert abs(drawn.std() / std - 1) < 0.1
    linear = model.blocks[0].mlp[0].weight
    bound = (6 / sum(linear.shape)) ** 0.5
    assert 0.99 * bound < linear.abs().max() <= bound
    biases = [value for name, value in model.state_dict().items() if name.endswith("bias")]
    assert all((bias == 0).all() for bias in biases)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: small()(torch.randn(2, 3, 8, 8)), r"got images of shape \(2, 3, 8, 8\); expected b 1 h w, the channels"),
        (lambda: small()(torch.randn(1, 8, 8)), r"got images of shape \(1, 8, 8\); expected b 1 h w"),
        (lambda: small()(torch.randn(1, 1, 8, 10)), "patches of 4 pixels do not tile an image of 8 x 10; .* 8 x 8 or 8 x 12"),
        (lambda: small(tokenizer=partial(PatchEmbed, patch=3)), "patches of 3 pixels do not tile an image of 8 x 8"),
        (lambda: small(heads=3), "3 heads do not divide width 8; take heads="),
        (lambda: small(registers=-1), "registers is -1; expected a whole number from 0 on"),
        (lambda: small(dim=0), "dim is 0; expected a whole number from 1 on"),
        (lambda: small(dim=8.0), "dim is 8.0; expected a whole number"),
        (lambda: small(depth=True), "depth is True; expected a whole number"),
        (lambda: small(depth=-1), "depth is -1; expected a whole number from 0 on"),
        (lambda: small(pool="mean"), "pool is 'mean'; expected a class, its knobs bound by functools.partial"),
        (lambda: small(pool=MeanTokens(8)), "pool is a MeanTokens that is made already; expected a class"),
        (lambda: small(reduction="merge"), "reduction is 'merge'; expected a class"),
        (lambda: small(block=None), "block is None; expected a class"),
        (lambda: small(drop_path=[0.1]), "got 1 drop-path rates for 2 blocks; expected one each, or a single number"),
        (lambda: small(drop_path=1.0), "drop_path is 1.0; expected a probability from 0 up to, not including, 1"),
        (lambda: small(drop_path=-0.1), "drop_path is -0.1"),
        (lambda: block(activation="selu"), "activation is 'selu'; expected one of 'gelu', 'relu'"),
        (lambda: small(position=SinCos2d, dim=6), "width 6 is not divisible by 4"),
        (lambda: small()(torch.randn(1, 1, 8, 8), torch.ones(5, 5)), "mask has dtype torch.float32; expected torch.bool"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
