import inspect
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

from smallvit import (
    Attention,
    Block,
    ConvStem,
    ConvTokenizer,
    DistilledTokens,
    Learned,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Resized,
    ShiftedPatchEmbed,
    SinCos2d,
    ViT,
    attention,
    from_timm,
    timm_attention,
    timm_tokenizer,
    to_timm,
    tokenizers,
)
from smallvit.pretrained.convert import rename

tiny = partial(VisionTransformer, img_size=28, patch_size=7, in_chans=1, num_classes=5, embed_dim=24, depth=2, num_heads=3)


def spelled(thing):
    """A short name for a slot with its knobs, or for a choice of options."""
    if isinstance(thing, dict):
        return ",".join(thing) or "plain"
    return f"{getattr(thing, 'func', thing).__name__}({','.join(getattr(thing, 'keywords', ()))})"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(model):
    """Every weight drawn anew: what starts at zero or one would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def images(model, b=2):
    return torch.randn(b, model.patch_embed.proj.in_channels, *model.patch_embed.img_size)


def close(one, other, by=1e-5):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= by


# timm's weights in our ViT


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224"]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_named_models_give_timms_logits_at_224_pixels(name, channels):
    theirs = perturbed(timm.create_model(name, depth=1, num_classes=7, in_chans=channels))
    x = images(theirs, b=1)
    with torch.no_grad():
        close(from_timm(theirs)(x), theirs(x))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(in_chans=3),
        dict(in_chans=4),
        dict(img_size=(14, 35)),
        dict(patch_size=4),
        dict(depth=1, num_heads=1),
        dict(reg_tokens=2),
        dict(reg_tokens=2, no_embed_class=True),
        dict(no_embed_class=True),
        dict(init_values=0.1),
        dict(qk_norm=True),
        dict(qkv_bias=False),
        dict(pos_embed="none"),
        dict(global_pool="avg"),
        dict(global_pool="avg", reg_tokens=1, init_values=1e-5, qk_norm=True),
        dict(global_pool="avg", fc_norm=False),
        dict(global_pool="token", fc_norm=True),
        dict(global_pool="avg", class_token=False),
        dict(global_pool="avg", class_token=False, reg_tokens=2, no_embed_class=True),
        dict(dynamic_img_size=True),
        dict(num_classes=0),
        dict(num_classes=0, global_pool="avg"),
        dict(act_layer="gelu", norm_layer=partial(nn.LayerNorm, eps=1e-6)),
        dict(mlp_ratio=59.5 / 21, embed_dim=21),
        dict(drop_rate=0.1, pos_drop_rate=0.1, patch_drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1),
    ],
    ids=spelled,
)
def test_every_plain_variant_gives_timms_logits_and_features(options):
    theirs = perturbed(tiny(**options))
    ours, x = from_timm(theirs), images(theirs)
    close(ours(x), theirs(x))
    close(ours.features(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    assert set(rename(theirs.state_dict())) == set(ours.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())

    again = to_timm(ours)
    close(again(x), theirs(x))
    close(again.forward_features(x), theirs.forward_features(x))
    if "class token" not in spelled(options) and not (theirs.has_class_token and theirs.global_pool == "avg"):
        state = theirs.state_dict()  # name by name; a class token that nobody reads comes back as a register
        assert again.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_other_image_sizes_give_timms_logits_too():
    theirs = perturbed(tiny(dynamic_img_size=True, reg_tokens=1))
    ours = from_timm(theirs)
    for image in ((56, 56), (14, 35), (7, 7)):
        x = torch.randn(2, 1, *image)
        close(ours(x), theirs(x))


def test_masks_mean_the_same():
    theirs = perturbed(tiny())
    x, mask = images(theirs), (torch.rand(17, 17) < 0.7) | torch.eye(17, dtype=torch.bool)
    close(from_timm(theirs)(x, mask), theirs(x, attn_mask=mask))


def test_gradients_are_timms_too():
    theirs = perturbed(tiny(init_values=0.1, reg_tokens=1))
    ours, x = from_timm(theirs), images(theirs)
    for model in (ours, theirs):
        F.cross_entropy(model(x), torch.tensor([0, 3])).backward()
    expected = rename({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, expected[name])


def test_the_timm_model_is_left_alone():
    theirs = perturbed(tiny()).train()
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    ours = from_timm(theirs)
    assert ours.training
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7.0)
    assert theirs.training and not from_timm(theirs.eval()).training
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
    assert tiny().state_dict().keys() == before.keys()


def test_precision_follows_the_model():
    theirs = perturbed(tiny()).double()
    x = images(theirs).double()
    close(from_timm(theirs)(x), theirs(x), 1e-12)


@pytest.mark.parametrize("key", ["blocks.1.attn.qkv.weight", "head.bias", "pos_embed", "cls_token"])
def test_a_renamed_key_fails_by_name(key):
    theirs = tiny()
    state = theirs.state_dict()
    state["blocks.1.attn.qkw.weight"] = state.pop(key)
    with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1\.attention\.qkw\.weight"):
        from_timm(theirs).load_state_dict(rename(state))


def test_a_weight_that_a_vit_does_not_have_fails_by_name():
    theirs = tiny()
    theirs.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="extra"):
        from_timm(theirs)


def test_another_networks_weights_fail_by_name():
    with pytest.raises(ValueError, match=r"without norm1.weight in it \(conv1.0.weight, .*; expected a timm vit_"):
        rename(timm.create_model("resnet10t").state_dict())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (dict(global_pool="map"), "AttentionPoolLatent"),
        (dict(global_pool="prr"), "AttentionPoolPrr"),
        (dict(global_pool="max"), "pooling 'max'"),
        (dict(global_pool=""), "pooling ''"),
        (dict(global_pool="avg", pool_include_prefix=True), "prefix tokens in its mean"),
        (dict(mlp_layer=SwiGLU), "SwiGLU"),
        (dict(mlp_layer=SwiGLUPacked), "GluMlp"),
        (dict(pre_norm=True), "a norm before the blocks"),
        (dict(final_norm=False), "no last norm"),
        (dict(embed_norm_layer=LayerNorm), "a norm behind the patch embedding"),
        (dict(scale_attn_norm=True), "norms inside attention or MLP"),
        (dict(scale_mlp_norm=True), "norms inside attention or MLP"),
        (dict(norm_layer=RmsNorm), "RmsNorm"),
        (dict(norm_layer=partial(LayerNorm, eps=1e-5)), "norms with another epsilon than 1e-6"),
        (dict(act_layer="relu"), "ReLU"),
        (dict(act_layer="gelu_tanh"), "GELUTanh"),
        (dict(act_layer=partial(nn.GELU, approximate="tanh")), "GELU by tanh"),
        (dict(block_fn=ResPostBlock), "ResPostBlock"),
        (dict(block_fn=ParallelScalingBlock), "ParallelScalingBlock"),
        (dict(attn_layer="diff", embed_dim=48), "DiffAttention"),
        (dict(attn_layer=timm_attention(LocalityAttention)), "TimmLocalityAttention"),
        (dict(attn_layer=timm_attention(partial(LocalityAttention, temperature="fixed"))), "TimmLocalityAttention"),
        (dict(embed_layer=timm_tokenizer(ShiftedPatchEmbed)), "ShiftedPatchEmbed"),
        (dict(proj_bias=False), "projections without bias"),
        (dict(patch_size=(7, 14)), "patches that are not square"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_part_that_a_vit_does_not_have_is_named(options, part):
    with pytest.raises(ValueError, match=rf"this timm model has .*{part}.*, which a ViT does not; expected a plain vit_"):
        from_timm(tiny(**options))


@pytest.mark.parametrize("name", ["resnet10t", "deit_tiny_distilled_patch16_224"])
def test_another_model_is_named(name):
    model = timm.create_model(name)
    with pytest.raises(ValueError, match=f"this timm model has the class {type(model).__name__}"):
        from_timm(model)


SMALL = partial(ViT, (28, 14), 3, 5, dim=24, depth=2, heads=3, tokenizer=partial(PatchEmbed, patch=7))


class Own(nn.Module):
    def __init__(self, dim, heads, attention, reduction, drop_path):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), attention(dim, heads)


KEPT = {
    "plain": {},
    "linear patches": {"tokenizer": partial(PatchEmbed, patch=7, linear=True)},
    "mean": {"pool": MeanTokens, "norm_after_pool": True, "registers": 2},
    "scaled": {"block": partial(Block, layer_scale=0.1, mlp_ratio=1.7), "attention": partial(Attention, qk_norm=True)},
    "no positions": {"position": None, "registers": 1},
    "no positions of the prefix": {"position": partial(Learned, on_prefix=False), "depth": 1},
    "dropout": {"dropout": 0.1, "drop_path": 0.1, "attention": partial(Attention, dropout=0.1, qkv_bias=False)},
}


@pytest.mark.parametrize("choices", KEPT.values(), ids=KEPT)
def test_our_models_are_timms_too(choices):
    ours = perturbed(SMALL(**choices))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    theirs, x = to_timm(ours), torch.randn(2, 3, 28, 14)
    assert isinstance(theirs, VisionTransformer) and not theirs.training
    close(theirs(x), ours(x))
    close(from_timm(theirs)(x), ours(x))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_an_exported_model_has_the_precision_and_mode_of_ours():
    theirs = to_timm(SMALL().double().train())
    assert theirs.training and theirs.patch_embed.proj.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("choices", "part"),
    [
        ({"tokenizer": partial(ShiftedPatchEmbed, patch=7)}, "ShiftedPatchEmbed"),
        ({"tokenizer": partial(PatchEmbed, patch=7, kernel=9)}, "overlapping patches"),
        ({"position": SinCos2d}, "SinCos2d"),
        ({"attention": LocalityAttention}, "LocalityAttention"),
        ({"attention": partial(Attention, head_dim=5)}, "heads of another width"),
        ({"reduction": partial(Merge, r=1)}, "Merge"),
        ({"pool": DistilledTokens}, "DistilledTokens.*a head of its own"),
        ({"block": partial(Block, norm_first=False)}, "norms behind the branches"),
        ({"block": partial(Block, activation="relu")}, "ReLU"),
        ({"depth": 0}, "no blocks"),
        ({"block": Own}, "Own"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_part_that_timm_does_not_have_is_named(choices, part):
    with pytest.raises(
        ValueError, match=rf"this ViT has .*{part}.*, which timm's VisionTransformer does not; expected the plain"
    ):
        to_timm(SMALL(**choices))


@pytest.mark.parametrize("change", ["head", "block"])
def test_a_model_that_was_changed_by_hand_is_named_too(change):
    ours = SMALL()
    if change == "head":
        ours.head = nn.Linear(24, 5, bias=False)
    else:
        ours.blocks[1] = Block(24, 3, Attention, None, 0.0, mlp_ratio=2.0)
    with pytest.raises(ValueError, match="a head of its own" if change == "head" else "blocks that differ"):
        to_timm(ours)


def test_no_digit_is_lost_between_us_and_timm():
    ours = perturbed(SMALL(block=partial(Block, layer_scale=0.0)).double())
    theirs = to_timm(ours)
    assert torch.equal(theirs.head.weight, ours.head.weight)
    assert torch.equal(from_timm(theirs).head.weight, ours.head.weight)


def test_what_is_no_vit_is_not_exported():
    with pytest.raises(ValueError, match="got a VisionTransformer; expected a ViT"):
        to_timm(tiny())


# Our slots in timm's models


def slots(module):
    return [
        c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module) and c.__module__ == module.__name__
    ]


ATTENTIONS = [Attention, LocalityAttention, partial(LocalityAttention, temperature="per layer", mask_self=False)]
TOKENIZERS = [
    partial(PatchEmbed, patch=7, kernel=13),
    partial(ShiftedPatchEmbed, patch=4, shift="1px cardinal"),
    partial(ShiftedPatchEmbed, patch=14),
    partial(ConvStem, layers=2),
    ConvTokenizer,
    partial(Resized, tokenizer=partial(PatchEmbed, patch=7), size=14),
]


def test_every_slot_class_is_tried_in_timm():
    assert {getattr(make, "func", make) for make in ATTENTIONS} == set(slots(attention))
    assert {getattr(make, "func", make) for make in TOKENIZERS} == set(slots(tokenizers))


def learns(model, *inputs, **options):
    model.train().zero_grad()
    F.cross_entropy(model(*inputs, **options), torch.tensor([0, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("make", ATTENTIONS, ids=spelled)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_attention_learns_in_a_timm_model(make, dynamic):
    model = perturbed(tiny(attn_layer=timm_attention(make), dynamic_img_size=dynamic, qkv_bias=True))
    slot = getattr(make, "func", make)
    assert isinstance(model.blocks[0].attn, slot) and type(model.blocks[0].attn).__name__ == f"Timm{slot.__name__}"
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    x = torch.randn(2, 1, 28, 28)
    learns(model, x)
    wider = mask | (torch.rand(17, 17) < 0.5)
    learns(model, x, attn_mask=wider)
    close(model.eval()(x, attn_mask=wider.T, is_causal=True), model(x, attn_mask=wider.T & mask), 1e-6)
    close(model.eval()(x, is_causal=True), model(x, attn_mask=mask), 1e-6)
    assert not torch.allclose(model(x, is_causal=True), model(x))
    if dynamic:
        learns(model, torch.randn(2, 1, 14, 35))


@pytest.mark.parametrize("options", [dict(), dict(qk_norm=True), dict(qkv_bias=False)], ids=spelled)
def test_our_attention_is_timms_under_its_names(options):
    theirs = perturbed(tiny(**options))
    ours = tiny(attn_layer=timm_attention(Attention), **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x, mask = images(theirs), (torch.rand(17, 17) < 0.7) | torch.eye(17, dtype=torch.bool)
    close(ours(x), theirs(x))
    close(ours(x, attn_mask=mask), theirs(x, attn_mask=mask))
    close(ours(x, is_causal=True), theirs(x, is_causal=True))


@pytest.mark.parametrize("make", ATTENTIONS[1:], ids=spelled)
def test_locality_attention_in_a_timm_model_is_that_in_ours(make):
    theirs = perturbed(tiny(attn_layer=timm_attention(make)))
    ours = ViT((28, 28), 1, 5, dim=24, depth=2, heads=3, tokenizer=partial(PatchEmbed, patch=7), attention=make)
    ours.load_state_dict(rename(theirs.state_dict()))
    x = images(theirs)
    close(ours(x), theirs(x))


def test_timms_weights_load_but_for_the_temperature_which_keeps_its_start():
    theirs = perturbed(tiny())
    ours = tiny(attn_layer=timm_attention(partial(LocalityAttention, mask_self=False))).eval()
    report = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert report.missing_keys == ["blocks.0.attn.scale", "blocks.1.attn.scale"] and not report.unexpected_keys
    assert torch.equal(ours.blocks[0].attn.scale, torch.full((3,), 8**-0.5))
    x = images(theirs)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("make", [Attention, LocalityAttention])
def test_timms_dropouts_are_taken_over_and_a_knob_wins(make):
    model = tiny(attn_layer=timm_attention(make), attn_drop_rate=0.2, proj_drop_rate=0.3)
    assert model.blocks[1].attn.dropout == 0.2 and model.blocks[1].attn.proj_drop.p == 0.3
    chosen = tiny(attn_layer=timm_attention(partial(make, dropout=0.4, qkv_bias=False)), attn_drop_rate=0.2)
    assert chosen.blocks[1].attn.dropout == 0.4 and chosen.blocks[1].attn.qkv.bias is None
    assert (timm_attention(make)(24, 3, proj_drop=1.0)(torch.randn(1, 5, 24)) == 0).all()


@pytest.mark.parametrize("make", TOKENIZERS, ids=spelled)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_tokenizer_learns_in_a_timm_model(make, dynamic):
    model = tiny(embed_layer=timm_tokenizer(make), dynamic_img_size=dynamic)
    embed, x = model.patch_embed, torch.randn(2, 1, 28, 28)
    assert embed.num_patches == embed.grid_size[0] * embed.grid_size[1] == model.pos_embed.shape[1] - 1
    assert (
        embed.feat_ratio() == 28 // embed.grid_size[0] and embed.feat_ratio(as_scalar=False) == (28 // embed.grid_size[0],) * 2
    )
    learns(model, x)
    assert torch.equal(embed(x).flatten(1, -2), embed.tokens(x))
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [m.shape for m in maps] == [(2, 24, *embed.grid_size)] * 2
    if dynamic:
        learns(model, torch.randn(2, 1, 56, 28))
        assert model.forward_intermediates(torch.randn(2, 1, 56, 28), intermediates_only=True)[0].shape[2:] == (
            embed.dynamic_feat_size((56, 28))
        )


@pytest.mark.parametrize("make", TOKENIZERS, ids=spelled)
def test_a_tokenizer_in_a_timm_model_is_that_in_ours(make):
    theirs = perturbed(tiny(embed_layer=timm_tokenizer(make), reg_tokens=1))
    ours = ViT((28, 28), 1, 5, dim=24, depth=2, heads=3, registers=1, tokenizer=make)
    ours.load_state_dict(rename({name.replace(".tokens.", "."): value for name, value in theirs.state_dict().items()}))
    x = torch.randn(2, 1, 28, 28)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("make", [PatchEmbed, ShiftedPatchEmbed])
def test_timms_patch_size_goes_to_a_tokenizer_that_leaves_it_open(make):
    assert tiny(embed_layer=timm_tokenizer(make)).patch_embed.grid_size == (4, 4)
    assert tiny(embed_layer=timm_tokenizer(make), patch_size=4).patch_embed.grid_size == (7, 7)
    assert tiny(embed_layer=timm_tokenizer(partial(make, patch=14)), patch_size=4).patch_embed.grid_size == (2, 2)


def test_spt_and_lsa_together_in_a_named_timm_model():
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        num_classes=5,
        depth=2,
        embed_layer=timm_tokenizer(ShiftedPatchEmbed),
        attn_layer=timm_attention(LocalityAttention),
    )
    learns(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_precision_are_timms_to_choose(dtype):
    slots = dict(embed_layer=timm_tokenizer(ShiftedPatchEmbed), attn_layer=timm_attention(LocalityAttention))
    assert tiny(**slots, dtype=dtype)(torch.randn(2, 1, 28, 28, dtype=dtype)).dtype == dtype
    assert all(p.is_meta for p in tiny(**slots, device="meta").parameters())


@pytest.mark.parametrize(
    ("slot", "options", "message"),
    [
        ("attn_layer", dict(scale_attn_norm=True), "timm asks Attention for scale_norm, which it does not have"),
        ("attn_layer", dict(proj_bias=False), "timm asks Attention for proj_bias=False"),
        ("attn_layer", dict(qk_norm=True, norm_layer=RmsNorm), "timm asks Attention for qk_norm"),
        ("attn_layer", dict(qk_norm=True, norm_layer=partial(LayerNorm, eps=1e-5)), "timm asks Attention for qk_norm"),
        ("embed_layer", dict(pre_norm=True), "timm asks PatchEmbed for bias=False"),
        ("embed_layer", dict(embed_norm_layer=LayerNorm), "timm asks PatchEmbed for norm_layer"),
        ("embed_layer", dict(dynamic_img_size=True, dynamic_img_pad=True), "timm asks PatchEmbed for dynamic_img_pad"),
        ("embed_layer", dict(patch_size=(7, 14)), "timm asks PatchEmbed for patch_size"),
        ("embed_layer", dict(patch_size=5), "patches of 5 pixels do not tile an image of 28 x 28"),
    ],
)
def test_what_timm_asks_and_a_slot_does_not_have_is_named(slot, options, message):
    ours = dict(attn_layer=timm_attention(Attention), embed_layer=timm_tokenizer(PatchEmbed))[slot]
    with pytest.raises(ValueError, match=message):
        tiny(**{slot: ours}, **options)


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match="timm asks LocalityAttention for qk_norm"):
        tiny(attn_layer=timm_attention(LocalityAttention), qk_norm=True)
    with pytest.raises(ValueError, match="timm asks PatchEmbed for output_fmt"):
        timm_tokenizer(PatchEmbed)(28, 7, 1, 24, output_fmt="NCHW")
    model = tiny(embed_layer=timm_tokenizer(PatchEmbed), attn_layer=timm_attention(LocalityAttention))
    with pytest.raises(ValueError, match=r"got images of \(56, 28\), expected \(28, 28\); build with dynamic_img_size=True"):
        model(torch.randn(1, 1, 56, 28))
    with pytest.raises(ValueError, match=r"mask has dtype torch.float32; expected torch.bool"):
        model(torch.randn(1, 1, 28, 28), attn_mask=torch.zeros(17, 17))
