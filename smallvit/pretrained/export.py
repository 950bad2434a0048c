"""Our ViT as timm's: the way back of `from_timm`, for a project that knows timm's models alone."""

from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.pooling import ClassToken, MeanTokens
from smallvit.positions import Learned
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, ViT

from .convert import NAMES, translated


def to_timm(model: ViT) -> nn.Module:
    """The timm `VisionTransformer` that computes what this `ViT` computes, with its weights; the model itself is left alone.

    For slots that timm has too: square patches, learned positions or none, plain attention, pre-norm blocks, class token or
    mean; registers, LayerScale, qk-norm. Its `state_dict()` is what other projects read. Without a class token all prefix
    tokens are timm's registers. On the device and in the precision of the model; dropout of any kind is not carried over.

    Raises   ValueError for a model with parts that timm's does not have, naming them.
    """
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(model, ViT):
        raise ValueError(f"got a {type(model).__name__}; expected a ViT")
    if strange := strangers(model):
        raise ValueError(
            f"this ViT has {', '.join(strange)}, which timm's VisionTransformer does not; expected the plain slots"
        )
    first, weight, prefix = model.blocks[0], model.blocks[0].norm1.weight, len(model.prefix)
    dim, hidden = len(weight), first.mlp[0].out_features
    mean = model.pool.class_tokens == 0
    timms = VisionTransformer(
        img_size=model.image,
        patch_size=model.tokenizer.patch,
        in_chans=model.channels,
        num_classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        global_pool="avg" if mean else "token",
        fc_norm=model.norm_after_pool,
        class_token=not mean,
        reg_tokens=prefix if mean else prefix - 1,
        embed_dim=dim,
        depth=len(model.blocks),
        num_heads=first.attention.heads,
        mlp_ratio=(hidden + 0.5) / dim,  # it is cut to a whole number of channels
        qkv_bias=first.attention.qkv.bias is not None,
        qk_norm=isinstance(first.attention.q_norm, nn.LayerNorm),
        init_values=None if first.branch1[1].start is None else 1.0,  # whatever it starts at is overwritten
        pos_embed="none" if model.position is None else "learn",
        no_embed_class=not positioned(model),
    )
    timms.to(weight).load_state_dict(renamed(model), strict=True)
    return timms.train(model.training)


def renamed(model: ViT) -> dict[str, Tensor]:
    """The weights under timm's names; the prefix taken apart into class token and registers."""
    own = model.state_dict()
    prefix, classes = own.pop("prefix")[None], model.pool.class_tokens
    state = {"cls_token": prefix[:, :classes], "reg_token": prefix[:, classes:]}
    state = {name: tokens for name, tokens in state.items() if tokens.shape[1]}
    # timm has two places for the last norm
    words = [(ours, theirs) for theirs, ours in NAMES.items() if theirs != "fc_norm." or model.norm_after_pool]
    for name, tensor in own.items():
        name = translated(name, words)
        state[name] = tensor[None] if name == "pos_embed" else tensor
    return state


def positioned(model: ViT) -> bool:
    """Whether prefix tokens have positions too."""
    rows, columns = model.tokenizer.grid(model.image)
    return model.position is not None and len(model.position.table) > rows * columns


def strangers(model: ViT) -> list[str]:
    """The parts of our ViT that timm's has no place for."""
    plain = {"tokenizer": (PatchEmbed,), "position": (Learned, type(None)), "pool": (ClassToken, MeanTokens)}
    found = [type(part).__name__ for name, kinds in plain.items() if type(part := getattr(model, name)) not in kinds]
    found += [type(block).__name__ for block in model.blocks if type(block) is not Block]
    blocks = [block for block in model.blocks if type(block) is Block]
    for block in blocks:
        parts = {block.attention: Attention, block.reduction: type(None), block.mlp[1]: nn.GELU}
        found += [type(part).__name__ for part, kind in parts.items() if type(part) is not kind]
    shapes = {tuple((name, tuple(weight.shape)) for name, weight in block.state_dict().items()) for block in model.blocks}
    odd = {
        "no blocks": not len(model.blocks),
        "blocks that differ": len(shapes) > 1,
        "a head of its own": not isinstance(model.head, nn.Linear | nn.Identity) or getattr(model.head, "bias", 0) is None,
        "overlapping patches": type(model.tokenizer) is PatchEmbed
        and model.tokenizer.proj.kernel_size != model.tokenizer.proj.stride,
        "norms behind the branches": any(not block.norm_first for block in blocks),
        "heads of another width": any(
            type(block.attention) is Attention and block.attention.proj.in_features != block.attention.proj.out_features
            for block in blocks
        ),
    }
    return list(dict.fromkeys(found)) + [part for part, is_there in odd.items() if is_there]
