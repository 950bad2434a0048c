"""Use our attentions and tokenizers in models of timm, through timm's arguments `attn_layer=` and `embed_layer=`."""

import copyreg
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smallvit.attention_positions import Places, places_of

CLASSES: dict[Hashable, Any] = {}  # the classes of `made_once`


def timm_attention(attention: Callable) -> type[nn.Module]:
    """Return a class that makes one of our attention modules usable in a timm model. Pass the class to timm as the argument
    `attn_layer=`. `attention` is the class of our attention module.

    This needs timm 1.0.23 or newer.

    `attention` is a class or a partial with options, such as `partial(LocalityAttention, mask_self=False)`. Its weights have
    timm's names, so that pretrained weights of timm load. Parameters that timm does not have, such as a temperature, keep their
    initial value; timm then needs `pretrained_strict=False`.

    timm does not say where the tokens are. So positions inside attention need the grid (rows, columns) of the patches and the
    number of prefix tokens: `partial(Attention, position=partial(Rotary, grid=(14, 14), prefix=1))`. The model then takes
    images of this size only, and no `patch_drop_rate`. Images of another shape with as many patches are not noticed.

    Raises   ValueError for a function such as `mimetic_start`, a finished module, a class that is no attention, and an option
             that the class does not have; when timm builds the model, for options of timm that our attention does not have:
             `scale_norm`, `proj_bias=False`, and `qk_norm` with a norm other than LayerNorm with epsilon 1e-6, and for
             positions without a grid. The model raises it if it has positions inside attention and gets another number of
             tokens.
    """
    check_unfinished("timm_attention", attention)
    slot, _ = split_partial(attention)
    if not isinstance(slot, type):
        raise ValueError(
            f"timm_attention got {getattr(slot, '__name__', slot)!r}, which is no class; expected an attention class, such as"
            " Attention. For mimetic initialization, build the model with timm_attention(Attention), and then call"
            " smallvit.attention_starts.draw_mimetic(block.attn, (0.7, 0.7), (0.4, 0.4)) for each block"
        )
    check_created_with("timm_attention", attention, ("dim", "heads"), "an attention, such as Attention")
    return made_once(attention_class, attention)


def attention_class(attention: Callable) -> Any:
    """Return a new class for `timm_attention`."""
    slot, options = split_partial(attention)
    takes_norm = "qk_norm" in inspect.signature(slot).parameters

    class TimmAttention(slot):
        """One of our attention modules, in a form that timm can use in its models. Its constructor accepts the same arguments
        as the attention of timm.
        """

        places: "FixedPlaces | None" = None

        def __init__(
            self,
            dim,
            num_heads=8,
            qkv_bias=False,
            qk_norm=False,
            proj_bias=True,
            attn_drop=0.0,
            proj_drop=0.0,
            norm_layer=None,
            device=None,
            dtype=None,
            **others,
        ):
            norm = norm_layer(1) if norm_layer else nn.LayerNorm(1, eps=1e-6)
            fits = takes_norm and is_plain_norm(norm)
            refuse_options(slot, others | {"qk_norm": qk_norm and not fits, "proj_bias=False": not proj_bias})
            timms = {"qkv_bias": qkv_bias, "dropout": attn_drop} | ({"qk_norm": True} if qk_norm else {})
            super().__init__(dim, num_heads, **timms | options)
            self.proj_drop = nn.Dropout(proj_drop)
            if getattr(self, "position", None) is not None:
                position = {"position": inspect.signature(slot).parameters["position"].default} | options
                shape = inspect.signature(position["position"]).parameters
                self.places = FixedPlaces(shape["grid"].default, shape["prefix"].default)
            self.to(device=device, dtype=dtype)

        def forward(self, x, attn_mask=None, is_causal=False):
            if is_causal and (attn_mask is None or attn_mask.dtype == torch.bool):  # another mask is refused by our attention
                n = x.shape[1]
                causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
                attn_mask = causal if attn_mask is None else attn_mask & causal
            return self.proj_drop(self.own_forward(x, attn_mask).x)

        def own_forward(self, x, mask=None):
            """Return the output of our attention, an `AttentionOutput`, before timm's dropout. `x` are tokens (b, n, dim)."""
            return super().forward(x, None, mask, *([] if self.places is None else [self.places.of(x)]))

    TimmAttention.__name__ = TimmAttention.__qualname__ = f"Timm{slot.__name__}"
    return TimmAttention


def is_plain_norm(norm: Any) -> bool:
    """Return whether a norm computes what `nn.LayerNorm` with weight, bias and epsilon 1e-6 computes."""
    import timm.layers

    layers: Any = timm.layers
    return type(norm) in (nn.LayerNorm, layers.LayerNorm) and norm.eps == 1e-6 and None not in (norm.weight, norm.bias)


class FixedPlaces(NamedTuple):
    """The positions of the patches in a model that does not say where its tokens are: the `grid` (rows, columns) of its
    patches, and the number of `prefix` tokens before them.
    """

    grid: tuple[int, int]
    prefix: int

    def of(self, tokens: Tensor) -> Places:
        """Return the places of `tokens` (batch, tokens, width). Raises ValueError for another number of tokens."""
        rows, columns = self.grid
        if tokens.shape[1] != self.prefix + rows * columns:
            raise ValueError(
                f"got {tokens.shape[1]} tokens; expected {self.prefix} prefix tokens and {rows} x {columns} patches, as the "
                "positions inside attention were built for: use images of one size and no patch_drop_rate, and set grid= and "
                "prefix= to them"
            )
        return places_of(self.grid, tokens.device)


def timm_tokenizer(tokenizer: Callable) -> Callable[..., nn.Module]:
    """Return a class that makes one of smallvit's tokenizers (modules that convert images to tokens) usable in a timm model.
    Pass this class to timm as the argument `embed_layer=`. `tokenizer` is the class of the tokenizer.

    `tokenizer` is a class or a partial with options. timm's `patch_size` sets the option `patch` of the tokenizer, unless the
    partial sets it. A convolutional stem has no patches: its layers set how many pixels a token covers. A warning says so if
    this differs from `patch_size`.

    Pretrained weights of timm load, also with images of another size. The kernel of timm's patch embedding is used if the
    tokenizer has a kernel of this shape, as `PatchEmbed` does. Otherwise the tokenizer keeps its initial values, and timm needs
    `pretrained_strict=False`.

    Raises   ValueError for a finished module, a class that is no tokenizer, and an option that the class does not have; when
             timm builds the model, for options of timm that our tokenizers do not have: a norm after the
             embedding, no bias (`pre_norm`), padding (`dynamic_img_pad`) and patches that are not square. The model raises it
             for images of another size, unless it has `dynamic_img_size=True`. `set_input_size` of the model raises it for
             another patch size.
    """
    check_unfinished("timm_tokenizer", tokenizer)
    check_created_with("timm_tokenizer", tokenizer, ("image", "channels", "dim"), "a tokenizer, such as PatchEmbed")
    return made_once(tokenizer_class, tokenizer)


def tokenizer_class(tokenizer: Callable) -> Any:
    """Return a new class for `timm_tokenizer`."""
    slot, options = split_partial(tokenizer)
    parameters = inspect.signature(slot).parameters

    class TimmTokenizer(nn.Module):
        """One of our tokenizers, in a form that timm can use in its models. It has the constructor arguments, attributes and
        methods of timm's class `PatchEmbed` that timm's Vision Transformers use. Our tokenizer is the attribute `tokens`.
        """

        def __init__(
            self,
            img_size=224,
            patch_size=16,
            in_chans=3,
            embed_dim=768,
            bias=True,
            output_fmt=None,
            strict_img_size=True,
            device=None,
            dtype=None,
            **others,
        ):
            super().__init__()
            image, (patch, width) = as_pair(img_size), as_pair(patch_size)
            unlike = {"bias=False": not bias, "patch_size": patch != width, "output_fmt": output_fmt not in (None, "NHWC")}
            refuse_options(slot, others | unlike)
            self.strict, self.as_image, self.channels, self.dim = strict_img_size, output_fmt is not None, in_chans, embed_dim
            self.tokens = slot(image, in_chans, embed_dim, **({"patch": patch} if "patch" in parameters else {}) | options)
            self.set_image(image)
            rows, columns = self.grid_size
            if "layers" in parameters and (rows, columns) != (-(-image[0] // patch), -(-image[1] // patch)):
                warnings.warn(
                    f"timm's patch_size={patch} has no effect on {slot.__name__}, whose options decide how many tokens an "
                    f"image has: {rows} x {columns} for {image[0]} x {image[1]} pixels",
                    stacklevel=3,
                )
            self.to(device=device, dtype=dtype)
            self.register_load_state_dict_pre_hook(rename_projection)

        def set_image(self, image):
            """Set the attributes that depend on the size (height, width) of the images, in pixels."""
            rows, columns = self.tokens.grid(image)
            self.img_size, self.grid_size, self.num_patches = image, (rows, columns), rows * columns
            self.patch_size = (image[0] // rows, image[1] // columns)

        def set_input_size(self, img_size=None, patch_size=None):
            """Change the size of the images, in pixels: a number, or a pair (height, width). The method `set_input_size` of
            timm's models calls this method. Raise ValueError for another patch size, which cannot be changed.
            """
            if patch_size is not None and as_pair(patch_size) != self.patch_size:
                raise ValueError(
                    f"got patch_size={patch_size} for {slot.__name__}, which has patches of {self.patch_size} pixels; expected"
                    " patch_size=None. For other patches, build a new model"
                )
            if img_size is not None:
                self.set_image(as_pair(img_size))

        @property
        def proj(self):
            """Return the projection of the patches, a convolution. timm uses this name to load pretrained weights.

            If our tokenizer has no convolution of timm's shape, this is one without values (on torch's device "meta"). So timm
            finds the shape that it expects, and the weights of our tokenizer stay as they are.
            """
            own, stand_in = projection(self), nn.Conv2d(self.channels, self.dim, self.patch_size, device="meta")
            return own if own is not None and own.weight.shape == stand_in.weight.shape else stand_in

        def feat_ratio(self, as_scalar=True):
            """Return the side of a patch in pixels: one number, the larger of height and width, if `as_scalar` is True, else
            the pair (height, width). Models of timm call this method.
            """
            return max(self.patch_size) if as_scalar else self.patch_size

        def dynamic_feat_size(self, img_size):
            """Return the number of (rows, columns) of patches in an image. `img_size` is the (height, width) of the image.
            Models of timm call this method.
            """
            return self.tokens.grid(img_size)

        def forward(self, x):
            image = tuple(x.shape[-2:])
            if self.strict and image != self.img_size:
                raise ValueError(
                    f"got images of {image}, expected {self.img_size}; build with dynamic_img_size=True for any size"
                )
            return self.tokens(x).unflatten(1, self.tokens.grid(image)) if self.as_image else self.tokens(x)

    TimmTokenizer.__name__ = TimmTokenizer.__qualname__ = f"Timm{slot.__name__}"
    return TimmTokenizer


def projection(module: Any) -> nn.Conv2d | None:
    """Return the convolution `proj` of the tokenizer in `module`, a module of `timm_tokenizer`; None if it has none."""
    own = getattr(module.tokens, "proj", None)
    return own if isinstance(own, nn.Conv2d) else None


def rename_projection(module: nn.Module, state: dict[str, Tensor], prefix: str, *others):
    """Rename the patch kernel and its bias in a state dict of timm, before it is loaded into `module`, a module of
    `timm_tokenizer`. `state` is changed in place. `prefix` is the start of the names of weights of the module in it.

    A kernel of another shape keeps its name. torch then reports it as unexpected, and our own kernel as missing.
    """
    own, kernel = projection(module), state.get(f"{prefix}proj.weight")
    if own is not None and kernel is not None and kernel.shape == own.weight.shape:
        for name in [f"{prefix}proj.{kind}" for kind in ("weight", "bias")]:
            if name in state:
                state[f"{prefix}tokens.{name.removeprefix(prefix)}"] = state.pop(name)


def made_once(make: Callable[[Callable], Any], component: Callable) -> Any:
    """Return the class `make(component)`. Equal components (the same class with equal options) give the same class.

    The class and its instances can be pickled: pickle cannot import the class, because a function makes it, so it calls
    `made_once` again. It does so for the classes of a metaclass that `copyreg` knows.
    """
    key = make, key_of(component)
    if key not in CLASSES:
        made = make(component)
        metaclass: Any = type("MadeOnce", (type(made),), {})
        copyreg.pickle(metaclass, lambda _: (made_once, (make, component)))
        CLASSES[key] = metaclass(made.__name__, (made,), {})
    return CLASSES[key]


def key_of(value: Any) -> Hashable:
    """Return a key for a dict that is equal for equal components and for equal options of them. `value` is a component or an
    option. An option that is not hashable, such as an array, is equal only to itself.
    """
    if isinstance(value, partial):
        return partial, value.func, key_of(value.args), key_of(value.keywords)
    if isinstance(value, dict):
        return dict, frozenset((name, key_of(option)) for name, option in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(key_of, value)
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def split_partial(component: Callable) -> tuple[Any, dict[str, Any]]:
    """Return a class and a dict of its options. `component` is a `functools.partial` of the class, or the class itself without
    options.
    """
    return (component.func, component.keywords) if isinstance(component, partial) else (component, {})


def check_unfinished(wrapper: str, component: Any):
    """Raise ValueError if the function `wrapper` got a module, and not a class or a function that makes one."""
    if isinstance(component, nn.Module) or not callable(component):
        raise ValueError(
            f"{wrapper} got a finished {type(component).__name__}; expected a class, or functools.partial of a class with its "
            "options"
        )


def check_created_with(wrapper: str, component: Callable, shapes: tuple[str, ...], kind: str):
    """Raise ValueError unless the class of a component can be created with these `shapes` by position, and with the options of
    its partial. `wrapper` is the function that got it, and `kind` says in the error message what it expects.
    """
    slot, options = split_partial(component)
    signature = inspect.signature(slot)
    required = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    needed = [name for name in required if name not in options]
    try:
        signature.bind_partial(*shapes, **options)
        reason = f"is created with ({', '.join(needed)})" if len(needed) > len(shapes) else None
    except TypeError as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"{wrapper} got {slot.__name__}: {reason}; expected the class of {kind}, created with ({', '.join(shapes)}), and "
            "in a partial only options that it has"
        )


def refuse_options(component: Callable, options: Mapping[str, object]):
    """Raise ValueError if timm sets an option that smallvit's class `component` does not have. `options` is a dict from the
    names of such options to timm's values. A value such as None or False counts as not set.
    """
    if names := [name for name, value in options.items() if value]:
        raise ValueError(
            f"timm asks {component.__name__} for {', '.join(names)}, which it does not have; leave it as timm has it by default"
        )


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return a size as a pair (height, width). `size` is a single number, for squares, or a pair of numbers."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
