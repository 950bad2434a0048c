"""Cost of a model: published figures to their printed digits, torch's count, and the tokens that are really processed."""

import copy
import inspect
from functools import partial
from itertools import groupby

import pytest
import timm
import torch
from torch import nn
from toys import option_id, slow_after

from smallvit import flops
from smallvit.attention import Attention, AttentionOutput, LocalityAttention
from smallvit.flops import (
    block_macs,
    check_vit,
    closed_form,
    counted,
    describe_tokens,
    embed_macs,
    evaluating,
    flop_counter,
    footprint,
    forward,
    macs_of_each,
    match_budget,
    milliseconds,
    reduces,
    seen_tokens,
    speedup,
    tokens_per_layer,
    unreduced,
    without_memory,
)
from smallvit.pooling import MeanTokens, Projected, SequencePool
from smallvit.positions import SinCos2d
from smallvit.reduction import LearnedPrune, LearnedThresholds, Merge, Prune
from smallvit.references import Pixels, SmallCNN
from smallvit.tokenizers import ConvStem, ConvTokenizer, PatchEmbed, ShiftedPatchEmbed
from smallvit.vit import Block, ViT

small = partial(ViT, (28, 28), 1, 10, dim=32, depth=4, heads=4, tokenizer=partial(PatchEmbed, patch=4))
wide = partial(ViT, (28, 28), 1, 10, dim=192, depth=4, heads=3, tokenizer=partial(PatchEmbed, patch=4))


def deit(dim, reduction=None):
    """DeiT-T, S or B on the meta device: 224 pixels, patches of 16, heads of width 64."""
    tokenizer = partial(PatchEmbed, patch=16)
    with torch.device("meta"):
        return ViT((224, 224), 3, 1000, dim=dim, depth=12, heads=dim // 64, tokenizer=tokenizer, reduction=reduction)


# Published figures, in units of 10^9 multiply-accumulates

PUBLISHED = [
    (192, None, "1.25"), (384, None, "4.60"), (768, None, "17.56"),
    (384, partial(Merge, r=8), "3.42"), (384, partial(Merge, r=13), "2.70"), (384, partial(Merge, r=16), "2.29"),
    (192, partial(Merge, r=8), "0.92"), (192, partial(Merge, r=12), "0.77"), (192, partial(Merge, r=16), "0.62"),
    *[(384, partial(Prune, fuse="none", keep=keep), figure)
      for keep, figure in ((0.9, "3.99"), (0.8, "3.44"), (0.7, "3.00"), (0.6, "2.61"), (0.5, "2.28"))],
    *[(384, partial(Prune, keep=keep), figure) for keep, figure in ((0.9, "4.0"), (0.8, "3.5"), (0.7, "3.0"), (0.6, "2.6"), (0.5, "2.3"))],
    (384, partial(LearnedPrune, keep=0.9), "3.91"), (384, partial(LearnedPrune, keep=0.8), "3.35"),
    (384, partial(LearnedPrune, keep=0.7), "2.88"),
]  # fmt: skip


def case_id(part):
    return option_id(part) if isinstance(part, partial) else {192: "T", 384: "S", 768: "B", None: "plain"}.get(part, str(part))


@pytest.mark.parametrize(
    ("dim", "reduction", "figure"),
    [pytest.param(*case, marks=pytest.mark.slow if index % 3 else ()) for index, case in enumerate(PUBLISHED)],
    ids=case_id,
)
def test_closed_form_gives_the_published_figures(dim, reduction, figure):
    macs = closed_form(deit(dim, reduction))
    digits = len(figure.partition(".")[2])
    assert f"{(sum(macs.values()) - macs['reduction']) / 1e9:.{digits}f}" == figure  # without the cost of the reduction itself


@pytest.mark.parametrize(("keep", "figure"), [(0.9, "0.13"), (0.8, "0.11"), (0.7, "0.10")])
def test_predictors_of_dynamicvit_cost_the_published_figures(keep, figure):
    assert f"{closed_form(deit(384, partial(LearnedPrune, keep=keep)))['reduction'] / 1e9:.2f}" == figure


def test_matching_costs_a_quarter_of_a_square():
    """(N / 2)^2 d_h for N patches."""
    model = deit(384, partial(Merge, r=16))
    patches = [196 - 16 * layer for layer in range(12)]
    assert closed_form(model)["reduction"] == sum((n // 2) * (n - n // 2) * 64 for n in patches)
    assert closed_form(deit(384, Merge))["reduction"] == 0


# The closed form


def by_hand(image, patch, channels, dim, depth, prefix, ratio=4, classes=10, copies=1) -> int:
    """MACs: depth (4 N D^2 + 2 N^2 D + 2 r N D^2) + the embedding of `copies` of the image + the head."""
    patches = image**2 // patch**2
    n = patches + prefix
    blocks = depth * (4 * n * dim**2 + 2 * n**2 * dim + 2 * ratio * n * dim**2)
    return blocks + patches * copies * channels * patch**2 * dim + dim * classes


@pytest.mark.parametrize(
    "image, patch, channels, dim, depth, tokenizer, more, prefix, copies",
    [
        (28, 7, 1, 64, 6, PatchEmbed, {}, 1, 1),
        (28, 4, 3, 48, 2, PatchEmbed, {"registers": 4}, 5, 1),
        (28, 7, 1, 64, 2, PatchEmbed, {"pool": MeanTokens, "attention": LocalityAttention}, 0, 1),
        (28, 7, 3, 32, 1, ShiftedPatchEmbed, {}, 1, 5),
        (46, 2, 1, 16, 2, PatchEmbed, {}, 1, 1),  # 530 tokens: the fused kernel
    ],
)
def test_macs_of_a_plain_vit_equal_the_closed_form(image, patch, channels, dim, depth, tokenizer, more, prefix, copies):
    embed = partial(tokenizer, patch=patch)
    model = ViT((image, image), channels, 10, tokenizer=embed, dim=dim, depth=depth, heads=4, **more).train()
    found = footprint(model, torch.zeros(3, channels, image, image))
    expected = by_hand(image, patch, channels, dim, depth, prefix, copies=copies)
    assert found["params"] == sum(p.numel() for p in model.parameters())
    assert found["macs"] == pytest.approx(expected, rel=0.01) and sum(closed_form(model).values()) == expected
    assert all(type(number) is int for number in found.values()) and model.training


@pytest.mark.parametrize("pool", [MeanTokens, SequencePool, Projected, partial(Projected, pool=SequencePool, layers=1)])
def test_macs_of_pools_equal_the_closed_form(pool):
    model = ViT((12, 12), 1, 5, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2, pool=pool)
    assert sum(closed_form(model).values()) == counted(model, torch.zeros(1, 1, 12, 12)) / 2


def test_parameters_of_a_plain_vit_follow_the_formula():
    d, n, depth = 64, 17, 6
    block = 12 * d * d + 13 * d  # qkv, proj, two of the MLP, with biases, and two LayerNorms
    model = ViT((28, 28), 1, 10, tokenizer=partial(PatchEmbed, patch=7), dim=d, depth=depth)
    expected = depth * block + (49 * d + d) + d + n * d + 2 * d + 10 * d + 10
    assert footprint(model, torch.zeros(1, 1, 28, 28))["params"] == expected


def test_shifted_patch_embed_costs_five_embeddings():
    image = torch.zeros(1, 1, 28, 28)
    plain, shifted = (ViT((28, 28), 1, 10, tokenizer=partial(t, patch=7), dim=32) for t in (PatchEmbed, ShiftedPatchEmbed))
    assert footprint(shifted, image)["macs"] - footprint(plain, image)["macs"] == 4 * 16 * 49 * 32
    assert closed_form(shifted)["embed"] - closed_form(plain)["embed"] == 4 * 16 * 49 * 32


def test_footprint_counts_one_image_also_in_training():
    cnn, image = SmallCNN((8, 8), 1, 10, width=4, hidden=16), torch.zeros(2, 1, 8, 8)
    assert footprint(cnn.train(), image) == footprint(cnn.eval(), image)
    macs = 64 * 9 * 1 * 4 + 64 * 9 * 4 * 4 + 16 * 9 * 4 * 8 + 16 * 9 * 8 * 8 + 4 * 8 * 16 + 16 * 10
    assert footprint(cnn, image)["macs"] == macs
    assert footprint(Pixels((8, 8), 1, 10), image) == {"params": 0, "macs": 0}
    assert forward(Pixels((8, 8), 1, 10))(image).shape == (len(image), image[0].numel())


@pytest.mark.parametrize("reduction", [partial(LearnedPrune, keep=0.5), partial(Prune, keep=0.5)])
def test_cost_is_that_of_inference_and_the_model_stays_in_training(reduction):
    model = small(reduction=reduction, pool=partial(Projected, pool=MeanTokens)).train()
    before = copy.deepcopy(model.state_dict())
    found = footprint(model, torch.randn(2, 1, 28, 28)), seen_tokens(model, torch.randn(2, 1, 28, 28)).tolist()
    assert all(module.training for module in model.modules())
    with evaluating(model):
        assert not any(module.training for module in model.modules()) and not model(torch.zeros(1, 1, 28, 28)).requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found[0] == footprint(model.eval(), torch.randn(2, 1, 28, 28)) and found[1] == [[*map(list, tokens_per_layer(model))]] * 2


def test_narrow_heads_cost_less():
    thin = small(attention=partial(Attention, head_dim=2))
    block = 50 * (4 * 32 * 8) + 50**2 * (2 * 8) + 50 * (8 * 32**2)
    assert block_macs(thin.blocks[0], 50, 50) == block and closed_form(thin)["blocks"] == 4 * block


def test_other_image_sizes_are_counted():
    model = small(reduction=partial(Merge, r=0.25))
    assert closed_form(model, image=(20, 12))["blocks"] < closed_form(model)["blocks"]
    assert tokens_per_layer(model, (20, 12))[0] == (16, 13)
    expected = sum(closed_form(model, image=(20, 12)).values())
    assert counted(model, torch.zeros(1, 1, 20, 12)) / 2 == pytest.approx(expected, rel=0.01)


class NoProjection(nn.Module):
    """Attention without a projection."""

    def __init__(self, dim, heads):
        super().__init__()

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(x)


class ConvMlp(Block):
    """A block whose MLP has a convolution."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        first, second = (layer for layer in self.mlp if isinstance(layer, nn.Linear))
        self.mlp = nn.Sequential(first, nn.Unflatten(2, (-1, 1)), nn.Conv2d(50, 50, 1), nn.Flatten(2), second)


class NoMlp(nn.Module):
    """A block that keeps the contract and has neither an attention nor an MLP."""

    def __init__(self, dim, heads, attention, reduction, drop_path):
        super().__init__()
        self.reduction, self.layer = reduction, nn.Linear(dim, dim)

    def forward(self, x, size=None, mask=None):
        return x + self.layer(x), size


@pytest.mark.parametrize("block", [ConvMlp, NoMlp])
def test_blocks_with_other_weights_have_no_closed_form_and_are_counted(block):
    model, x = small(block=block), torch.zeros(1, 1, 28, 28)
    with pytest.raises(ValueError, match="no closed form is known for blocks with"):
        closed_form(model)
    assert footprint(model, x)["macs"] == counted(model, x) / 2 > 0


def test_counting_leaves_a_tokenizer_with_batch_normalization_as_it_was():
    class Normalized(PatchEmbed):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.norm = nn.BatchNorm2d(1)

        def forward(self, x):
            return super().forward(self.norm(x))

    model = small(tokenizer=partial(Normalized, patch=7)).train()
    closed_form(model)
    assert model.tokenizer.norm.num_batches_tracked == 0 and model.training


def test_without_a_closed_form_an_error_says_so_and_torch_can_still_count():
    with pytest.raises(ValueError, match=r"no closed form is known for blocks with NoProjection: .* projection `proj`.* counted\(model, x\)"):
        closed_form(small(attention=NoProjection))
    assert footprint(small(attention=NoProjection), torch.zeros(1, 1, 28, 28))["macs"] > 0
    with pytest.raises(ValueError, match="depends on the image; give tokens, for instance from seen_tokens"):
        closed_form(small(reduction=LearnedThresholds))


# Against torch's counter

KERNELS = {"eager": False, "fused": True}
COUNTED = [
    None, partial(Merge, r=4), partial(Merge, r=0.25), partial(Prune), partial(Prune, fuse="none", keep=0.5),
    partial(LearnedPrune), partial(LearnedPrune, keep=0.4),
]  # fmt: skip


SLOTS = {"class token": dict(), "registers": dict(registers=3), "mean": dict(pool=MeanTokens), "stem": dict(tokenizer=ConvStem)}


@pytest.mark.parametrize(
    "kernel, reduction, slots",
    slow_after(14, [
        (kernel, reduction, slots)
        for slots in SLOTS
        for kernel in KERNELS
        for reduction in COUNTED
        # this Prune asks the fused kernel for the whole map, which closed_form leaves out as documented
        if not (kernel == "fused" and slots == "mean" and getattr(reduction, "func", None) is Prune)
    ]),
    ids=case_id,
)
def test_closed_form_equals_the_count_of_torch(kernel, reduction, slots):
    model = wide(reduction=reduction, **SLOTS[slots]).eval()
    for block in model.blocks:
        block.attention.fused = KERNELS[kernel]
    assert counted(model, torch.zeros(1, 1, 28, 28)) / 2 == pytest.approx(sum(closed_form(model).values()), rel=0.01)


@pytest.mark.parametrize("tokenizer", [partial(ShiftedPatchEmbed, patch=4), ConvStem, ConvTokenizer])
def test_every_tokenizer_is_counted(tokenizer):
    model = wide(tokenizer=tokenizer)
    macs = closed_form(model)
    assert macs["embed"] > 0 and counted(model, torch.zeros(1, 1, 28, 28)) / 2 == pytest.approx(sum(macs.values()), rel=0.01)


def test_layers_of_a_pool_are_counted():
    plain, projected = (wide(pool=pool) for pool in (MeanTokens, partial(Projected, hidden=300)))
    more = closed_form(projected)["head"] - closed_form(plain)["head"]
    inner = 192 * 300 + 300 * 300  # the head reads 300 channels, not 192
    assert more == inner + (300 - 192) * projected.head.out_features
    count = counted(projected.eval(), torch.zeros(1, 1, 28, 28)) / 2
    assert count == pytest.approx(sum(closed_form(projected).values()), rel=0.01)


# Tokens

FIXED = [partial(Merge, r=5), partial(Merge, r=0.3), Prune, partial(Prune, fuse="none"), LearnedPrune]


@pytest.mark.parametrize("reduction", [None, *map(partial, FIXED)], ids=case_id)
@pytest.mark.parametrize("registers", slow_after(1, [2, 0]))
@pytest.mark.parametrize("image", [(28, 28), (12, 20), (4, 8)])
def test_tokens_per_layer_are_those_really_processed(reduction, registers, image):
    model, seen = small(reduction=reduction, registers=registers).eval(), []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda _, given, out: seen.append([given[0].shape[1]]))
        block.mlp.register_forward_hook(lambda _, given, out: seen[-1].append(given[0].shape[1]))
    x = torch.randn(2, 1, *image)
    model(x)
    processed = seen[:4]
    assert tokens_per_layer(model, image) == [tuple(pair) for pair in processed]
    assert image != (28, 28) or tokens_per_layer(model) == tokens_per_layer(model, image)
    if reduction:
        assert seen_tokens(model, x).tolist() == [processed, processed]


def thresholds(**options):
    """A model whose images keep different numbers of tokens."""
    model = small(reduction=partial(LearnedThresholds, merge=0.7, prune=0.9), **options).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(3)
    return model


def test_seen_tokens_counts_tokens_of_size_above_0():
    model, x, left = thresholds(registers=1), torch.randn(5, 1, 28, 28), []
    assert tokens_per_layer(model) is None
    hooks = [block.register_forward_hook(lambda _, given, out: left.append((out[1] > 0).sum(1))) for block in model.blocks]
    model(x)
    for hook in hooks:
        hook.remove()
    seen, left = seen_tokens(model, x), torch.stack(left, 1)
    assert torch.equal(seen[..., 1], left) and torch.equal(seen[..., 0], torch.cat([torch.full((5, 1), 51), left[:, :-1]], 1))
    alone = [seen_tokens(model, image[None])[0] for image in x]
    assert torch.equal(seen, torch.stack(alone)) and len({tuple(row) for row in left.tolist()}) > 1


def test_macs_of_each_image_follow_its_tokens():
    model, x = thresholds(), torch.randn(5, 1, 28, 28)
    each = macs_of_each(model, x)
    assert each == [sum(closed_form(model, rows).values()) for rows in seen_tokens(model, x).tolist()] and len(set(each)) > 1
    assert footprint(model, x)["macs"] == pytest.approx(sum(each) / 5)
    assert max(each) < sum(closed_form(unreduced(model)).values())


def test_seen_tokens_counts_blocks_without_a_reduction_too():
    def in_second_block(context):
        return LearnedThresholds(context, merge=None, prune=0.9) if context.layer == 1 else None

    model, x = small(reduction=in_second_block).eval(), torch.randn(2, 1, 28, 28)
    model.blocks[0].attention.qkv.weight.data.mul_(3)
    seen = seen_tokens(model, x)
    m = seen[:, -1, 1].tolist()
    assert seen.tolist() == [[[50, 50], [50, k], [k, k], [k, k]] for k in m] and min(m) < 50
    assert seen_tokens(small(depth=0), x).shape == (2, 0, 2)


def test_describe_tokens_gives_the_tokens_after_each_block_and_the_share_of_macs():
    with_merge = small(reduction=partial(Merge, r=5))
    share = sum(closed_form(with_merge).values()) / sum(closed_form(small()).values())
    assert describe_tokens(with_merge) == f"50 tokens, after the blocks 45, 40, 35, 30; {share:.2f} of the MACs" and 0.6 < share < 0.8
    assert describe_tokens(small(reduction=LearnedThresholds)) == "50 tokens, after the blocks a number that depends on the image"
    assert describe_tokens(small(attention=NoProjection, registers=1)) == "51 tokens, after the blocks 51, 51, 51, 51"


# Unreduced


def test_unreduced_returns_a_copy_without_reduction():
    model, x = small(reduction=partial(Merge, r=5)).eval(), torch.randn(2, 1, 28, 28)
    before, plain = model(x), small().eval()
    plain.load_state_dict(model.state_dict())
    new = unreduced(model)
    assert torch.equal(new(x), plain(x)) and not reduces(new)
    assert torch.equal(model(x), before) and reduces(model)
    assert not {id(p) for p in new.parameters()} & {id(p) for p in model.parameters()}
    assert [reduces(other) for other in (plain, Pixels((8, 8), 1, 3), SmallCNN((8, 8), 1, 3))] == [False] * 3


# Measured time: never compared with a limit


def test_timed_calls_take_turns_of_two_and_times_are_positive():
    turns = []
    times = milliseconds([partial(turns.append, name) for name in "ab"], repeats=3)
    assert turns == ["a", "a", "b", "b"] * 3 and len(times) == 2 and min(times) > 0
    turns.clear()
    assert len(milliseconds([partial(turns.append, "a")], repeats=3)) == 1 and turns == ["a"] * 4
    turns.clear()
    milliseconds([partial(turns.append, name) for name in "ab"], repeats=2, warm_up=1e-3)
    groups = [(name, len([*group])) for name, group in groupby(turns)]
    assert [name for name, _ in groups] == ["a", "b", "a", "b"] and min(number for _, number in groups) > 2
    ms, ratio = speedup(small(reduction=partial(Merge, r=5)).eval(), torch.randn(2, 1, 28, 28), repeats=1)
    assert ms > 0 and ratio > 0


def test_speedup_compares_with_the_faster_kernel_and_leaves_the_model_unchanged(monkeypatch):
    kernels = []

    def fixed_times(calls, repeats):
        kernels.extend({block.attention.fused for block in call.func.blocks} for call in calls)
        return [2.0, 8.0, 5.0]

    monkeypatch.setattr(flops, "milliseconds", fixed_times)
    model = small(reduction=partial(Merge, r=5)).eval()
    before = copy.deepcopy(model.state_dict())
    assert speedup(model, torch.randn(2, 1, 28, 28)) == (2.0, 2.5)
    assert kernels == [{None}, {False}, {True}] and reduces(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Options at an equal budget


class ValueDependent(ViT):
    """A ViT that computes with values when it is created, which torch's device "meta" does not allow."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("spread", torch.tensor(float(torch.rand(3).std())))


@pytest.mark.parametrize("model", [ValueDependent, partial(ViT, position=SinCos2d)])
def test_budget_of_a_model_that_computes_with_values_is_matched(model):
    found = [match_budget(partial(each, dim=32, depth=4), Merge, "r", 0.7, (0.0, 0.5)) for each in (model, ViT)]
    assert found[0] == pytest.approx(found[1], abs=0.01)
    assert without_memory(small).head.weight.is_meta and not without_memory(partial(ValueDependent, (28, 28), 1, 10)).spread.is_meta


@pytest.mark.parametrize("share", slow_after(1, [0.7, 0.9, 0.5]))
@pytest.mark.parametrize(
    ("reduction", "option", "between"),
    [(Merge, "r", (0.0, 0.5)), (Prune, "keep", (0.05, 1.0)), (LearnedPrune, "keep", (0.05, 1.0))],
)
def test_matched_option_meets_the_share_of_the_macs(reduction, option, between, share):
    model = partial(ViT, dim=64, depth=6, tokenizer=partial(PatchEmbed, patch=2))
    value = match_budget(model, reduction, option, share, between)
    models = [model((28, 28), 1, 10, reduction=each) for each in (None, partial(reduction, **{option: value}))]
    full, left = (sum(closed_form(each).values()) for each in models)
    assert between[0] <= value <= between[1] and value == round(value, 3) and left / full == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("reduction", "option", "between"), [(Merge, "r", (0.0, 0.5)), (Prune, "keep", (0.05, 1.0))])
def test_matched_option_meets_the_share_of_the_last_tokens(reduction, option, between):
    model = partial(ViT, dim=16, depth=4, heads=2, tokenizer=partial(PatchEmbed, patch=2))
    value = match_budget(model, reduction, option, 0.25, between, of="tokens")
    reduced = model((28, 28), 1, 10, reduction=partial(reduction, **{option: value}))
    assert tokens_per_layer(reduced)[-1][1] / 197 == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("options", "key_words"),
    [
        (dict(of="time"), "of is 'time'; expected 'macs' or 'tokens'"),
        (dict(), r"r from 0\.0 to 0\.1 reaches 0\.\d+ of the macs at best; expected 0\.3"),
    ],
)
def test_impossible_budget_is_refused(options, key_words):
    with pytest.raises(ValueError, match=key_words):
        match_budget(partial(ViT, depth=4), Merge, "r", 0.3, (0.0, 0.1), **options)


def test_budget_of_a_finished_model_is_refused():
    with pytest.raises(ValueError, match="model is a finished ViT; expected a class or function"):
        match_budget(small(), Merge, "r", 0.7, (0.0, 0.5))


def test_model_that_is_no_vit_is_refused():
    model, x = timm.create_model("vit_tiny_patch16_224", depth=1), torch.zeros(1, 3, 224, 224)
    for call in (check_vit, tokens_per_layer, closed_form, describe_tokens, partial(speedup, images=x), partial(seen_tokens, images=x)):
        with pytest.raises(ValueError, match=r"got a VisionTransformer; .* for a timm model use from_timm\(model\)"):
            call(model)
    with pytest.raises(ValueError, match="speedup got a model without token reduction"):
        speedup(small(), torch.zeros(1, 1, 28, 28))


def test_known_cost_of_the_tokenizer_is_not_counted_again(monkeypatch):
    model = small(reduction=partial(Merge, r=4))
    macs, embed = closed_form(model), embed_macs(model, (28, 28))
    assert macs["embed"] == embed > 0
    monkeypatch.setattr(flops, "counted", lambda *_: pytest.fail("something was counted"))
    assert closed_form(model, embed=embed) == macs


def test_fused_attention_is_counted_as_two_matrix_products():
    q = k = v = torch.randn(2, 3, 7, 4)
    with flop_counter() as counter:
        nn.functional.scaled_dot_product_attention(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * (2 * 3) * 7 * 7 * 4


class Joined(nn.Module):
    """PyTorch's attention, as torchvision's Vision Transformer calls it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("layer", "macs"),
    [
        (Joined(), 7 * 4 * 32**2 + 7**2 * 2 * 32),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 7 * (4 * 32**2 + 2 * 32 * 64) + 7**2 * 2 * 32),
    ],
    ids=["attention", "encoder layer"],
)
def test_the_layers_of_pytorch_are_counted(layer, macs):
    """In evaluation mode PyTorch has a fast path for them, in which its counter finds nothing."""
    x = torch.randn(1, 7, 32)
    expected = layer.eval()(x)
    assert counted(layer, x) == 2 * macs and footprint(layer, x)["macs"] == macs
    assert torch.backends.mha.get_fastpath_enabled() and torch.allclose(layer(x), expected, atol=1e-5)


class Query(nn.Module):
    """A pool whose query, a parameter, is the input of a layer."""

    class_tokens = 0

    def __init__(self, dim):
        super().__init__()
        self.query, self.linear = nn.Parameter(torch.ones(1, 1, dim)), nn.Linear(dim, dim)

    def forward(self, x, size=None, prefix=0):
        return ((self.linear(self.query) @ x.mT).softmax(-1) @ x)[:, 0]


def test_parameter_that_is_the_input_of_a_module_is_counted():
    found, plain = (footprint(small(pool=pool), torch.randn(2, 1, 28, 28))["macs"] for pool in (Query, MeanTokens))
    assert found - plain == 32 * 32 + 2 * 49 * 32


def test_every_function_is_tested():
    found = {name for name, f in vars(flops).items() if inspect.isfunction(f) and f.__module__ == flops.__name__}
    assert found - {"linear_macs", "input_tokens", "has_closed_form", "matrix_weights"} <= set(globals())
