"""The call of the kernel as an operation of PyTorch's autograd: forward pass, backward pass, and stacks of models."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smallvit.convolution import leading

from .compiler import library
from .memory import POOL, in_memory, pointer
from .torch_internals import is_functorch_wrapped_tensor, is_legacy_batchedtensor, saved_tensors_hooks

if TYPE_CHECKING:
    from .branches import NativeBranches


class InnerPasses:
    """Whether a backward pass has run inside a forward pass. A training objective does so if it computes gradients itself, such
    as those of the images.
    """

    seen = False


class InPlace(local):
    """Whether gradients are added to `.grad` directly, in each thread. `inner` is set during a forward pass."""

    on = False
    inner: InnerPasses | None = None


IN_PLACE = InPlace()


@contextmanager
def gradients_in_place(wanted: bool = True, inner: InnerPasses | None = None) -> Iterator[None]:
    """Context manager for a forward pass. Its backward pass, which follows outside, adds the gradients of weights to their
    existing `.grad` itself, which saves time. So `torch.autograd.grad`, which expects gradients as results, must not be used
    after it. Where the kernel cannot add them, such as for weights with hooks, autograd does it: see `gradients_to_fill`.

    A backward pass inside the context manager gets its gradients from autograd. It sets `inner.seen`, and forward passes with
    the same `inner` leave all gradients to autograd from then on. So do those with `wanted=False`, which notice such a pass
    before it can go wrong. A pass that begins later raises RuntimeError.
    """
    before = IN_PLACE.on, IN_PLACE.inner
    inner = inner or InnerPasses()
    IN_PLACE.on, IN_PLACE.inner = wanted and not inner.seen, inner
    try:
        yield
    finally:
        IN_PLACE.on, IN_PLACE.inner = before


def is_inner_pass() -> bool:
    """Return whether a backward pass runs inside a forward pass, and remember it."""
    if IN_PLACE.inner is not None:
        IN_PLACE.inner.seen = True
    return IN_PLACE.inner is not None


class Call(NamedTuple):
    """What one forward pass hands to its backward pass, besides tensors that may need a gradient."""

    branches: "NativeBranches"
    draws: list[bool]  # for each branch: whether random images skip it (stochastic depth)
    half: bool
    gradients: bool  # whether a backward pass may follow
    kept: list[Tensor]  # what the forward pass leaves for it, one for each model, until autograd has it
    keys: bool = False  # whether the keys of the last branch, an attention, are wanted too
    weights: Sequence[Tensor | None] = ()  # read by `NativeFunctionInPlace` only, which hides them from autograd
    targets: Sequence[Tensor | None] = ()  # for it, too: the `.grad` of each weight
    stacked: bool = False  # whether the tensors have a leading axis: models with weights of their own


def compute(call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, weights: Sequence[Tensor | None]) -> Any:
    """Return the output of the branches for tokens `x`, and put what a backward pass needs into `call.kept`. If `call.keys`,
    return also the mean over heads of the keys of the last branch. For `keep`, see `NativeBranches.kept_images`.
    """
    x, keep = in_memory(x), None if keep is None else keep.contiguous()
    out = torch.empty_like(x)
    keys = x.new_empty(*x.shape[:-1], call.branches.key_width) if call.keys else None
    for index, (tokens, result) in enumerate(zip(x, out) if call.stacked else [(x, out)]):
        own = [member(w, call, index) for w in weights]
        problem = call.branches.problem(call, tokens, member(bias, call, index), member(keep, call, index), own)
        kept = POOL.lend(library().blocks_kept_floats(problem)) if call.gradients else None
        scratch = POOL.lend(library().blocks_scratch_floats(problem, call.gradients, 0))
        to_keys = pointer(member(keys, call, index))
        library().blocks_forward(problem, pointer(tokens), pointer(result), to_keys, kept and kept.pointer, scratch.pointer)
        if kept:
            call.kept.append(kept.as_tensor())
    return out if keys is None else (out, keys)


def compute_backward(
    call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, d_out: Tensor, weights: Sequence[Tensor | None],
    targets: Sequence[Tensor | None], kept: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Return the gradient of the tokens `x`, from the gradient `d_out` of the output. The gradients of `weights` are added to
    the tensors in `targets`. `kept` is what the forward pass left in `call.kept`.

    Raises RuntimeError if a second derivative may follow, and if PyTorch asks for several gradients at once.
    """
    if torch.is_grad_enabled():  # with create_graph=True; a result without a graph would count as a constant
        raise RuntimeError("the native kernel has no second derivative; use --numerics kernel=rule, or leave native_kernel()")
    if is_functorch_wrapped_tensor(d_out) or is_legacy_batchedtensor(d_out):
        raise RuntimeError(
            "the native kernel computes one gradient at a time, and got several (is_grads_batched=True, or a jacobian with "
            "vectorize=True); ask for them one after another, or leave native_kernel()"
        )
    x, keep = in_memory(x), None if keep is None else keep.contiguous()
    d_x = d_out.clone(memory_format=torch.contiguous_format)
    for index, (tokens, d) in enumerate(zip(x, d_x) if call.stacked else [(x, d_x)]):
        own = [[member(t, call, index) for t in tensors] for tensors in (weights, targets)]
        problem = call.branches.problem(call, tokens, member(bias, call, index), member(keep, call, index), *own)
        scratch = POOL.lend(library().blocks_scratch_floats(problem, 1, 1))
        library().blocks_backward(problem, pointer(tokens), pointer(d), pointer(kept[index]), scratch.pointer)
    return d_x


def compute_backward_in_place(
    call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, d_out: Tensor, weights: Sequence[Any], targets: Sequence[Any],
    kept: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Like `compute_backward`, for `targets` that were the `.grad` of the weights in the forward pass. Return also a list
    with the gradients that autograd must add: those of weights that have another `.grad` or a hook since then. The others are
    None.
    """
    changed = [
        t is not None and not (w.grad is t and w.requires_grad and not w._backward_hooks and not w._post_accumulate_grad_hooks)
        for w, t in zip(weights, targets)
    ]
    added: list[Tensor | None] = new_gradients(weights, changed) if any(changed) else [None] * len(changed)
    own = [gradient if other else target for gradient, other, target in zip(added, changed, targets)]
    if keep is not None:  # a branch that all images skip adds nothing, where PyTorch gives gradients of 0.0: see `FlatAdamW`
        for gradient in own:
            if gradient is not None:
                gradient.add_(0.0)
    return compute_backward(call, x, bias, keep, d_out, weights, own, kept), added


class NativeFunction(torch.autograd.Function):
    """The blocks as one operation of autograd. Under `torch.vmap` it computes one model after another."""

    @staticmethod
    def forward(call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, *weights: Tensor | None) -> Any:
        return compute(call, x, bias, keep, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any):
        call, *tensors = inputs
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        ctx.call = call
        ctx.targets, ctx.tensors = gradients_to_fill(tensors[3:]) if IN_PLACE.on else None, len(tensors)
        ctx.save_for_backward(*tensors, *call.kept)
        call.kept.clear()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, saved = ctx.call, ctx.saved_tensors
        (x, bias, keep, *weights), kept = saved[: ctx.tensors], saved[ctx.tensors :]
        if not is_inner_pass() and ctx.targets is not None:
            d_x, targets = compute_backward_in_place(call, x, bias, keep, d_out, weights, ctx.targets, kept)
            return None, d_x, None, None, *targets
        targets = new_gradients(weights, ctx.needs_input_grad[4:])
        return None, compute_backward(call, x, bias, keep, d_out, weights, targets, kept), None, None, *targets

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, *tensors: Tensor | None) -> tuple[Any, Any]:
        tensors = tuple(models_first(tensors, in_dims[1:], info.batch_size))
        return NativeFunction.apply(call._replace(stacked=True), *tensors), (0, 0) if call.keys else 0


# PyTorch asks for the signature in each call; working it out takes as long as a small matrix product
vars(NativeFunction.forward)["__signature__"] = inspect.signature(NativeFunction.forward)


class NativeFunctionInPlace(torch.autograd.Function):
    """Like `NativeFunction`, but autograd does not see the weights: their gradients are added to their `.grad`. With 56 weights
    less to look at, a call of a small model takes noticeably less time. It does not work under `torch.vmap`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, bias: Tensor, keep: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call, ctx.versions = call, versions(call.weights)
        output = compute(call, x, bias, keep, call.weights)
        ctx.save_for_backward(x, bias, keep, *call.kept)
        call.kept.clear()
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (x, bias, keep, *kept) = ctx.call, ctx.saved_tensors
        if is_inner_pass():
            raise RuntimeError(
                "the training objective computes gradients in its forward pass now, and did not do so in the first step; "
                "compute them in each step, or train with kernel=rule in place of kernel=native"
            )
        if versions(call.weights) != ctx.versions:
            raise RuntimeError(
                "a weight of the native blocks was changed in place between the forward and the backward pass, which needs the "
                "old value; change weights after the backward pass"
            )
        d_x, gradients = compute_backward_in_place(call, x, bias, keep, d_out, call.weights, call.targets, kept)
        for weight, gradient in zip(call.weights, gradients):
            # autograd, too, drops the gradient of a weight that needs none any more
            if weight is not None and gradient is not None and weight.requires_grad:
                with torch.enable_grad():
                    weight.view_as(weight).backward(gradient)
        return None, d_x, None, None


def models_first(tensors: Sequence[Tensor | None], axes: Sequence[int | None], models: int) -> list[Tensor | None]:
    """Return tensors with the axis of the models of a stack first, as `leading` does. What is None stays None."""
    return [None if tensor is None else leading(tensor, axis, models) for tensor, axis in zip(tensors, axes)]


def gradients_to_fill(weights: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Return the `.grad` of each weight that needs a gradient, and None for the others.

    The result is None instead of a list if the kernel cannot add to each `.grad`, so that autograd must do it: one is missing,
    is not contiguous or has another number format, a weight is computed from others, a weight has a hook, or saved tensors have
    hooks.
    """
    if saved_tensors_hooks(False) is not None:
        return None
    needing: list[Any] = [weight for weight in weights if weight is not None and weight.requires_grad]
    if not all([w.is_leaf and not w._backward_hooks and not w._post_accumulate_grad_hooks for w in needing]):
        return None
    if not all([(g := w.grad) is not None and g.dtype == torch.float32 and g.is_contiguous() for w in needing]):
        return None
    return [weight.grad if weight is not None and weight.requires_grad else None for weight in weights]


def versions(weights: Sequence[Tensor | None]) -> list[int | None]:
    """Return how often PyTorch has changed each weight in place."""
    return [None if weight is None else weight._version for weight in weights]


def member(tensor: Any, call: Call, index: int) -> Any:
    """Return the part of a tensor that belongs to one model of a stack, or the tensor itself if there is no stack."""
    return tensor[index] if call.stacked and tensor is not None else tensor


def new_gradients(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return a tensor of zeros for each weight that needs a gradient, all in one piece of memory, and None for the others."""
    sizes = [weight.numel() if need and weight is not None else 0 for weight, need in zip(weights, needed)]
    pieces = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu").split(sizes)
    triples = zip(pieces, weights, needed)
    return [piece.view(weight.shape) if weight is not None and need else None for piece, weight, need in triples]
