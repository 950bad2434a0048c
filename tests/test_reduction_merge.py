"""Merge (ToMe): equal to the paper; total size and weighted sum conserved; merging equal patches changes nothing."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import tiny_vit

from smallvit import Attention, LayerContext, MeanTokens, Merge, SequencePool
from smallvit.reduction.merge import merge_schedule

tiny = partial(tiny_vit, depth=3)


def merged_by_hand(x, size, key, prefix, r):
    """Bipartite soft matching of one image, one token at a time, after section 3.2 and appendix D of the paper."""
    n = len(x)
    sources = [i for i in range(prefix, n) if i % 2 == 0]
    targets = [i for i in range(prefix, n) if i % 2 == 1]

    def cosine(i, j):
        return (key[i] @ key[j]) / (key[i].norm() * key[j].norm())

    best = {i: max(targets, key=lambda j, i=i: cosine(i, j)) for i in sources}
    merged = sorted(sources, key=lambda i: -cosine(i, best[i]))[:r]
    groups = {j: [j] + [i for i in merged if best[i] == j] for j in targets}
    out = [(x[i], size[i]) for i in range(prefix)] + [(x[i], size[i]) for i in sources if i not in merged]
    for group in groups.values():
        total = sum(size[i] for i in group)
        out.append((sum(size[i] * x[i] for i in group) / total, total))
    return torch.stack([token for token, _ in out]), torch.stack([mass for _, mass in out])


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 23), prefix=st.integers(0, 3), r=st.integers(0, 14), seed=st.integers(0, 99), sized=st.booleans())
def test_merge_equals_the_paper_conserves_size_and_mass_and_keeps_the_prefix(n, prefix, r, seed, sized):
    n = n + prefix
    g = torch.Generator().manual_seed(seed)
    x, key = torch.randn(2, n, 6, generator=g, dtype=torch.float64), torch.randn(2, n, 4, generator=g, dtype=torch.float64)
    size = torch.randint(1, 5, (2, n), generator=g).double() if sized else None
    output, sizes = Merge(LayerContext(prefix=prefix), r=r)(x, size, lambda: key)
    merges = min(r, (n - prefix) // 2)
    if merges == 0:
        assert output is x and sizes is size
        return
    before = torch.ones(2, n, dtype=torch.float64) if size is None else size
    assert output.shape[1] == n - merges and torch.equal(output[:, :prefix], x[:, :prefix])
    assert torch.allclose(sizes.sum(1), before.sum(1))
    assert torch.allclose((output * sizes[..., None]).sum(1), (x * before[..., None]).sum(1))
    for image in range(2):
        tokens, masses = merged_by_hand(x[image], before[image], key[image], prefix, merges)
        assert torch.allclose(output[image], tokens, atol=1e-10) and torch.allclose(sizes[image], masses)
        changed = sizes[image] != (output[image][:, None] == x[image]).all(-1).to(torch.float64) @ before[image]
        assert changed.sum() <= merges  # tokens without a merge are bit for bit the same


@pytest.mark.parametrize("r", [1, 5, 9])
def test_merging_equal_tokens_is_exact(r):
    x, key = torch.randn(1, 1, 6).expand(2, 19, -1), torch.randn(1, 1, 4).expand(2, 19, -1)
    output, size = Merge(LayerContext(), r=r)(x, None, lambda: key)
    assert torch.equal(output, x[:, : 19 - r]) and size.sum() == 2 * 19


def test_every_input_token_is_in_exactly_one_output_token():
    """With one-hot tokens, an output token shows the shares of its members."""
    key, x = torch.randn(2, 20, 4), torch.eye(20).expand(2, -1, -1)
    output, size = Merge(LayerContext(dim=0), r=6)(x, None, lambda: key)
    assert torch.allclose(size[:, None] @ output, torch.ones(2, 1, 20)) and ((output > 0).sum(1) == 1).all()
    assert torch.equal((output > 0).sum(2).float(), size)


def test_key_of_length_zero_gives_no_nan():
    output, size = Merge(LayerContext(), r=4)(torch.randn(1, 9, 3), None, lambda: torch.zeros(1, 9, 2))
    assert output.isfinite().all() and size.sum() == 9


def test_without_class_token_the_remaining_sources_keep_the_order_of_the_image():
    x, key = torch.arange(12.0)[None, :, None], torch.randn(1, 12, 4)
    output, _ = Merge(LayerContext(prefix=0, class_token=False), r=2)(x, None, lambda: key)
    assert output[0, :4, 0].tolist() == sorted(output[0, :4, 0].tolist())  # see `Departs`: the authors keep the score order


class Unproportional(Attention):
    """Attention that counts a merged token once."""

    def forward(self, x, size=None, mask=None):
        return super().forward(x, None, mask)


@pytest.mark.parametrize("pool", [None, MeanTokens, SequencePool])
@pytest.mark.parametrize("attention, equal", [(Attention, True), (Unproportional, False)])
def test_merging_duplicates_changes_nothing_with_proportional_attention_only(attention, equal, pool):
    slots = dict(position=None, attention=attention, registers=1) | ({"pool": pool} if pool else {})
    plain, reduced = tiny(**slots).double(), tiny(**slots, reduction=partial(Merge, r=(18, 0, 0))).double()
    reduced.load_state_dict(plain.state_dict())
    left = torch.randn(2, 1, 12, 6, dtype=torch.float64)  # every patch is next to its copy
    x = left.unflatten(-1, (3, 2)).repeat_interleave(2, dim=-2).flatten(-2)
    tokens, size = reduced.tokens(x)
    prefix = len(plain.prefix)
    assert tokens.shape[1] == prefix + 18 and torch.equal(size[:, prefix:], torch.full((2, 18), 2.0, dtype=torch.float64))
    assert (plain(x) - reduced(x)).abs().max().lt(1e-10) == equal


@pytest.mark.parametrize("r", [3, 0.25, (6, 2, 1), 99])
def test_each_layer_leaves_the_number_of_tokens_of_the_paper(r):
    model, n = tiny(reduction=partial(Merge, r=r), registers=1), 38
    for layer, block in enumerate(model.blocks):
        requested = int(r * (n - 2)) if isinstance(r, float) else r[layer] if isinstance(r, tuple) else r
        left = n - min(requested, (n - 2) // 2)
        assert block.reduction.left(n) == left < n
        n = left
    tokens, size = model.tokens(torch.randn(2, 1, 12, 12))
    assert tokens.shape[1] == n == size.shape[1] and torch.equal(size.sum(1), torch.full((2,), 38.0))


def test_schedules_equal_the_paper():
    assert merge_schedule(16, -1.0, 12) == [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    assert merge_schedule(8, 0.0, 12) == [8] * 12 and merge_schedule(8, 1.0, 1) == [8] and merge_schedule((1, 2), 0.0, 2) == [1, 2]
    assert merge_schedule(15, 1.0, 12)[-1] == 29, "as in the authors' code, in which 30 is rounded down"
    assert merge_schedule((np.int64(3), np.float32(0.25)), 0.0, 2) == [3, 0.25] and merge_schedule(np.int32(3), 0.0, 2) == [3, 3]
    assert merge_schedule(8, 1.0, 5) == [0, 4, 8, 12, 16] and merge_schedule(0.25, 0.0, 3) == [0.25] * 3


@pytest.mark.parametrize(
    ("options", "key_words"),
    [
        (dict(r=-1), "r is -1; expected a number of merges"),
        (dict(r=0.6), "r is 0.6; expected"),
        (dict(r=(1, 2)), "got 2 values of r for 3 layers"),
        (dict(r=1, inflect=2.0), "inflect is 2.0"),
        (dict(r=0.2, inflect=-1.0), "inflect=-1.0 spreads a number of merges and r is 0.2; expected an integer"),
        (dict(r="4"), "r is '4'; expected a number of merges"),
        (dict(r=float("nan")), "r is nan; expected a number of merges"),
    ],
)
def test_bad_input_is_refused(options, key_words):
    with pytest.raises(ValueError, match=key_words):
        tiny(reduction=partial(Merge, **options))


def test_result_of_a_function_in_its_place_is_explained():
    x = torch.randn(2, 17, 8)
    with pytest.raises(ValueError, match=r"Merge got a Tensor as key; pass the function out.key of .*, not its result"):
        Merge(LayerContext(patches=16), r=2)(x, None, x)


@pytest.mark.parametrize(("r", "merges"), [(0.29, 29), (0.35, 35), (0.5, 50), (0.299, 29)])
def test_fraction_of_the_patches_is_not_cut_by_rounding(r, merges):
    assert Merge(LayerContext(patches=100), r=r).count(101) == merges
