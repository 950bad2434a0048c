"""What comes out of a model step by step: the shapes that a student works out on paper, as they are."""

from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """One part of a model: what it is, the shape that leaves it for one image, its parameters, its multiply-adds."""

    name: str
    kind: str
    shape: tuple[int, ...]
    params: int
    macs: int


class Steps(list):
    """Steps in their order; printed, a table in columns with the sums below."""

    def __repr__(self) -> str:
        total = Step("total", "", (), sum(step.params for step in self), sum(step.macs for step in self))
        cells = [("step", "what", "output", "parameters", "MACs")]
        for step in [*self, total]:
            macs = f"{step.macs / 1e6:,.3f} M" if step.macs else ""
            cells.append(
                (step.name, step.kind, " x ".join(map(str, step.shape)), f"{step.params:,}" if step.params else "", macs)
            )
        wide = [max(map(len, column)) for column in zip(*cells)]
        lines = [
            [f"{cell:>{w}}" if at > 2 else f"{cell:{w}}" for at, (cell, w) in enumerate(zip(line, wide))] for line in cells
        ]
        return "\n".join("  ".join(line).rstrip() for line in lines)


def summary(model: "torch.nn.Module", image: tuple[int, int, int] | None = None) -> Steps:  # noqa: F821
    """The parts of a model as an image goes through them, each with the shape that leaves it, n d for tokens.

    `image` is channels, height and width, by default those that a `ViT` was built for. Any model will do; lists of layers are
    opened, one row a layer. Where tokens are merged or pruned, the blocks leave fewer of them; where how many depends on the
    image, they are those of an image of noise. Parameters and multiply-adds (as torch counts them: products alone) of all rows
    add up to the model's. A model on torch's device "meta" costs neither memory nor time. Printed, it is a table.

    print(summary(ViT((224, 224), 3, 1000, tokenizer=partial(PatchEmbed, patch=16), dim=768, depth=12, heads=12)))

    Raises   ValueError without `image` for a model that does not say which images it was built for.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from smallvit.evaluate import frozen
    from smallvit.vit import ViT

    if image is None and not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} does not say for which images it is; give image=(channels, height, width)")
    image = tuple(image or (model.channels, *model.image))
    if len(image) != 3:
        raise ValueError(f"image is {image}; expected three numbers: channels, height, width")
    parameters = list(model.parameters())
    noise = torch.rand(1, *image, generator=torch.Generator().manual_seed(0)).to(parameters[0] if parameters else "cpu")
    rows, started, seen = [Step("image", "", image, 0, 0)], {}, set()

    def before(name, module, given):
        if isinstance(model, ViT) and rows[-1].name == "tokenizer" and len(model.prefix):
            rows.append(Step("prefix", in_words(model), tuple(given[0].shape[1:]), fresh([model.prefix]), 0))
        started[name] = counter.get_total_flops()

    def after(name, module, given, out):
        shape = tuple((out[0] if isinstance(out, tuple) else out).shape[1:])
        macs, params = (counter.get_total_flops() - started[name]) // 2, fresh(module.parameters())
        if macs or params or shape != rows[-1].shape or any(True for _ in module.buffers()):
            rows.append(Step(name, kind(module), shape, params, macs))

    def fresh(parameters) -> int:
        """How many parameters these are that no row has counted."""
        new = {id(p): p.numel() for p in parameters if id(p) not in seen}
        seen.update(new)
        return sum(new.values())

    hooks = []
    for name, module in opened(model):
        hooks.append(module.register_forward_pre_hook(lambda *given, name=name: before(name, *given)))
        hooks.append(module.register_forward_hook(lambda *given, name=name: after(name, *given)))
    try:
        with frozen(model), FlopCounterMode(display=False) as counter:
            (model if parameters else model.features)(noise)
    finally:
        for hook in hooks:
            hook.remove()
    params, macs = fresh(parameters), counter.get_total_flops() // 2 - sum(row.macs for row in rows)
    return Steps(rows + ([Step("elsewhere", "", (), params, macs)] if params or macs else []))


def opened(model, path: str = "") -> Iterator[tuple[str, object]]:
    """The parts of a model by name, lists of layers opened."""
    from torch import nn

    for name, part in model.named_children():
        if isinstance(part, nn.Sequential | nn.ModuleList) and len(part):
            yield from opened(part, f"{path}{name}.")
        else:
            yield f"{path}{name}", part


def kind(part) -> str:
    """`Block`, or `Block, Merge` where its tokens are reduced."""
    inside = getattr(part, "reduction", None)
    return type(part).__name__ + (f", {type(inside).__name__}" if inside is not None else "")


def in_words(model) -> str:
    """The prefix tokens of a `ViT`: `class token and 4 registers`."""
    classes, extra = model.pool.class_tokens, len(model.prefix) - model.pool.class_tokens
    said = ["class token" if classes == 1 else f"{classes} class tokens"] if classes else []
    return " and ".join(said + ([f"{extra} register{'s' * (extra > 1)}"] if extra else []))
