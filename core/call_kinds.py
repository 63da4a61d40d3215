"""What a call is like: whether it is differentiated, traced, transformed or watched, and whether its tensors are plain.

Private names of PyTorch are used for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes without `__torch_dispatch__`. Others, such as FakeTensor, may have no memory or symbolic shapes."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_has_storage = torch._C._has_storage
_trace = torch._C._get_tracing_state


def needs_grad(*values: Any) -> bool:
    """Whether what is computed of these, of which some are tensors, is to be differentiated."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to do: plain Tensors and Parameters, no dispatch mode, no transform."""
    return (
        _dispatch_modes() == 0
        and _transforms() is None
        and all(tensor is None or has_plain_memory(tensor) for tensor in tensors)
    )


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the numbers are those in the tensor's own memory, so that a kernel may read them there.

    Batched gradients (`is_grads_batched`) and tensors that outlive a transform of torch.func have no storage, tensors
    of zeros that forward-mode differentiation makes and those of functionalization hold none, and a view such as
    `z.conj().imag` has a bit that says that its numbers are to be negated. The dispatcher handles these.
    """
    return (
        type(tensor) in PLAIN
        and _has_storage(tensor)
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._is_functional_tensor(tensor)
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, vmap for example, or forward-mode differentiation.

    Custom kernels have no rules for those. In code that torch.compile traces the answer is no: it must not query this.
    """
    return not torch.compiler.is_compiling() and has_transform()


def is_exporting() -> bool:
    """Whether torch.export traces. Before torch 2.12 `torch.compiler.is_exporting` says so of torch.compile too."""
    return bool(torch.compiler._is_exporting_flag)


def has_transform() -> bool:
    """The same, for what is not traced."""
    return _transforms() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether a dispatch mode or a tracer wants to see operators."""
    return _dispatch_modes() > 0 or _trace() is not None
