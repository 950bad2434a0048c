"""Merge is ToMe: exact to the paper, sizes and their weighted sum conserved, equal patches merged without a trace."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smallvit import Attention, LayerContext, MeanTokens, Merge, PatchEmbed, SequencePool, ViT
from smallvit.reduction.merge import schedule

TINY = partial(ViT, (12, 12), 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))


def merged_by_hand(x, size, key, prefix, r):
    """Bipartite soft matching, one image, one token at a time, from the paper's section 3.2 and appendix D."""
    n = len(x)
    sources = [i for i in range(prefix, n) if i % 2 == 0]
    targets = [i for i in range(prefix, n) if i % 2 == 1]

    def cosine(i, j):
        return (key[i] @ key[j]) / (key[i].norm() * key[j].norm())

    best = {i: max(targets, key=lambda j, i=i: cosine(i, j)) for i in sources}
    gone = sorted(sources, key=lambda i: -cosine(i, best[i]))[:r]
    groups = {j: [j] + [i for i in gone if best[i] == j] for j in targets}
    out = [(x[i], size[i]) for i in range(prefix)] + [(x[i], size[i]) for i in sources if i not in gone]
    for group in groups.values():
        total = sum(size[i] for i in group)
        out.append((sum(size[i] * x[i] for i in group) / total, total))
    return torch.stack([token for token, _ in out]), torch.stack([mass for _, mass in out])


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 23), prefix=st.integers(0, 3), r=st.integers(0, 14), seed=st.integers(0, 99), sized=st.booleans())
def test_a_merge_is_the_papers_conserves_size_and_mass_and_leaves_the_prefix_alone(n, prefix, r, seed, sized):
    n = n + prefix
    g = torch.Generator().manual_seed(seed)
    x, key = torch.randn(2, n, 6, generator=g, dtype=torch.float64), torch.randn(2, n, 4, generator=g, dtype=torch.float64)
    size = torch.randint(1, 5, (2, n), generator=g).double() if sized else None
    got, sizes = Merge(LayerContext(prefix=prefix), r=r)(x, size, lambda: key)
    done = min(r, (n - prefix) // 2)
    if done == 0:
        assert got is x and sizes is size
        return
    given_size = torch.ones(2, n, dtype=torch.float64) if size is None else size
    assert got.shape[1] == n - done and torch.equal(got[:, :prefix], x[:, :prefix])
    assert torch.allclose(sizes.sum(1), given_size.sum(1))
    assert torch.allclose((got * sizes[..., None]).sum(1), (x * given_size[..., None]).sum(1))
    for image in range(2):
        tokens, masses = merged_by_hand(x[image], given_size[image], key[image], prefix, done)
        assert torch.allclose(got[image], tokens, atol=1e-10) and torch.allclose(sizes[image], masses)
        joined = sizes[image] != (got[image][:, None] == x[image]).all(-1).to(torch.float64) @ given_size[image]
        assert joined.sum() <= done  # what nothing joined is bit for bit what it was


@pytest.mark.parametrize("r", [1, 5, 9])
def test_merging_equal_tokens_is_exact(r):
    x, key = torch.randn(1, 1, 6).expand(2, 19, -1), torch.randn(1, 1, 4).expand(2, 19, -1)
    got, size = Merge(LayerContext(), r=r)(x, None, lambda: key)
    assert torch.equal(got, x[:, : 19 - r]) and size.sum() == 2 * 19


def test_every_token_that_came_is_in_exactly_one_that_left():
    """With one channel for each token that came, a token that left shows its members, each by its share."""
    key, came = torch.randn(2, 20, 4), torch.eye(20).expand(2, -1, -1)
    got, size = Merge(LayerContext(dim=0), r=6)(came, None, lambda: key)
    assert torch.allclose(size[:, None] @ got, torch.ones(2, 1, 20)) and ((got > 0).sum(1) == 1).all()
    assert torch.equal((got > 0).sum(2).float(), size)


def test_a_key_of_zero_length_is_no_nan():
    got, size = Merge(LayerContext(), r=4)(torch.randn(1, 9, 3), None, lambda: torch.zeros(1, 9, 2))
    assert got.isfinite().all() and size.sum() == 9


class Unproportional(Attention):
    """Attention that counts a merged token once."""

    def forward(self, x, size=None, mask=None):
        return super().forward(x, None, mask)


@pytest.mark.parametrize("pool", [None, MeanTokens, SequencePool])
@pytest.mark.parametrize("attention, equal", [(Attention, True), (Unproportional, False)])
def test_merging_duplicates_changes_nothing_with_proportional_attention_and_only_with_it(attention, equal, pool):
    torch.manual_seed(0)
    slots = dict(position=None, attention=attention, registers=1) | ({"pool": pool} if pool else {})
    plain, reduced = TINY(**slots).double(), TINY(**slots, reduction=partial(Merge, r=(18, 0, 0))).double()
    reduced.load_state_dict(plain.state_dict())
    left = torch.randn(2, 1, 12, 6, dtype=torch.float64)  # every patch stands beside its copy
    x = left.unflatten(-1, (3, 2)).repeat_interleave(2, dim=-2).flatten(-2)
    tokens, size = reduced.tokens(x)
    prefix = len(plain.prefix)
    assert tokens.shape[1] == prefix + 18 and torch.equal(size[:, prefix:], torch.full((2, 18), 2.0, dtype=torch.float64))
    assert (plain(x) - reduced(x)).abs().max().lt(1e-10) == equal


@pytest.mark.parametrize("r", [3, 0.25, (6, 2, 1), 99])
def test_a_model_has_the_tokens_that_the_paper_says(r):
    model, n = TINY(reduction=partial(Merge, r=r), registers=1), 38
    for layer, block in enumerate(model.blocks):
        wanted = int(r * (n - 2)) if isinstance(r, float) else r[layer] if isinstance(r, tuple) else r
        left = n - min(wanted, (n - 2) // 2)
        assert block.reduction.left(n) == left < n
        n = left
    tokens, size = model.tokens(torch.randn(2, 1, 12, 12))
    assert tokens.shape[1] == n == size.shape[1] and torch.equal(size.sum(1), torch.full((2,), 38.0))


def test_schedules_are_the_papers():
    assert schedule(16, -1.0, 12) == [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    assert schedule(8, 0.0, 12) == [8] * 12 and schedule(8, 1.0, 1) == [8] and schedule((1, 2), 0.0, 2) == [1, 2]
    assert schedule(8, 1.0, 5) == [0, 4, 8, 12, 16] and schedule(0.25, 0.0, 3) == [0.25] * 3


@pytest.mark.parametrize(
    "knobs, said",
    [
        (dict(r=-1), "r is -1; expected a number of merges from 0 on"),
        (dict(r=0.6), "r is 0.6; expected"),
        (dict(r=(1, 2)), "got 2 values of r for 3 layers"),
        (dict(r=1, inflect=2.0), "inflect is 2.0"),
        (dict(r=0.2, inflect=-1.0), "inflect=-1.0 spreads a number of merges and r is 0.2; expected a whole number"),
        (dict(r="4"), "r is '4'; expected a number of merges"),
        (dict(r=float("nan")), "r is nan; expected a number of merges"),
    ],
)
def test_bad_schedules_are_refused(knobs, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        TINY(reduction=partial(Merge, **knobs))
