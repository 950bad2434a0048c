"""LearnedThresholds is LTMP: exact to the paper, and one function in training, in batches and image by image."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smallvit import (
    Attention,
    ClassToken,
    LayerContext,
    LearnedThresholds,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    SequencePool,
    ViT,
    initialize,
)

TINY = partial(ViT, (12, 12), 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def peaked(model):
    """The model with attention that is far from uniform."""
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.attention.parameters():
                parameter.normal_(std=0.3)
    return model


# One module


def reduced_by_hand(x, size, key, importance, prefix, merge, prune):
    """LTMP section 3, one image, one token at a time: merge what is alike, then prune what nobody looks at."""
    n = len(x)
    sources = [i for i in range(prefix, n) if i % 2 == 0]
    targets = [i for i in range(prefix, n) if i % 2 == 1]

    def cosine(i, j):
        return float(key[i] @ key[j]) / float(key[i].norm() * key[j].norm())

    joins = {}
    for i in sources if merge is not None and targets else []:
        best = max(targets, key=lambda j, i=i: cosine(i, j))
        if cosine(i, best) > merge:
            joins[i] = best
    tokens, masses, important = {}, {}, {}
    for j in range(n):
        if j not in joins:
            group = [j] + [i for i in joins if joins[i] == j]
            masses[j] = sum(float(size[i]) for i in group)
            tokens[j] = sum(float(size[i]) * x[i] for i in group) / masses[j]
            important[j] = max(float(importance[i]) for i in group)
    patches = [j for j in tokens if j >= prefix]
    top = max(patches, key=important.get)
    left = [j for j in tokens if j < prefix or j == top or important[j] > prune]
    return torch.stack([tokens[j] for j in left]), torch.tensor([masses[j] for j in left], dtype=x.dtype)


@settings(deadline=None, max_examples=60)
@given(
    patches=st.integers(1, 15),
    prefix=st.integers(0, 3),
    merge=st.sampled_from([None, -1.0, 0.0, 0.3, 0.7, 1.0]),
    prune=st.sampled_from([0.0, 0.7, 0.9, 1.1, 99.0]),
    seed=st.integers(0, 999),
    sized=st.booleans(),
)
def test_every_image_is_reduced_as_in_the_paper(patches, prefix, merge, prune, seed, sized):
    n, g = prefix + patches, torch.Generator().manual_seed(seed)
    x, key = torch.randn(3, n, 5, generator=g).double(), torch.randn(3, n, 3, generator=g).double()
    size = torch.randint(1, 5, (3, n), generator=g).double() if sized else None
    seen = torch.rand(3, n, generator=g).double().softmax(-1)
    module = LearnedThresholds(LayerContext(prefix=prefix, patches=patches), merge=merge, prune=prune).double().eval()
    got, sizes = module(x, size, lambda: key, lambda queries: seen)
    after = torch.ones(got.shape[:2]).double() if sizes is None else sizes
    assert got.shape[1] == (after > 0).sum(1).max()
    for image in range(3):
        before = torch.ones(n) if size is None else size[image]
        tokens, masses = reduced_by_hand(x[image], before, key[image], seen[image] * n, prefix, merge, prune)
        there = after[image] > 0
        assert there.sum() == len(tokens)
        assert torch.allclose(got[image, there], tokens, atol=1e-12) and torch.allclose(after[image, there], masses)
    masked, theirs = module.train()(x, size, lambda: key, lambda queries: seen)
    assert masked.shape == x.shape
    for image in range(3):
        assert torch.equal(masked[image, theirs[image] > 0], got[image, after[image] > 0])


def test_the_most_important_patch_stays_whatever_the_threshold():
    x, seen = torch.randn(2, 6, 4), torch.tensor([[0.9, 0.1, 0.3, 0.2, 0.1, 0.0], [0.9, 0.0, 0.1, 0.1, 0.1, 0.4]])
    got, _ = LearnedThresholds(LayerContext(patches=5), merge=None, prune=1e3).eval()(x, None, lambda: x, lambda queries: seen)
    assert torch.equal(got, torch.stack([x[0, [0, 2]], x[1, [0, 5]]]))


@pytest.mark.parametrize("patches", [16, 196])
def test_the_unit_of_the_prune_threshold_is_the_mean_importance(patches):
    n = patches + 1
    x, seen = torch.randn(1, n, 4), torch.full((1, n), 1 / n)
    for prune, left in ((0.99, n), (1.01, 2)):
        got, _ = LearnedThresholds(LayerContext(patches=patches), merge=None, prune=prune).eval()(x, None, lambda: x, lambda q: seen)
        assert got.shape[1] == left


def test_exact_duplicates_do_not_merge_at_1():
    for seed in range(20):  # among many keys some have a cosine to themselves that rounds above 1
        g = torch.Generator().manual_seed(seed)
        x, key = torch.randn(4, 33, 4, generator=g), torch.randn(4, 1, 7, generator=g).expand(-1, 33, -1)
        seen = torch.full((4, 33), 1 / 33)
        got, size = LearnedThresholds(LayerContext(patches=32), merge=1.0).eval()(
            x, None, lambda key=key: key, lambda q, seen=seen: seen
        )
        assert torch.equal(got, x) and size is None


# Straight through


def slope(value, threshold, temperature):
    soft = 1 / (1 + math.exp(-(value - threshold) / temperature))
    return soft * (1 - soft) / temperature


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_decisions_are_hard_and_their_gradient_is_that_of_the_sigmoid(temperature):
    module = LearnedThresholds(LayerContext(), temperature=temperature)
    value = torch.linspace(-1, 2, 31).requires_grad_()
    threshold = torch.tensor(0.45, requires_grad=True)
    decided = module.beyond(value, threshold)
    assert decided.tolist() == [float(v > 0.45) for v in value.tolist()]
    decided.sum().backward()
    slopes = torch.tensor([slope(v, 0.45, temperature) for v in value.tolist()])
    assert torch.allclose(value.grad, slopes, atol=1e-5) and torch.allclose(threshold.grad, -slopes.sum(), rtol=1e-4)


def test_the_thresholds_get_the_gradient_of_every_decision_they_made():
    n, temperature = 9, 0.2
    module = LearnedThresholds(LayerContext(patches=n - 1), merge=0.5, prune=0.8, temperature=temperature).train()
    x, key, seen, kept = torch.randn(1, n, 4), torch.randn(1, n, 3), torch.rand(1, n).softmax(-1), []
    module.kept.register_forward_hook(lambda _, given, out: kept.append(out))
    module(x, None, lambda: key, lambda queries: seen)
    assert set(kept[0].unique().tolist()) == {0.0, 1.0} and kept[0][0, 0] == 1
    kept[0].sum().backward()

    unit = torch.nn.functional.normalize(key[0], dim=-1)
    cosine, important = unit @ unit.T, (seen[0] * n).tolist()
    best = {i: max((1, 3, 5, 7), key=lambda j, i=i: cosine[i, j]) for i in (2, 4, 6, 8)}
    joins = [i for i in best if cosine[i, best[i]] > 0.5]
    assert 0 < len(joins) < 4
    highest = {j: max([important[j]] + [important[i] for i in joins if best[i] == j]) for j in range(1, n)}
    free = [j for j in highest if j != max((i for i in highest if i not in joins), key=highest.get)]
    pruning = {j: slope(highest[j], 0.8, temperature) for j in free if j not in joins}
    assert module.prune.grad.item() == pytest.approx(-sum(pruning.values()), rel=1e-4)
    by_merging = sum(slope(cosine[i, best[i]].item(), 0.5, temperature) * (i not in free or highest[i] > 0.8) for i in best)
    assert module.merge.grad.item() == pytest.approx(by_merging, rel=1e-4)


def test_the_loss_reaches_every_threshold_that_somebody_reads():
    model = peaked(TINY(pool=MeanTokens, reduction=partial(LearnedThresholds, merge=0.5, prune=0.8, temperature=0.5))).train()
    model(torch.randn(4, 1, 12, 12)).square().sum().backward()
    for block in model.blocks:
        assert block.reduction.prune.grad.abs() > 0 and block.reduction.merge.grad.abs() > 0


# One function


@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("pool, registers", [(ClassToken, 0), (ClassToken, 2), (MeanTokens, 1), (SequencePool, 3)])
def test_merging_all_one_can_is_merge_with_its_largest_r(attention, pool, registers):
    slots = dict(attention=attention, pool=pool, registers=registers)
    merged = peaked(TINY(**slots, reduction=partial(Merge, r=999))).eval()
    model = TINY(**slots, reduction=partial(LearnedThresholds, merge=-1.0)).eval()
    model.load_state_dict(merged.state_dict(), strict=False)
    x = torch.randn(3, 1, 12, 12)
    (ours, sizes), (theirs, counts) = model.tokens(x), merged.tokens(x)
    assert torch.equal(sizes, counts) and (ours - theirs).abs().max() < 1e-5  # the same groups, in the same order
    assert (model.train()(x) - merged(x)).abs().max() < 1e-5


@settings(deadline=None, max_examples=40, derandomize=True)  # a threshold within a rounding of a value may fall either way
@given(
    seed=st.integers(0, 10**6),
    merges=st.booleans(),
    registers=st.integers(0, 2),
    pool=st.sampled_from([ClassToken, MeanTokens, SequencePool]),
    attention=st.sampled_from([Attention, LocalityAttention]),
)
def test_training_a_batch_and_an_image_are_one_function(seed, merges, registers, pool, attention):
    torch.manual_seed(seed)
    reduction = partial(LearnedThresholds, merge=0.5 if merges else None)
    model = peaked(TINY(pool=pool, registers=registers, attention=attention, reduction=reduction))
    with torch.no_grad():
        for block in model.blocks:
            block.reduction.prune.uniform_(0.2, 1.1)
            if merges:
                block.reduction.merge.uniform_(-0.5, 1)
    x, p = torch.randn(4, 1, 12, 12), len(model.prefix)
    with torch.no_grad():
        (batch, sizes), (unlearned, _) = model.eval().tokens(x), model.train().tokens(x)
        logits, each = model.eval()(x), torch.cat([model(image[None]) for image in x])
    trained, masses = model.train().tokens(x)
    assert masses.requires_grad and trained.shape[1] == p + 36
    assert sizes is None or batch.shape[1] == (sizes > 0).sum(1).max() < p + 36
    assert (model(x) - logits).abs().max() < 1e-5 and (each - logits).abs().max() < 1e-5
    for image in range(4):
        there = torch.ones(batch.shape[1], dtype=torch.bool) if sizes is None else sizes[image] > 0
        for masked in (trained, unlearned):
            assert (masked[image, masses[image] > 0] - batch[image, there]).abs().max() < 1e-5


def test_images_of_one_batch_keep_different_numbers_of_tokens():
    model = peaked(TINY(reduction=partial(LearnedThresholds, merge=0.6, prune=0.9))).eval()
    _, size = model.tokens(torch.randn(6, 1, 12, 12))
    assert len(set((size > 0).sum(1).tolist())) > 1


@pytest.mark.parametrize("training, by", [(False, 0), (True, 1e-4)])
@pytest.mark.parametrize("merge", [1.0, None])
def test_off_is_the_plain_model(training, by, merge):
    plain, model = peaked(TINY()), TINY(reduction=partial(LearnedThresholds, merge=merge, prune=0.0))
    model.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(4, 1, 12, 12)
    assert (model.train(training)(x) - plain.train(training)(x)).abs().max() <= by


# The thresholds themselves


def test_thresholds_start_where_they_are_told_for_every_seed_and_are_two_scalars_a_block():
    model = TINY(reduction=partial(LearnedThresholds, merge=0.8, prune=0.25))
    learned = {name: value.item() for name, value in initialize(model, 3).named_parameters() if ".reduction." in name}
    assert len(learned) == 6
    assert all(value == pytest.approx(0.8 if name.endswith("merge") else 0.25) for name, value in learned.items())
    assert [name for name, _ in LearnedThresholds(LayerContext(), merge=None).named_parameters()] == ["prune"]


def test_clamp_puts_them_back_to_where_they_mean_something():
    module = LearnedThresholds(LayerContext(patches=16))
    for prune, merge, after in ((-1.0, -0.5, (0.0, 0.0)), (99.0, 1.5, (17.0, 1.0)), (0.5, 0.5, (0.5, 0.5))):
        with torch.no_grad():
            module.prune.fill_(prune)
            module.merge.fill_(merge)
        module.clamp()
        assert (module.prune.item(), module.merge.item()) == after


@pytest.mark.parametrize(
    "knobs, said",
    [
        (dict(merge=1.5), "merge is 1.5; expected a cosine from -1 (merge all you can) to 1 (nothing), or None"),
        (dict(merge=-1.5), "merge is -1.5"),
        (dict(prune=-0.1), "got prune=-0.1, temperature=0.1; expected 0 or more, and more than 0"),
        (dict(temperature=0), "temperature=0"),
    ],
)
def test_bad_input_is_named(knobs, said):
    with pytest.raises(ValueError) as raised:
        TINY(reduction=partial(LearnedThresholds, **knobs))
    assert said in str(raised.value)
