"""LearnedThresholds (LTMP): equal to the paper, and one function in training, in batches and image by image."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import tiny_vit

from smallvit import initialize
from smallvit.attention import Attention, LocalityAttention
from smallvit.pooling import ClassToken, MeanTokens, SequencePool
from smallvit.reduction import LayerContext, LearnedThresholds, Merge

tiny = partial(tiny_vit, depth=3)


def sharpen(model):
    """Give the model attention that is far from uniform."""
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.attention.parameters():
                parameter.normal_(std=0.3)
    return model


# One module


def reduced_by_hand(x, size, key, importance, prefix, merge, prune):
    """LTMP section 3 for one image, one token at a time: merge similar patches, then prune unimportant ones."""
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
def test_reduction_of_every_image_equals_the_paper(patches, prefix, merge, prune, seed, sized):
    n, g = prefix + patches, torch.Generator().manual_seed(seed)
    x, key = torch.randn(3, n, 5, generator=g).double(), torch.randn(3, n, 3, generator=g).double()
    size = torch.randint(1, 5, (3, n), generator=g).double() if sized else None
    saliency = torch.rand(3, n, generator=g).double().softmax(-1)
    module = LearnedThresholds(LayerContext(prefix=prefix, patches=patches), merge=merge, prune=prune).double().eval()
    output, sizes = module(x, size, lambda: key, lambda queries: saliency)
    after = torch.ones(output.shape[:2]).double() if sizes is None else sizes
    assert output.shape[1] == (after > 0).sum(1).max()
    masked, masked_sizes = module.train()(x, size, lambda: key, lambda queries: saliency)
    assert masked.shape == x.shape
    for image in range(3):
        before = torch.ones(n) if size is None else size[image]
        tokens, masses = reduced_by_hand(x[image], before, key[image], saliency[image] * n, prefix, merge, prune)
        present = after[image] > 0
        assert present.sum() == len(tokens)
        assert torch.allclose(output[image, present], tokens, atol=1e-12) and torch.allclose(after[image, present], masses)
        assert torch.equal(masked[image, masked_sizes[image] > 0], output[image, present])


def test_most_important_patch_always_stays():
    x, saliency = torch.randn(2, 6, 4), torch.tensor([[0.9, 0.1, 0.3, 0.2, 0.1, 0.0], [0.9, 0.0, 0.1, 0.1, 0.1, 0.4]])
    module = LearnedThresholds(LayerContext(patches=5), merge=None, prune=1e3).eval()
    output, _ = module(x, None, lambda: x, lambda queries: saliency)
    assert torch.equal(output, torch.stack([x[0, [0, 2]], x[1, [0, 5]]]))


@pytest.mark.parametrize("patches", [16, 196])
def test_unit_of_the_prune_threshold_is_the_mean_importance(patches):
    n = patches + 1
    x, saliency = torch.randn(1, n, 4), torch.full((1, n), 1 / n)
    for prune, left in ((0.99, n), (1.01, 2)):
        module = LearnedThresholds(LayerContext(patches=patches), merge=None, prune=prune).eval()
        assert module(x, None, lambda: x, lambda q: saliency)[0].shape[1] == left


def test_exact_duplicates_do_not_merge_at_threshold_1():
    module, saliency = LearnedThresholds(LayerContext(patches=32), merge=1.0).eval(), torch.full((4, 33), 1 / 33)
    for seed in range(20):  # among many keys some have a cosine to themselves that rounds above 1
        g = torch.Generator().manual_seed(seed)
        x, key = torch.randn(4, 33, 4, generator=g), torch.randn(4, 1, 7, generator=g).expand(-1, 33, -1)
        output, size = module(x, None, lambda key=key: key, lambda queries: saliency)
        assert torch.equal(output, x) and size is None


# Straight through


def slope(value, threshold, temperature):
    soft = 1 / (1 + math.exp(-(value - threshold) / temperature))
    return soft * (1 - soft) / temperature


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_decisions_are_hard_with_the_gradient_of_a_sigmoid(temperature):
    module = LearnedThresholds(LayerContext(), temperature=temperature)
    value = torch.linspace(-1, 2, 31).requires_grad_()
    threshold = torch.tensor(0.45, requires_grad=True)
    decided = module.above_threshold(value, threshold)
    assert decided.tolist() == [float(v > 0.45) for v in value.tolist()]
    decided.sum().backward()
    slopes = torch.tensor([slope(v, 0.45, temperature) for v in value.tolist()])
    assert torch.allclose(value.grad, slopes, atol=1e-5) and torch.allclose(threshold.grad, -slopes.sum(), rtol=1e-4)


def test_thresholds_get_the_gradient_of_all_their_decisions():
    n, temperature = 9, 0.2
    module = LearnedThresholds(LayerContext(patches=n - 1), merge=0.5, prune=0.8, temperature=temperature).train()
    x, key, saliency, kept = torch.randn(1, n, 4), torch.randn(1, n, 3), torch.rand(1, n).softmax(-1), []
    module.kept.register_forward_hook(lambda _, given, out: kept.append(out))
    module(x, None, lambda: key, lambda queries: saliency)
    assert set(kept[0].unique().tolist()) == {0.0, 1.0} and kept[0][0, 0] == 1
    kept[0].sum().backward()

    unit = torch.nn.functional.normalize(key[0], dim=-1)
    cosine, important = unit @ unit.T, (saliency[0] * n).tolist()
    best = {i: max((1, 3, 5, 7), key=lambda j, i=i: cosine[i, j]) for i in (2, 4, 6, 8)}
    joins = [i for i in best if cosine[i, best[i]] > 0.5]
    assert 0 < len(joins) < 4
    highest = {j: max([important[j]] + [important[i] for i in joins if best[i] == j]) for j in range(1, n)}
    free = [j for j in highest if j != max((i for i in highest if i not in joins), key=highest.get)]
    pruning = {j: slope(highest[j], 0.8, temperature) for j in free if j not in joins}
    assert module.prune.grad.item() == pytest.approx(-sum(pruning.values()), rel=1e-4)
    by_merging = sum(slope(cosine[i, best[i]].item(), 0.5, temperature) * (i not in free or highest[i] > 0.8) for i in best)
    assert module.merge.grad.item() == pytest.approx(by_merging, rel=1e-4)


def test_patch_without_a_partner_gives_the_threshold_no_gradient():
    module = LearnedThresholds(LayerContext(patches=1), merge=0.0, temperature=2.0).train()
    x, kept = torch.randn(1, 2, 4), []
    module.kept.register_forward_hook(lambda _, given, out: kept.append(out))
    module(x, None, lambda: x, lambda queries: torch.full((1, 2), 0.5))
    kept[0].sum().backward()
    assert module.merge.grad == 0


def test_loss_reaches_every_threshold():
    model = sharpen(tiny(pool=MeanTokens, reduction=partial(LearnedThresholds, merge=0.5, prune=0.8, temperature=0.5))).train()
    model(torch.randn(4, 1, 12, 12)).square().sum().backward()
    for block in model.blocks:
        assert block.reduction.prune.grad.abs() > 0 and block.reduction.merge.grad.abs() > 0


# One function in training and inference


@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("pool, registers", [(ClassToken, 0), (ClassToken, 2), (MeanTokens, 1), (SequencePool, 3)])
def test_merging_all_possible_equals_merge_with_its_largest_r(attention, pool, registers):
    slots = dict(attention=attention, pool=pool, registers=registers)
    merged = sharpen(tiny(**slots, reduction=partial(Merge, r=999))).eval()
    model = tiny(**slots, reduction=partial(LearnedThresholds, merge=-1.0)).eval()
    model.load_state_dict(merged.state_dict(), strict=False)
    x = torch.randn(3, 1, 12, 12)
    (ours, sizes), (theirs, counts) = model.tokens(x), merged.tokens(x)
    assert torch.equal(sizes, counts) and (ours - theirs).abs().max() < 1e-5  # the same groups, in the same order
    assert (model.train()(x) - merged(x)).abs().max() < 1e-5


@settings(deadline=None, max_examples=40, derandomize=True)  # rounding decides for a value that equals a threshold
@given(
    seed=st.integers(0, 10**6),
    merges=st.booleans(),
    registers=st.integers(0, 2),
    pool=st.sampled_from([ClassToken, MeanTokens, SequencePool]),
    attention=st.sampled_from([Attention, LocalityAttention]),
)
@pytest.mark.slow
def test_training_batch_inference_and_single_images_agree(seed, merges, registers, pool, attention):
    torch.manual_seed(seed)
    reduction = partial(LearnedThresholds, merge=0.5 if merges else None)
    model = sharpen(tiny(pool=pool, registers=registers, attention=attention, reduction=reduction))
    with torch.no_grad():
        for block in model.blocks:
            block.reduction.prune.uniform_(0.2, 1.1)
            if merges:
                block.reduction.merge.uniform_(-0.5, 1)
    x, p = torch.randn(4, 1, 12, 12), len(model.prefix)
    with torch.no_grad():
        (batch, sizes), (without_gradient, _) = model.eval().tokens(x), model.train().tokens(x)
        logits, each = model.eval()(x), torch.cat([model(image[None]) for image in x])
    trained, masses = model.train().tokens(x)
    assert masses.requires_grad and trained.shape[1] == p + 36
    assert sizes is None or batch.shape[1] == (sizes > 0).sum(1).max() < p + 36
    assert (model(x) - logits).abs().max() < 1e-5 and (each - logits).abs().max() < 1e-5
    for image in range(4):
        present = torch.ones(batch.shape[1], dtype=torch.bool) if sizes is None else sizes[image] > 0
        for masked in (trained, without_gradient):
            assert (masked[image, masses[image] > 0] - batch[image, present]).abs().max() < 1e-5


def test_images_of_one_batch_keep_different_numbers_of_tokens():
    model = sharpen(tiny(reduction=partial(LearnedThresholds, merge=0.6, prune=0.9))).eval()
    _, size = model.tokens(torch.randn(6, 1, 12, 12))
    assert len(set((size > 0).sum(1).tolist())) > 1


# The thresholds


def test_thresholds_are_two_scalars_per_block_with_the_given_initial_values():
    model = tiny(reduction=partial(LearnedThresholds, merge=0.8, prune=0.25))
    learned = {name: value.item() for name, value in initialize(model, 3).named_parameters() if ".reduction." in name}
    assert len(learned) == 6
    assert all(value == pytest.approx(0.8 if name.endswith("merge") else 0.25) for name, value in learned.items())
    assert [name for name, _ in LearnedThresholds(LayerContext(), merge=None).named_parameters()] == ["prune"]


def test_clamp_clips_the_thresholds_to_their_ranges():
    module = LearnedThresholds(LayerContext(patches=16))
    for prune, merge, after in ((-1.0, -0.5, (0.0, 0.0)), (99.0, 1.5, (17.0, 1.0)), (0.5, 0.5, (0.5, 0.5))):
        with torch.no_grad():
            module.prune.fill_(prune)
            module.merge.fill_(merge)
        module.clamp()
        assert (module.prune.item(), module.merge.item()) == after


@pytest.mark.parametrize(
    ("options", "key_words"),
    [
        (dict(merge=1.5), "merge is 1.5; expected a cosine from -1"),
        (dict(merge=-1.5), "merge is -1.5"),
        (dict(prune=-0.1), "got prune=-0.1, temperature=0.1; expected prune of at least 0"),
        (dict(temperature=0), "temperature=0"),
    ],
)
def test_bad_input_is_refused(options, key_words):
    with pytest.raises(ValueError, match=key_words):
        tiny(reduction=partial(LearnedThresholds, **options))
