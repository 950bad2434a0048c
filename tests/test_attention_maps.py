"""Attention maps and roll-out are those that the model computes, for every attention, kernel and reduction."""

import copy
import math
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from toys import slow_after

from smallvit.attention import Attention, AttentionOutput, LocalityAttention
from smallvit.explain import attention_maps, maps, patch_attention, rollout, token_shares, trace
from smallvit.pooling import ClassToken, MeanTokens, SequencePool
from smallvit.pretrained import timm_attention
from smallvit.reduction import LearnedPrune, LearnedThresholds, Merge, Prune
from smallvit.references import SmallCNN
from smallvit.tokenizers import ConvTokenizer, PatchEmbed
from smallvit.vit import Block, ViT

SIZE = (8, 12)  # 4 x 6 patches
TINY = partial(ViT, SIZE, 1, 5, dim=16, depth=3, heads=2, tokenizer=partial(PatchEmbed, patch=2))
DROP = partial(Prune, keep=0.6, fuse="none", layers=(0, 2))
REDUCTIONS = {
    "none": None,
    "merge": partial(Merge, r=5),
    "drop": DROP,
    "fuse sum": partial(DROP, fuse="sum"),
    "fuse mean": partial(DROP, fuse="mean"),
    "learned": partial(LearnedPrune, keep=0.6, layers=(0, 2)),
    "thresholds": partial(LearnedThresholds, merge=0.6, prune=0.95),
}
ATTENTIONS = {
    "plain": Attention,
    "wide, normed": partial(Attention, head_dim=5, qk_norm=True),
    "lsa": LocalityAttention,
    "lsa by layer": partial(LocalityAttention, temperature="per layer"),
    "temperature alone": partial(LocalityAttention, mask_self=False),
}


def make_vit(reduction=None, fused=None, **options) -> ViT:
    torch.manual_seed(0)  # every call gives equal weights
    model = TINY(reduction=reduction, **options).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.fused = fused
            block.attention.qkv.weight.mul_(3)  # so that attention weights differ clearly
    return model


def pixels(n=3, size=SIZE, channels=1, dtype=torch.float64):
    return torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def attention_inputs(model, x, name="attention") -> list:
    """The inputs of the attention of each block."""
    calls = []
    with ExitStack() as hooks, torch.no_grad():
        for block in model.blocks:
            hooks.enter_context(getattr(block, name).register_forward_pre_hook(lambda _, inputs: calls.append(inputs)))
        model(x)
    return calls


def slow_map(attention, x, size=None, mask=None):
    """Softmax of the scaled products, weighted by size, one number at a time; LSA excludes the token itself."""
    b, n, _ = x.shape
    mask = None if mask is None else mask.expand(b, attention.heads, n, n).tolist()
    attention, h = copy.deepcopy(attention).requires_grad_(False), attention.heads
    e = attention.qkv.out_features // (3 * h)
    normed = getattr(attention, "q_norm", nn.Identity()), getattr(attention, "k_norm", nn.Identity())
    out = torch.zeros(b, h, n, n, dtype=x.dtype)
    for image in range(b):
        projected = attention.qkv(x[image])
        for head in range(h):
            q, k = (norm(projected[:, (part * h + head) * e :][:, :e]) for part, norm in enumerate(normed))
            products = (q @ k.T).tolist()
            for i in range(n):
                row = []
                for j in range(n):
                    allowed = mask is None or mask[image][head][i][j]
                    weight = 1.0 if size is None else float(size[image, j])
                    scale = e**-0.5
                    if isinstance(attention, LocalityAttention):
                        allowed = allowed and not (attention.mask_self and i == j)
                        scale = {
                            "per head": lambda head=head: float(attention.scale[head]),
                            "per layer": lambda: float(attention.log_scale.exp()),
                            "fixed": lambda e=e: e**-0.5,
                        }[attention.temperature]()
                    row.append(weight * math.exp(scale * products[i][j]) if allowed else 0.0)
                if not sum(row):
                    row[i] = 1.0  # no other token is allowed
                out[image, head, i] = torch.tensor(row, dtype=x.dtype) / sum(row)
    return out


# attention_maps


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_map_of_an_attention_equals_its_equation_with_sizes_and_masks(name, fused):
    torch.manual_seed(0)
    attention = ATTENTIONS[name](16, 2).double().eval()
    attention.qkv.weight.mul_(3)
    attention.fused = fused
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    size = torch.tensor([[1, 2.5, 1, 0, 3], [1, 1, 4, 1, 0.5]], dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5) < 0.7
    mask |= torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(1, 0)
    for sizes, masks in ((None, None), (None, mask), (size, None)):
        output = attention(x, sizes, masks)
        torch.testing.assert_close(output.map(), slow_map(attention, x, sizes, masks), rtol=0, atol=1e-12)
        values = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[2]
        again = attention.proj((output.map() @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(output.x, again, rtol=0, atol=1e-12)
    assert attention(x[:, :1]).map().tolist() == [[[[1.0]]] * 2] * 2


@pytest.mark.parametrize("pool, registers", slow_after(1, [(ClassToken, 0), (MeanTokens, 2)]))
@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_maps_of_a_model_equal_the_equation_for_the_inputs_of_each_block(name, attention, pool, registers):
    model, x = make_vit(REDUCTIONS[name], attention=attention, pool=pool, registers=registers), pixels(1)
    found = attention_maps(model, x)
    assert len(found) == 3
    for weights, block, (tokens, size, mask) in zip(found, model.blocks, attention_inputs(model, x)):
        assert mask is None
        torch.testing.assert_close(weights, slow_map(block.attention, tokens, size), rtol=0, atol=1e-12)
    counts = [weights.shape[-1] for weights in found]
    assert counts == sorted(counts, reverse=True) and (counts[-1] < counts[0] or name == "none")


@pytest.mark.parametrize("fused", slow_after(1, [None, False, True]))
@pytest.mark.parametrize("attention", slow_after(1, ["lsa", "plain"]))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_maps_sum_to_one_and_the_model_is_unchanged(name, attention, fused):
    model, x = make_vit(REDUCTIONS[name], fused, attention=ATTENTIONS[attention]).float(), pixels().float()
    model.blocks[1].train()
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    logits = []
    hook = model.head.register_forward_hook(lambda _, inputs, output: logits.append(output))
    with torch.no_grad():
        before = copy.deepcopy(model).eval()(x)
    logits.clear()
    found, shares = attention_maps(model, x), token_shares(model, x)
    rolled, heads = rollout(model, x), patch_attention(model, x)
    hook.remove()
    assert len(found) == len(shares) == 3 and rolled.shape == (3, 4, 6) and heads.shape == (3, 2, 4, 6)
    for weights, share in zip(found, shares):
        b, h, n, m = weights.shape
        assert (b, h) == (3, 2) and n == m and share.shape == (3, n, 24)
        assert (weights >= 0).all() and (weights.sum(-1) - 1).abs().max() < 1e-5
        if attention.startswith("lsa"):
            assert (weights.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert logits and all((found - before).abs().max() < 1e-5 for found in logits)
    assert [module.training for module in model.modules()] == modes
    assert all(block.attention.fused is fused for block in model.blocks)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_results_are_ordinary_tensors():
    for tensor in [*attention_maps(make_vit(), pixels()), *token_shares(make_vit(), pixels()), rollout(make_vit(), pixels())]:
        assert not tensor.is_inference() and not tensor.requires_grad
        tensor.mul_(2)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_half_precision_gives_float32_maps_that_sum_to_one(name):
    model = TINY(reduction=REDUCTIONS[name]).bfloat16()
    for weights in attention_maps(model, pixels()):
        assert weights.dtype == torch.float32 and (weights.sum(-1) - 1).abs().max() < 0.02
    assert 0.5 < rollout(model, pixels()).sum((1, 2)).min() <= 1


class Uniform(nn.Module):
    """A user's attention, uniform, that offers its map."""

    def __init__(self, dim, heads, weights=None, **others):
        super().__init__()
        self.qkv, self.weights = nn.Linear(dim, dim), weights

    def forward(self, x, size=None, mask=None):
        uniform = x.new_ones(len(x), 3, x.shape[1], x.shape[1]) / x.shape[1]
        return AttentionOutput(x.mean(1, keepdim=True).expand_as(x), map=lambda: self.weights or uniform)


def test_map_of_a_users_attention_is_used_also_if_blocks_share_the_module():
    shared = Uniform(16, 2)
    model, x = TINY(attention=lambda dim, heads: shared), pixels().float()
    assert [tuple(weights.shape) for weights in attention_maps(model, x)] == [(3, 3, 25, 25)] * 3
    torch.testing.assert_close(patch_attention(model, x), torch.full((3, 3, 4, 6), 1 / 25))


# token_shares and patch_attention


@pytest.mark.parametrize("prefix", slow_after(1, [{"registers": 2, "pool": MeanTokens}, {}]))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_token_shares_agree_with_the_groups_of_trace(name, prefix):
    model, x = make_vit(REDUCTIONS[name], **prefix), pixels()
    p, groups = len(model.prefix), trace(model, x).groups
    single = torch.arange(24).expand(3, 1, -1)
    at_attention = groups if name == "learned" else torch.cat([single, groups], dim=1)[:, :-1]  # "learned" reduces first
    for block, (share, (_, size, _)) in enumerate(zip(token_shares(model, x), attention_inputs(model, x))):
        assert not share[:, :p].any()
        for image in range(3):
            found = [row.nonzero().flatten().tolist() for row in share[image, p:]]
            group = at_attention[image, block]
            members = [(group == number).nonzero().flatten().tolist() for number in set(group.tolist()) - {-1}]
            assert sorted(filter(None, found)) == sorted(members)
            masses = share.new_ones(len(found)) if size is None else size[image, p:]
            for row, patches, mass in zip(share[image, p:], found, masses):
                assert bool(patches) == bool(mass > 0) and (not patches or float(row.sum()) == pytest.approx(1))
                if patches and name not in ("fuse sum", "fuse mean"):  # these weight by attention
                    assert row[patches].tolist() == pytest.approx([1 / len(patches)] * len(patches))


def test_shares_of_a_fused_token_are_its_fusion_weights():
    model, x = make_vit(REDUCTIONS["fuse sum"]), pixels()
    weights, share = attention_maps(model, x)[0], token_shares(model, x)[1][:, -1]
    score = weights[:, :, 0, 1:].mean(1)
    gone = score.argsort(dim=1, descending=True)[:, 15:]  # ceil(0.6 * 24) of 24 stay
    for image in range(3):
        assert share[image].nonzero().flatten().tolist() == gone[image].sort().values.tolist()
        torch.testing.assert_close(share[image, gone[image]], score[image, gone[image]] / score[image, gone[image]].sum())


def expand_map(weights, share, p: int):
    """A map of n tokens as a map of p prefix tokens and all patches.

    The query of a patch is that of its token; as a key it gets its share of the attention to its token.
    """
    patches, dtype = share.shape[1], weights.dtype
    full = [[0.0] * (p + patches) for _ in range(p + patches)]
    token = {patch: int(share[:, patch].argmax()) for patch in range(patches) if share[:, patch].any()}
    tokens = {i: i for i in range(p)} | {p + patch: index for patch, index in token.items()}
    weights, share = weights.tolist(), share.tolist()  # numbers, because tensors of one number are slow
    for i, row in tokens.items():
        for j, column in tokens.items():
            full[i][j] = weights[row][column] * (1 if j < p else share[column][j - p])
    return torch.tensor(full, dtype=dtype)


@pytest.mark.parametrize("prefix", [{"registers": 1}, {"registers": 2, "pool": MeanTokens}])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_patch_attention_has_full_size_and_sums_to_the_attention_to_patches(name, prefix):
    model, x = make_vit(REDUCTIONS[name], **prefix), pixels()
    p, found, shares = len(model.prefix), attention_maps(model, x), token_shares(model, x)
    for block in (0, 2):
        pictures = patch_attention(model, x, block=block)
        assert pictures.shape == (3, 2, 4, 6)
        for image in range(3):
            present = shares[block][image].any(0)
            for head in range(2):
                full = expand_map(found[block][image, head], shares[block][image], p)
                row = full[p:][present].mean(0) if prefix.get("pool") else full[0]
                torch.testing.assert_close(pictures[image, head].flatten(), row[p:])
                if not prefix.get("pool"):
                    assert pictures[image, head].sum() == pytest.approx(float(found[block][image, head, 0, p:].sum()))
                assert (pictures[image, head].flatten()[~present] == 0).all()


@pytest.mark.parametrize("images", [3, 4])  # 4 is also the number of heads
def test_maps_times_shares_are_attention_to_patches(images):
    model, x = make_vit(partial(Merge, r=5), heads=4), torch.cat([pixels(), pixels()])[:images]
    found, shares = attention_maps(model, x), token_shares(model, x)
    for block in range(3):
        product = found[block] @ shares[block][:, None]
        for image in range(images):
            torch.testing.assert_close(product[image], found[block][image] @ shares[block][image])


def test_patch_can_be_the_query():
    model, x = make_vit(partial(Merge, r=5)), pixels()
    found, shares = attention_maps(model, x), token_shares(model, x)
    for patch in ((0, 0), (3, 5), (2, 1)):
        pictures = patch_attention(model, x, block=2, query=patch)
        for image, head in ((0, 0), (2, 1)):
            full = expand_map(found[2][image, head], shares[2][image], 1)
            torch.testing.assert_close(pictures[image, head].flatten(), full[1 + patch[0] * 6 + patch[1], 1:])
    identity = rollout(make_vit(), x, query=(2, 1), residual=1)
    assert identity[:, 2, 1].tolist() == [1, 1, 1] and identity.sum() == 3


# Roll-out


def slow_rollout(found, p, *, combine=lambda heads: heads.mean(0), residual=0.5, shares=None):
    """The product of all blocks for one image, as a full-size map: queries in rows."""
    product = None
    for block, weights in enumerate(found):
        one = combine(weights)
        one = (1 - residual) * one + residual * torch.eye(len(one), dtype=one.dtype)
        one = one / one.sum(1)[:, None]
        one = one if shares is None else expand_map(one, shares[block], p)
        product = one if product is None else one @ product
    return product


@pytest.mark.parametrize("heads, residual", [("mean", 0.5), ("mean", 0.0), ("max", 0.9), ("min", 0.2)])
@pytest.mark.parametrize("prefix", [{}, {"registers": 3}, {"pool": MeanTokens}, {"pool": MeanTokens, "registers": 2}])
def test_rollout_is_the_product_of_all_maps(prefix, heads, residual):
    model, x = make_vit(**prefix), pixels()
    p, found = len(model.prefix), attention_maps(model, x)
    pictures = rollout(model, x, heads=heads, residual=residual)
    combine = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}[heads]
    for image in range(3):
        product = slow_rollout([weights[image] for weights in found], p, combine=combine, residual=residual)
        assert product.sum(1).tolist() == pytest.approx([1] * (p + 24))
        row = product[p:].mean(0) if prefix.get("pool") else product[0]
        torch.testing.assert_close(pictures[image].flatten(), row[p:])


@pytest.mark.parametrize("prefix", [{"registers": 1}, {"pool": MeanTokens}])
@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name != "none"])
def test_rollout_with_reduction_equals_the_product_of_full_size_maps(name, prefix):
    """The last block has no reduction, so that the query is the class token or the mean of the patches in the last map."""
    reduction = REDUCTIONS[name]
    model, x = make_vit(lambda context: reduction(context) if context.layer < 2 else None, **prefix), pixels()
    p, found, shares = len(model.prefix), attention_maps(model, x), token_shares(model, x)
    pictures = rollout(model, x)
    assert found[2].shape[-1] < found[0].shape[-1] or name == "learned"
    for image in range(3):
        product = slow_rollout([weights[image] for weights in found], p, shares=[share[image] for share in shares])
        row = product[p:][shares[2][image].any(0)].mean(0) if prefix.get("pool") else product[0]
        torch.testing.assert_close(pictures[image].flatten(), row[p:])


def test_patches_that_are_pruned_before_the_first_attention_get_zero():
    model, x = make_vit(partial(LearnedPrune, keep=0.5, layers=(0,))), pixels()
    kept = trace(model, x).groups[:, 0].unflatten(-1, (4, 6)) >= 0
    assert (rollout(model, x)[kept] > 0).all() and (rollout(model, x)[~kept] == 0).all() and kept.sum() == 3 * 12


def test_maps_do_not_depend_on_the_batch(monkeypatch):
    model, x = make_vit(REDUCTIONS["thresholds"]), pixels(6)
    rolled, heads = rollout(model, x), patch_attention(model, x)
    assert len({int((share.sum(-1) > 0).sum()) for share in token_shares(model, x)[-1]}) > 1  # some are padded
    for image in range(6):
        torch.testing.assert_close(rolled[image], rollout(model, x[image : image + 1])[0])
        torch.testing.assert_close(heads[image], patch_attention(model, x[image : image + 1])[0])
    monkeypatch.setattr(maps, "MAX_ELEMENTS", 2 * 3 * 25**2)
    torch.testing.assert_close(rolled, rollout(model, x))


@pytest.mark.parametrize("size", [(4, 20), (16, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": partial(Merge, r=0.2)}, {"tokenizer": ConvTokenizer, "pool": SequencePool}]
)
def test_other_image_sizes_have_their_own_grid(options, size):
    model, x = make_vit(**options), pixels(2, size)
    assert rollout(model, x).shape == (2, *model.tokenizer.grid(size))
    assert all((weights.sum(-1) - 1).abs().max() < 1e-9 for weights in attention_maps(model, x))


# timm


def timm_vit(kind=None, fused=True, **options):
    from timm.models.vision_transformer import VisionTransformer

    size = {"img_size": SIZE, "patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2, "in_chans": 1}
    options = {"num_classes": 3} | size | options
    model = (kind or VisionTransformer)(**options).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(10)
            block.attn.fused_attn = fused
    return model


def distilled():
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled


TIMM_OPTIONS = {
    "plain": {},
    "without head": {"num_classes": 0},
    "mean pooling": {"global_pool": "avg"},
    "mean without class token": {"global_pool": "avg", "class_token": False},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "norms everywhere": {"qk_norm": True, "init_values": 0.1, "pre_norm": True},
    "map pooling": {"global_pool": "map"},
    "no bias": {"qkv_bias": False},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", [*TIMM_OPTIONS, "distilled"])
def test_maps_of_a_timm_model_are_those_that_timm_computes(name, fused):
    model = timm_vit(distilled(), fused) if name == "distilled" else timm_vit(fused=fused, **TIMM_OPTIONS[name])
    x, theirs = pixels(), []
    state, before = copy.deepcopy(model.state_dict()), model(x)
    found, shares, pictures = attention_maps(model, x), token_shares(model, x), rollout(model, x)
    assert all(block.attn.fused_attn is fused for block in model.blocks) and torch.equal(model(x), before)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())

    for block in model.blocks:  # without fused attention timm passes its map to the dropout
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, inputs, output: theirs.append(inputs[0].detach()))
    model(x)
    assert len(found) == len(theirs) == len(shares) == 3
    p = model.num_prefix_tokens
    for weights, expected, share in zip(found, theirs, shares):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        assert weights.shape == (3, 2, p + 24, p + 24) and weights.std() > 0.01
        assert torch.equal(share[:, p:], torch.eye(24, dtype=share.dtype).expand(3, -1, -1)) and not share[:, :p].any()
    for image in range(3):
        product = slow_rollout([weights[image] for weights in theirs], p)
        row = product[p:].mean(0) if name.startswith(("mean", "map")) else product[0]
        torch.testing.assert_close(pictures[image].flatten(), row[p:])


def test_map_of_a_timm_model_equals_the_equation():
    model, x = timm_vit(), pixels(1)
    (tokens,) = attention_inputs(model, x, "attn")[1]
    q, k, _ = model.blocks[1].attn.qkv(tokens)[0].chunk(3, dim=-1)
    for head in range(2):
        logits = q[:, 8 * head : 8 * head + 8] @ k[:, 8 * head : 8 * head + 8].T / math.sqrt(8)
        torch.testing.assert_close(attention_maps(model, x)[1][0, head], logits.softmax(-1).detach(), rtol=0, atol=1e-12)


def test_timm_model_with_images_of_another_size():
    model = timm_vit(dynamic_img_size=True)
    assert rollout(model, pixels(2, (4, 16))).shape == (2, 2, 8)


@pytest.mark.parametrize("attention", [Attention, LocalityAttention])
def test_map_of_our_attention_inside_a_timm_model(attention):
    model, x = timm_vit(attn_layer=timm_attention(attention)), pixels(2)
    for weights, block, (tokens,) in zip(attention_maps(model, x), model.blocks, attention_inputs(model, x, "attn")):
        torch.testing.assert_close(weights, slow_map(block.attn, tokens), rtol=0, atol=1e-12)


# Refused models and arguments


class WithoutMap(Uniform):
    """A user's attention without a map."""

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(x.mean(1, keepdim=True).expand_as(x))


class MapWithoutHeads(Uniform):
    """A map of shape (b, n, n)."""

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(x, map=lambda: x @ x.mT)


class MapBeforeSoftmax(Uniform):
    """A map whose rows do not sum to 1."""

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(x, map=lambda: (x @ x.mT)[:, None])


class WithoutAttention(nn.Module):
    """A block without attention."""

    def __init__(self, dim, heads, attention, reduction, drop_path):
        super().__init__()

    def forward(self, x, size=None, mask=None):
        return x, size


class Twice(Block):
    """A block that calls its attention twice."""

    def forward(self, x, size=None, mask=None):
        return super().forward(*super().forward(x, size, mask))


def eva():
    from timm.models.eva import Eva

    return Eva(img_size=SIZE, patch_size=2, embed_dim=16, depth=1, num_heads=2, in_chans=1, num_classes=3)


def diverged():
    model = TINY()
    nn.init.constant_(model.prefix, math.nan)
    return model


def resnet():
    import timm

    return timm.create_model("resnet10t", in_chans=1, num_classes=3)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: SmallCNN(SIZE, 1, 5), "got a SmallCNN; expected a ViT, or a Vision Transformer of timm"),
        (lambda: Attention(8, 2), "got a Attention; expected a ViT"),
        (resnet, "got a ResNet; expected a ViT"),
        (eva, r"EvaAttention gives no attention map; expected AttentionOutput\(x, map="),
        (lambda: TINY(attention=WithoutMap), r"WithoutMap gives no attention map; expected AttentionOutput\(x, map="),
        (lambda: TINY(attention=MapWithoutHeads), r"map of MapWithoutHeads has shape \(3, 25, 25\); expected .* here 3 heads 25 25"),
        (lambda: TINY(attention=MapBeforeSoftmax), "rows of the map of MapBeforeSoftmax do not sum to 1"),
        (diverged, "the map of Attention is not finite; expected a model that has not diverged"),
        (lambda: TINY(block=WithoutAttention), "this ViT has a WithoutAttention, in which no attention is found"),
        (lambda: TINY(block=Twice), "called 6 times in the 3 blocks of this ViT"),
        (lambda: TINY(depth=0), "this ViT has no blocks"),
        (lambda: timm_vit(attn_layer=timm_attention(WithoutMap)).float(), "TimmWithoutMap gives no attention map"),
    ],
    ids=["cnn", "attention", "resnet", "eva", "no map", "no heads", "logits", "diverged", "no attention", "twice", "no blocks", "in timm"],
)
def test_model_without_maps_is_refused_by_name_and_hooks_removed(build, message):
    model = build()
    for ask in (attention_maps, rollout, patch_attention):
        with pytest.raises(ValueError, match=message):
            ask(model, pixels().float())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda model, x: attention_maps(model, x[:0]), "no images to look at"),
        (lambda model, x: rollout(model, x[:0]), "no images to look at"),
        (lambda model, x: attention_maps(model, x.to(torch.uint8)), "got pixels of type torch.uint8; expected normalized floats"),
        (lambda model, x: attention_maps(model, x[0]), r"pixels of shape \(1, \d+, \d+\); expected b c h w: images\[None\]"),
        (lambda model, x: rollout(model, [x]), "got list; expected a tensor of normalized pixels, b c h w"),
        (lambda model, x: rollout(model, x, heads="sum"), "got heads='sum', residual=0.5; expected one of mean, max, min"),
        (lambda model, x: rollout(model, x, residual=1.5), "residual=1.5; expected .* a share from 0 to 1"),
        (lambda model, x: patch_attention(model, x, block=3), "block is 3; expected one of this model, from 0 to 2"),
        (lambda model, x: patch_attention(model, x, block=-4), "block is -4; expected one of this model, from 0 to 2"),
        (lambda model, x: patch_attention(model, x, query=(4, 0)), r"query is \(4, 0\); expected row and column .* 4 and 6"),
        (lambda model, x: rollout(model, x, query=(0, -1)), r"query is \(0, -1\)"),
        (lambda model, x: patch_attention(model, x, query=5), "query is 5; expected row and column of a patch"),
        (lambda model, x: patch_attention(model, x, query=(1,)), r"query is \(1,\); expected row and column"),
        (lambda model, x: rollout(model, x, query=(1, 2, 3)), r"query is \(1, 2, 3\); expected row and column"),
        (lambda model, x: rollout(model, x, query=(1, 0.5)), r"query is \(1, 0.5\); expected row and column"),
        (lambda model, x: patch_attention(model, x, block=1.0), "block is 1.0; expected one of this model"),
        (lambda model, x: patch_attention(model, x, block=None), "block is None; expected one of this model"),
        (lambda model, x: rollout(model, x, residual=None), "residual=None; expected .* a share from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(make_vit(), pixels())


def test_pruned_patch_cannot_be_the_query():
    model, x = make_vit(DROP), pixels()
    groups = trace(model, x).groups
    patch = divmod(int((groups[0, 0] == -1).nonzero()[0]), 6)
    with pytest.raises(ValueError, match=r"is gone before block 1 in . of 3 images; expected one that is still there"):
        patch_attention(model, x, block=1, query=patch)
    with pytest.raises(ValueError, match="is gone before the last block has done"):
        rollout(model, x, query=patch)
    assert patch_attention(model, x, block=0, query=patch).sum() > 0
    assert all((earlier >= later).all() for earlier, later in pairwise((groups >= 0).int().unbind(1)))
