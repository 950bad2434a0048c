"""Prune (EViT): the patches with the most attention from the class token stay, best first; the others become one token."""

import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from toys import slow_after, tiny_vit

from smallvit import Attention, LayerContext, LocalityAttention, MeanTokens, Prune, Supervised

tiny = partial(tiny_vit, depth=4)
FUSES = ["sum", "mean", "none"]


@pytest.mark.parametrize(
    "keep, fuse, counts",
    [
        (0.7, "sum", [197] * 3 + [140] * 3 + [100] * 3 + [72] * 3),
        (0.7, "mean", [197] * 3 + [140] * 3 + [100] * 3 + [72] * 3),
        (0.7, "none", [197] * 3 + [139] * 3 + [98] * 3 + [69] * 3),
        (1, "sum", [197] * 12),
    ],
)
def test_token_counts_of_deit_s_equal_the_paper(keep, fuse, counts):
    n, left = 197, []
    for layer in range(12):
        n = Prune(LayerContext(layer, 12, 8, 1, True, 196), keep=keep, fuse=fuse).left(n)
        left.append(n)
    assert left == counts


def test_float_error_of_the_product_is_not_rounded_up():
    cases = {(0.55, 100): 55, (0.14, 50): 7, (0.55, 20): 11, (0.551, 20): 12, (0.05, 20): 1, (1e-9, 20): 1}
    assert {(keep, n): Prune(LayerContext(), keep=keep, fuse="none").left(n + 1) - 1 for keep, n in cases} == cases
    assert math.ceil(0.55 * 100) == 56  # what the authors keep


# The score, computed by hand


def record(model, x):
    """Inputs of the attention and of the reduction of every block, and the outputs of the reduction."""
    seen = []
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda _, given, out: seen.append([out]))
        block.reduction.register_forward_hook(lambda _, given, out: seen[-1].extend([given[0], given[1], *out]))
    with torch.no_grad():
        model(x)
    return seen


@torch.no_grad()
def row_of(attention, x, size, query):
    """The attention from token `query` of one image to every token, the mean over heads; one number at a time."""
    n, heads = len(x), attention.heads
    q, k, _ = attention.qkv(x).reshape(n, 3, heads, -1).unbind(1)
    products = torch.einsum("hd, nhd -> hn", q[query], k).tolist()
    row = torch.zeros(n, dtype=x.dtype)
    for head in range(heads):
        weight = []
        for j in range(n):
            logit = products[head][j] / math.sqrt(q.shape[-1])
            allowed = not (getattr(attention, "mask_self", False) and j == query)
            weight.append(allowed * math.exp(logit) * (1 if size is None else float(size[j])))
        row += torch.tensor(weight, dtype=x.dtype) / sum(weight) / heads
    return row


def pruned_by_hand(x, size, score, prefix, keep, fuse):
    """EViT section 3.2, equation 3, for one image: the patches that stay, best first, and the fused token of the others."""
    patches = list(range(prefix, len(x)))
    kept = math.ceil(keep * len(patches))
    stay = [prefix + i for i in torch.topk(score[prefix:], kept).indices.tolist()]
    dropped = [i for i in patches if i not in stay]
    assert sorted(stay + dropped) == patches
    tokens, sizes = [x[i] for i in [*range(prefix), *stay]], [float(size[i]) for i in [*range(prefix), *stay]]
    if fuse != "none" and dropped:
        token = sum(score[i] * x[i] for i in dropped)
        tokens.append(token if fuse == "sum" else token / sum(score[i] for i in dropped))
        sizes.append(1.0 if fuse == "sum" else sum(float(size[i]) for i in dropped))
    return torch.stack(tokens), torch.tensor(sizes, dtype=x.dtype)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize(
    "slots",
    slow_after(3, [
        dict(),
        dict(attention=partial(LocalityAttention, temperature="fixed")),
        dict(pool=MeanTokens, registers=1),
        dict(registers=2),
        dict(pool=MeanTokens),
    ]),
    ids=["class token", "locality", "mean, register", "registers", "mean"],
)
def test_every_pruning_block_follows_the_equations(fuse, slots):
    model = tiny(**slots, reduction=partial(Prune, keep=0.6, fuse=fuse)).double().eval()
    x = torch.randn(2, 1, 12, 12, dtype=torch.float64)
    p, pruning = len(model.prefix), 0
    for block, (attended, before, size, after, sizes) in zip(model.blocks, record(model, x)):
        if block.reduction.keep == 1:
            assert after is before
            continue
        pruning += 1
        for image in range(2):
            image_size = None if size is None else size[image]
            queries = [0] if model.pool.class_tokens else range(attended.shape[1])
            score = sum(row_of(block.attention, attended[image], image_size, q) for q in queries) / len(queries)
            weights = torch.ones(before.shape[1]) if image_size is None else image_size
            tokens, expected_sizes = pruned_by_hand(before[image], weights, score, p, 0.6, fuse)
            assert torch.allclose(after[image], tokens, atol=1e-12)
            assert torch.equal(after[image, : len(tokens) - (fuse != "none")], tokens[: len(tokens) - (fuse != "none")])
            assert sizes is None if fuse != "mean" else torch.equal(sizes[image], expected_sizes)
    assert pruning == 3


@pytest.mark.parametrize("fuse, last", [("sum", 1.0), ("mean", 2 + 3 + 4.0)])
def test_sizes_are_kept_and_the_fused_token_has_the_documented_size(fuse, last):
    x, size = torch.randn(1, 7, 4), torch.tensor([[1.0, 5, 2, 6, 3, 7, 4]])
    score = torch.tensor([[0.0, 0.5, 0.1, 0.4, 0.05, 0.3, 0.02]])
    output, sizes = Prune(LayerContext(), keep=0.5, fuse=fuse)(x, size, None, lambda queries: score)
    assert torch.equal(sizes, torch.tensor([[1.0, 5, 6, 7, last]])) and torch.equal(output[:, :4], x[:, [0, 1, 3, 5]])


@pytest.mark.parametrize("fuse", FUSES)
def test_order_of_the_patches_has_no_effect(fuse):
    x, score = torch.randn(3, 12, 4, dtype=torch.float64), torch.rand(3, 12, dtype=torch.float64)
    order = torch.cat([torch.tensor([0, 1]), 2 + torch.randperm(10)])
    prune = Prune(LayerContext(prefix=2), keep=0.4, fuse=fuse)
    output, size = prune(x, None, None, lambda queries: score)
    moved, same = prune(x[:, order], None, None, lambda queries: score[:, order])
    assert torch.allclose(moved, output, atol=1e-14) and (size is same is None or torch.equal(size, same))


@pytest.mark.parametrize("class_token, queries", [(True, 1), (False, None)])
def test_score_is_the_attention_of_the_class_token_or_else_of_all_tokens(class_token, queries):
    calls = []
    Prune(LayerContext(class_token=class_token))(torch.randn(1, 5, 4), None, None, lambda q: calls.append(q) or torch.rand(1, 5))
    assert calls == [queries]


def test_attention_dropout_does_not_change_the_choice():
    attention, prune = Attention(16, 2, dropout=0.7), Prune(LayerContext(), keep=0.4, fuse="none")
    x, indices = torch.randn(2, 20, 16), torch.arange(20.0)[:, None].expand(2, -1, -1)

    def chosen(output):
        return prune(indices, None, output.key, output.saliency)[0]

    before, after = attention.eval()(x), attention.train()(x)
    assert not torch.equal(before.x, after.x) and torch.equal(chosen(before), chosen(after))


@pytest.mark.parametrize("fuse", FUSES)
def test_kept_and_fused_patches_get_a_gradient(fuse):
    x, score = torch.randn(1, 6, 4, requires_grad=True), torch.rand(1, 6).requires_grad_()
    output, _ = Prune(LayerContext(), keep=0.4, fuse=fuse)(x, None, None, lambda queries: score)
    output.square().sum().backward()
    kept = 1 + score[0, 1:].topk(2).indices
    reached = (x.grad[0].abs().sum(-1) > 0).tolist()
    assert reached == [i == 0 or i in kept.tolist() or fuse != "none" for i in range(6)]


# A share that shrinks during training


def test_patches_that_were_removed_before_are_fused_with_finite_gradients():
    prune = Prune(LayerContext(layer=1, depth=4, dim=8, prefix=1, patches=6), keep=0.5, fuse="mean", layers=(1,))
    x, size, score = torch.randn(2, 7, 8, requires_grad=True), torch.ones(2, 7), torch.rand(2, 7)
    size[:, 4:], score[:, 4:] = 0, 0  # the three patches to be fused
    score.requires_grad_()
    out, new_size = prune(x, size, saliency=lambda queries: score)
    out.sum().backward()
    assert new_size.tolist() == [[1, 1, 1, 1, 0]] * 2 and not out[:, 4].any()
    assert x.grad.isfinite().all() and score.grad.abs().max() < 100  # not divided by the smallest float


def test_share_kept_in_training_falls_along_a_cosine_during_shrink():
    model = tiny(reduction=partial(Prune, keep=0.5, layers=(1,), fuse="none", shrink=(0.2, 0.6))).train()
    objective, counts = Supervised(model), []
    model.blocks[2].norm1.register_forward_hook(lambda _, given, out: counts.append(out.shape[1] - 1))
    batch = SimpleNamespace(images=torch.randn(2, 1, 12, 12), targets=torch.eye(5)[:2])
    steps = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9, 1.0]
    for progress in steps:
        objective(batch, progress)
    share = [1 if t < 0.2 else 0.5 if t >= 0.6 else 0.5 + 0.5 * (1 + math.cos(math.pi * (t - 0.2) / 0.4)) / 2 for t in steps]
    assert counts == [math.ceil(round(36 * keep, 6)) for keep in share]
    assert counts[:3] == [36] * 3 and counts[4] == 27 and counts[-3:] == [18] * 3 and counts == sorted(counts, reverse=True)
    objective(batch, 0.0)
    model.eval()(batch.images)
    assert counts[-2:] == [36, 18]  # evaluation always keeps the final share


def test_left_gives_the_final_count_whatever_shrink_is():
    assert Prune(LayerContext(), keep=0.5, shrink=(0.2, 0.6)).train().left(21) == 1 + 10 + 1


@pytest.mark.parametrize(
    ("options", "key_words"),
    [
        (dict(keep=0), "keep is 0; expected a fraction of the patches, above 0 and up to 1"),
        (dict(keep=1.1), "keep is 1.1"),
        (dict(keep=True), "keep is True"),
        (dict(keep="0.7"), "keep is '0.7'"),
        (dict(fuse="max"), "fuse is 'max'; expected 'sum' (as published), 'mean' or 'none'"),
        (dict(layers=(4,)), "layers is (4,); expected different block indices of this model, from 0 to 3"),
        (dict(layers=(1, 1)), "layers is (1, 1)"),
        (dict(layers=(-1,)), "layers is (-1,)"),
        (dict(shrink=(0.5, 0.2)), "shrink is (0.5, 0.2); expected the progress at its start and end"),
        (dict(shrink=(0.5,)), "shrink is (0.5,)"),
        (dict(shrink=(0.0, 1.5)), "shrink is (0.0, 1.5)"),
    ],
)
def test_bad_input_is_refused(options, key_words):
    with pytest.raises(ValueError, match=re.escape(key_words)):
        tiny(reduction=partial(Prune, **options))


def test_result_of_a_function_in_its_place_is_explained():
    x = torch.randn(2, 17, 8)
    with pytest.raises(ValueError, match=r"Prune got a Tensor as saliency; pass the function out.saliency of .*, not its result"):
        Prune(LayerContext(0, 1, 8, 1, True, 16), layers=(0,))(x, None, saliency=x[..., 0])


def test_image_without_patches_has_nothing_to_prune():
    prune = Prune(LayerContext(0, 1, prefix=1), keep=0.5, layers=(0,))
    x = torch.randn(2, 1, 8)
    assert prune(x, None, saliency=lambda queries: torch.ones(2, 1))[0] is x and prune.left(1) == 1


def test_default_layers_are_at_quarters_of_the_depth():
    def pruning(depth, **options):
        return [layer for layer in range(depth) if Prune(LayerContext(layer, depth), **options).keep < 1]

    assert pruning(12) == [3, 6, 9] and pruning(4) == [1, 2, 3] and pruning(6) == [1, 3, 4] and pruning(1) == [0]
    assert pruning(6, layers=(5, 0)) == [0, 5] and pruning(6, layers=()) == []


def test_schedule_of_a_second_objective_goes_on_after_a_whole_number_as_progress():
    model = tiny(reduction=partial(Prune, keep=0.5, shrink=(0.0, 0.5)))
    Supervised(model).set_progress(0)
    second = Supervised(model)
    second.set_progress(0.25)
    assert [module.progress for module in model.modules() if isinstance(module, Prune)] == [0.25] * 4
