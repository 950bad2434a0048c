"""Pictures of reductions: every patch is where the tokens say it is, and what is drawn is what the model did."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

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
)  # fmt: skip

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


def made(reduction=None, **knobs) -> ViT:
    torch.manual_seed(0)
    return TINY(reduction=reduction, **knobs).double().eval()


def pixels(n=4, size=(12, 12)):
    return torch.randn(n, 1, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def seen(model, x) -> list:
    """(given, result) of every reduction."""
    calls = []
    hooks = [
        block.reduction.register_forward_hook(lambda _, given, result: calls.append((given, result))) for block in model.blocks
    ]
    with torch.inference_mode():
        model(x)
    for hook in hooks:
        hook.remove()
    return calls


def numbered(tokens: list[set], patches: int) -> list[int]:
    """What `Trace.groups` says of tokens that stand for these sets of patches."""
    return [next((min(token) for token in tokens if patch in token), -1) for patch in range(patches)]


# Where patches go


@pytest.mark.parametrize("prefix", [{}, {"registers": 2}, {"registers": 1, "pool": MeanTokens}, {"pool": MeanTokens}])
def test_merged_patches_are_those_of_the_papers_matching_one_token_at_a_time(prefix):
    model, x = made(partial(Merge, r=(9, 5, 20)), **prefix), pixels()
    p, (groups, grid) = len(model.prefix), explain.trace(model, x)
    assert groups.shape == (4, 3, 36) and groups.dtype == torch.int64 and grid == (6, 6)
    calls = seen(model, x)
    for image in range(len(x)):
        tokens = [{place - p} if place >= p else set() for place in range(p + 36)]
        for block, r in enumerate((9, 5, 11)):  # no more than half of the 22 patches left can be merged
            (_, _, key, _), (_, size) = calls[block]
            key = nn.functional.normalize(key()[image], dim=-1)
            sources, targets = ([i for i in range(p, len(tokens)) if i % 2 == parity] for parity in (0, 1))
            best = {i: max(targets, key=lambda j, i=i: float(key[i] @ key[j])) for i in sources}
            gone = sorted(sources, key=lambda i: -float(key[i] @ key[best[i]]))[:r]
            for i in gone:
                tokens[best[i]] = tokens[best[i]] | tokens[i]
            tokens = tokens[:p] + [tokens[i] for i in sources if i not in gone] + [tokens[j] for j in targets]
            assert groups[image, block].tolist() == numbered(tokens, 36)
            assert [len(token) for token in tokens[p:]] == size[image, p:].tolist()


@pytest.mark.parametrize("prefix", [{"registers": 2}, {"pool": MeanTokens}])
@pytest.mark.parametrize("reduction, left", [(PRUNE, 14), (LEARNED, 12), (partial(THRESHOLDS, merge=None), None)])
def test_kept_patches_are_those_whose_token_came_through_unchanged(reduction, left, prefix):
    """A pruner returns the tokens it keeps bit for bit, which says which they are."""
    model, x = made(reduction, **prefix), pixels()
    p, (groups, _) = len(model.prefix), explain.trace(model, x)
    for image in range(len(x)):
        places = [-1] * p + list(range(36))
        for block, (given, (after, size)) in enumerate(seen(model, x)):
            before = given[0][image]
            came = [int((before == token).all(-1).nonzero()[0]) for token in after[image]]
            places = [places[at] for at in came]
            here = [place for i, place in enumerate(places) if i >= p and (size is None or size[image, i] > 0)]
            places = [place if i < p or place in here else -1 for i, place in enumerate(places)]
            assert groups[image, block].tolist() == [patch if patch in here else -1 for patch in range(36)]
        assert 0 < len(here) < 36 and len(here) == (left or len(here))


@pytest.mark.parametrize("fuse", ["sum", "mean"])
def test_patches_that_evit_fuses_are_one_group_and_none_is_gone(fuse):
    dropped, fused = (explain.trace(made(partial(PRUNE, fuse=how)), pixels()).groups[:, 0] for how in ("none", fuse))
    assert ((dropped == -1).sum(1) == 36 - 22).all() and (fused >= 0).all()
    for gone, group in zip(dropped == -1, fused):
        assert group[gone].tolist() == [gone.nonzero()[0].item()] * 14
        assert group[~gone].tolist() == (~gone).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_groups_only_grow_carry_their_smallest_number_and_are_as_many_as_the_tokens(name):
    model, x = made(REDUCTIONS[name]), pixels()
    groups, _ = explain.trace(model, x)
    tokens = [(size if size is not None else after.new_ones(after.shape[:2]))[:, 1:] for _, (after, size) in seen(model, x)]
    assert sum((size > 0).sum() for size in tokens) < 3 * 4 * 36
    for before, now, size in zip([torch.arange(36).expand(4, -1), *groups.unbind(1)], groups.unbind(1), tokens):
        for old, new, masses in zip(before, now, size):
            assert (new[old == -1] == -1).all()
            for group in old[old >= 0].unique():
                assert len(new[old == group].unique()) == 1
            there, counts = new[new >= 0].unique(return_counts=True)
            assert (new[there] == there).all() and len(there) == (masses > 0).sum()
            if name in ("merge", "fuse mean", "thresholds"):
                assert counts.sort().values.tolist() == masses[masses > 0].sort().values.tolist()


def test_an_image_alone_is_what_it_is_in_a_padded_batch_and_in_batches_of_one(monkeypatch):
    model, x = made(THRESHOLDS), pixels(6)
    groups = explain.trace(model, x).groups
    counts = {len(image[-1].unique()) for image in groups}
    assert len(counts) > 1 and (groups == -1).any() and (groups[:, -1] < torch.arange(36)).any()
    assert torch.equal(groups, torch.cat([explain.trace(model, x[i : i + 1]).groups for i in range(6)]))
    monkeypatch.setattr(explain.tokens, "MAX_ELEMENTS", 2 * 36**2)
    assert torch.equal(groups, explain.trace(model, x).groups)


def test_equal_patches_merge_first():
    """The left half is one patch again and again: it alone merges, and wholly, as far as one matching can."""
    x = pixels(2)
    x[..., :6] = x[..., :2, :2].repeat(1, 1, 6, 3)
    sources = [place for place in range(36) if place % 2 == 1 and place % 6 < 3]  # behind the class token these are even
    groups = explain.trace(made(partial(Merge, r=(len(sources), 0, 0)), position=None), x).groups[:, -1]
    left = torch.arange(36) % 6 < 3
    for image in groups:
        counts = (image[:, None] == image).sum(1)
        assert (counts[~left] == 1).all() and left[image[left]].all()
        assert (counts[sources] > 1).all() and len(image.unique()) == 36 - len(sources)


class Neighbours(nn.Module):
    """A reduction of one's own: the mean of each two neighbours, of which the second lends a little to the next pair."""

    def __init__(self, place):
        super().__init__()
        self.prefix = place.prefix

    def forward(self, x, size, key=None, saliency=None):
        patches = x[:, self.prefix :]
        n = patches.shape[1] // 2
        weights = torch.eye(n).to(x).repeat_interleave(2, dim=1) / 2
        weights[1:, 1:-2:2] += 0.1 * torch.eye(n - 1).to(x)
        return torch.cat([x[:, : self.prefix], weights @ patches], dim=1), None


def test_a_reduction_of_ones_own_needs_no_code_and_a_patch_goes_where_most_of_it_goes():
    groups, _ = explain.trace(made(lambda place: Neighbours(place) if place.layer < 2 else None), pixels())
    patch = torch.arange(36)
    assert torch.equal(groups, torch.stack([patch - patch % 2, patch - patch % 4, patch - patch % 4]).expand(4, -1, -1))


@pytest.mark.parametrize(
    "knobs, size, grid",
    [
        ({"pool": MeanTokens}, (12, 12), (6, 6)),
        ({"registers": 3}, (8, 14), (4, 7)),
        ({"tokenizer": ConvTokenizer}, (12, 20), (3, 5)),
        ({"reduction": Merge}, (12, 12), (6, 6)),
    ],
)
def test_without_a_reduction_every_patch_is_its_own_group_at_any_size(knobs, size, grid):
    groups, seen_grid = explain.trace(made(**knobs), pixels(2, size))
    assert seen_grid == grid and torch.equal(groups, torch.arange(grid[0] * grid[1]).expand(2, 3, -1))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_another_size_and_half_precision_are_traced_and_the_model_stays_what_it_was(name):
    model = TINY(reduction=REDUCTIONS[name]).bfloat16().train()
    groups, grid = explain.trace(model, pixels(2, (8, 16)))
    assert grid == (4, 8) and groups.shape == (2, 3, 32) and len(groups.unique()) > 2 and (groups != torch.arange(32)).any()
    assert not groups.is_inference() and all(module.training and not module._forward_hooks for module in model.modules())


# What is said of what cannot be traced


class Nosy(Neighbours):
    """Keeps the nine patches that are nowhere small, in whatever channel."""

    def forward(self, x, size, key=None, saliency=None):
        best = 1 + x[:, 1:].abs().amin(-1).argsort(dim=1, descending=True)[:, :9]
        return torch.stack([torch.cat([image[:1], image[kept]]) for image, kept in zip(x, best)]), size


class Forgetful(Neighbours):
    """Gives back the channels it knows of."""

    def forward(self, x, size, key=None, saliency=None):
        return x[:, :-1, :16], size


class Secretive(Block):
    """Reduces where nobody looks."""

    def forward(self, x, size=None, mask=None):
        x, size = super().forward(x, size, mask)
        return x[:, :-1], size


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"reduction": Nosy}, "Nosy gives other tokens when 36 channels are added behind the 16"),
        ({"reduction": Forgetful}, "Forgetful gives other tokens"),
        ({"block": Secretive}, "Secretive gave 36 tokens where its attribute `reduction` left 37"),
    ],
)
def test_a_model_that_keeps_no_contract_is_refused_and_keeps_no_hooks(knobs, words):
    model = made(**knobs)
    with pytest.raises(ValueError, match=words):
        explain.trace(model, pixels())
    assert not any(module._forward_hooks for module in model.modules())


def test_other_models_other_pixels_and_no_images_are_refused():
    with pytest.raises(ValueError, match="got a Tensor; expected Images"):
        explain.token_map(made(), pixels())
    with pytest.raises(ValueError, match=r"got a Attention; .*from_timm"):
        explain.trace(Attention(8, 2), pixels())
    with pytest.raises(ValueError, match="no images to trace"):
        explain.trace(made(), pixels(0))


# What is drawn


def some(n=3, channels=1, size=(12, 12)) -> Images:
    spec = DataSpec(name="noise", channels=channels, size=size, classes=("a",), mean=(0.5,) * channels, std=(0.25,) * channels)
    noise = torch.randint(0, 256, (n, channels, *size), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return Images(noise, torch.zeros(n, dtype=torch.long), spec)


def titles(figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize("blocks, columns", [(None, 4), ((0, 2), 3), ([2], 2)])
def test_a_row_for_each_image_and_a_column_for_each_block_which_says_how_many_tokens_are_left(blocks, columns, tmp_path):
    figure = explain.token_map(made(partial(Merge, r=9)), some(), blocks=blocks)
    assert len(figure.axes) == 3 * columns
    expected = ["block 0\n27 tokens", "block 1\n18 tokens", "block 2\n9 tokens"]
    assert titles(figure) == ["image\n36 patches"] + [expected[block] for block in blocks or range(3)]
    figure.savefig(tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").stat().st_size > 1000


def test_counts_that_differ_are_given_from_the_least_to_the_most():
    picture = {"shape": [2, 2, 4, 1], "grid": [1, 2], "blocks": [5], "groups": [[[0, 0]], [[0, 1]]]}
    pixels = explain.token_map_data(made(), some())["pixels"]
    with pytest.raises(ValueError):  # other pixels than the shape says
        explain.draw_token_map(picture | {"pixels": pixels})
    pixels = explain.token_map_data(made(), some(2))["pixels"]
    figure = explain.draw_token_map(picture | {"shape": [2, 12, 12, 1], "pixels": pixels})
    assert titles(figure) == ["image\n2 patches", "block 5\n1–2 tokens"]


def test_what_is_written_down_is_json_and_is_all_that_a_picture_needs(tmp_path):
    """The picture of the JSON, drawn where neither torch nor a model is, has the same pixels."""
    picture = explain.token_map_data(made(PRUNE), some())
    path = tmp_path / "picture.json"
    path.write_text(json.dumps(picture))
    assert json.loads(path.read_text()) == picture and path.stat().st_size < 3_000
    code = f"""
import json, sys
from smallvit import explain
explain.draw_token_map(json.load(open({str(path)!r}))).savefig({str(tmp_path / "theirs.png")!r})
print("torch" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
    explain.draw_token_map(picture).savefig(tmp_path / "ours.png")
    assert (tmp_path / "ours.png").read_bytes() == (tmp_path / "theirs.png").read_bytes()


@pytest.mark.parametrize("channels", [1, 3])
def test_alone_a_patch_looks_as_it_is_shared_as_the_mean_and_gone_it_is_hatched(channels):
    images = some(1, channels)
    model = ViT((12, 12), channels, 2, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=6))
    picture = explain.token_map_data(model, images) | {"groups": [[[0, 1, 1, -1]]]}
    image, block = explain.draw_token_map(picture).axes
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


def test_lines_run_between_tokens_and_nowhere_else():
    import numpy as np

    groups = np.array([[0, 0, 2], [0, 4, 2]])
    lines = {tuple(map(tuple, line)) for line in explain.tokens.token_borders(groups).reshape(-1, 2, 2).tolist()}
    assert lines == {((1, 1), (2, 1)), ((1, 1), (1, 2)), ((2, 0), (2, 2))}


@pytest.mark.parametrize("blocks", [(), (3,), (-1, 0)])
def test_a_block_that_is_not_there_is_refused(blocks):
    with pytest.raises(ValueError, match="expected some of this model, from 0 to 2"):
        explain.token_map_data(made(), some(), blocks=blocks)


def test_images_that_no_eye_can_see_are_refused():
    model = ViT((12, 12), 2, 2, dim=16, depth=1, heads=2)
    with pytest.raises(ValueError, match=r"2 channels; expected gray \(1\)"):
        explain.token_map(model, some(1, 2))
