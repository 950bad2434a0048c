"""LearnedPrune (DynamicViT): the predictor, the patches that stay, and masked training equal to removing patches."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toys import tiny_vit

from smallvit import Attention, ClassToken, LayerContext, LearnedPrune, LocalityAttention, MeanTokens, SequencePool

tiny = partial(tiny_vit, depth=4)


def randomized(module, std=0.5):
    """The module with all parameters drawn from N(0, std)."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


# Which patches stay


@pytest.mark.parametrize("keep, counts", [(0.7, [137, 96, 67]), (0.9, [176, 158, 142]), (0.5, [98, 49, 24]), (1, [196] * 3)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_patch_counts_equal_the_paper(keep, counts, prefix):
    n, left = prefix + 196, []
    for layer in range(12):
        n = LearnedPrune(LayerContext(layer, 12, 8, prefix, prefix > 0, 196), keep=keep).left(n)
        left.append(n - prefix)
    assert left == [196] * 3 + [counts[0]] * 3 + [counts[1]] * 3 + [counts[2]] * 3


def test_rounding_errors_cost_no_patch():
    second = LearnedPrune(LayerContext(1, 2, 8, 1, True, 100), keep=0.7, layers=(0, 1))
    assert second.left(71) == 1 + 49  # 100 * 0.7**2 is 48.99999999999999


def test_shares_stay_the_same_at_another_image_size():
    n, left = 1 + 784, []
    for layer in (3, 6, 9):
        n = LearnedPrune(LayerContext(layer, 12, 8, 1, True, 196), keep=0.7).left(n)
        left.append(n - 1)
    assert left == pytest.approx([784 * 0.7, 784 * 0.49, 784 * 0.343], abs=6)


def keep_log_probabilities(predictor, x, size):
    """DynamicViT section 3.2 for one image, one patch at a time: the log-probability to keep each patch."""
    d = x.shape[1]

    def layer(linear, row):
        rows = zip(linear.weight, linear.bias)
        return [sum(float(w) * float(v) for w, v in zip(weight, row)) + float(b) for weight, b in rows]

    def gelu(row):
        return [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in row]

    norm, embed, _ = predictor.embed
    hidden = []
    for row in x.tolist():
        mean = sum(row) / d
        std = math.sqrt(sum((v - mean) ** 2 for v in row) / d + 1e-6)
        normal = [(v - mean) / std * float(w) + float(b) for v, w, b in zip(row, norm.weight, norm.bias)]
        hidden.append(gelu(layer(embed, normal)))
    mass = sum(float(s) for s in size)
    shared = [sum(float(s) * row[c] for s, row in zip(size, hidden)) / mass for c in range(d // 2, d)]
    first, _, second, _, third = predictor.decide
    result = []
    for row in hidden:
        keep, drop = layer(third, gelu(layer(second, gelu(layer(first, row[: d // 2] + shared)))))
        result.append(keep - math.log(math.exp(keep) + math.exp(drop)))
    return result


@pytest.mark.parametrize("sized", [False, True])
@torch.no_grad()
def test_patches_with_the_highest_keep_probability_stay_best_first(sized):
    module = randomized(LearnedPrune(LayerContext(0, 1, 8, 2, True, 10), keep=0.5)).double().eval()
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    size = torch.randint(1, 4, (2, 12)).double() if sized else None
    output, sizes = module(x, size)
    for image in range(2):
        weights = [1.0] * 12 if size is None else size[image].tolist()
        score = keep_log_probabilities(module.predictor, x[image, 2:], weights[2:])
        stay = sorted(range(10), key=lambda i: -score[i])[:5]
        assert torch.equal(output[image], x[image, [0, 1, *(2 + i for i in stay)]])
        assert sizes is None or sizes[image].tolist() == [weights[i] for i in (0, 1, *(2 + i for i in stay))]


@torch.no_grad()
def test_each_layer_keeps_a_subset_of_the_patches_kept_before():
    x, kept = torch.randn(3, 37, 16), [set(range(36))] * 3
    x = torch.cat([x, torch.arange(-1.0, 36.0).expand(3, -1)[..., None]], -1)  # a channel with the index of the patch
    for layer, count in zip((3, 6, 9), (25, 17, 12)):
        x, _ = randomized(LearnedPrune(LayerContext(layer, 12, 16, 1, True, 36))).eval()(x, None)
        now = [set(row) for row in x[:, 1:, -1].int().tolist()]
        assert all(len(image) == count and image < before for image, before in zip(now, kept))
        kept = now


# Training: decisions are drawn, permanent, and dropped patches stay in the tensor


@torch.no_grad()
def test_training_moves_no_token_and_decisions_are_permanent():
    x, before = torch.randn(3, 37, 16), torch.ones(3, 37)
    for layer in (3, 6, 9):
        module = LearnedPrune(LayerContext(layer, 12, 16, 1, True, 36)).train()
        same, size = module(x, None if layer == 3 else before)
        assert same is x and set(size.unique().tolist()) == {0.0, 1.0} and (size[:, 0] == 1).all()
        assert (size <= before).all() and (size < before).any() and (size[:, 1:] > 0).any()
        before = size


def test_draw_follows_the_predictor_and_its_gradient_reaches_the_predictor():
    module = LearnedPrune(LayerContext(0, 1, 8, 0, False, 4000), keep=0.5).train()
    with torch.no_grad():
        module.predictor.decide[-1].weight.zero_()
        module.predictor.decide[-1].bias.copy_(torch.tensor([math.log(3), 0.0]))
    _, size = module(torch.randn(1, 4000, 8), None)
    assert abs(size.mean().item() - 0.75) < 0.03
    (size * torch.randn(1, 4000)).sum().backward()
    assert module.predictor.decide[-1].bias.grad.abs().max() > 0


def test_kept_gives_the_decisions_and_target_the_share_to_be_left():
    modules, seen = [LearnedPrune(LayerContext(layer, 12, 16, 1, True, 36), keep=0.6).train() for layer in range(12)], []
    for module in modules:
        module.kept.register_forward_hook(lambda _, given, out: seen.append(out))
        module(torch.randn(2, 37, 16), None)
    assert [kept.shape for kept in seen] == [(2, 36)] * 3
    assert [module.target for module in modules if module.predictor] == pytest.approx([0.6, 0.36, 0.216])


@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool])
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
def test_keeping_every_patch_equals_the_plain_model(pool, attention):
    plain, model = (tiny(pool=pool, attention=attention, reduction=made).train() for made in (None, LearnedPrune))
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.reduction.predictor.decide[-1].bias.copy_(torch.tensor([100.0, -100.0]))
    x = torch.randn(3, 1, 12, 12)
    tokens, size = model.tokens(x)
    assert (size == 1).all()
    assert (model(x) - plain(x)).abs().max() < 1e-6 and (tokens - plain.tokens(x)[0]).abs().max() < 1e-5


def set_decisions(monkeypatch, policies):
    """Replace the Gumbel draw by these decisions, (b, patches) for each predictor, over and over."""
    queue = [torch.stack([policy, 1 - policy], -1) for policy in policies]

    def draw(score, hard):
        assert hard
        queue.append(queue.pop(0))
        return queue[-1] + (score - score.detach()) * 0.1

    monkeypatch.setattr(F, "gumbel_softmax", draw)


@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool])
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("registers", [0, 2])
def test_masked_training_equals_removing_the_dropped_patches(pool, attention, registers, monkeypatch):
    model = tiny(pool=pool, attention=attention, registers=registers, reduction=LearnedPrune).train()
    for block in model.blocks:
        randomized(block.attention, 0.3)  # attention that is far from uniform
    policies = [(torch.rand(3, 36) < 0.7).float() for _ in range(3)]
    set_decisions(monkeypatch, policies)
    x, p = torch.randn(3, 1, 12, 12), len(model.prefix)
    tokens, size = model.tokens(x)
    logits = model.head(model.pooled(tokens, size))
    assert torch.equal(size[:, p:], policies[0] * policies[1] * policies[2])
    for image in range(3):
        alone = torch.cat([model.prefix[None], model.tokenizer(x[image : image + 1])], 1)
        alone, left = model.position(alone, (6, 6)), list(range(36))
        for layer, block in enumerate(model.blocks):
            if layer:
                stay = [index for index, patch in enumerate(left) if policies[layer - 1][image, patch]]
                alone, left = alone[:, [*range(p), *(p + index for index in stay)]], [left[index] for index in stay]
            alone = alone + block.branch1(block.attention(block.norm1(alone)).x)
            alone = alone + block.branch2(block.mlp(block.norm2(alone)))
        alone = model.norm(alone)
        present = [*range(p), *(p + patch for patch in left)]
        assert (tokens[image, present] - alone[0]).abs().max() < 1e-5
        assert (logits[image] - model.head(model.pooled(alone, None))[0]).abs().max() < 1e-5


@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
def test_loss_reaches_every_predictor_through_attention(attention):
    model, decisions = tiny(attention=attention, reduction=LearnedPrune).train(), []
    for block in model.blocks[1:]:
        block.reduction.kept.register_forward_pre_hook(lambda _, given: (given[0].retain_grad(), decisions.append(given[0]))[0])
    model(torch.randn(8, 1, 12, 12)).square().sum().backward()
    for block, kept in zip(model.blocks[1:], decisions, strict=True):
        assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in block.reduction.predictor.parameters())
        assert (kept == 0).any() and (kept.grad[kept == 0] != 0).any()  # dropped patches give a signal, too


@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, SequencePool])
@pytest.mark.parametrize("registers", [0, 1])
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
def test_draw_that_drops_every_patch_keeps_the_most_probable_one(pool, registers, attention, monkeypatch):
    """With 16 patches, three untrained predictors and 64 images this happens in nearly every batch."""
    model = tiny(pool=pool, reduction=LearnedPrune, registers=registers, attention=attention).train()
    first = torch.zeros(2, 36)
    first[:, 5:8] = 1  # one of these three stays, whatever the second and the third predictor draw
    set_decisions(monkeypatch, [first, torch.zeros(2, 36), torch.zeros(2, 36)])
    scores = []
    for block in model.blocks[1:]:
        block.reduction.predictor.register_forward_hook(lambda _, given, out: scores.append(out.log_softmax(-1)[..., 0]))
    x = torch.randn(2, 1, 12, 12)
    tokens, size = model.tokens(x)
    assert torch.equal(size[:, len(model.prefix) :].argmax(1), 5 + scores[1][:, 5:8].argmax(1))
    assert (size[:, len(model.prefix) :].sum(1) == 1).all()
    logits = model.head(model.pooled(tokens, size))
    logits.square().sum().backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "key_words"),
    [
        (dict(keep=0.0), "keep is 0.0; expected a fraction"),
        (dict(keep="0.5"), "keep is '0.5'; expected a fraction"),
        (dict(keep=2.0, layers=()), "keep is 2.0; expected a fraction"),  # also in blocks that keep all patches
        (dict(layers=(9,)), r"layers is \(9,\); expected different"),
    ],
)
def test_bad_input_is_refused(options, key_words):
    with pytest.raises(ValueError, match=key_words):
        tiny(reduction=partial(LearnedPrune, **options))
