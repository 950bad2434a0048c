"""Conversion between timm and smallvit: models in both directions, and our attentions and tokenizers inside timm's models."""

import copy
import inspect
import subprocess
import sys
import warnings
from functools import partial

import numpy
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.layers import LayerNorm, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn.utils import prune
from toys import assert_close, option_id, randomize, slow_after

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
    Supervised,
    ViT,
    apply,
    attention,
    from_timm,
    mimetic_start,
    timm_attention,
    timm_tokenizer,
    to_timm,
    tokenizers,
)
from smallvit.attention_starts import draw_mimetic
from smallvit.optim import decay_groups
from smallvit.pretrained.convert import rename

TIMM = partial(VisionTransformer, img_size=28, patch_size=7, in_chans=1, num_classes=5, embed_dim=24, depth=2, num_heads=3)
OURS = partial(ViT, (28, 28), 1, 5, dim=24, depth=2, heads=3)
close = partial(assert_close, atol=1e-5)


def options_id(options: dict) -> str:
    return ",".join(options) or "plain"


def random_weights(model):
    return randomize(model, 0.05).eval()


def random_images(model, b=2):
    return torch.randn(b, model.patch_embed.proj.in_channels, *model.patch_embed.img_size)


def assert_state(model, state):
    """The model still has the weights of an earlier copy of its state dict."""
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def copy_state(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def overwrite(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


# from_timm


@pytest.mark.parametrize(
    "name", slow_after(1, ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224"])
)
@pytest.mark.parametrize("channels", [1, 3])
def test_named_timm_models_give_equal_logits_at_224_pixels(name, channels):
    theirs = random_weights(timm.create_model(name, depth=1, num_classes=7, in_chans=channels))
    x = random_images(theirs, b=1)
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
        pytest.param(dict(depth=1, num_heads=1), marks=pytest.mark.slow),
        pytest.param(dict(reg_tokens=2), marks=pytest.mark.slow),
        dict(reg_tokens=2, no_embed_class=True),
        dict(no_embed_class=True),
        dict(init_values=0.1),
        dict(qk_norm=True),
        dict(qkv_bias=False),
        dict(pos_embed="none"),
        pytest.param(dict(global_pool="avg"), marks=pytest.mark.slow),
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
    ids=options_id,
)
def test_converted_model_gives_equal_logits_and_features_in_both_directions(options):
    theirs = random_weights(TIMM(**options))
    ours, x = from_timm(theirs), random_images(theirs)
    close(ours(x), theirs(x))
    close(ours.features(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    assert set(rename(theirs.state_dict())) == set(ours.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())

    again = to_timm(ours)
    close(again(x), theirs(x))
    close(again.forward_features(x), theirs.forward_features(x))
    if not (theirs.has_class_token and theirs.global_pool == "avg"):  # an unused class token becomes a register
        assert_state(again, theirs.state_dict())


def test_other_image_sizes_give_equal_logits():
    theirs = random_weights(TIMM(dynamic_img_size=True, reg_tokens=1))
    ours = from_timm(theirs)
    for image in ((56, 56), (14, 35), (7, 7)):
        x = torch.randn(2, 1, *image)
        close(ours(x), theirs(x))


def test_padding_of_dynamic_img_pad_is_not_converted():
    theirs = random_weights(TIMM(dynamic_img_size=True, dynamic_img_pad=True))
    ours, x = from_timm(theirs), torch.randn(2, 1, 30, 28)
    close(ours(x[..., :28, :]), theirs(x[..., :28, :]))
    assert theirs(x).shape == (2, 5)
    with pytest.raises(ValueError, match="do not tile an image of 30 x 28"):
        ours(x)
    assert "dynamic_img_pad" in from_timm.__doc__.partition("Departs")[2]


def test_attention_masks_have_the_same_meaning():
    theirs = random_weights(TIMM())
    x, mask = random_images(theirs), (torch.rand(17, 17) < 0.7) | torch.eye(17, dtype=torch.bool)
    close(from_timm(theirs)(x, mask), theirs(x, attn_mask=mask))


def test_gradients_are_equal():
    theirs = random_weights(TIMM(init_values=0.1, reg_tokens=1))
    ours, x = from_timm(theirs), random_images(theirs)
    for model in (ours, theirs):
        F.cross_entropy(model(x), torch.tensor([0, 3])).backward()
    expected = rename({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, expected[name])


def test_conversion_leaves_the_timm_model_unchanged():
    theirs = random_weights(TIMM()).train()
    state, ours = copy_state(theirs), from_timm(theirs)
    assert ours.training
    overwrite(ours)
    assert theirs.training and not from_timm(theirs.eval()).training
    assert_state(theirs, state)


@pytest.mark.parametrize("head", [nn.Linear(24, 3), nn.Identity()], ids=["another number of classes", "none"])
def test_replaced_head_is_converted(head):
    """Fine-tuning replaces `head` and leaves `num_classes`, the number of classes of pretraining."""
    theirs = TIMM()
    theirs.head = head
    x = random_images(random_weights(theirs))
    assert theirs.num_classes == 5
    for ours in (from_timm(theirs), apply(theirs, None)):
        close(ours(x), theirs(x))


def test_frozen_parameters_stay_frozen():
    theirs = TIMM(reg_tokens=1, init_values=0.1)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(name.startswith(("head.", "blocks.1.attn.")))
    for ours in (from_timm(theirs), apply(theirs, partial(Merge, r=1))):
        trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
        assert trained == {
            "head.weight", "head.bias", *(f"blocks.1.attention.{layer}.{kind}" for layer in ("qkv", "proj") for kind in ("weight", "bias"))
        }  # fmt: skip
    back = to_timm(from_timm(theirs))
    assert {n: p.requires_grad for n, p in back.named_parameters()} == {n: p.requires_grad for n, p in theirs.named_parameters()}
    assert all(parameter.requires_grad for parameter in from_timm(TIMM()).parameters())


@pytest.mark.parametrize("options", [dict(reg_tokens=2), dict(global_pool="avg", class_token=False)], ids=options_id)
def test_prefix_is_frozen_if_all_its_parts_are(options):
    theirs = TIMM(**options)
    assert from_timm(theirs).prefix.requires_grad
    if theirs.cls_token is not None:
        theirs.cls_token.requires_grad_(False)
        assert from_timm(theirs).prefix.requires_grad, "the registers are trained"
    assert not any(parameter.requires_grad for parameter in from_timm(theirs.requires_grad_(False)).parameters())


def test_conversion_keeps_the_precision():
    theirs = random_weights(TIMM()).double()
    x = random_images(theirs).double()
    close(from_timm(theirs)(x), theirs(x), atol=1e-12)


@pytest.mark.parametrize("key", ["blocks.1.attn.qkv.weight", "head.bias", "pos_embed", "cls_token"])
def test_unknown_weight_is_named(key):
    theirs = TIMM()
    state = theirs.state_dict()
    state["blocks.1.attn.qkw.weight"] = state.pop(key)
    with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1\.attention\.qkw\.weight"):
        from_timm(theirs).load_state_dict(rename(state))


@pytest.mark.parametrize("changes", [{"stride": 5}, {"padding": 1}, {"dilation": 2}], ids=str)
def test_patches_that_overlap_or_leave_gaps_are_refused(changes):
    theirs = TIMM()
    proj = theirs.patch_embed.proj
    theirs.patch_embed.proj = nn.Conv2d(proj.in_channels, proj.out_channels, proj.kernel_size, **({"stride": proj.stride} | changes))
    with pytest.raises(ValueError, match="patches that overlap or leave gaps"):
        from_timm(theirs)


def test_additional_weight_is_named():
    theirs = TIMM()
    theirs.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"do not fit: extra \(1,\); expected those of the model as it was built"):
        from_timm(theirs)


def test_weights_of_another_network_are_refused():
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
        (dict(norm_layer=partial(nn.LayerNorm, eps=1e-6, bias=False)), "norms without weight or bias"),
        (dict(norm_layer=partial(nn.LayerNorm, eps=1e-6, elementwise_affine=False)), "norms without weight or bias"),
        (dict(patch_size=(7, 14)), "patches that are not square"),
        (dict(depth=0), "no blocks"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_from_timm_names_unsupported_parts(options, part):
    with pytest.raises(ValueError, match=rf"this timm model has .*{part}.*, which a ViT does not; expected a plain vit_"):
        from_timm(TIMM(**options))


def test_from_timm_refuses_a_model_with_two_last_norms():
    theirs = TIMM(global_pool="avg")
    theirs.norm = nn.LayerNorm(theirs.embed_dim, eps=1e-6)
    with pytest.raises(ValueError, match=r"this timm model has .*two last norms.*, which a ViT does not"):
        from_timm(theirs)


def test_from_timm_refuses_blocks_that_differ_from_the_first():
    theirs = TIMM(depth=3, drop_path_rate=0.1)
    from_timm(theirs)  # the rates of stochastic depth differ, and are not copied
    theirs.blocks[2].attn.scale *= 2
    with pytest.raises(ValueError, match="this timm model has blocks that are not all alike, which a ViT does not"):
        from_timm(theirs)


def test_from_timm_refuses_mlps_without_bias():
    theirs = TIMM()
    for block in theirs.blocks:
        block.mlp.fc1 = nn.Linear(block.mlp.fc1.in_features, block.mlp.fc1.out_features, bias=False)
    with pytest.raises(ValueError, match="this timm model has projections without bias, which a ViT does not"):
        from_timm(theirs)


def change_all(path, make):
    """A function that replaces a part in each block of a model of timm. `path` is the name of the part in the block."""

    def change(model):
        for block in model.blocks:
            parent, _, name = path.rpartition(".")
            setattr(block.get_submodule(parent), name, make())

    return change


def share_the_first_block(model):
    model.blocks[1] = model.blocks[0]


def fix_the_positions(model):
    table = model.pos_embed.data
    del model.pos_embed
    model.register_buffer("pos_embed", table)


@pytest.mark.parametrize("change", [share_the_first_block, fix_the_positions])
def test_from_timm_copies_shared_and_fixed_weights(change):
    theirs = random_weights(TIMM())
    change(theirs)
    ours, images = from_timm(theirs), random_images(theirs)
    assert_close(ours(images), theirs.eval()(images), 1e-5)
    assert ours.position.table.requires_grad == isinstance(theirs.pos_embed, nn.Parameter)
    assert ours.head.weight.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_all("attn", nn.Identity), "has Identity as attn, which a ViT does not"),
        (change_all("mlp", nn.Identity), "has Identity as mlp, which a ViT does not"),
        (change_all("mlp.fc1", lambda: nn.Sequential(nn.Linear(24, 96))), "has Sequential as mlp.fc1, which a ViT does not"),
        (change_all("attn.q_norm", nn.GELU), "has GELU as attn.q_norm, which a ViT does not"),
        (change_all("mlp.drop1", nn.GELU), "has GELU as mlp.drop1, which a ViT does not"),
        (change_all("attn.scale", lambda: 1.0), "has attention with another scale, which a ViT does not"),
        (lambda m: setattr(m, "norm_pre", nn.GELU()), "has GELU as norm_pre, which a ViT does not"),
        (change_all("mlp.act", nn.Identity), "has Identity as mlp.act, which a ViT does not"),
        (change_all("norm1", nn.Identity), "has Identity as norm1, which a ViT does not"),
        (lambda m: setattr(m.blocks, "1", nn.Identity()), "has Identity as a block, which a ViT does not"),
        (lambda m: prune.l1_unstructured(m.head, "weight", 0.3), r"the weights of this timm model.* do not fit: head.weight missing"),
        (lambda m: m.register_buffer("mean", torch.zeros(3)), r"the weights of this timm model.* do not fit: mean \(3,\); expected"),
        (lambda m: setattr(m, "pos_embed", nn.Parameter(torch.zeros(1, 5, 24))), r"do not fit: position.table \(5, 24\)"),
        (lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True), r"torch.ao.nn.*Linear, which a ViT does not"),
    ],
    ids=["attention", "mlp", "linear", "qk-norm", "dropout", "scale", "norm_pre", "activation", "norm", "block", "pruned", "buffer", "positions", "quantized"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.ao
def test_from_timm_names_manual_changes_of_a_model(change, message):
    theirs = TIMM()
    change(theirs)
    with pytest.raises(ValueError, match=message):
        from_timm(theirs)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3)), r"a Sequential as head \(instead of nn.Linear\)"),
        (nn.Linear(24, 3, bias=False), "a head without bias"),
    ],
    ids=["Sequential", "no bias"],
)
def test_from_timm_names_another_head(head, part):
    theirs = TIMM()
    theirs.head = head
    with pytest.raises(ValueError, match=rf"this timm model has {part}, which a ViT does not"):
        from_timm(theirs)


@pytest.mark.parametrize("name", ["resnet10t", "deit_tiny_distilled_patch16_224"])
def test_from_timm_names_the_class_of_another_model(name):
    model = timm.create_model(name)
    with pytest.raises(ValueError, match=f"got a {type(model).__name__}; expected a plain Vision Transformer of timm"):
        from_timm(model)


# to_timm


SMALL = partial(ViT, (28, 14), 3, 5, dim=24, depth=2, heads=3, tokenizer=partial(PatchEmbed, patch=7))


class OwnBlock(nn.Module):
    def __init__(self, dim, heads, attention, reduction, drop_path):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), attention(dim, heads)


EXPORTABLE = {
    "plain": {},
    "linear patches": {"tokenizer": partial(PatchEmbed, patch=7, linear=True)},
    "mean": {"pool": MeanTokens, "norm_after_pool": True, "registers": 2},
    "scaled": {"block": partial(Block, layer_scale=0.1, mlp_ratio=1.7), "attention": partial(Attention, qk_norm=True)},
    "no positions": {"position": None, "registers": 1},
    "no positions of the prefix": {"position": partial(Learned, on_prefix=False), "depth": 1},
    "dropout": {"dropout": 0.1, "drop_path": 0.1, "attention": partial(Attention, dropout=0.1, qkv_bias=False)},
}


@pytest.mark.parametrize("choices", EXPORTABLE.values(), ids=EXPORTABLE)
def test_exported_model_gives_equal_logits_in_both_directions(choices):
    ours = random_weights(SMALL(**choices))
    state, theirs, x = copy_state(ours), to_timm(ours), torch.randn(2, 3, 28, 14)
    assert isinstance(theirs, VisionTransformer) and not theirs.training
    close(theirs(x), ours(x))
    close(from_timm(theirs)(x), ours(x))
    overwrite(theirs)
    assert_state(ours, state)


@pytest.mark.parametrize("choices", EXPORTABLE.values(), ids=EXPORTABLE)
def test_exported_model_gives_equal_logits_at_other_image_sizes(choices):
    ours = random_weights(SMALL(**choices))
    theirs = to_timm(ours)
    for image in ((14, 28), (28, 28), (21, 35), (7, 7)):
        x = torch.randn(2, 3, *image)
        close(theirs(x), ours(x))


def test_export_keeps_precision_and_mode():
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
        ({"block": OwnBlock}, "OwnBlock"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_to_timm_names_unsupported_parts(choices, part):
    with pytest.raises(
        ValueError, match=rf"this ViT has .*{part}.*, which timm's VisionTransformer does not; expected the plain"
    ):
        to_timm(SMALL(**choices))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "head", nn.Linear(24, 5, bias=False)), "has a head of its own, which"),
        (lambda m: setattr(m.blocks, "1", Block(24, 3, Attention, None, 0.0, mlp_ratio=2.0)), "has blocks that differ, which"),
        (lambda m: setattr(m, "norm", nn.Identity()), "has no last norm, which"),
        (lambda m: setattr(m.blocks[1].norm2, "eps", 1e-5), "has norms with another epsilon than 1e-6, which"),
        (lambda m: setattr(m.blocks[0].mlp, "1", nn.GELU("tanh")), "has GELU by tanh, which"),
        (lambda m: setattr(m.blocks[0].mlp, "2", nn.GELU()), "has GELU as mlp.2, which"),
        (lambda m: setattr(m.blocks[1], "mlp", nn.Linear(24, 24)), "has Linear as mlp, which"),
        (lambda m: setattr(m.blocks[1].attention, "q_norm", nn.GELU()), "has GELU as attention.q_norm, which"),
        (lambda m: setattr(m.tokenizer, "proj", nn.Sequential(m.tokenizer.proj)), "has Sequential as tokenizer.proj, which"),
        (lambda m: setattr(m.blocks[0].attention, "scale", 0.05), "has attention with another scale, which"),
        (lambda m: prune.l1_unstructured(m.head, "weight", 0.3), "the weights of this ViT.* do not fit: head.weight missing"),
    ],
    ids=["head", "block", "no norm", "epsilon", "activation", "dropout", "mlp", "qk-norm", "tokenizer", "scale", "pruned"],
)
def test_to_timm_names_manual_changes_of_a_model(change, message):
    ours = SMALL()
    to_timm(ours)
    change(ours)
    with pytest.raises(ValueError, match=message):
        to_timm(ours)


def test_to_timm_copies_a_shared_block():
    ours = random_weights(SMALL()).eval()
    ours.blocks[1] = ours.blocks[0]
    images = torch.rand(2, 3, 28, 28)
    assert_close(to_timm(ours)(images), ours(images), 1e-5)


def test_float64_weights_survive_both_conversions_exactly():
    ours = random_weights(SMALL(block=partial(Block, layer_scale=0.0)).double())
    theirs = to_timm(ours)
    assert torch.equal(theirs.head.weight, ours.head.weight)
    assert torch.equal(from_timm(theirs).head.weight, ours.head.weight)


@pytest.mark.parametrize("registers", [0, 2])
def test_names_of_a_timm_model_whose_mean_leaves_out_its_class_token_can_be_kept(registers):
    theirs = TIMM(global_pool="avg", reg_tokens=registers)
    back = to_timm(from_timm(theirs), class_token=True)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())
    with pytest.raises(ValueError, match="class_token is True, and this ViT has no prefix token"):
        to_timm(from_timm(TIMM(global_pool="avg", class_token=False)), class_token=True)


def test_to_timm_refuses_another_model():
    with pytest.raises(ValueError, match="got a VisionTransformer; expected a ViT"):
        to_timm(TIMM())


# timm_attention and timm_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:timm's patch_size")  # of 7, where stems have tokens of other sizes


def slot_classes(module) -> set:
    classes = (one for one in vars(module).values() if inspect.isclass(one) and issubclass(one, nn.Module))
    return {one for one in classes if one.__module__ == module.__name__}


ATTENTIONS = [Attention, LocalityAttention, partial(LocalityAttention, temperature="per layer", mask_self=False)]
TOKENIZERS = [
    partial(PatchEmbed, patch=7, kernel=13),
    partial(ShiftedPatchEmbed, patch=4, shift="1px cardinal"),
    partial(ShiftedPatchEmbed, patch=14),
    partial(ConvStem, layers=2),
    ConvTokenizer,
    partial(Resized, tokenizer=partial(PatchEmbed, patch=7), size=14),
]


def test_every_slot_class_is_tested_in_timm():
    assert {getattr(make, "func", make) for make in ATTENTIONS} == slot_classes(attention)
    assert {getattr(make, "func", make) for make in TOKENIZERS} == slot_classes(tokenizers)


def assert_learns(model, *inputs, **options):
    """Every parameter gets a finite gradient that is not zero."""
    model.train().zero_grad()
    F.cross_entropy(model(*inputs, **options), torch.tensor([0, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("make", ATTENTIONS, ids=option_id)
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_learns_in_a_timm_model(make, dynamic):
    model = random_weights(TIMM(attn_layer=timm_attention(make), dynamic_img_size=dynamic, qkv_bias=True))
    slot = getattr(make, "func", make)
    assert isinstance(model.blocks[0].attn, slot) and type(model.blocks[0].attn).__name__ == f"Timm{slot.__name__}"
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    x = torch.randn(2, 1, 28, 28)
    assert_learns(model, x)
    wider = mask | (torch.rand(17, 17) < 0.5)
    assert_learns(model, x, attn_mask=wider)
    close(model.eval()(x, attn_mask=wider.T, is_causal=True), model(x, attn_mask=wider.T & mask), atol=1e-6)
    close(model.eval()(x, is_causal=True), model(x, attn_mask=mask), atol=1e-6)
    assert not torch.allclose(model(x, is_causal=True), model(x))
    if dynamic:
        assert_learns(model, torch.randn(2, 1, 14, 35))


@pytest.mark.parametrize("options", [dict(), dict(qk_norm=True), dict(qkv_bias=False)], ids=options_id)
def test_our_attention_loads_timm_weights_and_gives_equal_logits(options):
    theirs = random_weights(TIMM(**options))
    ours = TIMM(attn_layer=timm_attention(Attention), **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x, mask = random_images(theirs), (torch.rand(17, 17) < 0.7) | torch.eye(17, dtype=torch.bool)
    close(ours(x), theirs(x))
    close(ours(x, attn_mask=mask), theirs(x, attn_mask=mask))
    close(ours(x, is_causal=True), theirs(x, is_causal=True))


@pytest.mark.parametrize("make", ATTENTIONS[1:], ids=option_id)
def test_locality_attention_in_a_timm_model_equals_that_in_a_vit(make):
    theirs = random_weights(TIMM(attn_layer=timm_attention(make)))
    ours = OURS(tokenizer=partial(PatchEmbed, patch=7), attention=make)
    ours.load_state_dict(rename(theirs.state_dict()))
    x = random_images(theirs)
    close(ours(x), theirs(x))


def test_temperature_keeps_its_initial_value_when_timm_weights_are_loaded():
    theirs = random_weights(TIMM())
    ours = TIMM(attn_layer=timm_attention(partial(LocalityAttention, mask_self=False))).eval()
    report = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert report.missing_keys == ["blocks.0.attn.scale", "blocks.1.attn.scale"] and not report.unexpected_keys
    assert torch.equal(ours.blocks[0].attn.scale, torch.full((3,), 8**-0.5))
    x = random_images(theirs)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("make", [Attention, LocalityAttention])
def test_dropout_of_timm_is_used_unless_an_option_overrides_it(make):
    model = TIMM(attn_layer=timm_attention(make), attn_drop_rate=0.2, proj_drop_rate=0.3)
    assert model.blocks[1].attn.dropout == 0.2 and model.blocks[1].attn.proj_drop.p == 0.3
    chosen = TIMM(attn_layer=timm_attention(partial(make, dropout=0.4, qkv_bias=False)), attn_drop_rate=0.2)
    assert chosen.blocks[1].attn.dropout == 0.4 and chosen.blocks[1].attn.qkv.bias is None
    assert (timm_attention(make)(24, 3, proj_drop=1.0)(torch.randn(1, 5, 24)) == 0).all()


def test_function_that_makes_attention_is_refused_with_another_way():
    with pytest.raises(ValueError, match=r"got 'mimetic_start', which is no class; .* call smallvit.attention_starts.draw_mimetic"):
        timm_attention(partial(mimetic_start, query_key=None))
    model = TIMM(attn_layer=timm_attention(Attention), qkv_bias=True)
    draw_mimetic(model.blocks[0].attn, (0.7, 0.7), (0.4, 0.4))
    attn = model.blocks[0].attn
    assert float((attn.proj.weight @ attn.qkv.weight[48:]).trace()) / 24 == pytest.approx(-0.4, abs=0.2)


def test_weight_decay_leaves_out_what_a_timm_model_names():
    model = TIMM()
    (decayed, others), _ = decay_groups(Supervised(model), 0.05)
    assert any(p is model.pos_embed for p in others["params"]) and any(p is model.cls_token for p in others["params"])
    assert any(p is model.head.weight for p in decayed["params"])


@pytest.mark.parametrize("make", TOKENIZERS, ids=option_id)
@pytest.mark.parametrize("dynamic", [False, True])
def test_tokenizer_learns_in_a_timm_model(make, dynamic):
    model = TIMM(embed_layer=timm_tokenizer(make), dynamic_img_size=dynamic)
    embed, x = model.patch_embed, torch.randn(2, 1, 28, 28)
    assert embed.num_patches == embed.grid_size[0] * embed.grid_size[1] == model.pos_embed.shape[1] - 1
    patch = 28 // embed.grid_size[0]
    assert embed.feat_ratio() == patch and embed.feat_ratio(as_scalar=False) == (patch, patch)
    assert_learns(model, x)
    assert torch.equal(embed(x).flatten(1, -2), embed.tokens(x))
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [m.shape for m in maps] == [(2, 24, *embed.grid_size)] * 2
    if dynamic:
        assert_learns(model, torch.randn(2, 1, 56, 28))
        maps = model.forward_intermediates(torch.randn(2, 1, 56, 28), intermediates_only=True)
        assert maps[0].shape[2:] == embed.dynamic_feat_size((56, 28))


@pytest.mark.parametrize("make", TOKENIZERS, ids=option_id)
def test_tokenizer_in_a_timm_model_equals_that_in_a_vit(make):
    theirs = random_weights(TIMM(embed_layer=timm_tokenizer(make), reg_tokens=1))
    ours = OURS(registers=1, tokenizer=make)
    ours.load_state_dict(rename({name.replace(".tokens.", "."): value for name, value in theirs.state_dict().items()}))
    x = torch.randn(2, 1, 28, 28)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("make", [PatchEmbed, ShiftedPatchEmbed])
def test_patch_size_of_timm_is_used_unless_an_option_overrides_it(make):
    assert TIMM(embed_layer=timm_tokenizer(make)).patch_embed.grid_size == (4, 4)
    assert TIMM(embed_layer=timm_tokenizer(make), patch_size=4).patch_embed.grid_size == (7, 7)
    assert TIMM(embed_layer=timm_tokenizer(partial(make, patch=14)), patch_size=4).patch_embed.grid_size == (2, 2)


def test_stem_that_covers_other_pixels_than_timms_patches_says_so():
    with pytest.warns(UserWarning, match="timm's patch_size=14 has no effect on ConvStem, .* 4 x 4 for 28 x 28 pixels"):
        model = TIMM(embed_layer=timm_tokenizer(ConvStem), patch_size=14)
    assert model.patch_embed.grid_size == (4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TIMM(embed_layer=timm_tokenizer(partial(ConvStem, layers=2)), patch_size=4)
        TIMM(embed_layer=timm_tokenizer(partial(PatchEmbed, patch=14)), patch_size=7)  # which was asked for


PRETRAINED = partial(timm.create_model, "vit_tiny_patch16_224", img_size=28, patch_size=7, embed_dim=24, num_heads=3, depth=2, num_classes=5)


@pytest.mark.parametrize("make", [PatchEmbed, *TOKENIZERS], ids=option_id)
@pytest.mark.parametrize("options", [dict(), dict(in_chans=1, img_size=56)], ids=options_id)
def test_pretrained_weights_load_with_another_tokenizer(make, options, tmp_path):
    theirs = random_weights(PRETRAINED())
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    overlay = dict(file=str(tmp_path / "weights.safetensors"), custom_load=False, num_classes=5)
    load = partial(PRETRAINED, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    torch.manual_seed(1)
    ours = load(embed_layer=timm_tokenizer(make), pretrained_strict=False).eval()
    assert torch.equal(ours.blocks[1].attn.qkv.weight, theirs.blocks[1].attn.qkv.weight)
    assert torch.equal(ours.head.bias, theirs.head.bias)
    if make is PatchEmbed:  # the same function as timm's own model with these weights
        x = random_images(ours)
        close(ours(x), load().eval()(x))
    else:  # no kernel of this shape: the initial values
        torch.manual_seed(1)
        new = PRETRAINED(embed_layer=timm_tokenizer(make), **options).patch_embed
        assert_state(ours.patch_embed, new.state_dict())
        with pytest.raises(RuntimeError, match=r"patch_embed\.proj\.weight"):
            load(embed_layer=timm_tokenizer(make))


def test_patch_embed_in_a_timm_model_loads_its_own_weights_and_those_of_timm():
    theirs = random_weights(TIMM())
    ours, again = (TIMM(embed_layer=timm_tokenizer(PatchEmbed)).eval() for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    again.load_state_dict(ours.state_dict())
    x = random_images(theirs)
    close(ours(x), theirs(x))
    close(again(x), theirs(x))
    assert "patch_embed.proj.weight" in theirs.state_dict(), "the state dict of the other model is unchanged"


@pytest.mark.parametrize("make", [PatchEmbed, *TOKENIZERS], ids=option_id)
def test_image_size_of_a_timm_model_can_be_changed(make):
    model = random_weights(TIMM(embed_layer=timm_tokenizer(make), dynamic_img_size=True))
    fixed = TIMM(embed_layer=timm_tokenizer(make)).eval()
    fixed.load_state_dict(model.state_dict())
    fixed.set_input_size(img_size=(56, 28))
    x = torch.randn(2, 1, 56, 28)
    close(fixed(x), model(x))
    assert fixed.patch_embed.grid_size == model.patch_embed.dynamic_feat_size((56, 28))
    assert fixed.patch_embed.num_patches == fixed.pos_embed.shape[1] - 1
    with pytest.raises(ValueError, match=r"got images of \(28, 28\), expected \(56, 28\)"):
        fixed(torch.randn(2, 1, 28, 28))
    with pytest.raises(ValueError, match=r"got patch_size=3 for .* pixels; expected patch_size=None. .* build a new model"):
        fixed.set_input_size(patch_size=3)


# pickle


NAMED = partial(timm.create_model, "vit_tiny_patch16_224", **TIMM.keywords)  # it keeps our classes, too
PICKLED = [
    dict(attn_layer=timm_attention(LocalityAttention), embed_layer=timm_tokenizer(PatchEmbed)),
    dict(
        attn_layer=timm_attention(partial(LocalityAttention, mask_self=False)),
        embed_layer=timm_tokenizer(partial(Resized, tokenizer=partial(PatchEmbed, patch=7), size=14)),
    ),
]


@pytest.mark.parametrize("slots", PICKLED, ids=["classes", "options"])
def test_timm_model_with_our_modules_can_be_copied_and_saved(slots, tmp_path):
    model, x = random_weights(NAMED(**slots)), torch.randn(2, 1, 28, 28)
    torch.save(model, tmp_path / "model.pt")
    for again in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert torch.equal(again(x), model(x))
        assert type(again.blocks[1].attn) is type(model.blocks[1].attn)
        assert type(again.patch_embed) is type(model.patch_embed)
        expected = model(x)
        overwrite(again)
        assert torch.equal(model(x), expected)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(x), expected)


@pytest.mark.slow
def test_saved_timm_model_with_our_modules_gives_equal_logits_in_a_new_process(tmp_path):
    models, x = [random_weights(NAMED(**slots)) for slots in PICKLED], torch.randn(2, 1, 28, 28)
    torch.save((models, x), tmp_path / "models.pt")
    code = """if True:
        import sys, torch
        models, x = torch.load(sys.argv[1], weights_only=False)
        torch.save([model(x) for model in models], sys.argv[2])
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "models.pt", tmp_path / "logits.pt"], check=True)
    for logits, model in zip(torch.load(tmp_path / "logits.pt"), models):
        close(logits, model(x))


def test_equal_components_give_the_same_class():
    nested = [partial(Resized, tokenizer=partial(PatchEmbed, patch=patch), size=28) for patch in (7, 7, 4)]
    one, same, other = map(timm_tokenizer, nested)
    assert one is same and one is not other
    assert timm_attention(Attention) is timm_attention(Attention) is not timm_attention(LocalityAttention)
    array = numpy.array(0.5)  # not hashable
    one, same, other = (timm_attention(partial(Attention, dropout=rate)) for rate in (array, array, 0.5))
    assert one is same and one is not other


def test_shifted_patches_and_locality_attention_learn_in_a_named_timm_model():
    slots = dict(embed_layer=timm_tokenizer(ShiftedPatchEmbed), attn_layer=timm_attention(LocalityAttention))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=5, depth=2, **slots)
    assert_learns(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_timm_chooses_device_and_precision(dtype):
    slots = dict(embed_layer=timm_tokenizer(ShiftedPatchEmbed), attn_layer=timm_attention(LocalityAttention))
    assert TIMM(**slots, dtype=dtype)(torch.randn(2, 1, 28, 28, dtype=dtype)).dtype == dtype
    assert all(p.is_meta for p in TIMM(**slots, device="meta").parameters())


IN_TIMM = dict(embed_layer=timm_tokenizer(PatchEmbed), attn_layer=timm_attention(Attention))
LSA = dict(attn_layer=timm_attention(LocalityAttention))
MIXED = partial(TIMM, embed_layer=timm_tokenizer(PatchEmbed), **LSA)


class Doubled(nn.LayerNorm):
    """A norm that computes something else than its base class."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: timm_attention(LocalityAttention(64, 4)), "timm_attention got a finished LocalityAttention; expected a class"),
        (lambda: timm_tokenizer(LocalityAttention), "timm_tokenizer got LocalityAttention: .*; expected the class of a tokenizer"),
        (lambda: timm_attention(ShiftedPatchEmbed), r"ShiftedPatchEmbed: is created with \(image, channels, dim\); .* an attention"),
        (lambda: timm_attention(partial(LocalityAttention, mask_sel=False)), "unexpected keyword argument 'mask_sel'; expected"),
        (lambda: timm_tokenizer(partial(ShiftedPatchEmbed, shft="none")), "unexpected keyword argument 'shft'; expected"),
        (lambda: TIMM(**IN_TIMM, scale_attn_norm=True), "timm asks Attention for scale_norm, which it does not have"),
        (lambda: TIMM(**IN_TIMM, proj_bias=False), "timm asks Attention for proj_bias=False"),
        (lambda: TIMM(**IN_TIMM, qk_norm=True, norm_layer=RmsNorm), "timm asks Attention for qk_norm"),
        (lambda: TIMM(**IN_TIMM, qk_norm=True, norm_layer=partial(LayerNorm, eps=1e-5)), "timm asks Attention for qk_norm"),
        (lambda: TIMM(**IN_TIMM, qk_norm=True, norm_layer=partial(Doubled, eps=1e-6)), "timm asks Attention for qk_norm"),
        (lambda: TIMM(**IN_TIMM, qk_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6, bias=False)), "Attention for qk_norm"),
        (lambda: TIMM(**LSA, qk_norm=True), "timm asks LocalityAttention for qk_norm"),
        (lambda: TIMM(**IN_TIMM, pre_norm=True), "timm asks PatchEmbed for bias=False"),
        (lambda: TIMM(**IN_TIMM, embed_norm_layer=LayerNorm), "timm asks PatchEmbed for norm_layer"),
        (lambda: TIMM(**IN_TIMM, dynamic_img_size=True, dynamic_img_pad=True), "timm asks PatchEmbed for dynamic_img_pad"),
        (lambda: TIMM(**IN_TIMM, patch_size=(7, 14)), "timm asks PatchEmbed for patch_size"),
        (lambda: TIMM(**IN_TIMM, patch_size=5), "5 .* do not tile an image of 28 x 28"),
        (lambda: timm_tokenizer(PatchEmbed)(28, 7, 1, 24, output_fmt="NCHW"), "timm asks PatchEmbed for output_fmt"),
        (lambda: MIXED()(torch.randn(1, 1, 56, 28)), r"images of \(56, 28\), expected \(28, 28\); .*dynamic_img_size=True"),
        (lambda: MIXED()(torch.randn(1, 1, 28, 28), attn_mask=torch.zeros(17, 17)), "mask has dtype torch.float32"),
        (lambda: timm_attention(Attention)(24, 3)(torch.randn(1, 5, 24), torch.zeros(5, 5), is_causal=True), "mask has dtype"),
    ],
)
def test_options_and_inputs_that_a_slot_does_not_support_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
