"""The contract of every reduction: prefix tokens first, sizes, token counts, the off setting, and all other slots."""

import copy
import inspect
import io
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import option_id, pairwise, randomize, slow_after, slow_but, tiny_vit

from smallvit import reduction
from smallvit.attention import Attention, LocalityAttention
from smallvit.pooling import ClassToken, MeanTokens, SequencePool
from smallvit.reduction import LayerContext, LearnedPrune, LearnedThresholds, Merge, Prune
from smallvit.tokenizers import ConvStem, ConvTokenizer, PatchEmbed, ShiftedPatchEmbed

CLASSES = [c for c in vars(reduction).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
ON = {
    Merge: [dict(r=2), dict(r=99), dict(r=0.3), dict(r=3, inflect=-1.0), dict(r=(3, 0))],
    Prune: [dict(), dict(keep=0.5, fuse="mean"), dict(keep=0.01, fuse="none"), dict(keep=0.6, layers=(1,))],
    LearnedPrune: [dict(), dict(keep=0.3), dict(keep=0.01, layers=(0, 1))],
    LearnedThresholds: [dict(), dict(merge=0.2, prune=0.8), dict(merge=None, prune=1.0), dict(merge=-1.0, prune=99.0)],
}
OFF = {
    Merge: [dict(), dict(r=0.0), dict(r=(0, 0))],
    Prune: [dict(keep=1), dict(keep=1.0, fuse="mean"), dict(layers=())],
    LearnedPrune: [dict(keep=1), dict(layers=())],
    LearnedThresholds: [dict(merge=1.0), dict(merge=None)],
}


SETTINGS = [partial(c, **options) for c in ON for options in ON[c]]
on = pytest.mark.parametrize("make", SETTINGS, ids=option_id)
off = pytest.mark.parametrize("make", [partial(c, **options) for c in OFF for options in OFF[c]], ids=option_id)
one_each = pytest.mark.parametrize("make", [partial(c, **ON[c][1]) for c in ON], ids=option_id)
small = partial(tiny_vit, (8, 8), 1, 3, dim=8)  # 16 patches, two blocks


def test_both_tables_contain_every_public_reduction_and_option():
    assert len(CLASSES) == 4 and set(CLASSES) == set(ON) == set(OFF)
    for c in CLASSES:
        options = {name for name, p in inspect.signature(c).parameters.items() if p.kind == p.KEYWORD_ONLY}
        used = {name for chosen in (*ON[c], *OFF[c]) for name in chosen}
        assert options - used <= {"shrink", "temperature"}, c  # these act in training only: see the tests of their classes


# One module


def module_and_inputs(make, patches, prefix, seed, dim=6, layer=0):
    """A reduction for one of two blocks with random weights, and its inputs: tokens, keys and saliency."""
    g = torch.Generator().manual_seed(seed)
    module = make(LayerContext(layer, 2, dim, prefix, prefix > 0, patches)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim:
                parameter.copy_(torch.randn(parameter.shape, generator=g))
    n = prefix + patches
    x, key = torch.randn(2, n, dim, generator=g).double(), torch.randn(2, n, 4, generator=g).double()
    rows = torch.rand(2, n, n, generator=g).double().softmax(-1)
    return module, x, (lambda: key), (lambda queries=None: rows[:, :queries].mean(1))


def call(module, x, size, key, saliency):
    """Call a reduction as its block does."""
    return module(x, size) if getattr(module, "first", False) else module(x, size, key, saliency)


@on
@settings(deadline=None, max_examples=15)
@given(
    patches=st.one_of(st.integers(1, 3), st.integers(1, 24)),
    prefix=st.integers(0, 3),
    seed=st.integers(0, 999),
    sized=st.booleans(),
)
def test_prefix_sizes_counts_and_further_channels(make, patches, prefix, seed, sized):
    module, x, key, saliency = module_and_inputs(make, patches, prefix, seed, layer=seed % 2)
    g = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 5, x.shape[:2], generator=g).double() if sized else None
    before = torch.ones(x.shape[:2]).double() if size is None else size
    with torch.no_grad():
        output, sizes = call(module, x, size, key, saliency)
    after = torch.ones(output.shape[:2]).double() if sizes is None else sizes

    assert torch.equal(output[:, :prefix], x[:, :prefix]) and torch.equal(after[:, :prefix], before[:, :prefix])
    assert output.isfinite().all() and (after >= 0).all()
    assert output.shape[1] >= prefix + 1 and (after[:, prefix:] > 0).any(1).all()  # at least one patch is left
    if type(module) is Merge or (type(module) is Prune and module.fuse == "mean"):
        assert torch.allclose(after.sum(1), before.sum(1))
    assert (after.sum(1) <= before.sum(1) + 1e-9).all()

    left = module.left(prefix + patches)
    assert left is None if type(module) is LearnedThresholds else left == output.shape[1]

    mixing = torch.randn(x.shape[-1], 3, generator=g).double()
    with torch.no_grad():
        wider, same = call(module, torch.cat([x, x @ mixing], -1), size, key, saliency)
    assert torch.equal(wider[..., :-3], output) and (same is sizes is None or torch.equal(same, sizes))
    present = after > 0
    assert torch.allclose(wider[..., -3:][present], (output @ mixing)[present])  # carried along, in the same shares


@pytest.mark.parametrize("make", [make for make in SETTINGS if make.func in (Prune, LearnedPrune)], ids=option_id)
def test_pruners_return_a_subset_of_the_tokens(make):
    module, x, key, saliency = module_and_inputs(make, 12, 2, 0, layer=1)
    with torch.no_grad():
        output, _ = call(module, x, None, key, saliency)
    fused = type(module) is Prune and module.fuse != "none"
    for image in range(2):
        origins = [(x[image] == token).all(-1).nonzero().flatten().tolist() for token in output[image, : -1 if fused else None]]
        assert all(len(origin) == 1 for origin in origins) and len({origin[0] for origin in origins}) == len(origins)


@on
def test_sizes_may_be_whole_numbers(make):
    module, x, key, saliency = module_and_inputs(make, 12, 2, 0, layer=1)
    module.train()
    outputs = []
    for dtype in (torch.float64, torch.int64):
        torch.manual_seed(0)
        outputs.append(call(module, x, torch.ones(x.shape[:2], dtype=dtype), key, saliency))
    assert all(torch.allclose(one.double(), other.double()) for one, other in zip(*outputs))


# The off setting


@on
def test_removed_tokens_stay_removed(make):
    """Tokens of size 0, all equal as padding is, come in; attention and pools ignore those that go out."""
    module, x, key, saliency = module_and_inputs(make, patches=8, prefix=1, seed=0)
    size = torch.tensor([[1.0, 2, 1, 1, 0, 1, 0, 0, 0]]).double().expand(2, -1)
    x[size == 0], attention = 0.0, Attention(6, 2).double()
    keys, rows = key().masked_fill(size[..., None] == 0, 1.0), saliency() * (size > 0)
    y, left = call(module, x, size, lambda: keys, lambda queries=None: rows)
    assert y.isfinite().all() and (left >= 0).all() and (left.sum(1) <= size.sum(1)).all()
    assert attention(y, left).x.isfinite().all()
    for tokens, sizes in zip(y, left):
        assert tokens[sizes > 0].abs().sum(1).min() > 0, "a removed token came back"
    if make.func in (Prune, LearnedPrune):
        fused = make.func is Prune and make.keywords.get("fuse") != "none"
        assert ((left > 0).sum(1) >= min(5, left.shape[1] - fused)).all(), "a removed token took the place of a present one"


@off
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("pool", slow_after(1, [ClassToken, MeanTokens, SequencePool]))
def test_off_setting_equals_the_plain_model_bit_for_bit(make, attention, pool):
    slots = dict(attention=attention, pool=pool, registers=1)
    plain, reduced = small(**slots), small(**slots, reduction=make)
    for block in plain.blocks:  # attention that is far from uniform
        randomize(block.attention, 0.3)
    missing = reduced.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(".reduction." in name for name in missing.missing_keys)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(reduced.eval()(x), plain.eval()(x)) and reduced.tokens(x)[1] is None
    difference = (reduced.train()(x) - plain.train()(x)).abs().max()
    assert difference <= (1e-4 if make.func is LearnedThresholds else 0)


@on
def test_other_settings_change_the_logits(make):
    plain, reduced = small(pool=MeanTokens), small(pool=MeanTokens, reduction=make)
    reduced.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 1, 8, 8)
    assert (reduced.eval()(x) - plain.eval()(x)).abs().max() > 1e-4


# Every combination of slots

TOKENIZERS = [partial(PatchEmbed, patch=2), partial(ShiftedPatchEmbed, patch=2), partial(ConvStem, layers=1), ConvTokenizer]
POOLS = [ClassToken, MeanTokens, SequencePool]
COMBINED = {
    "Merge": partial(Merge, r=2),
    "Prune": Prune,
    "Prune, mean": partial(Prune, keep=0.5, fuse="mean"),
    "LearnedPrune": LearnedPrune,
    "LearnedThresholds": partial(LearnedThresholds, merge=0.2, prune=0.8),
    "LearnedThresholds, no merge": partial(LearnedThresholds, merge=None, prune=1.0),
}
COMBINATIONS = [
    *product(COMBINED, POOLS, (torch.float32, torch.bfloat16), TOKENIZERS, (Attention, LocalityAttention), (0, 2))
]
PAIRS = pairwise(COMBINATIONS)  # the other combinations are slow


def assert_trains(model, x):
    """Assert finite logits, and a finite gradient for every parameter that affects them."""
    logits = model.train()(x)
    F.cross_entropy(logits.float(), torch.tensor([0, 2, 1])).backward()
    assert logits.isfinite().all()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # the class token reads nothing after the last block
            assert name.startswith("blocks.1.reduction.") and isinstance(model.pool, ClassToken), name
        else:
            assert parameter.grad.isfinite().all(), name


def test_the_combinations_contain_every_reduction():
    assert len(COMBINATIONS) == 576 and {getattr(make, "func", make) for make in COMBINED.values()} == set(CLASSES)
    assert {COMBINATIONS[index][:2] for index in PAIRS} == {*product(COMBINED, POOLS)}


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(each, id="-".join(map(option_id, each)), marks=[] if index in PAIRS else pytest.mark.slow)
        for index, each in enumerate(COMBINATIONS)
    ],
)
def test_every_combination_of_slots_trains_with_every_reduction(combination):
    kind, pool, dtype, tokenizer, attention, registers = combination
    slots = dict(tokenizer=tokenizer, attention=attention, registers=registers)
    model, x = small(**slots, pool=pool, reduction=COMBINED[kind]), torch.randn(3, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert_trains(model, x)
        assert model.eval()(x).isfinite().all()


# A trained model


@on
def test_copy_and_loaded_state_dict_give_equal_logits(make):
    model, x = small(reduction=make, registers=1).eval(), torch.randn(3, 1, 8, 8)
    expected = model(x)
    loaded = small(reduction=make, registers=1).eval()
    loaded.load_state_dict(model.state_dict())
    for other in (model, copy.deepcopy(model), loaded):
        assert torch.equal(other(x), expected)


@one_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sizes_are_exact_in_a_model_of_half_precision(make, dtype):
    """With many patches: bfloat16 cannot count beyond 256."""
    model = small(reduction=make).to(dtype).eval()
    images = torch.randn(2, 1, 48, 48, dtype=dtype)
    x, size = model.tokens(images)
    assert x.dtype == dtype and model(images).dtype == dtype
    if size is not None:
        assert size.dtype == torch.promote_types(dtype, torch.float32) and torch.equal(size, size.round())
        if make.func in (Merge, Prune):  # the others remove patches
            assert size.sum(1).tolist() == [577, 577]


@on
@pytest.mark.parametrize("image", slow_but(((2, 2), (6, 10)), [(2, 2), (2, 4), (6, 10), (12, 14)]))
def test_other_image_sizes_work(make, image):
    model, x = small(reduction=make, registers=2), torch.randn(2, 1, *image)
    tokens, size = model.eval().tokens(x)
    assert tokens.isfinite().all() and tokens.shape[1] <= 3 + image[0] * image[1] // 4
    assert size is None or (size[:, 3:] > 0).any(1).all()
    assert model.train()(x).isfinite().all()


@pytest.mark.slow
@one_each
def test_exported_model_gives_equal_logits_for_any_batch_size(make):
    model = small(reduction=make, depth=1, registers=1).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for b in (1, 5):
        x = torch.randn(b, 1, 8, 8)
        assert torch.allclose(loaded(x), model(x), atol=1e-6)


class TokensOnly(Attention):
    """Attention that gives neither keys nor saliency."""

    def forward(self, x, size=None, mask=None):
        return super().forward(x, size, mask)._replace(key=None, saliency=None)


@pytest.mark.parametrize(("c", "needed"), [(Merge, "keys"), (Prune, "saliency"), (LearnedThresholds, "keys and saliency")])
def test_attention_without_keys_or_saliency_is_refused_where_they_are_needed(c, needed):
    model = small(attention=TokensOnly, reduction=partial(c, **ON[c][0]))
    with pytest.raises(ValueError, match=rf"{c.__name__} needs .*{needed}.*return AttentionOutput\("):
        model(torch.randn(1, 1, 8, 8))
    assert small(attention=TokensOnly, reduction=LearnedPrune)(torch.randn(1, 1, 8, 8)).isfinite().all()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*is deprecated")
@pytest.mark.parametrize("make", slow_after(2, [partial(Merge, r=0.3), LearnedPrune, partial(Merge, r=2), Prune]), ids=option_id)
def test_traced_model_is_that_of_python(make):
    model = small(reduction=make).eval()
    traced, images = torch.jit.trace(model, torch.randn(2, 1, 8, 8)), torch.randn(3, 1, 8, 8)
    assert torch.allclose(traced(images), model(images), atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(traced(images), model(images), atol=1e-6)
