"""Reduction: exact to the paper, sizes conserved, prefix tokens untouched, and off when off."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smallvit import Attention, LocalityAttention, MeanTokens, Merge, PatchEmbed, ViT
from smallvit.reduction import schedule

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
    got, sizes = Merge(0, 1, prefix, r=r)(x, size, lambda: key)
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


@pytest.mark.parametrize("pool", [MeanTokens, None])
@pytest.mark.parametrize("off", [Merge, partial(Merge, r=0.0), partial(Merge, r=(0, 0, 0))])
def test_off_is_the_plain_model_bit_for_bit(off, pool):
    knobs = {"pool": pool} if pool else {}
    torch.manual_seed(0)
    plain = TINY(**knobs)
    reduced = TINY(reduction=off, **knobs)
    reduced.load_state_dict(plain.state_dict())
    x = torch.randn(3, 1, 12, 12)
    assert torch.equal(reduced(x), plain(x))


class Unproportional(Attention):
    """Attention that counts a merged token once."""

    def forward(self, x, size=None, mask=None):
        return super().forward(x, None, mask)


@pytest.mark.parametrize("attention, equal", [(Attention, True), (Unproportional, False)])
def test_merging_duplicates_changes_nothing_with_proportional_attention_and_only_with_it(attention, equal):
    torch.manual_seed(0)
    plain = TINY(position=None, attention=attention, registers=1).double()
    reduced = TINY(position=None, attention=attention, registers=1, reduction=partial(Merge, r=(18, 0, 0))).double()
    reduced.load_state_dict(plain.state_dict())
    left = torch.randn(2, 1, 12, 6, dtype=torch.float64)  # every patch stands beside its copy
    x = left.unflatten(-1, (3, 2)).repeat_interleave(2, dim=-2).flatten(-2)
    tokens, size = reduced.tokens(x)
    assert tokens.shape[1] == 2 + 18 and torch.equal(size[:, 2:], torch.full((2, 18), 2.0, dtype=torch.float64))
    assert (plain(x) - reduced(x)).abs().max().lt(1e-10) == equal


@pytest.mark.parametrize("r", [3, 0.25, (6, 2, 1)])
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduced_model_trains_and_has_the_tokens_that_it_says(r, attention, dtype):
    torch.manual_seed(0)
    model = TINY(reduction=partial(Merge, r=r), attention=attention, pool=MeanTokens, registers=2)
    expected = 36 + 2
    for block in model.blocks:
        expected -= block.reduction.count(expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out, (tokens, size) = model(torch.randn(2, 1, 12, 12)), model.tokens(torch.randn(2, 1, 12, 12))
    out.float().sum().backward()
    assert tokens.shape[1] == expected < 38 and torch.equal(size.sum(1), torch.full((2,), 38.0))
    assert all(p.grad is not None and p.grad.isfinite().all() for name, p in model.named_parameters() if name != "norm.bias")


def test_schedules_are_the_papers():
    assert schedule(16, -1.0, 12) == [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    assert schedule(8, 0.0, 12) == [8] * 12 and schedule(8, 1.0, 1) == [8] and schedule((1, 2), 0.0, 2) == [1, 2]


@pytest.mark.parametrize(
    "knobs, said",
    [
        (dict(r=-1), "r is -1; expected a number of merges from 0 on"),
        (dict(r=0.6), "r is 0.6; expected"),
        (dict(r=(1, 2)), "got 2 values of r for 3 layers"),
        (dict(r=1, inflect=2.0), "inflect is 2.0"),
    ],
)
def test_bad_schedules_are_refused(knobs, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        TINY(reduction=partial(Merge, **knobs))


def test_an_attention_without_keys_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="this attention gives none"):
        Merge(0, 1, 0, r=1)(torch.randn(1, 4, 2), None, None)
