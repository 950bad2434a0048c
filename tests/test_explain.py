"""trace and token_map: patches are assigned to the right tokens, and the figure shows what the model did."""

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import slow_after

from smallvit import (
    Attention,
    Block,
    ConvTokenizer,
    DataSpec,
    Images,
    LearnedPrune,
    LearnedThresholds,
    MeanTokens,
    Merge,
    PatchEmbed,
    Prune,
    ViT,
    explain,
)

ROOT = Path(explain.__file__).parents[2]
TINY = partial(ViT, (12, 12), 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))
PRUNE = partial(Prune, keep=0.6, fuse="none", layers=(0, 2))
LEARNED = partial(LearnedPrune, keep=0.6, layers=(0, 2))
THRESHOLDS = partial(LearnedThresholds, merge=0.6, prune=0.95)
REDUCTIONS = {
    "merge": partial(Merge, r=9),
    "drop": PRUNE,
    "fuse sum": partial(PRUNE, fuse="sum"),
    "fuse mean": partial(PRUNE, fuse="mean"),
    "learned": LEARNED,
    "thresholds": THRESHOLDS,
}


def make_vit(reduction=None, **options) -> ViT:
    torch.manual_seed(0)  # every call gives equal weights
    return TINY(reduction=reduction, **options).double().eval()


def random_pixels(n=4, size=(12, 12)):
    return torch.randn(n, 1, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def reduction_calls(model, x) -> list:
    """(inputs, output) of the reduction of each block."""
    calls = []
    with ExitStack() as hooks, torch.inference_mode():
        for block in model.blocks:
            hooks.enter_context(block.reduction.register_forward_hook(lambda _, x, y: calls.append((x, y))))
        model(x)
    return calls


def group_numbers(tokens: list[set], patches: int) -> list[int]:
    """`Trace.groups` for tokens that contain these sets of patches."""
    return [next((min(token) for token in tokens if patch in token), -1) for patch in range(patches)]


# Groups of patches


@pytest.mark.parametrize("prefix", [{}, {"registers": 2}, {"registers": 1, "pool": MeanTokens}, {"pool": MeanTokens}])
def test_groups_are_those_of_a_slow_matching_as_in_the_paper(prefix):
    model, x = make_vit(partial(Merge, r=(9, 5, 20)), **prefix), random_pixels()
    p, (groups, grid) = len(model.prefix), explain.trace(model, x)
    assert groups.shape == (4, 3, 36) and groups.dtype == torch.int64 and grid == (6, 6)
    calls = reduction_calls(model, x)
    for image in range(len(x)):
        tokens = [{place - p} if place >= p else set() for place in range(p + 36)]
        for block, r in enumerate((9, 5, 11)):  # at most half of the remaining 22 patches can be merged
            (_, _, key, _), (_, size) = calls[block]
            key = nn.functional.normalize(key()[image], dim=-1)
            sources, targets = ([i for i in range(p, len(tokens)) if i % 2 == parity] for parity in (0, 1))
            best = {i: max(targets, key=lambda j, i=i: float(key[i] @ key[j])) for i in sources}
            gone = sorted(sources, key=lambda i: -float(key[i] @ key[best[i]]))[:r]
            for i in gone:
                tokens[best[i]] = tokens[best[i]] | tokens[i]
            tokens = tokens[:p] + [tokens[i] for i in sources if i not in gone] + [tokens[j] for j in targets]
            assert groups[image, block].tolist() == group_numbers(tokens, 36)
            assert [len(token) for token in tokens[p:]] == size[image, p:].tolist()


@pytest.mark.parametrize("prefix", [{"registers": 2}, {"pool": MeanTokens}])
@pytest.mark.parametrize("reduction, left", [(PRUNE, 14), (LEARNED, 12), (partial(THRESHOLDS, merge=None), None)])
def test_kept_patches_are_those_with_unchanged_tokens(reduction, left, prefix):
    """A pruner returns the tokens that it keeps without any change, so they can be found in its input."""
    model, x = make_vit(reduction, **prefix), random_pixels()
    p, (groups, _) = len(model.prefix), explain.trace(model, x)
    for image in range(len(x)):
        patches = [-1] * p + list(range(36))  # the patch of each token
        for block, (inputs, (after, size)) in enumerate(reduction_calls(model, x)):
            before = inputs[0][image]
            patches = [patches[int((before == token).all(-1).nonzero()[0])] for token in after[image]]
            kept = [patch for i, patch in enumerate(patches) if i >= p and (size is None or size[image, i] > 0)]
            patches = [patch if i < p or patch in kept else -1 for i, patch in enumerate(patches)]
            assert groups[image, block].tolist() == [patch if patch in kept else -1 for patch in range(36)]
        assert 0 < len(kept) < 36 and len(kept) == (left or len(kept))


@pytest.mark.parametrize("fuse", ["sum", "mean"])
def test_fused_patches_are_one_group(fuse):
    dropped, fused = (explain.trace(make_vit(partial(PRUNE, fuse=option)), random_pixels()).groups[:, 0] for option in ("none", fuse))
    assert ((dropped == -1).sum(1) == 36 - 22).all() and (fused >= 0).all()
    for gone, group in zip(dropped == -1, fused):
        assert group[gone].tolist() == [gone.nonzero()[0].item()] * 14
        assert group[~gone].tolist() == (~gone).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_groups_only_grow_and_match_the_tokens_in_number_and_size(name):
    model, x = make_vit(REDUCTIONS[name]), random_pixels()
    groups, _ = explain.trace(model, x)
    tokens = [(size if size is not None else after.new_ones(after.shape[:2]))[:, 1:] for _, (after, size) in reduction_calls(model, x)]
    assert sum((size > 0).sum() for size in tokens) < 3 * 4 * 36
    for before, now, size in zip([torch.arange(36).expand(4, -1), *groups.unbind(1)], groups.unbind(1), tokens):
        for old, new, masses in zip(before, now, size):
            assert (new[old == -1] == -1).all()
            for group in old[old >= 0].unique():
                assert len(new[old == group].unique()) == 1
            numbers, counts = new[new >= 0].unique(return_counts=True)
            assert (new[numbers] == numbers).all() and len(numbers) == (masses > 0).sum()
            if name in ("merge", "fuse mean", "thresholds"):
                assert counts.sort().values.tolist() == masses[masses > 0].sort().values.tolist()


def test_groups_do_not_depend_on_the_batch(monkeypatch):
    model, x = make_vit(THRESHOLDS), random_pixels(6)
    groups = explain.trace(model, x).groups
    counts = {len(image[-1].unique()) for image in groups}
    assert len(counts) > 1 and (groups == -1).any() and (groups[:, -1] < torch.arange(36)).any()
    assert torch.equal(groups, torch.cat([explain.trace(model, x[i : i + 1]).groups for i in range(6)]))
    monkeypatch.setattr(explain.tokens, "MAX_ELEMENTS", 2 * 36**2)
    assert torch.equal(groups, explain.trace(model, x).groups)


def test_equal_patches_merge_first():
    """All patches of the left half are equal: as many as possible merge, and no others."""
    x = random_pixels(2)
    x[..., :6] = x[..., :2, :2].repeat(1, 1, 6, 3)
    sources = [patch for patch in range(36) if patch % 2 == 1 and patch % 6 < 3]  # after the class token: even positions
    groups = explain.trace(make_vit(partial(Merge, r=(len(sources), 0, 0)), position=None), x).groups[:, -1]
    left = torch.arange(36) % 6 < 3
    for image in groups:
        counts = (image[:, None] == image).sum(1)
        assert (counts[~left] == 1).all() and left[image[left]].all()
        assert (counts[sources] > 1).all() and len(image.unique()) == 36 - len(sources)


class MeanOfPairs(nn.Module):
    """A user's reduction: the mean of each two neighbors, plus a little of the second patch of the pair before."""

    def __init__(self, place):
        super().__init__()
        self.prefix = place.prefix

    def forward(self, x, size, key=None, saliency=None):
        patches = x[:, self.prefix :]
        n = patches.shape[1] // 2
        weights = torch.eye(n).to(x).repeat_interleave(2, dim=1) / 2
        weights[1:, 1:-2:2] += 0.1 * torch.eye(n - 1).to(x)
        return torch.cat([x[:, : self.prefix], weights @ patches], dim=1), None


def test_reduction_of_a_user_is_traced_and_a_patch_belongs_to_its_largest_share():
    groups, _ = explain.trace(make_vit(lambda place: MeanOfPairs(place) if place.layer < 2 else None), random_pixels())
    patch = torch.arange(36)
    assert torch.equal(groups, torch.stack([patch - patch % 2, patch - patch % 4, patch - patch % 4]).expand(4, -1, -1))


@pytest.mark.parametrize(
    "options, size, grid",
    [
        ({"pool": MeanTokens}, (12, 12), (6, 6)),
        ({"registers": 3}, (8, 14), (4, 7)),
        ({"tokenizer": ConvTokenizer}, (12, 20), (3, 5)),
        ({"reduction": Merge}, (12, 12), (6, 6)),
    ],
)
def test_without_reduction_every_patch_is_a_group_at_any_size(options, size, grid):
    groups, found_grid = explain.trace(make_vit(**options), random_pixels(2, size))
    assert found_grid == grid and torch.equal(groups, torch.arange(grid[0] * grid[1]).expand(2, 3, -1))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_trace_supports_other_sizes_and_half_precision_and_leaves_the_model_unchanged(name):
    model = TINY(reduction=REDUCTIONS[name]).bfloat16().train()
    groups, grid = explain.trace(model, random_pixels(2, (8, 16)))
    assert grid == (4, 8) and groups.shape == (2, 3, 32) and len(groups.unique()) > 2 and (groups != torch.arange(32)).any()
    assert not groups.is_inference() and all(module.training and not module._forward_hooks for module in model.modules())


# Refused models


class UsesAllChannels(MeanOfPairs):
    """Keeps the nine patches whose smallest channel is largest, so that added channels change the choice."""

    def forward(self, x, size, key=None, saliency=None):
        best = 1 + x[:, 1:].abs().amin(-1).argsort(dim=1, descending=True)[:, :9]
        return torch.stack([torch.cat([image[:1], image[kept]]) for image, kept in zip(x, best)]), size


class DropsChannels(MeanOfPairs):
    """Returns only the channels of the model."""

    def forward(self, x, size, key=None, saliency=None):
        return x[:, :-1, :16], size


class HiddenReduction(Block):
    """Removes a token outside of its attribute `reduction`."""

    def forward(self, x, size=None, mask=None):
        x, size = super().forward(x, size, mask)
        return x[:, :-1], size


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduction": UsesAllChannels}, "UsesAllChannels gives other tokens when 36 channels are added behind the 16"),
        ({"reduction": DropsChannels}, "DropsChannels gives other tokens"),
        ({"block": HiddenReduction}, "HiddenReduction gave 36 tokens where its attribute `reduction` left 37"),
    ],
)
def test_reductions_that_cannot_be_traced_are_refused_and_hooks_removed(options, message):
    model = make_vit(**options)
    with pytest.raises(ValueError, match=message):
        explain.trace(model, random_pixels())
    assert not any(module._forward_hooks for module in model.modules())


# Figures


def random_images(n=3, channels=1, size=(12, 12)) -> Images:
    spec = DataSpec(name="noise", channels=channels, size=size, classes=("a",), mean=(0.5,) * channels, std=(0.25,) * channels)
    noise = torch.randint(0, 256, (n, channels, *size), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return Images(noise, torch.zeros(n, dtype=torch.long), spec)


def titles(figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize("blocks, columns", slow_after(1, [((0, 2), 3), (None, 4), ([2], 2)]))
def test_figure_has_a_row_per_image_and_a_column_per_block_with_its_number_of_tokens(blocks, columns, tmp_path):
    figure = explain.token_map(make_vit(partial(Merge, r=9)), random_images(), blocks=blocks)
    assert len(figure.axes) == 3 * columns
    expected = ["block 0\n27 tokens", "block 1\n18 tokens", "block 2\n9 tokens"]
    assert titles(figure) == ["image\n36 patches"] + [expected[block] for block in blocks or range(3)]
    figure.savefig(tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").stat().st_size > 1000


def test_title_gives_the_range_of_token_counts():
    data = {"shape": [2, 2, 4, 1], "grid": [1, 2], "blocks": [5], "groups": [[[0, 0]], [[0, 1]]]}
    pixels = explain.token_map_data(make_vit(), random_images())["pixels"]
    with pytest.raises(ValueError):  # the pixels of 3 images, not of 2
        explain.draw_token_map(data | {"pixels": pixels})
    pixels = explain.token_map_data(make_vit(), random_images(2))["pixels"]
    figure = explain.draw_token_map(data | {"shape": [2, 12, 12, 1], "pixels": pixels})
    assert titles(figure) == ["image\n2 patches", "block 5\n1–2 tokens"]


def test_token_map_of_floats_is_that_of_bytes_and_other_channels_are_refused():
    images = random_images()
    floats = Images(images.pixels(), images.labels, replace(images.spec, dtype="float32"))
    assert explain.token_map_data(make_vit(), floats) == explain.token_map_data(make_vit(), images)
    with pytest.raises(ValueError, match="the images have 4 channels; only images with 1 or 3 can be drawn"):
        explain.token_map_data(make_vit(), random_images(channels=4))


def test_figures_take_tensors_with_a_gradient():
    features = torch.rand(5, 3, requires_grad=True)
    assert explain.feature_view(features, torch.tensor([0, 1, 0, 1, 0])).axes


def test_stored_json_gives_an_equal_figure_without_torch(tmp_path):
    data = explain.token_map_data(make_vit(PRUNE), random_images())
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    assert json.loads(path.read_text()) == data and path.stat().st_size < 3_000
    code = f"""
import json, sys
from smallvit import explain
explain.draw_token_map(json.load(open({str(path)!r}))).savefig({str(tmp_path / "theirs.png")!r})
print("torch" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
    explain.draw_token_map(data).savefig(tmp_path / "ours.png")
    assert (tmp_path / "ours.png").read_bytes() == (tmp_path / "theirs.png").read_bytes()


@pytest.mark.parametrize("channels", [1, 3])
def test_single_patches_are_unchanged_shared_ones_have_the_mean_color_and_pruned_ones_are_hatched(channels):
    images = random_images(1, channels)
    model = ViT((12, 12), channels, 2, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=6))
    data = explain.token_map_data(model, images) | {"groups": [[[0, 1, 1, -1]]]}
    image, block = explain.draw_token_map(data).axes
    raw = images.images[0].permute(1, 2, 0).expand(-1, -1, 3).numpy() / 255
    assert (image.images[0].get_array() == raw).all()
    painted = block.images[0].get_array()
    mean = torch.from_numpy(raw.copy()).double()
    mean = (mean[:6, 6:].mean((0, 1)) + mean[6:, :6].mean((0, 1))) / 2
    assert (painted[:6, :6] == raw[:6, :6]).all()
    assert abs(painted[:6, 6:] - mean.numpy()).max() < 1e-9 and abs(painted[6:, :6] - mean.numpy()).max() < 1e-9
    (hatched,) = [patch for patch in block.patches if patch.get_hatch()]
    box = hatched.get_path().get_extents()
    assert box.extents.tolist() == [5.5, 5.5, 11.5, 11.5]


def test_lines_are_drawn_only_between_tokens():
    import numpy as np

    groups = np.array([[0, 0, 2], [0, 4, 2]])
    lines = {tuple(map(tuple, line)) for line in explain.tokens.token_borders(groups).reshape(-1, 2, 2).tolist()}
    assert lines == {((1, 1), (2, 1)), ((1, 1), (1, 2)), ((2, 0), (2, 2))}


TWO_CHANNELS = partial(ViT, (12, 12), 2, 2, dim=16, depth=1, heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain.token_map_data(make_vit(), random_images(), blocks=()), "expected some of this model, from 0 to 2"),
        (lambda: explain.token_map_data(make_vit(), random_images(), blocks=(3,)), "expected some of this model, from 0 to 2"),
        (lambda: explain.token_map_data(make_vit(), random_images(), blocks=(-1, 0)), "expected some of this model, from 0 to 2"),
        (lambda: explain.token_map(TWO_CHANNELS(), random_images(1, 2)), r"2 channels; only images with 1 or 3"),
        (lambda: explain.token_map(make_vit(), random_pixels()), "got a Tensor; expected Images"),
        (lambda: explain.trace(Attention(8, 2), random_pixels()), r"got a Attention; .*from_timm"),
        (lambda: explain.trace(make_vit(), random_pixels(0)), "no images to look at"),
        *[
            (partial(call, make_vit(), random_images()), r"got Images; .* it is images.spec.normalize\(images.pixels\(\)\)")
            for call in (explain.trace, explain.attention_maps, explain.rollout, explain.patch_attention)
        ],
    ],
)
def test_wrong_blocks_models_and_images_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
