"""The private functions of PyTorch that the native kernel calls. A new version of PyTorch may change them.

PyTorch has no public function that says the same: the public ones only switch on and off what these functions find.
"""

# how many `TorchFunctionMode` are active, and which; one of them is the `DeviceContext` of a default device
from torch._C import _len_torch_function_stack as count_function_modes

# the active `torch.autograd.graph.saved_tensors_hooks`, or None
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks  # pyright: ignore[reportMissingImports]

# whether a tensor belongs to a transform of `torch.func` such as `vmap`; whether it stands for the several gradients of
# `torch.autograd.grad(is_grads_batched=True)`; and the active transform, or None
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, peek_interpreter_stack

# `torch.jit.is_tracing`, from where type checkers find it
from torch.jit._trace import is_tracing

# whether there are hooks for all modules, as of `torch.nn.modules.module.register_module_forward_hook`
from torch.nn.modules.module import _has_any_global_hook as has_global_hook
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext

# the active `TorchDispatchMode`, or None
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

__all__ = [
    "DeviceContext",
    "count_function_modes",
    "dispatch_mode",
    "function_modes",
    "has_global_hook",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "is_tracing",
    "peek_interpreter_stack",
    "saved_tensors_hooks",
]
