"""Convolution, max-pooling and batch normalization that are faster on CPUs, also for several models that are trained together.

PyTorch computes them faster on CPUs if the channels of a pixel lie side by side in memory ("channels last"). The layers here
arrange their images like this. They have the parameters of PyTorch's layers of the same name, and the same results up to
rounding.

For models that are trained together by `torch.vmap`, the channels of all models lie side by side. The convolutions of the
models become one convolution with groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import TransformType, is_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, faster on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        if in_vmap(input, self.weight) and self.padding_mode == "zeros":
            return Convolution.apply(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)  # pyright: ignore[reportReturnType]
        return super().forward(channels_last(input))


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d`, faster on CPUs."""

    def forward(self, input: Tensor) -> Any:
        if in_vmap(input) and not self.return_indices:
            return Pooling.apply(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        return super().forward(channels_last(input))


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, faster in training on CPUs if several models are trained together."""

    def forward(self, input: Tensor) -> Tensor:
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        if self.training and self.momentum is not None and None not in tensors and in_vmap(input, *tensors, all_batched=True):
            self.num_batches_tracked.add_(1)  # pyright: ignore[reportOptionalMemberAccess]
            return Normalization.apply(input, *tensors, self.momentum, self.eps)  # pyright: ignore[reportReturnType]
        return super().forward(input)


class BatchNorm1d(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, also for several models that are trained together in half precision: it computes in the number
    format of its statistics, because PyTorch's own does not work under `torch.vmap` with the inputs that autocast makes.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.running_mean))


def channels_last(images: Tensor) -> Tensor:
    """Return the same images (batch, channels, height, width); on CPUs with the channels of a pixel side by side in memory.

    Nothing changes if PyTorch compiles the model or transforms its operations, for example by `torch.func.grad`.
    """
    if images.ndim != 4 or images.device.type != "cpu" or torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return images
    if images.shape[1] == 1:  # arranged in both ways at once; PyTorch goes by the strides, which are set here
        return images.reshape(images.shape[0], *images.shape[2:], 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def in_vmap(images: Tensor, *weights: Any, all_batched: bool = False) -> bool:
    """Return whether a single `torch.vmap`, and no other transform of PyTorch, computes with these images on a CPU, and has
    several of the images or of the weights; with `all_batched`, several of each.
    """
    if images.ndim != 4 or images.device.type != "cpu" or torch.compiler.is_compiling() or transform() != "vmap":
        return False
    return (all if all_batched else any)(is_batchedtensor(tensor) for tensor in (images, *weights))


def transform() -> str | None:
    """Return which transform of PyTorch computes the next operation: None, "vmap" for a single `torch.vmap`, or "other" for any
    other transform and for several of them.
    """
    outer = peek_interpreter_stack()
    if forward_ad._current_level >= 0:
        return "other"
    if outer is None:
        return None
    return "vmap" if (outer.level(), outer.key()) == (1, TransformType.Vmap) else "other"


class RuleForVmap(torch.autograd.Function):
    """Base class of functions that PyTorch calls under `torch.vmap` only, by their method `vmap`. The layers call them only
    there (`in_vmap`).
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise RuntimeError("only torch.vmap computes this function")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any):
        raise RuntimeError("only torch.vmap computes this function")


class Convolution(RuleForVmap):
    """A convolution that `torch.vmap` computes as one convolution with groups."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, int]:
        models, (stride, padding, dilation, groups) = info.batch_size, options
        x = side_by_side(x, in_dims[0], models)
        weight = leading(weight, in_dims[1], models).flatten(0, 1)
        if bias is not None:
            bias = leading(bias, in_dims[2], models).flatten()
        out = F.conv2d(x, weight, bias, stride, padding, dilation, models * groups)
        return out.unflatten(1, (models, -1)), 1


class Pooling(RuleForVmap):
    """A max-pooling that `torch.vmap` computes for the channels of all models at once."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *options: Any) -> tuple[Tensor, int]:
        out = F.max_pool2d(side_by_side(x, in_dims[0], info.batch_size), *options)
        return out.unflatten(1, (info.batch_size, -1)), 1


class Normalization(RuleForVmap):
    """A batch normalization in training that `torch.vmap` computes for the channels of all models at once."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *inputs: Any) -> tuple[Tensor, int]:
        *tensors, momentum, eps = inputs
        folded = side_by_side(x, in_dims[0], info.batch_size)
        stacked = [leading(t, axis, info.batch_size) for t, axis in zip(tensors, in_dims[1:])]
        weight, bias, mean, variance = (t.flatten() for t in stacked)
        out = F.batch_norm(folded, mean, variance, weight, bias, True, momentum, eps)
        for statistics, changed in ((stacked[2], mean), (stacked[3], variance)):
            if changed.data_ptr() != statistics.data_ptr():  # a copy, if the axis of the models was not the first
                statistics.copy_(changed.view(statistics.shape))
        return out.unflatten(1, (info.batch_size, -1)), 1


def leading(tensor: Tensor, axis: int | None, models: int) -> Tensor:
    """Return a tensor with the axis of the models first; it has the number `axis`, or is missing if all models share it."""
    if axis == 0:
        return tensor  # a view of a weight would have no gradient of its own
    return tensor.expand(models, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def side_by_side(x: Tensor, axis: int | None, models: int) -> Tensor:
    """Return the images of all models as images with more channels, (batch, models * channels, height, width), channels last.
    `axis` is the axis of the models in `x`, or None if they have the same images.
    """
    folded = leading(x, axis, models).movedim(0, 1).flatten(1, 2)
    return folded.contiguous(memory_format=torch.channels_last)
