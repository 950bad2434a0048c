"""Convert our `ViT` to a Vision Transformer of timm, for use in projects that do not know smallvit."""

from typing import Any

from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.pooling import ClassToken, MeanTokens
from smallvit.positions import Learned
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, DropPath, LayerScale, ViT

from .convert import NAMES, copy_frozen, load_all, replace_parts, replaced_part, trained_weights


def to_timm(model: ViT, *, class_token: bool = False) -> nn.Module:
    """Return a Vision Transformer of timm that has the same weights and gives the same outputs as a `ViT` of smallvit
    (`model`).

    The weights are copied.

    The `ViT` is left unchanged; the new model has its device, precision and mode. Its `state_dict()` has timm's names. Frozen
    parameters (`requires_grad=False`) stay frozen.
    Supported are the slots that timm has too: square patches, learned positions or none, plain attention, pre-norm blocks,
    class token or mean pooling, registers, LayerScale and qk-norm. Without a class token all prefix tokens become timm's
    registers, or with `class_token=True` the first one becomes a class token that the mean leaves out: timm's models that were
    made with `global_pool="avg"` have one, so `to_timm(from_timm(m), class_token=True)` has the names of `m`. Like a `ViT`, the
    new model takes images of other sizes too (timm's `dynamic_img_size=True`) and resizes the positions for them.

    Departs  Dropout of any kind is not copied, nor are hooks. Weights that several blocks share become a copy for each block.
    Raises   ValueError for another kind of model, and for parts or weights that timm's model does not have; the error names
             them.
    """
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(model, ViT):
        raise ValueError(f"got a {type(model).__name__}; expected a ViT")
    if parts := unsupported_parts(model):
        raise ValueError(f"this ViT has {', '.join(parts)}, which timm's VisionTransformer does not; expected the plain slots")
    first: Any = model.blocks[0]
    weight, prefix = first.norm1.weight, len(model.prefix)
    dim, mean = len(weight), model.pool.class_tokens == 0
    if class_token and not prefix:
        raise ValueError("class_token is True, and this ViT has no prefix token that could be one; leave class_token out")
    classes = int(class_token or not mean)
    height, width = model.image
    new = VisionTransformer(
        img_size=(height, width),
        patch_size=model.tokenizer.patch,
        in_chans=model.channels,
        num_classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        global_pool="avg" if mean else "token",
        fc_norm=model.norm_after_pool,
        class_token=bool(classes),
        reg_tokens=prefix - classes,
        embed_dim=dim,
        depth=len(model.blocks),
        num_heads=first.attention.heads,
        mlp_ratio=(first.mlp[0].out_features + 0.5) / dim,  # timm truncates ratio * dim to a whole number
        qkv_bias=first.attention.qkv.bias is not None,
        qk_norm=isinstance(first.attention.q_norm, nn.LayerNorm),
        init_values=None if first.branch1[1].start is None else 1.0,  # overwritten by load_state_dict
        pos_embed="none" if model.position is None else "learn",
        no_embed_class=not positions_cover_prefix(model),
        dynamic_img_size=True,
    )
    load_all(new.to(weight), timm_state(model, model.state_dict(), classes), "ViT")
    copy_frozen(timm_state(model, trained_weights(model), classes), new)
    return new.train(model.training)


def timm_state(model: ViT, own: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
    """Return the tensors `own` with the names that they have in timm. `own` is the state dict (a dict from names to weights) of
    the `ViT` `model`, or another dict with its names and shapes. A `ViT` stores class token and registers together as prefix
    tokens; timm stores them separately, so they are split: the first `classes` of them, 0 or 1, become the class token.
    """
    own = dict(own)
    prefix = own.pop("prefix")[None]
    state = {"cls_token": prefix[:, :classes], "reg_token": prefix[:, classes:]}
    state = {name: tokens for name, tokens in state.items() if tokens.shape[1]}
    # our last norm is timm's `fc_norm` if it follows the pooling, else timm's `norm`
    pairs = [(ours, timms) for timms, ours in NAMES.items() if timms != "fc_norm." or model.norm_after_pool]
    for name, tensor in own.items():
        name = replace_parts(name, pairs)
        state[name] = tensor[None] if name == "pos_embed" else tensor
    return state


def positions_cover_prefix(model: ViT) -> bool:
    """Return True if a `ViT` adds position embeddings to its prefix tokens (class token and registers) too, else False."""
    rows, columns = model.tokenizer.grid(model.image)
    return model.position is not None and len(model.position.table) > rows * columns


def unsupported_parts(model: ViT) -> list[str]:
    """Return a list of the classes and settings in our `ViT` that timm's Vision Transformer does not support, as text. The list
    is empty if the `ViT` can be converted to timm.
    """
    allowed = {"tokenizer": (PatchEmbed,), "position": (Learned, type(None)), "pool": (ClassToken, MeanTokens)}
    found = [type(part).__name__ for name, kinds in allowed.items() if type(part := getattr(model, name)) not in kinds]
    found += [type(block).__name__ for block in model.blocks if type(block) is not Block]
    blocks: list[Any] = [block for block in model.blocks if type(block) is Block]
    norm, branch = (nn.LayerNorm,), {"": (nn.Sequential,), ".0": (nn.Dropout,), ".1": (LayerScale,), ".2": (DropPath,)}
    in_block = {
        "norm1": norm, "attention": (Attention,), "attention.qkv": (nn.Linear,), "attention.q_norm": (*norm, nn.Identity),
        "attention.k_norm": (*norm, nn.Identity), "attention.proj": (nn.Linear,), "norm2": norm, "mlp": (nn.Sequential,),
        "mlp.0": (nn.Linear,), "mlp.1": (nn.GELU,), "mlp.2": (nn.Dropout,), "mlp.3": (nn.Linear,),
        **{f"{name}{place}": kinds for name in ("branch1", "branch2") for place, kinds in branch.items()},
    }  # fmt: skip
    found += [type(block.reduction).__name__ for block in blocks if block.reduction is not None]
    replaced = [replaced_part(block, in_block) for block in blocks]
    replaced += [replaced_part(model, {"tokenizer.proj": (nn.Conv2d,)})] if type(model.tokenizer) is PatchEmbed else []
    if any(replaced):
        return list(dict.fromkeys([*found, *filter(None, replaced)]))
    shapes = {tuple((name, tuple(weight.shape)) for name, weight in block.state_dict().items()) for block in model.blocks}
    tokenizer, attentions = model.tokenizer, [block.attention for block in blocks if type(block.attention) is Attention]
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    settings = {
        "no blocks": not len(model.blocks),
        "blocks that differ": len(shapes) > 1,
        "a head of its own": not isinstance(model.head, nn.Linear | nn.Identity) or getattr(model.head, "bias", 0) is None,
        "overlapping patches": type(tokenizer) is PatchEmbed and tokenizer.proj.kernel_size != tokenizer.proj.stride,
        "no last norm": not isinstance(model.norm, nn.LayerNorm),
        "norms with another epsilon than 1e-6": any(norm.eps != 1e-6 for norm in norms),
        "GELU by tanh": any(getattr(block.mlp[1], "approximate", "none") != "none" for block in blocks),
        "attention with another scale": any(one.scale != (one.proj.in_features // one.heads) ** -0.5 for one in attentions),
        "norms behind the branches": any(not block.norm_first for block in blocks),
        "positions inside attention": any(one.position is not None for one in attentions),
        "heads of another width": any(one.proj.in_features != one.proj.out_features for one in attentions),
    }
    return list(dict.fromkeys(found)) + [setting for setting, present in settings.items() if present]
