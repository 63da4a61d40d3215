"""Whether a module's forward gives all layers of a group the same tensor, tried on fresh inputs."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ._core import patching
from ._core.stock import has_foreign_forward

SHAPES = ((2, 4), (4,), (2, 2, 2))
"""Leading dimensions of the inputs, before the channels: of models, of a mixture's experts, of images."""

CROSS = ("cross", "encoder_attn", "encdec")
"""What the names of a module, or of the one around it, have in them where keys and values are of another tensor."""


def why_not_shared(path: str, module: torch.nn.Module, names: Sequence[str]) -> str | None:
    """Why the layers of these names cannot share a product in this module's forward; None if they can.

    Nothing of the module is called or changed, so it may be on any device.
    """
    if any(part in "".join(path.lower().split(".")[-2:]) for part in CROSS):
        return "cross-attention: its queries are of another tensor than keys and values"
    forward = patching.forward_of_class(module)
    if has_foreign_forward(module):
        return "its forward was replaced before"
    if "_forward_unimplemented" in getattr(forward, "__name__", ""):
        return "it has no forward"
    if attribute := _set_attribute(type(module), forward):
        return f"its forward sets an attribute, {attribute}"
    reason = None
    for shape in SHAPES:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            reasons = [_try(module, forward, names, shape, training) for training in (False, True)]
        if not any(reasons):
            return None
        reason = reason or next(filter(None, reasons))
    return reason


class _Seen(BaseException):
    """All layers of the group were called."""


class _Recorder:
    """Stand-in for a layer of the group: records its inputs."""

    def __init__(self, name: str, layer: torch.nn.Module, calls: list[tuple[str, Tensor, Tensor]], wanted: int) -> None:
        self._all = name, layer, calls, wanted

    def __call__(self, x: Tensor) -> Tensor:
        name, layer, calls, wanted = self._all
        calls.append((name, x, x.clone()))
        if len(calls) == wanted:
            raise _Seen
        return torch.randn(*x.shape[:-1], layer.out_features, dtype=x.dtype)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all[1], name)


class _PassThrough:
    """Stand-in for any other child: returns a copy of its input."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) else x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _try(
    module: torch.nn.Module, forward: Callable[..., Any], names: Sequence[str], shape: Sequence[int], training: bool
) -> str | None:
    """One call of the class's forward on a stand-in; why the layers cannot share a product, or None."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    children: dict[str, Any] = {
        name: child if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)) else _PassThrough(child)
        for name, child in module._modules.items()
        if child is not None
    }
    for name in names:
        layer = module._modules[name]
        assert layer is not None
        children[name] = _Recorder(name, layer, calls, len(names))
    probe = patching.stand_in(module, children, training=training)
    before = dict(probe.__dict__)
    x = torch.randn(*shape, module._modules[names[0]].in_features)  # type: ignore[union-attr, arg-type]
    failed = ""
    try:
        forward(probe, x, **_required(module, forward, x))
    except _Seen:
        pass
    except Exception as error:  # it takes other arguments
        failed = f", and fails on inputs of its own: {type(error).__name__}: {str(error).splitlines()[0:1]}"
    after = probe.__dict__
    if changed := [name for name in {*before, *after} if before.get(name) is not after.get(name)]:
        return f"its forward sets an attribute, {changed[0]}"
    if missing := [name for name in names if name not in {name for name, *_ in calls}]:
        return f"its forward calls {' and '.join(missing)} not once beside the others{failed}"
    if any(given is not calls[0][1] or not torch.equal(value, calls[0][2]) for _, given, value in calls):
        return "its forward gives the layers different tensors"
    return None


def _required(module: torch.nn.Module, forward: Callable[..., Any], x: Tensor) -> dict[str, Any]:
    """Arguments without which the forward cannot be called, beside the first."""
    columns = getattr(module, "head_dim", 1)
    table = torch.ones(*x.shape[:-1], columns), torch.zeros(*x.shape[:-1], columns)
    known: dict[str, Any] = {"position_embeddings": table, "cos": table[0], "sin": table[1]}
    parameters = [*inspect.signature(forward).parameters.values()][2:]
    return {
        each.name: known.get(each.name, 2 if each.annotation in (int, "int") else None)
        for each in parameters
        if each.default is inspect.Parameter.empty
        and each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }


def _set_attribute(kind: type, forward: Callable[..., Any]) -> str | None:
    """An attribute that a forward, or a method that it calls, may set on the module; on a copy it would be lost."""
    inner = inspect.unwrap(forward)
    asked: list[CodeType] = [inner.__code__] if isinstance(inner, FunctionType) else []
    seen: set[CodeType] = set()
    while asked:
        code = asked.pop()
        if code in seen:
            continue
        seen.add(code)
        before: Any = None
        for each in dis.get_instructions(code):
            if each.opname in ("STORE_ATTR", "DELETE_ATTR") and _may_be_self(before, code):
                return str(each.argval)
            before = each
        for name in code.co_names:
            for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
                method = inspect.unwrap(base.__dict__[name]) if name in base.__dict__ else None
                if isinstance(method, FunctionType):
                    asked.append(method.__code__)
    return None


def _may_be_self(loading: dis.Instruction, code: CodeType) -> bool:
    """Whether what an instruction loads may be the first argument: anything but another local variable."""
    name = loading.argval[-1] if isinstance(loading.argval, tuple) else loading.argval
    return not loading.opname.startswith("LOAD_FAST") or name == code.co_varnames[0]
