"""ViT and Block: all combinations of slots, the equations of a block, the model's interface, initial weights and error messages."""

import functools
import inspect
import io
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import assert_close, option_id, pairwise, slow_after

import smallvit
from smallvit import attention, pooling, positions, references, tokenizers
from smallvit.attention import Attention, LocalityAttention
from smallvit.attention_positions import Rotary, places_of
from smallvit.pooling import ClassToken, DistilledTokens, MeanTokens, Projected, SequencePool
from smallvit.positions import PEG, Learned, SinCos1d, SinCos2d
from smallvit.random_weights import initialize
from smallvit.reduction import LayerContext, Merge, Prune
from smallvit.references import LeNet, Pixels, ResNet, SmallCNN
from smallvit.tokenizers import ConvStem, ConvTokenizer, PatchEmbed, Resized, ShiftedPatchEmbed
from smallvit.vit import Block, DropPath, LayerScale, ViT, drop_path_rates


def public_classes(module):
    """The public module classes that a file defines."""
    found = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    return [c for c in found if c.__module__ == module.__name__ and c.__name__ in smallvit.__all__]


def small_vit(**options):
    """A ViT of width 8 with 2 blocks for images of 8 x 8 pixels, 4 patches."""
    return ViT((8, 8), 1, 3, **dict(dim=8, depth=2, heads=2) | options)


# Every combination of slots

TOKENIZERS = [
    *(partial(PatchEmbed, patch=4), partial(PatchEmbed, patch=7)),
    *(partial(ShiftedPatchEmbed, patch=4), partial(ShiftedPatchEmbed, patch=7)),
    *(partial(ConvStem, layers=2), partial(ConvStem, layers=3)),
    *(partial(ConvTokenizer, kernel=3), partial(ConvTokenizer, kernel=7)),
    *(partial(Resized, size=16, tokenizer=partial(PatchEmbed, patch=4)), partial(Resized, size=12, tokenizer=ConvStem)),
]
WRAPPERS = {Resized, Projected}  # they contain another tokenizer or pool: combined with each other only
COMBINATIONS = [
    combination
    for combination in product(
        TOKENIZERS, [*public_classes(positions), None], public_classes(attention), public_classes(pooling), (True, False)
    )
    if (combination[0].func in WRAPPERS) == (combination[3] in WRAPPERS)
]
IMAGES = [(28, 28), (24, 40)]
CHANNELS = [(1, 3, 4)[index % 3] for index in range(len(COMBINATIONS))]
PAIRS = pairwise((*options, channels) for options, channels in zip(COMBINATIONS, CHANNELS))  # the other combinations are slow


def combination_id(combination):
    return "-".join(str(part) if isinstance(part, bool) else option_id(part) for part in combination)


def test_the_combinations_cover_every_slot_class():
    counts = [len(public_classes(module)) for module in (tokenizers, positions, attention, pooling)]
    assert counts == [5, 4, 2, 5] and len(WRAPPERS) == 2
    assert {tokenizer.func for tokenizer in TOKENIZERS} == set(public_classes(tokenizers))
    assert len(COMBINATIONS) == 680 == 2 * (4 * 4 + 1 * 1) * (4 + 1) * 2 * 2
    assert len({combination_id(combination) for combination in COMBINATIONS}) == 680
    kept = [COMBINATIONS[index] for index in PAIRS]
    for one, other in product(range(5), range(5)):
        assert len({(option_id(c[one]), option_id(c[other])) for c in kept}) == len({(option_id(c[one]), option_id(c[other])) for c in COMBINATIONS})


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=combination_id(combination), marks=[] if index in PAIRS else pytest.mark.slow)
        for index, combination in enumerate(COMBINATIONS)
    ],
)
def test_every_combination_of_slots_trains_on_every_image_size(index):
    tokenizer, position, attend, pool, norm_first = COMBINATIONS[index]
    channels, patch, refused = CHANNELS[index], tokenizer.keywords.get("patch", 1), 0
    slots = dict(tokenizer=tokenizer, position=position, attention=attend, pool=pool)
    slots["block"] = partial(Block, norm_first=norm_first, mlp_ratio=2)
    for built, other in (IMAGES, reversed(IMAGES)):
        if any(side % patch for side in built):
            refused += 1
            with pytest.raises(ValueError, match=f"patches of {patch} pixels do not tile an image of {built[0]} x {built[1]}"):
                ViT(built, channels, 3, dim=8, depth=2, heads=2, **slots)
            continue
        model = ViT(built, channels, 3, dim=8, depth=2, heads=2, **slots)
        for image in (built, other):
            x = torch.randn(2, channels, *image)
            if any(side % patch for side in image):
                refused += 1
                with pytest.raises(ValueError, match=f"patches of {patch} pixels do not tile an image of {image[0]} x {image[1]}"):
                    model(x)
                continue
            logits = model(x)
            assert logits.shape == (2, 3)
            model.zero_grad()
            F.cross_entropy(logits, torch.tensor([0, 2])).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad.isfinite().all(), name
                no_effect = name == "pool.score.bias" or not parameter.numel()  # a softmax ignores a shift of its scores
                assert no_effect or parameter.grad.abs().max() > 0, name
    assert refused == (2 if patch == 7 else 0)


EXPORTED = [
    dict(tokenizer=partial(PatchEmbed, patch=4), position=Learned, attention=Attention, pool=DistilledTokens, registers=2),
    dict(tokenizer=partial(ShiftedPatchEmbed, patch=4), position=SinCos2d, attention=LocalityAttention, pool=MeanTokens),
    dict(
        tokenizer=ConvStem, position=SinCos1d, attention=partial(LocalityAttention, temperature="per layer"), pool=SequencePool
    ),
    dict(
        **dict(tokenizer=ConvTokenizer, position=None, attention=partial(Attention, qk_norm=True), pool=ClassToken),
        norm_after_pool=True,
    ),
    dict(
        **dict(tokenizer=partial(Resized, tokenizer=partial(PatchEmbed, patch=4), size=8), position=PEG),
        **dict(attention=Attention, pool=partial(Projected, pool=ClassToken)),
    ),
]


def test_the_exported_models_use_every_slot_class():
    used = {getattr(slot, "func", slot) for slots in EXPORTED for slot in slots.values() if isinstance(slot, Callable)}
    assert used == {c for module in (tokenizers, positions, attention, pooling) for c in public_classes(module)}


@pytest.mark.parametrize("slots", slow_after(1, EXPORTED), ids=lambda slots: option_id(slots["tokenizer"]))
@pytest.mark.parametrize("image", [(16, 8), pytest.param((8, 8), marks=pytest.mark.slow)])
def test_exported_model_gives_equal_logits_for_any_batch_size(slots, image):
    model = ViT((8, 8), 1, 3, dim=8, depth=1, heads=2, **slots).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, *image),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for b in (1, 5):
        x = torch.randn(b, 1, *image)
        assert_close(loaded(x), model(x), 1e-6)


# Every constructor argument has an effect

GENERATOR = torch.Generator().manual_seed(0)
X, TOKENS = torch.randn(2, 1, 28, 28, generator=GENERATOR), torch.randn(2, 50, 8, generator=GENERATOR)
PLACES = places_of((7, 7), TOKENS.device)


class Halve(nn.Module):
    """A minimal reduction: keeps the first half of the tokens, with sizes 1, 2, 3 and so on."""

    def __init__(self, context):
        super().__init__()
        self.context, self.received = context, None

    def forward(self, x, size, key, saliency):
        self.received = size, key().shape, saliency(1).shape
        kept = x.shape[1] // 2
        return x[:, :kept], (1.0 + torch.arange(kept)).expand(len(x), -1)


MAKE: dict[type, Callable] = {
    **{c: lambda c, **options: (c((28, 28), 1, 8, **options), (X,)) for c in public_classes(tokenizers)},
    **{c: lambda c, **options: (c(8, (7, 7), 1, **options), (TOKENS, (7, 7))) for c in public_classes(positions)},
    **{c: lambda c, **options: (c(8, 2, **options), (TOKENS, None, None, PLACES)) for c in public_classes(attention)},
    **{c: lambda c, **options: (c(8, **options), (TOKENS,)) for c in public_classes(pooling)},
    Block: lambda c, **options: (c(8, 2, Attention, None, 0.0, **options), (TOKENS,)),
    **{c: lambda c, **options: (c((28, 28), 1, 3, **options), (X,)) for c in (ViT, SmallCNN, LeNet, ResNet, Pixels)},
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
    SinCos2d: dict(temperature=10, centered=False, amplitude=2.0),
    SinCos1d: dict(temperature=10),
    PEG: dict(start="zero"),
    Attention: dict(
        head_dim=2, qkv_bias=False, qk_norm=True, dropout=0.5, position=partial(Rotary, grid=(7, 7), prefix=1)
    ),
    LocalityAttention: dict(
        **dict(mask_self=False, temperature="fixed", head_dim=2, qkv_bias=False, dropout=0.5),
        **dict(position=partial(Rotary, grid=(7, 7), prefix=1)),
    ),
    ClassToken: {},
    MeanTokens: {},
    SequencePool: {},
    Projected: dict(pool=ClassToken, hidden=16, layers=1),
    DistilledTokens: {},
    Block: dict(mlp_ratio=2, activation="swiglu", norm_first=False, dropout=0.5, layer_scale=0.1),
    ViT: dict(
        **dict(dim=16, depth=3, heads=4, tokenizer=partial(PatchEmbed, patch=7), position=SinCos2d),
        **dict(attention=LocalityAttention, reduction=Halve, pool=ClassToken, block=partial(Block, activation="relu")),
        **dict(registers=2, dropout=0.5, drop_path=0.5, norm_after_pool=True),
    ),
    SmallCNN: dict(width=8, hidden=32),
    LeNet: dict(activation="relu", pooling="max"),
    ResNet: dict(name="resnet10t", small_stem=False),
    Pixels: {},
}


def test_the_table_lists_every_argument_of_every_public_class():
    slots = (tokenizers, positions, attention, pooling, references)
    assert set(OTHER) == set(MAKE) == {Block, ViT, *(c for module in slots for c in public_classes(module))}
    assert len(OTHER) == 22
    for c in OTHER:
        options = [name for name, p in inspect.signature(c).parameters.items() if p.kind == p.KEYWORD_ONLY]
        assert list(OTHER[c]) == options, c


def behavior(c, **options):
    """The weights of a seeded module of this class, and its output in training."""
    torch.manual_seed(0)
    module, inputs = MAKE[c](c, **BASE.get(c, {}) | options)
    initialize(module, seed=0)
    torch.manual_seed(0)
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    return {**module.state_dict(), "output": output.detach()}


@functools.cache
def default_behavior(c):
    default, again = behavior(c), behavior(c)
    assert default.keys() == again.keys() and all(torch.equal(default[key], again[key]) for key in default)
    return default


@pytest.mark.parametrize(
    ("c", "name"),
    # the options of a ResNet, which is large, are compared with those of timm in test_references
    [pytest.param(c, name, marks=pytest.mark.slow if c is ResNet else ()) for c in OTHER for name in OTHER[c]],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_every_argument_has_an_effect(c, name):
    default, other = default_behavior(c), behavior(c, **{name: OTHER[c][name]})
    equal = default.keys() == other.keys() and all(
        default[key].shape == other[key].shape and torch.allclose(default[key], other[key], atol=1e-6) for key in default
    )
    assert equal == ((c, name) == (PatchEmbed, "linear"))  # another way to compute the same: see test_tokenizers


class ZeroAttention(nn.Module):
    """A class from outside smallvit whose initial weights are zero on purpose."""

    def __init__(self, dim, heads):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x, size=None, mask=None):
        return attention.AttentionOutput(self.proj(x))


class DrawnAttention(ZeroAttention):
    def reset_parameters(self):
        nn.init.normal_(self.proj.weight)


FIXED = {
    "sines": {"position": SinCos2d},
    "published sines": {"position": partial(SinCos2d, temperature=None, centered=False, amplitude=1.0)},
    "sines in one dimension": {"position": SinCos1d},
    "rotary": {"attention": partial(Attention, position=Rotary), "position": None},
}


@pytest.mark.parametrize("options", FIXED.values(), ids=FIXED)
def test_fixed_positions_are_computed_again_after_to_empty(options):
    expected = ViT((8, 12), 1, 10, **options)
    with torch.device("meta"):
        model = ViT((8, 12), 1, 10, **options)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7.0)
    initialize(model).load_state_dict(expected.state_dict())
    buffers = dict(expected.named_buffers())
    assert buffers and all(torch.equal(tensor, buffers[name]) for name, tensor in model.named_buffers())
    x, state = torch.randn(2, 1, 8, 12), torch.get_rng_state()
    assert torch.equal(model(x), expected(x))
    for module in (model.position, *(block.attention.position for block in model.blocks)):
        if module is not None:
            module.reset_parameters()  # a table needs no random numbers
    assert torch.equal(torch.get_rng_state(), state)


def test_class_from_outside_keeps_its_weights_unless_it_has_reset_parameters():
    def weights_of(c, **options):
        torch.manual_seed(len(options))
        block = initialize(small_vit(attention=c, **options), seed=0).blocks[1]
        return block.attention.proj.weight, block.mlp[0].weight

    assert (weights_of(ZeroAttention)[0] == 0).all()
    drawn = weights_of(DrawnAttention)[0]
    assert torch.equal(drawn, weights_of(DrawnAttention, registers=3)[0]) and (drawn != 0).all()
    assert torch.equal(weights_of(ZeroAttention)[1], weights_of(Attention)[1])


# The block


def random_block(dtype=torch.float64, attention=Attention, reduction=None, drop_path=0.0, **options):
    made = Block(8, 2, attention, reduction, drop_path, **options).to(dtype)
    for parameter in made.requires_grad_(False).parameters():
        parameter.normal_(std=0.5)
    return made


def copy_of(made, **options):
    """A block with other options and the same weights."""
    new = random_block(**options)
    new.load_state_dict(made.state_dict())
    return new


def layernorm(x, norm):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("layer_scale", [None, 0.1, 1])
@pytest.mark.parametrize("make", [Attention, LocalityAttention])
def test_block_equals_its_equations(norm_first, activation, layer_scale, make):
    made = random_block(norm_first=norm_first, activation=activation, layer_scale=layer_scale, mlp_ratio=1.5, attention=make)
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
    output, unchanged = made(x, size, mask)
    assert_close(output, y)
    assert unchanged is size


@pytest.mark.parametrize("norm_first", [True, False])
def test_reduction_runs_between_attention_and_mlp_and_gets_keys_and_saliency(norm_first):
    made = random_block(norm_first=norm_first, reduction=Halve(LayerContext()))
    x, size = torch.randn(2, 6, 8).double(), torch.ones(2, 6)
    output, new_size = made(x, size)
    assert_close(output, copy_of(made, norm_first=norm_first)(x)[0][:, :3], 1e-12)
    assert torch.equal(new_size, torch.tensor([[1.0, 2.0, 3.0]] * 2))
    given, key, saliency = made.reduction.received
    assert given is size and key == (2, 6, 4) and saliency == (2, 6)


@pytest.mark.parametrize("norm_first", [True, False])
def test_reduction_with_attribute_first_runs_before_attention(norm_first):
    class EverySecond(nn.Module):
        first = True

        def forward(self, x, size):
            return x[:, ::2], torch.full((len(x), x.shape[1] // 2), 3.0, dtype=x.dtype)

    made, x = random_block(norm_first=norm_first, reduction=EverySecond()), torch.randn(2, 6, 8).double()
    size = torch.full((2, 3), 3.0).double()
    output, new_size = made(x)
    assert torch.equal(output, copy_of(made, norm_first=norm_first)(x[:, ::2], size)[0]) and torch.equal(new_size, size)


def test_layer_scale_starts_at_its_value_and_none_is_the_identity():
    assert torch.equal(LayerScale(4, 0.1).factor, torch.full((4,), 0.1))
    x = torch.randn(2, 3, 4)
    assert LayerScale(4, None)(x) is x and not list(LayerScale(4, None).parameters())


def test_drop_path_drops_whole_images_keeps_the_mean_and_is_off_in_evaluation():
    drop, x = DropPath(0.2), torch.ones(20_000, 2, 3)
    output = drop(x)
    assert ((output == 0) | (output == 1 / 0.8)).all()
    assert (output == output[:, :1, :1]).all()
    assert abs(output.mean() - 1) < 0.02
    assert drop.eval()(x) is x and DropPath(0.0).train()(x) is x


def test_drop_path_skips_each_branch_of_a_block_independently():
    made, x = random_block(drop_path=0.5), torch.randn(1, 3, 8).double().expand(200, -1, -1)
    change = (made.train()(x)[0] - x).flatten(1)
    kinds, counts = (change * 1e6).round().unique(dim=0, return_counts=True)
    assert len(kinds) == 4 and counts.min() > 25
    assert any((kind == 0).all() for kind in kinds)
    assert_close(made.eval()(x)[0], made(x[:1])[0].expand(200, -1, -1))


def test_numbers_of_numpy_are_numbers():
    make = partial(ViT, (np.int64(8), np.int64(8)), np.int64(1), np.int64(5), depth=np.int64(2), heads=np.int32(2))
    for reduction in (None, partial(Merge, r=np.int64(1)), partial(Merge, r=np.float64(0.2)), partial(Prune, keep=np.float32(0.5))):
        model = make(dim=np.int64(16), tokenizer=partial(PatchEmbed, patch=np.int64(2)), reduction=reduction)
        assert initialize(model, np.int64(3)).eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert len(smallvit.digits().subset(labels=np.int64(50), val=np.int64(20), seed=np.int64(0)).train) == 50


def test_dropout_acts_on_both_branches_and_inside_the_mlp_in_training_only():
    made, x = random_block(dropout=0.5), torch.randn(2, 4, 8).double()
    plain = copy_of(made)
    assert torch.equal(made.eval()(x)[0], plain.eval()(x)[0])
    dropouts = [part for part in made.train().modules() if isinstance(part, nn.Dropout)]
    assert len(dropouts) == 3 and all(part.p == 0.5 for part in dropouts)
    for active in dropouts:
        for part in dropouts:
            part.p = 0.5 if part is active else 0.0
        assert not torch.equal(made(x)[0], plain(x)[0])


def test_drop_path_rates_rise_as_in_timm_or_are_given_for_each_block():
    from timm.layers import calculate_drop_path_rates

    for rate, depth in product((0.0, 0.1, 0.3), (1, 2, 5)):
        assert drop_path_rates(rate, depth) == pytest.approx(calculate_drop_path_rates(rate, depth))
    blocks = small_vit(depth=3, drop_path=[0.3, 0.0, 0.2]).blocks
    assert [made.branch1[2].rate for made in blocks] == [made.branch2[2].rate for made in blocks] == [0.3, 0.0, 0.2]


# The model


def test_logits_are_the_head_of_the_features_and_features_the_pool_of_the_tokens():
    model, x = small_vit(registers=2), torch.randn(2, 1, 8, 8)
    tokens, size = model.tokens(x)
    assert tokens.shape == (2, 1 + 2 + 4, 8) and size is None
    assert_close(tokens.mean(-1), torch.zeros(2, 7), 1e-6)  # the last LayerNorm
    assert torch.equal(model.features(x), tokens[:, 0])
    assert torch.equal(model(x), model.head(model.features(x)))


def test_norm_after_pool_applies_the_last_norm_to_the_feature():
    model, x = small_vit(pool=MeanTokens, norm_after_pool=True).double(), torch.randn(2, 1, 8, 8).double()
    tokens = model.tokens(x)[0]
    assert_close(model.features(x), layernorm(tokens.mean(1), model.norm))
    norm_first = small_vit(pool=MeanTokens).double()
    norm_first.load_state_dict(model.state_dict())
    assert_close(norm_first.features(x), layernorm(tokens, model.norm).mean(1))


@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool, DistilledTokens])
def test_registers_change_the_blocks_but_no_pool_reads_them(pool):
    x = torch.randn(2, 1, 8, 8)
    for depth in (2, 0):
        model = small_vit(pool=pool, registers=3, depth=depth)
        assert model.prefix.shape == (pool.class_tokens + 3, 8)
        before = model(x)
        nn.init.normal_(model.prefix[-3:])
        assert torch.equal(model(x), before) == (depth == 0)


def test_tokens_are_prefix_then_patches_plus_positions():
    model, x = small_vit(depth=0, registers=1, norm_after_pool=True), torch.randn(2, 1, 8, 8)
    expected = torch.cat([model.prefix.expand(2, -1, -1), model.tokenizer(x)], dim=1) + model.position.table
    assert torch.equal(model.tokens(x)[0], expected)
    assert small_vit(position=None).position is None


def test_reduction_is_made_for_each_layer_and_its_sizes_reach_the_pool():
    def in_odd_layers(context):
        return Halve(context) if context.layer % 2 else None

    model, x = small_vit(depth=4, reduction=in_odd_layers, pool=MeanTokens), torch.randn(2, 1, 32, 32)
    contexts = [LayerContext(layer, 4, 8, 0, False, 2 * 2) for layer in (1, 3)]
    assert [made.reduction and made.reduction.context for made in model.blocks] == [None, contexts[0], None, contexts[1]]
    assert model.layer_contexts(4, (8, 8))[1::2] == contexts and model.layer_contexts(1, (32, 16))[0].patches == 8 * 4
    tokens, size = model.tokens(x)
    assert tokens.shape == (2, 64 // 4, 8) and size.shape == (2, 16)
    assert model.blocks[1].reduction.received[0] is None
    assert torch.equal(model.blocks[3].reduction.received[0][0], 1.0 + torch.arange(32))
    assert_close(model.features(x), (tokens * size[..., None]).sum(1) / size.sum(1, keepdim=True), 1e-6)


def test_mask_reaches_every_block():
    model, x = small_vit(pool=MeanTokens, depth=3).double(), torch.randn(1, 1, 8, 8).double()
    other = x.clone()
    other[..., 4:, 4:] += 1  # the last of four patches
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:3, 3] = False
    assert torch.equal(model.tokens(x, mask)[0][:, :3], model.tokens(other, mask)[0][:, :3])
    assert not torch.equal(model.tokens(x)[0][:, :3], model.tokens(other)[0][:, :3])
    assert not torch.equal(model(x, mask), model(x))


def test_model_runs_under_autocast_and_in_half_precision():
    model, x = small_vit(attention=LocalityAttention, tokenizer=partial(ShiftedPatchEmbed, patch=4)), torch.randn(2, 1, 8, 8)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(x).float(), expected, 0.05)
    assert_close(model.bfloat16()(x.bfloat16()).float(), expected, 0.05)


# Initial weights

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


def weights_at(seed, **options):
    return initialize(small_vit(**options), seed).state_dict()


@pytest.mark.parametrize("arm", ARMS)
def test_arms_start_with_equal_weights_in_every_shared_layer(arm):
    base, other = weights_at(7), weights_at(7, **ARMS[arm])
    shared = {name for name in base.keys() & other.keys() if base[name].shape == other[name].shape}
    assert all(torch.equal(base[name], other[name]) for name in shared)
    assert shared >= {"head.weight", "blocks.0.attention.qkv.weight", "blocks.1.mlp.3.weight"}
    assert {name.rsplit(".", 1)[0] for name in base.keys() - shared} <= {"prefix", "position", "tokenizer.proj"}
    if "position.table" in base.keys() & other.keys():
        assert torch.equal(base["position.table"][-4:], other["position.table"][-4:])  # patches, whatever the prefix


@pytest.mark.parametrize("dim", [6, 8, 16, 24, 36, 64])
@pytest.mark.parametrize("more", [dict(registers=1), dict(registers=3), dict(pool=DistilledTokens)], ids=str)
def test_more_prefix_tokens_change_no_shared_token_or_position(dim, more):
    """torch draws 16 normal numbers at a time; the width must not decide whether two arms start alike."""
    base, other = weights_at(7, dim=dim, registers=0), weights_at(7, dim=dim, **more)
    extra = len(other["prefix"]) - 1
    assert extra > 0 and torch.equal(base["prefix"][0], other["prefix"][0])
    assert torch.equal(base["position.table"][0], other["position.table"][0])  # of the class token
    assert torch.equal(base["position.table"][1:], other["position.table"][1 + extra :])
    assert all(len(table.unique(dim=0)) == len(table) for table in (other["prefix"], other["position.table"]))


def test_seeds_differ_in_every_drawn_tensor_and_repeat():
    one, again, other = (weights_at(seed, **ARMS["sequence pool"]) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].numel() > 8 and one[name].unique().numel() > 1]
    assert len(drawn) == 1 + 1 + 2 * 4 + 1  # positions, patches, four linear maps in each block, head (and no prefix)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert not torch.equal(one["blocks.0.attention.qkv.weight"], one["blocks.1.attention.qkv.weight"])


def test_initialize_uses_the_global_generator_only_without_a_seed():
    model, state = small_vit(), torch.get_rng_state()
    initialize(model, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    first = initialize(model).head.weight.clone()
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(initialize(model).head.weight, first)


def test_initialize_draws_weights_that_are_parametrized():
    first, second, plain = (ViT((8, 8), 1, 3, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2) for _ in range(3))
    for model in (first, second):
        nn.utils.parametrizations.weight_norm(model.blocks[0].attention.qkv)
    weights = [initialize(model, 5).blocks[0].attention.qkv.weight for model in (first, second, plain)]
    assert torch.allclose(weights[0], weights[2]) and torch.equal(weights[0], weights[1])
    nn.utils.parametrizations.weight_norm(first.norm)
    with pytest.raises(ValueError, match="weight of a LayerNorm has a parametrization, such as weight norm, so it cannot be"):
        initialize(first, 5)


def test_initialize_draws_the_attention_of_torch_from_the_seed():
    weights = [initialize(nn.TransformerEncoderLayer(8, 2, 16), seed).state_dict() for seed in (3, 3, 4)]
    name = "self_attn.in_proj_weight"
    assert torch.equal(weights[0][name], weights[1][name]) and not torch.equal(weights[0][name], weights[2][name])


@pytest.mark.parametrize("arm", ["other tokenizer", "other block", "qk-norm", "all"])
def test_initialize_replaces_every_weight(arm):
    model = small_vit(**ARMS[arm])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, seed=0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights_at(0, **ARMS[arm]).values()))


def test_initial_weights_have_the_documented_spread():
    model = ViT((28, 28), 1, 100, dim=64, depth=1, heads=4, registers=31)
    for drawn, std in ((model.position.table, 1.0), (model.prefix, 0.02), (model.head.weight, 0.02)):
        assert abs(drawn.std() / std - 1) < 0.1
    linear = model.blocks[0].mlp[0].weight
    bound = (6 / sum(linear.shape)) ** 0.5
    assert 0.99 * bound < linear.abs().max() <= bound
    assert all((value == 0).all() for name, value in model.state_dict().items() if name.endswith("bias"))


class Foreign(nn.Module):
    """A module as users define it, with positions of smallvit."""

    def __init__(self):
        super().__init__()
        self.position = Rotary(2, 8, (4, 4), 1)
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "inside"])
def test_fixed_tables_of_a_foreign_module_are_computed_again(whole):
    inner = Foreign()
    frequencies, weight = inner.position.frequencies.clone(), inner.layer.weight.clone()
    inner.position.frequencies.fill_(7)
    initialize(inner if whole else nn.Sequential(inner), seed=0)
    assert torch.equal(inner.position.frequencies, frequencies)
    assert torch.equal(inner.layer.weight, weight) != whole, "a foreign module inside a model keeps its weights"


# Bad input


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: small_vit()(torch.randn(2, 3, 8, 8)), r"shape \(2, 3, 8, 8\); .* needs b 1 h w"),
        (lambda: small_vit()(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), r"got torch.uint8 images .* normalized floats"),
        (lambda: small_vit()(torch.randn(1, 8, 8)), r"shape \(1, 8, 8\); .* needs b 1 h w"),
        (lambda: small_vit()(torch.randn(1, 1, 8, 10)), "patches of 4 pixels do not tile .* 8 x 10; .* 8 x 8 or 8 x 12"),
        (lambda: small_vit(tokenizer=partial(PatchEmbed, patch=3)), "patches of 3 pixels do not tile an image of 8 x 8"),
        (lambda: ViT(28, 1, 10), "image is 28; expected .height, width. in pixels"),
        (lambda: small_vit(heads=3), "3 heads do not divide width 8; use heads="),
        (lambda: small_vit(registers=-1), "registers is -1; expected an integer of at least 0"),
        (lambda: small_vit(dim=0), "dim is 0; expected an integer of at least 1"),
        (lambda: small_vit(dim=8.0), "dim is 8.0; expected an integer"),
        (lambda: small_vit(depth=True), "depth is True; expected an integer"),
        (lambda: small_vit(depth=-1), "depth is -1; expected an integer of at least 0"),
        (lambda: small_vit(pool="mean"), "pool is 'mean'; expected a class, or functools.partial"),
        (lambda: small_vit(pool=MeanTokens(8)), "pool is a finished MeanTokens; expected a class"),
        (lambda: small_vit(reduction="merge"), "reduction is 'merge'; expected a class"),
        (lambda: small_vit(block=None), "block is None; expected a class"),
        (lambda: small_vit(drop_path=[0.1]), "got 1 drop-path rates for 2 blocks; expected one per block"),
        (lambda: small_vit(drop_path=None), "drop_path is None; expected a rate from 0 to below 1, or a list with one rate per block"),
        (lambda: small_vit(drop_path=1.0), "drop_path is 1.0; expected a probability"),
        (lambda: small_vit(drop_path=-0.1), "drop_path is -0.1"),
        (lambda: random_block(activation="selu"), "activation is 'selu'; expected one of 'gelu', 'relu'"),
        (lambda: small_vit(position=SinCos2d, dim=6), "width 6 is not divisible by 4"),
        (lambda: small_vit(tokenizer=partial(PatchEmbed, patch=(4, 4))), r"patch is \(4, 4\); expected the side of a square"),
        (lambda: ViT((8, 8), "1", 10), "channels is '1'; expected an integer of at least 1"),
        (lambda: ViT((8, 8), 1, -1), "classes is -1; expected an integer of at least 0"),
        (lambda: small_vit(block=partial(Block, mlp_ratio=-1)), "mlp_ratio is -1; expected the hidden width"),
        (lambda: small_vit(block=partial(Block, dropout=1.0)), "dropout is 1.0; expected a probability"),
        (lambda: small_vit(dropout=1.0), "dropout is 1.0; expected a probability"),
        (lambda: small_vit(attention=partial(Attention, dropout=1.5)), "dropout is 1.5; expected a probability"),
        (lambda: small_vit().tokens(torch.randn(1, 1, 8, 8), keep=torch.tensor([[0, 4]])), "indices from 0 to 4; expected 0 to 3"),
        (lambda: small_vit().tokens(torch.randn(1, 1, 8, 8), keep=torch.tensor([[-1]])), "indices from -1 to -1"),
        (lambda: small_vit().tokens(torch.randn(2, 1, 8, 8), keep=torch.tensor([[0]])), r"shape \(1, 1\) .*; expected .* a row for each"),
        (lambda: small_vit()(torch.randn(1, 1, 8, 8), torch.ones(5, 5)), "mask has dtype torch.float32; expected torch.bool"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()
