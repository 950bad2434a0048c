"""A table of the layers of a model: output shapes, parameters and multiply-adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smallvit.vit import ViT


class Step(NamedTuple):
    """One row of the table that `summary` returns. The row describes a layer of a model: name, class, output shape, number of
    parameters and number of multiply-adds.

    name     where the layer is in the model, such as "blocks.0"
    kind     its class, and the class of its reduction if it has one
    shape    shape of its output for one image
    params   number of its parameters that no earlier row has counted
    macs     number of its multiply-adds (MACs) for one image
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    params: int
    macs: int


class Steps(list):
    """The table that `summary` returns: a list with one row (`Step`) for each layer of a model. When the table is printed, the
    last line shows the totals.
    """

    def __repr__(self) -> str:
        total = Step("total", "", (), sum(step.params for step in self), sum(step.macs for step in self))
        cells = [("step", "what", "output", "parameters", "MACs")]
        for step in [*self, total]:
            params, macs = f"{step.params:,}" if step.params else "", f"{step.macs / 1e6:,.3f} M" if step.macs else ""
            cells.append((step.name, step.kind, " x ".join(map(str, step.shape)), params, macs))
        widths = [max(map(len, column)) for column in zip(*cells)]
        align = "<<<>>"
        return "\n".join("  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths)).rstrip() for row in cells)


def summary(model: nn.Module, image: tuple[int, int, int] | None = None) -> Steps:
    """Return a table of the layers of a model in the order of execution. Each row has the output shape, the number of
    parameters and the number of multiply-adds of a layer. `image` is the image size (channels, height, width); None uses the
    size that a `ViT` was built for.

    `model` is any module; lists of layers get one row per layer. Shapes are those for one image, (tokens, dim) for tokens. With
    merging or pruning, later blocks have fewer tokens; if the number depends on the image, an image of random noise is used.
    Multiply-adds are counted by torch, which counts matrix products and convolutions only. All rows add up to the whole model.
    A model on torch's device "meta" needs neither memory nor time. Print the result to see a table.

    print(summary(ViT((224, 224), 3, 1000, tokenizer=partial(PatchEmbed, patch=16), dim=768, depth=12, heads=12)))

    Raises   ValueError if `image` is missing for a model that is not a `ViT`, or is not three numbers, and for a model on the
             device "meta" whose number of tokens depends on the image.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from smallvit.evaluate import frozen
    from smallvit.flops import flop_counter
    from smallvit.vit import ViT

    if image is None and not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} does not say for which images it is; give image=(channels, height, width)")
    size: Any = (model.channels, *model.image) if image is None and isinstance(model, ViT) else image
    if not hasattr(size, "__len__") or len(size) != 3:
        raise ValueError(f"image is {size}; expected three numbers: channels, height, width")
    parameters = list(model.parameters())
    noise = torch.rand(1, *size, generator=torch.Generator().manual_seed(0)).to(parameters[0] if parameters else "cpu")
    rows, flops_before, counted = [Step("image", "", tuple(size), 0, 0)], {}, set()
    # `Pixels` has no parameters and gives no logits
    body: Any = model if parameters or not hasattr(model, "features") else model.features
    counter = flop_counter()

    def before_layer(name: str, module: nn.Module, inputs: tuple[Tensor, ...]):
        """Forward pre-hook of a layer: store the number of operations that were counted before the layer runs. The count after
        the layer, minus this number, is the number of operations of the layer. `name` is the name of the layer, `module` the
        layer, and `inputs` its inputs.

        Also adds the table row of the prefix tokens (class token and registers), which come after the tokenizer.
        """
        if isinstance(model, ViT) and rows[-1].name == "tokenizer" and len(model.prefix):
            params = count_unseen_parameters([model.prefix])
            rows.append(Step("prefix", describe_prefix(model), tuple(inputs[0].shape[1:]), params, 0))
        flops_before[name] = counter.get_total_flops()

    def after_layer(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Any):
        """Forward hook of a layer: add a row for the layer to the table. `name` is the name of the layer, and `output` is its
        output. The shape is that of the first tensor in the output, or of the row above if there is none.

        Layers such as dropout get no row: they have no parameters, buffers or multiply-adds, and keep the shape.
        """
        shape = next((tuple(x.shape[1:]) for x in tree_leaves(output) if isinstance(x, torch.Tensor)), rows[-1].shape)
        macs, params = (counter.get_total_flops() - flops_before[name]) // 2, count_unseen_parameters(module.parameters())
        if macs or params or shape != rows[-1].shape or any(True for _ in module.buffers()):
            rows.append(Step(name, describe_class(module), shape, params, macs))

    def count_unseen_parameters(parameters: Iterable[nn.Parameter]) -> int:
        """Return the total number of values in the given parameters, without parameters that were counted before. A parameter
        that several layers share is counted once.
        """
        new = {id(p): p.numel() for p in parameters if id(p) not in counted}
        counted.update(new)
        return sum(new.values())

    with ExitStack() as hooks:
        for name, layer in find_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(partial(before_layer, name)))
            hooks.enter_context(layer.register_forward_hook(partial(after_layer, name)))
        with frozen(model), counter:
            body(noise)
    params, macs = count_unseen_parameters(parameters), counter.get_total_flops() // 2 - sum(row.macs for row in rows)
    return Steps(rows + ([Step("elsewhere", "", (), params, macs)] if params or macs else []))


def find_layers(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model as pairs (name, module). A list of modules, such as the blocks of a ViT, gives one pair for
    each of its modules. `path` is a text that is put before each name, such as "blocks.".
    """
    from torch import nn

    for name, child in model.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(child):
            yield from find_layers(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def describe_class(module: nn.Module) -> str:
    """Return the class name of a layer as text, such as "Block". For a layer that merges or prunes tokens, the name of the
    class that merges or prunes follows, as in "Block, Merge".
    """
    reduction = getattr(module, "reduction", None)
    return type(module).__name__ + (f", {type(reduction).__name__}" if reduction is not None else "")


def describe_prefix(model: ViT) -> str:
    """Return a text that names the prefix tokens of a model, such as "class token and 4 registers"."""
    classes = model.pool.class_tokens
    registers = len(model.prefix) - classes
    names = {1: "class token", 2: "class token and distillation token"}  # `DistilledTokens` has both
    parts = [names.get(classes, f"{classes} class tokens")] if classes else []
    return " and ".join(parts + ([f"{registers} register{'s' * (registers > 1)}"] if registers else []))
