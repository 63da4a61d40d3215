"""What an analysis must leave as it was: random state, buffers, attributes, gradients, hooks and mode of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Loss = Callable[[Any], Tensor]


@contextlib.contextmanager
def preserved(module: torch.nn.Module) -> Iterator[None]:
    """Put everything back at the end: also what a forward changes in the attributes of its modules.

    Lists and dictionaries that a forward changes in place, and parameters that it writes to, are not put back.
    """
    modules = [*module.modules()]
    attributes = [{k: v.copy() if isinstance(v, dict) else v for k, v in m.__dict__.items()} for m in modules]
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    gradients = [(p, p.grad) for p in module.parameters()]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for m, found in zip(modules, attributes, strict=True):
            for name, value in found.items():
                now = m.__dict__.get(name)
                if isinstance(value, dict) and isinstance(now, dict):
                    now.clear()
                    now.update(value)
                else:
                    m.__dict__[name] = value
            for name in m.__dict__.keys() - found.keys():
                del m.__dict__[name]
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


def loss_of(output: Any, loss: Loss | None = None) -> Tensor:
    """The scalar whose gradients are computed: `loss(output)`, else `output.loss`, else the mean square of it all."""
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    floats = [t for t in leaves_of(output) if t.is_floating_point()]
    if not floats:
        raise TypeError("output: it has no floating-point tensor; give loss=, a function of the output")
    return torch.stack([t.float().square().mean() for t in floats]).sum()


def leaves_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also in the fields of a dataclass-like output of transformers."""
    found = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    if not found and hasattr(value, "__dict__"):
        found = [t for t in tree_leaves({**vars(value)}) if isinstance(t, Tensor)]
    return found


def call(module: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """One call."""
    return module(*inputs, **(kwargs or {}))


def device_of(module: torch.nn.Module, inputs: Any = ()) -> torch.device:
    """Where a module computes."""
    tensors = [*module.parameters(), *module.buffers(), *(t for t in tree_leaves(inputs) if isinstance(t, Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def innermost_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of an exception that is the user's code."""
    from .recorder import is_foreign

    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not is_foreign(file):
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def check_module(module: Any, kwargs: Any = None) -> None:
    """Raise TypeError unless this is a module, neither compiled nor scripted, and `kwargs` is a mapping or None."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: given {type(module).__name__}; it must be a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        raise TypeError(f"module: given {type(module).__name__}; give the model before it is compiled or scripted")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs: given {type(kwargs).__name__}; it must map names to inputs of the call")
