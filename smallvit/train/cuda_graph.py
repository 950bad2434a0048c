"""CUDA graphs: the forward and backward pass of a training step on a GPU, recorded once and then repeated as a whole.

A small ViT computes less than its GPU could: most of a step passes while Python and PyTorch start some hundred small operations
one after another. A CUDA graph records these operations once. From then on one call starts all of them. They are the same
operations on the same memory, so the numbers stay the same up to rounding.

The Python code of a step runs once, while it is recorded. A recorded step cannot react to anything but the values of its
tensors. So a step is recorded only if its code comes from libraries whose steps are known to be always the same, and the
recording is used only if it gives the same loss and gradients as the code on the batch with which it was made. Everything else
is computed as usual.

Set the environment variable SMALLVIT_CUDA_GRAPHS to 0 to record nothing.
"""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves, tree_map

from smallvit.augment import Batch
from smallvit.optimizers.sam import copy_all, random_states, set_random_states

SWITCH = "SMALLVIT_CUDA_GRAPHS"
FIRST_STEPS = 3  # computed as usual; they also load kernels and fill caches
FEWEST_STEPS = 32  # of a training for which recording pays
LIBRARIES = ("smallvit", "torch", "torchvision", "timm", "lightly")
# of the loss and of each gradient, relative to its own norm, and relative to the largest: a GPU may add in any order
TOLERANCE = (1e-2, 1e-4)


class Unused:
    """Stands for the finished fraction of the training while a step is recorded. Any use of it raises TypeError: the recorded
    step would keep the value.
    """

    def __bool__(self) -> bool:
        raise TypeError("the step depends on the finished fraction of the training")

    __eq__ = __float__ = __index__ = __bool__  # pyright: ignore[reportAssignmentType]
    __hash__ = None  # pyright: ignore[reportAssignmentType]


class GradientStep:
    """Computes the gradients of training steps: as a CUDA graph where this is possible, otherwise by the usual code.

    compute(batch, progress)   the usual code: removes all gradients, computes new ones, and returns the loss or the losses
    parameters                 what gets the gradients
    others                     all other tensors of the model, which `compute` may change
    reason                     why nothing is recorded, or None. It is set if recording fails.
    phase(progress)            what `compute` reads from the progress, or None if it reads nothing; see `Objective.phase`. A
                               recorded step is used as long as the phase stays the same.
    """

    def __init__(
        self,
        compute: Callable[[Batch, Any], Tensor],
        parameters: Sequence[Tensor],
        others: Sequence[Tensor],
        reason: str | None,
        phase: Callable[[float], Any] = lambda progress: None,
    ):
        self.compute, self.parameters, self.others, self.reason, self.phase = compute, parameters, others, reason, phase
        self.now: Any = None  # the phase of the present steps, and their number
        self.steps = 0
        self.graph: Any = None

    def __call__(self, batch: Batch, progress: float) -> Tensor:
        """Compute the gradients of a step, and return the loss or the losses. They keep their values until the next call."""
        if self.reason is None and (now := self.phase(progress)) != self.now:
            self.now, self.steps, self.graph = now, 0, None
        self.steps += 1
        if self.reason is None and self.steps > FIRST_STEPS:
            if self.graph is not None and self.places != self.places_now():  # a tensor has moved: record again
                self.graph = None
            if self.graph is None:
                self.record(batch, Unused() if self.now is None else progress)
            tensors = tree_leaves(batch)
            if self.graph is not None and shapes(tensors) == self.shapes:
                return self.replay(tensors)
        return self.compute(batch, progress)

    def record(self, batch: Batch, progress: Any):
        """Record a step, and check it on the `batch`. If this fails, `reason` says why, and nothing is recorded later. If the
        step may not read the finished fraction of the training, `progress` is `Unused`.
        """
        device = batch.images.device
        draws, others = random_states(device), [other.clone() for other in self.others]

        def restore():
            set_random_states(device, draws)
            copy_all(self.others, others)

        try:
            self.batch = tree_map(torch.clone, batch)
            self.tensors = tree_leaves(self.batch)
            self.shapes = shapes(self.tensors)
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # as PyTorch asks for: twice, so that nothing is allocated or chosen anew later
                for _ in range(2):
                    restore()
                    before = cpu_generators()
                    expected = self.result(self.compute(self.batch, progress))
                    if before != cpu_generators():
                        raise ValueError("the step draws random numbers on the CPU")
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.loss = self.compute(self.batch, progress)
            self.gradients = [parameter.grad for parameter in self.parameters]
            restore()
            graph.replay()
            found = self.result(self.loss)
            of_own, of_largest = TOLERANCE
            allowed = of_largest * max(tensor.norm() for tensor in expected[1:])
            for one, other in zip(found, expected, strict=True):
                if not (one - other).norm() <= of_own * other.norm() + allowed:
                    raise ValueError("the recorded step has another loss or other gradients than the usual one")
            self.graph, self.places = graph, self.places_now()
        except Exception as error:  # a step that cannot be recorded can raise anything
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]
        restore()

    def replay(self, tensors: Sequence[Tensor]) -> Tensor:
        """Compute the gradients of a step by the recorded operations, and return the loss or the losses. `tensors` are those of
        the batch.
        """
        copy_all(self.tensors, tensors)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        return self.loss

    def result(self, loss: Tensor) -> list[Tensor]:
        """Return copies of the loss and of all gradients that there are now."""
        return [tensor.clone() for tensor in (loss, *(p.grad for p in self.parameters)) if tensor is not None]

    def places_now(self) -> list[int]:
        """Return the addresses of all tensors of the model. A recorded step reads them there."""
        return [tensor.data_ptr() for tensor in (*self.parameters, *self.others)]


def reason_against(objective: Any, device: torch.device, steps: int, compiled: bool) -> str | None:
    """Return why the training steps of an objective are not recorded, as text, or None if recording can be tried. `steps` is
    the number of steps of the training, and `compiled` says whether blocks are compiled.
    """
    if device.type != "cuda":
        return "there is no CUDA device"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few"
    if compiled:
        return "blocks are compiled"
    if objective.scheduled_modules:
        return f"{type(objective.scheduled_modules[0]).__name__} changes during the training"
    for module in objective.modules():
        kind = type(module)
        own = "forward" in vars(module) or kind.__module__.partition(".")[0] not in LIBRARIES
        if own or getattr(module, "not_stackable", None):
            return f"nothing is known about the steps of {kind.__module__}.{kind.__qualname__}"
        if has_hooks(module):
            return f"{kind.__name__} has hooks"
    if torch_modules._has_any_global_hook():
        return "all modules have a hook"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether functions of others are called in the forward or the backward pass of a module, or for the gradient of one
    of its own parameters. PyTorch's weight norm, which is computed by a hook, does not count.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    found = [getattr(each, name, None) or {} for each in (module, *module.parameters(recurse=False)) for name in names]
    return any(not isinstance(hook, WeightNorm) for hooks in found for hook in hooks.values())


def cpu_generators() -> list[Any]:
    """Return the states of the generators of random numbers that compute on the CPU: those of torch, NumPy and Python."""
    import numpy as np

    name, keys, *place = np.random.get_state()
    return [torch.get_rng_state().tolist(), name, list(keys), place, random.getstate()]


def shapes(tensors: Sequence[Tensor]) -> list[tuple]:
    """Return the shape and the type of each tensor."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
