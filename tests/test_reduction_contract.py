"""What every reduction promises, whichever it is: prefix first, sizes, counts, off, and all slots beside it."""

import copy
import inspect
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smallvit import (
    Attention,
    ClassToken,
    ConvStem,
    ConvTokenizer,
    LayerContext,
    LearnedPrune,
    LearnedThresholds,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Prune,
    SequencePool,
    ShiftedPatchEmbed,
    ViT,
    reduction,
)

CLASSES = [made for made in vars(reduction).values() if inspect.isclass(made) and issubclass(made, nn.Module)]
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


def settings_of(table):
    return [partial(made, **knobs) for made in table for knobs in table[made]]


def spelled(make):
    return f"{make.func.__name__}({', '.join(f'{name}={knob}' for name, knob in make.keywords.items())})"


on = pytest.mark.parametrize("make", settings_of(ON), ids=spelled)
off = pytest.mark.parametrize("make", settings_of(OFF), ids=spelled)
one_each = pytest.mark.parametrize("make", [partial(made, **ON[made][1]) for made in ON], ids=spelled)


def small(image=(8, 8), channels=1, **knobs):
    """16 patches, two blocks."""
    slots = dict(tokenizer=partial(PatchEmbed, patch=2), dim=8, depth=2, heads=2) | knobs
    return ViT(image, channels, 3, **slots)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_every_public_reduction_stands_in_both_tables():
    assert len(CLASSES) == 4 and set(CLASSES) == set(ON) == set(OFF)
    for made in CLASSES:  # and every knob of it is turned
        taken = {name for name, p in inspect.signature(made).parameters.items() if p.kind == p.KEYWORD_ONLY}
        turned = {name for knobs in (*ON[made], *OFF[made]) for name in knobs}
        assert taken - turned <= {"shrink", "temperature"}, made  # what these do only shows in training: see the others


# One module


def alone(make, patches, prefix, seed, dim=6, layer=0):
    """A reduction in the first of two blocks, what attention tells it, and tokens b n (d + 3)."""
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


def called(module, x, size, key, saliency):
    return module(x, size) if getattr(module, "first", False) else module(x, size, key, saliency)


@on
@settings(deadline=None, max_examples=15)
@given(
    patches=st.one_of(st.integers(1, 3), st.integers(1, 24)),
    prefix=st.integers(0, 3),
    seed=st.integers(0, 999),
    sized=st.booleans(),
)
def test_prefix_sizes_counts_and_channels_behind_the_width(make, patches, prefix, seed, sized):
    module, x, key, saliency = alone(make, patches, prefix, seed, layer=seed % 2)
    g = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 5, x.shape[:2], generator=g).double() if sized else None
    before = torch.ones(x.shape[:2]).double() if size is None else size
    with torch.no_grad():
        got, sizes = called(module, x, size, key, saliency)
    after = torch.ones(got.shape[:2]).double() if sizes is None else sizes

    assert torch.equal(got[:, :prefix], x[:, :prefix]) and torch.equal(after[:, :prefix], before[:, :prefix])
    assert got.isfinite().all() and (after >= 0).all()
    assert got.shape[1] >= prefix + 1 and (after[:, prefix:] > 0).any(1).all()  # somebody is left
    if type(module) is Merge or (type(module) is Prune and module.fuse == "mean"):
        assert torch.allclose(after.sum(1), before.sum(1))
    assert (after.sum(1) <= before.sum(1) + 1e-9).all()

    left = module.left(prefix + patches)
    assert left is None if type(module) is LearnedThresholds else left == got.shape[1]

    mixing = torch.randn(x.shape[-1], 3, generator=g).double()
    with torch.no_grad():
        wider, same = called(module, torch.cat([x, x @ mixing], -1), size, key, saliency)
    assert torch.equal(wider[..., :-3], got) and (same is sizes is None or torch.equal(same, sizes))
    there = after > 0
    assert torch.allclose(wider[..., -3:][there], (got @ mixing)[there])  # moved along, in the same shares


@pytest.mark.parametrize("make", [make for make in settings_of(ON) if make.func in (Prune, LearnedPrune)], ids=spelled)
def test_those_left_are_some_of_those_that_came(make):
    module, x, key, saliency = alone(make, 12, 2, 0, layer=1)
    with torch.no_grad():
        got, _ = called(module, x, None, key, saliency)
    fused = type(module) is Prune and module.fuse != "none"
    for image in range(2):
        places = [(x[image] == token).all(-1).nonzero().flatten().tolist() for token in got[image, : -1 if fused else None]]
        assert all(len(place) == 1 for place in places) and len({place[0] for place in places}) == len(places)


# Off


@off
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool])
def test_off_is_the_plain_model_bit_for_bit(make, attention, pool):
    slots = dict(attention=attention, pool=pool, registers=1)
    plain, reduced = small(**slots), small(**slots, reduction=make)
    missing = reduced.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(".reduction." in name for name in missing.missing_keys)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(reduced.eval()(x), plain.eval()(x)) and reduced.tokens(x)[1] is None
    difference = (reduced.train()(x) - plain.train()(x)).abs().max()
    assert difference <= (1e-4 if make.func is LearnedThresholds else 0)


@on
def test_on_is_not_off(make):
    plain, reduced = small(pool=MeanTokens), small(pool=MeanTokens, reduction=make)
    reduced.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 1, 8, 8)
    assert (reduced.eval()(x) - plain.eval()(x)).abs().max() > 1e-4


# Every combination of slots

TOKENIZERS = [partial(PatchEmbed, patch=2), partial(ShiftedPatchEmbed, patch=2), partial(ConvStem, layers=1), ConvTokenizer]
POOLS = [ClassToken, MeanTokens, SequencePool]
SLOTS = [
    dict(tokenizer=tokenizer, attention=attention, registers=registers)
    for tokenizer in TOKENIZERS
    for attention in (Attention, LocalityAttention)
    for registers in (0, 2)
]
COMBINED = {
    "Merge": partial(Merge, r=2),
    "Prune": Prune,
    "Prune, mean": partial(Prune, keep=0.5, fuse="mean"),
    "LearnedPrune": LearnedPrune,
    "LearnedThresholds": partial(LearnedThresholds, merge=0.2, prune=0.8),
    "LearnedThresholds, no merge": partial(LearnedThresholds, merge=None, prune=1.0),
}


def learns(model, x):
    """One step of training: finite logits, and a finite gradient for every parameter that has a part in them."""
    logits = model.train()(x)
    F.cross_entropy(logits.float(), torch.tensor([0, 2, 1])).backward()
    assert logits.isfinite().all()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # a class token has read all that it reads when the last block reduces
            assert name.startswith("blocks.1.reduction.") and isinstance(model.pool, ClassToken), name
        else:
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", COMBINED)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_combination_of_slots_learns_with_it(kind, pool, dtype):
    assert len(SLOTS) * len(POOLS) == 48 and {getattr(made, "func", made) for made in COMBINED.values()} == set(CLASSES)
    for slots in SLOTS:
        model, x = small(**slots, pool=pool, reduction=COMBINED[kind]), torch.randn(3, 1, 8, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            learns(model, x)
            assert model.eval()(x).isfinite().all()


# A finished model


@on
def test_a_copy_and_a_state_dict_say_the_same_twice(make):
    model, x = small(reduction=make, registers=1).eval(), torch.randn(3, 1, 8, 8)
    expected = model(x)
    loaded = small(reduction=make, registers=1).eval()
    loaded.load_state_dict(model.state_dict())
    for other in (model, copy.deepcopy(model), loaded):
        assert torch.equal(other(x), expected)


@on
@pytest.mark.parametrize("image", [(2, 2), (2, 4), (6, 10), (12, 14)])
def test_another_size_of_the_image(make, image):
    model, x = small(reduction=make, registers=2), torch.randn(2, 1, *image)
    tokens, size = model.eval().tokens(x)
    assert tokens.isfinite().all() and tokens.shape[1] <= 3 + image[0] * image[1] // 4
    assert size is None or (size[:, 3:] > 0).any(1).all()
    assert model.train()(x).isfinite().all()


@one_each
def test_an_exported_model_gives_the_same_logits_for_any_batch(make):
    model = small(reduction=make, depth=1, registers=1).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for b in (1, 5):
        x = torch.randn(b, 1, 8, 8)
        assert torch.allclose(loaded(x), model(x), atol=1e-6)


class Silent(Attention):
    """Attention that says nothing about keys and saliency."""

    def forward(self, x, size=None, mask=None):
        return super().forward(x, size, mask)._replace(key=None, saliency=None)


@pytest.mark.parametrize("made, what", [(Merge, "keys"), (Prune, "saliency"), (LearnedThresholds, "keys and saliency")])
def test_an_attention_that_does_not_say_what_is_needed_is_refused_with_what_to_do(made, what):
    model = small(attention=Silent, reduction=partial(made, **ON[made][0]))
    with pytest.raises(ValueError, match=rf"{made.__name__} needs .*{what.split()[0]}.*return AttentionOutput\("):
        model(torch.randn(1, 1, 8, 8))
    assert small(attention=Silent, reduction=LearnedPrune)(torch.randn(1, 1, 8, 8)).isfinite().all()
