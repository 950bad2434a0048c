"""position_table draws the sines of the paper, and summary lists the shapes and costs of a model."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
from torch import nn
from toys import slow_after

from smallvit import (
    Attention,
    DistilledTokens,
    LearnedPrune,
    LearnedThresholds,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    Prune,
    RelativeBias,
    Rotary,
    SinCos1d,
    SinCos2d,
    SmallCNN,
    ViT,
    position_similarity,
    position_table,
    summary,
)
from smallvit.flops import counted, tokens_per_layer

TINY = partial(ViT, (8, 12), 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))


# Positions


@pytest.mark.parametrize("length, width", slow_after(2, [(1_000, 160), (1, 2), (100, 16)]))
def test_position_table_equals_the_positions_of_a_model(length, width, tmp_path):
    figure = position_table(length, width)
    drawn = np.asarray(figure.axes[0].images[0].get_array())
    assert np.allclose(drawn, SinCos1d(width, (length, 1), 1).table, atol=1e-6)
    position, channel = length - 1, width - 2
    assert drawn[position, channel + 1] == pytest.approx(np.cos(position / 10_000 ** (channel / width)))
    assert f"{length:,} positions, {width:,} channels" in figure.axes[0].get_title()
    figure.savefig(tmp_path / "table.png", dpi=40)
    assert (tmp_path / "table.png").stat().st_size > 1_000


@pytest.mark.parametrize("length, width", [(0, 16), (10, 15), (10, 0), (2.5, 4), ("a", 4)])
def test_position_table_refuses_odd_widths_and_no_positions(length, width):
    with pytest.raises(ValueError, match=f"got length {length} and width {width}; expected"):
        position_table(length, width)


def test_each_map_of_position_similarity_is_largest_at_its_own_patch():
    model = ViT((28, 28), 1, 10, dim=64, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=4), position=SinCos2d)
    drawn = np.asarray(position_similarity(model).axes[0].images[0].get_array())
    assert drawn.shape == (7 * 8 - 1, 7 * 8 - 1)
    for row, column in np.ndindex(7, 7):
        part = drawn[8 * row : 8 * row + 7, 8 * column : 8 * column + 7]
        assert np.unravel_index(part.argmax(), (7, 7)) == (row, column) and part.max() == pytest.approx(1)


# summary


def find_step(steps, name):
    return next(step for step in steps if step.name == name)


def test_summary_of_vit_b_16_agrees_with_the_paper():
    """Dosovitskiy et al. 2020, table 1: 86 M parameters; 196 patches of 768, 197 tokens with the class token."""
    with torch.device("meta"):
        model = ViT((224, 224), 3, 1000, tokenizer=partial(PatchEmbed, patch=16), dim=768, depth=12, heads=12)
    steps = summary(model)
    assert [step.shape for step in steps[:4]] == [(3, 224, 224), (196, 768), (197, 768), (197, 768)]
    assert [step.name for step in steps[:4]] == ["image", "tokenizer", "prefix", "position"]
    blocks = [step for step in steps if step.kind == "Block"]
    assert len(blocks) == 12 and {(step.shape, step.params) for step in blocks} == {((197, 768), 7_087_872)}
    assert [(step.name, step.shape) for step in steps[-2:]] == [("pool", (768,)), ("head", (1000,))]
    assert sum(step.params for step in steps) == 86_567_656
    d, n = 768, 197
    assert {step.macs for step in blocks} == {12 * n * d * d + 2 * n * n * d}
    assert find_step(steps, "tokenizer").macs == 196 * 768 * 768


OPTIONS = {
    "plain": {},
    "mean": {"pool": MeanTokens, "registers": 2},
    "two heads": {"pool": DistilledTokens},
    "no positions": {"position": None},
    "sines": {"position": SinCos1d},
    "merge": {"reduction": partial(Merge, r=4)},
    "learned": {"reduction": partial(LearnedPrune, keep=0.5, layers=(1, 2))},
    "fits all": {"norm_after_pool": True, "attention": partial(Attention, qk_norm=True)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_a_vit_add_up_and_show_its_tokens(name):
    model = TINY(**OPTIONS[name]).train()
    steps, noise = summary(model), torch.rand(1, 1, 8, 12)
    assert sum(step.params for step in steps) == sum(p.numel() for p in model.parameters())
    assert sum(step.macs for step in steps) == counted(model.eval(), noise) // 2
    left = [step.shape[0] for step in steps if step.name.startswith("blocks.")]
    assert left == [m for _, m in tokens_per_layer(model)] and steps[-1].shape == (5,)
    assert find_step(steps, "tokenizer").shape == (24, 16)
    prefix = len(model.prefix)
    assert [step.shape for step in steps if step.name == "prefix"] == ([(24 + prefix, 16)] if prefix else [])
    assert any(step.name == "position" for step in steps) == (OPTIONS[name].get("position", True) is not None)
    assert "elsewhere" not in [step.name for step in steps]


@pytest.mark.parametrize("position", [RelativeBias, Rotary])
@pytest.mark.parametrize("reduction", slow_after(1, [LearnedPrune, None, partial(Merge, r=4), partial(Prune, keep=0.5)]))
def test_summary_needs_no_values_for_positions_inside_attention(position, reduction):
    model = TINY(attention=partial(Attention, position=position), reduction=reduction)
    expected = [step[:4] for step in summary(model)]  # without multiply-adds, which depend on the kernel of the attention
    assert [step[:4] for step in summary(model.to("meta"))] == expected


def test_summary_counts_the_fused_attention_kernel():
    """145 tokens: from 128 on, the attention of smallvit uses the fused kernel; timm always does."""
    model = ViT((48, 48), 1, 10, tokenizer=partial(PatchEmbed, patch=4), dim=32, depth=1, heads=2)
    assert find_step(summary(model), "blocks.0").macs == 12 * 145 * 32**2 + 2 * 145**2 * 32
    other = timm.create_model("vit_tiny_patch16_224", img_size=48, patch_size=4, embed_dim=32, depth=1, num_heads=2)
    assert find_step(summary(other, (3, 48, 48)), "blocks.0").macs == 12 * 145 * 32**2 + 2 * 145**2 * 32


def test_summary_without_values_refuses_tokens_that_depend_on_the_image():
    model = TINY(reduction=LearnedThresholds).to("meta")
    with pytest.raises(ValueError, match=r"LearnedThresholds got tokens on the device 'meta'.*use a model on a device such as 'cpu'"):
        summary(model)


def test_summary_names_the_reduction_and_shows_fewer_tokens_block_by_block():
    steps = summary(TINY(reduction=partial(Merge, r=4)))
    assert [(step.shape, step.kind) for step in steps if step.name.startswith("blocks.")] == [
        ((21, 16), "Block, Merge"), ((17, 16), "Block, Merge"), ((13, 16), "Block, Merge"),
    ]  # fmt: skip
    costs = [step.macs for step in steps if step.name.startswith("blocks.")]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 3


def test_tokens_that_depend_on_the_image_are_those_of_fixed_noise():
    model = TINY(reduction=partial(LearnedThresholds, merge=0.5, prune=0.5))
    first = summary(model)
    assert first == summary(model) and find_step(first, "blocks.2").shape[0] < 25


@pytest.mark.parametrize(
    "options, kind",
    [
        ({}, "class token"),
        ({"registers": 1}, "class token and 1 register"),
        ({"registers": 4}, "class token and 4 registers"),
        ({"pool": MeanTokens, "registers": 2}, "2 registers"),
        ({"pool": DistilledTokens}, "class token and distillation token"),
    ],
)
def test_prefix_is_described_by_its_tokens(options, kind):
    assert find_step(summary(TINY(**options)), "prefix").kind == kind


def test_any_model_can_be_summarized_if_the_image_size_is_given():
    cnn = SmallCNN((8, 8), 1, 10)
    steps = summary(cnn, (1, 8, 8))
    assert find_step(steps, "body.0").shape == (16, 8, 8) and find_step(steps, "body.5").shape == (16, 4, 4)
    assert sum(step.params for step in steps) == sum(p.numel() for p in cnn.parameters())
    assert sum(step.macs for step in steps) == counted(cnn.eval(), torch.zeros(1, 1, 8, 8)) // 2
    assert summary(Pixels((8, 8), 1, 10), (1, 8, 8))[-1].shape == (1, 8, 8)
    with pytest.raises(ValueError, match=r"SmallCNN does not say .* give image=\(channels, height, width\)"):
        summary(cnn)
    for image in ((8, 8), 28):
        with pytest.raises(ValueError, match="expected three numbers: channels, height, width"):
            summary(cnn, image)


class Odd(nn.Module):
    """It has a parameter outside of its layers, a layer that is called twice, and a product outside of its layers."""

    def __init__(self):
        super().__init__()
        self.turn, self.flat, self.bias = nn.Linear(4, 4), nn.Flatten(), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return self.turn(self.turn(self.flat(x))) @ self.bias


class Returning(nn.Module):
    """A layer that returns `result(x)`, before a linear layer."""

    def __init__(self, result):
        super().__init__()
        self.odd, self.linear = nn.Identity(), nn.Linear(4, 3)
        self.odd.forward = lambda x: result(x[..., :1])

    def forward(self, x):
        self.odd(x)
        return self.linear(x.flatten(1))


@pytest.mark.parametrize(
    "result, shapes",
    [(lambda x: [x, 2 * x], [(1, 2, 1)]), (lambda x: {"name": "x", "x": x}, [(1, 2, 1)]), (lambda x: None, [])],
    ids=["list", "dict", "none"],
)
def test_layers_may_return_several_tensors_or_none(result, shapes):
    assert [step.shape for step in summary(Returning(result), (1, 2, 2))] == [(1, 2, 2), *shapes, (3,)]


def test_costs_outside_of_layers_are_listed_and_nothing_is_counted_twice():
    steps = summary(Odd(), (1, 2, 2))
    assert [(step.name, step.params, step.macs) for step in steps[1:]] == [
        ("flat", 0, 0), ("turn", 20, 16), ("turn", 0, 16), ("elsewhere", 16, 16),
    ]  # fmt: skip


def test_summary_leaves_the_model_unchanged():
    model = TINY().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    summary(model)
    assert model.training and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="do not tile"):
        summary(model, (1, 9, 9))
    assert model.training and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_printed_summary_is_a_table_with_totals():
    lines = str(summary(TINY())).splitlines()
    assert lines[0].split() == ["step", "what", "output", "parameters", "MACs"]
    assert lines[2].split()[:5] == ["tokenizer", "PatchEmbed", "24", "x", "16"]
    params = sum(p.numel() for p in TINY().parameters())
    assert lines[-1].split()[:2] == ["total", f"{params:,}"] and len(lines) == 1 + 10 + 1
