"""Impulse initialization of attention: the neighbors that heads attend to, the paper's equations, other slots, refusals."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from smallvit import (
    Attention,
    DifferentialAttention,
    Learned,
    LocalityAttention,
    Merge,
    PatchEmbed,
    Rotary,
    SinCos2d,
    TalkingHeadsAttention,
    ViT,
    attention_maps,
    impulse_start,
    initialize,
    mimetic_start,
)
from smallvit.attention_starts import NEIGHBORS


def small_vit(**options):
    """A ViT with 16 patches and heads of width 16, so that a head can tell all patches apart."""
    defaults = {"tokenizer": partial(PatchEmbed, patch=7), "dim": 64, "depth": 2, "heads": 4, "attention": impulse_start}
    return ViT((28, 28), 1, 10, **defaults | options)


def maps_of_positions(model, block=0):
    """The attention maps of a block (heads, 16, 16) for tokens that are the position embeddings alone, normalized."""
    positions = F.layer_norm(model.position.table[len(model.prefix) :], (64,))
    return model.blocks[block].attention(positions[None]).map()[0]


def test_each_head_attends_to_one_neighbor_of_each_patch():
    model = small_vit()
    for block in range(2):
        maps = maps_of_positions(model, block).unflatten(1, (4, 4)).unflatten(-1, (4, 4))
        for head, (down, right) in enumerate(NEIGHBORS[:4]):
            for row in range(4):
                for column in range(4):
                    if 0 <= row + down < 4 and 0 <= column + right < 4:
                        assert maps[head, row, column, row + down, column + right] > 0.98


@pytest.mark.parametrize("dim, heads, patch", [(64, 4, 7), (64, 4, 4), (192, 3, 4)])
def test_attention_to_the_intended_patch_is_that_of_the_page(dim, heads, patch):
    page = (Path(__file__).parents[1] / "docs/techniques/impulse_start.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| width {dim}, {heads} heads, patch {patch} \| .*", page, re.M)[0].split(" | ")
    side, inner = 28 // patch, slice(1, -1)
    shares = torch.zeros(heads)
    for seed in range(8):
        model = initialize(small_vit(tokenizer=partial(PatchEmbed, patch=patch), dim=dim, heads=heads, depth=1), seed)
        maps = attention_maps(model, torch.zeros(1, 1, 28, 28))[0][0, :, 1:, 1:].unflatten(1, (side, side))
        for head, (down, right) in enumerate(NEIGHBORS[:heads]):
            own = maps[head].unflatten(-1, (side, side)).roll((-down, -right), (2, 3))  # the intended patch lies on the diagonal
            shares[head] += torch.einsum("rcrc->rc", own)[inner, inner].mean() / 8
    itself, neighbor = ([float(number) for number in re.findall(r"[\d.]+", cell)] for cell in row[3:5])
    assert shares[0].item() == pytest.approx(itself[0], abs=0.01)
    assert shares[1:].min().item() == pytest.approx(neighbor[0], abs=0.01)
    assert shares[1:].max().item() == pytest.approx(neighbor[-1], abs=0.01)


def test_heads_take_the_neighbors_in_the_order_of_the_paper():
    wide = small_vit(dim=160, heads=10)
    positions = F.layer_norm(wide.position.table[1:], (160,))
    found = wide.blocks[0].attention(positions[None]).map()[0, :, 5].argmax(-1)  # of the patch in row 1, column 1
    assert found.tolist() == [5, 1, 6, 4, 9, 0, 2, 8, 10, 5]


def test_maps_follow_the_equations_of_the_paper():
    module = small_vit(depth=1)
    attention, n = module.blocks[0].attention, 16
    positions = module.position.table[1:].detach().double()
    normalized = (positions - positions.mean(1, keepdim=True)) / (positions.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    gram = normalized.T @ normalized
    inverse = torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ normalized.T
    queries, keys, values = attention.qkv.weight.detach().double().view(3, 4, 16, 64)
    noise = torch.Generator().manual_seed(attention.noise_seed)
    for head in range(4):
        target = torch.nn.init.trunc_normal_(torch.empty(n, n, dtype=torch.float64), std=0.6, a=-2, b=2, generator=noise) * 3
        for query in range(n):
            row, column = query // 4 + NEIGHBORS[head][0], query % 4 + NEIGHBORS[head][1]
            if 0 <= row < 4 and 0 <= column < 4:
                target[query, 4 * row + column] = 1000
        u, s, vh = torch.linalg.svd(inverse @ target @ inverse.T)
        best = u[:, :16] @ s[:16].diag() @ vh[:16]
        product = queries[head].T @ keys[head]
        assert torch.allclose(product, 49 * best / s[:16].sum(), atol=1e-4)
        assert queries[head].norm().item() == pytest.approx(7, abs=1e-4)
        assert keys[head].norm().item() == pytest.approx(7, abs=1e-4)
    diagonal = (attention.proj.weight.double() @ values.reshape(64, 64)).diagonal().mean().item()
    assert -0.55 < diagonal < -0.25


def test_only_the_weights_of_attention_differ_and_a_seed_gives_the_same_ones():
    plain = initialize(small_vit(attention=Attention), 3).state_dict()
    ours, again = (initialize(small_vit(), 3).state_dict() for _ in range(2))
    changed = {name for name in plain if not torch.equal(plain[name], ours[name])}
    assert changed == {f"blocks.{i}.attention.{part}.weight" for i in range(2) for part in ("qkv", "proj")}
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    other = initialize(small_vit(), 4).state_dict()
    assert not torch.equal(ours["blocks.0.attention.qkv.weight"], other["blocks.0.attention.qkv.weight"])
    assert not torch.equal(ours["blocks.0.attention.qkv.weight"], ours["blocks.1.attention.qkv.weight"])


def test_values_are_those_of_mimetic_initialization():
    ours, mimetic = (initialize(small_vit(attention=make), 3).blocks[0].attention for make in (impulse_start, mimetic_start))
    assert torch.equal(ours.proj.weight, mimetic.proj.weight) and torch.equal(ours.qkv.weight[128:], mimetic.qkv.weight[128:])
    plain = initialize(small_vit(attention=Attention), 3).blocks[0].attention
    kept = initialize(small_vit(attention=partial(impulse_start, value_proj=None)), 3).blocks[0].attention
    assert torch.equal(kept.proj.weight, plain.proj.weight) and torch.equal(kept.qkv.weight[128:], plain.qkv.weight[128:])


def test_a_larger_strength_makes_heads_more_certain():
    certain = [
        maps_of_positions(small_vit(attention=partial(impulse_start, strength=strength)))[0].diagonal().mean()
        for strength in (2.0, 3.0, 7.0)
    ]
    assert certain[0] < certain[1] < certain[2]


@pytest.mark.parametrize(
    "options",
    [
        {"position": partial(Learned, std="patch")},
        {"position": partial(Learned, on_prefix=False), "registers": 3},
        {"attention": partial(impulse_start, attention=TalkingHeadsAttention)},
        {"attention": partial(impulse_start, attention=partial(LocalityAttention, mask_self=False))},
    ],
    ids=["std of patches", "registers without positions", "talking heads", "LSA without mask"],
)
def test_other_slots_keep_the_start(options):
    model = small_vit(**options)
    positions = F.layer_norm(model.position.table[-16:], (64,))
    attention_map = model.blocks[0].attention(positions[None]).map()[0]
    assert attention_map[0].argmax(-1).tolist() == list(range(16))
    assert model(torch.randn(2, 1, 28, 28)).isfinite().all()


def test_works_with_merging_and_rotary_positions():
    for options in ({"reduction": partial(Merge, r=2)}, {"attention": partial(impulse_start, attention=partial(Attention, position=Rotary))}):
        model = small_vit(**options)
        model(torch.randn(2, 1, 28, 28)).sum().backward()
        assert model.blocks[0].attention.qkv.weight.grad.isfinite().all()


def test_a_model_without_weights_can_be_made():
    with torch.device("meta"):
        assert small_vit().blocks[0].attention.qkv.weight.is_meta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": None}, "no positions; expected Learned"),
        ({"position": SinCos2d}, "SinCos2d; expected Learned"),
        ({"attention": partial(impulse_start, attention=LocalityAttention)}, "mask_self=False"),
        ({"attention": partial(impulse_start, attention=DifferentialAttention)}, "DifferentialAttention has no linear maps"),
        ({"attention": partial(impulse_start, attention=partial(Attention, head_dim=8))}, "are 32 wide together; expected 64"),
        ({"attention": partial(impulse_start, strength=0)}, "strength is 0; expected a number above 0"),
        ({"attention": partial(impulse_start, value_proj=0.4)}, "value_proj is 0.4; expected None or two numbers"),
    ],
)
def test_refusals_say_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        small_vit(**options)
