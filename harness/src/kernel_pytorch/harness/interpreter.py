"""Triton's interpreter, which checks kernels without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
from typing import Any

import torch


def interpret_without_gpu() -> bool:
    """Turn the interpreter on where there is no CUDA device, unless the user has decided. Must run before Triton loads.

    Triton reads `TRITON_INTERPRET` when a kernel is decorated, that is, when its module is imported.

    Returns:
        Whether kernels will be interpreted.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if is_interpreting() and importlib.util.find_spec("triton"):
        speed_up_interpreter()
    return is_interpreting()


def is_interpreting() -> bool:
    """Whether Triton kernels run in the interpreter, which shows their results but not their speed."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def speed_up_interpreter() -> None:
    """Leave out work of the interpreter that changes no result: kernels are interpreted about four times as fast.

    For each addition, subtraction and multiplication of integers Triton 3.6 to 3.9 computes whether it overflowed, and
    drops the answer unless `debug` is set, which the interpreter cannot do. Each call of one `@triton.jit` function by
    another replaces the functions of `triton.language` once more. And each operation makes several types and tensors,
    whose attributes follow from a dtype and a shape.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if getattr(patch, "is_fast", False):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [v for v in function.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]

    def patch_once(function: Any) -> Any:
        members = [member for each in languages(function) for member in (each.load, each.tensor.__add__)]
        if members and not any(map(tl.core.is_builtin, members)):
            return interpreter._LangPatchScope()  # the caller has replaced them, and puts them back
        return patch(function)

    patch_once.is_fast = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
    _keep_types(tl.core, interpreter)


def _keep_types(core: Any, interpreter: Any) -> None:
    """Let Triton compute the attributes of a block type, of a tensor and of NumPy's dtype once for each."""
    make_type, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def kept_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        key = (type(self), element_ty.name, repr(sizes))  # as text: 4.0 equals 4, but is refused
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self) | {"shape": shapes.setdefault(key[2], self.shape)}
        vars(self).update(types[key], element_ty=element_ty)

    def kept_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self) | {"handle": None}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    def kept_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(of)
        return dtypes[name]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = kept_type, kept_tensor
    interpreter._get_np_dtype, semantic.broadcast_impl_value = kept_dtype, broadcast_others


def complete_interpreter() -> None:
    """Add features of compiled kernels to the interpreter, for kernels of other libraries.

    A float argument becomes a scalar with methods (`eps.to(tl.float32)`) instead of a Python float, and functions of
    CUDA's libdevice, which have no body in the interpreter, become the functions of Triton with the same name.
    """
    import numpy as np
    import triton.language as tl
    from triton.language import math
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt
    if getattr(converted, "is_complete", False):
        return

    def convert(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    convert.is_complete = True  # type: ignore[attr-defined]
    interpreter._implicit_cvt = convert
    for name in set(dir(libdevice)) & set(math.__all__ if hasattr(math, "__all__") else dir(math)):
        if callable(getattr(math, name)) and not name.startswith("_"):
            # Looked up when it is called: the interpreter replaces the functions of `tl` while a kernel runs.
            setattr(libdevice, name, functools.partial(_of_triton, name))


def _of_triton(name: str, *arguments: Any) -> Any:
    import triton.language as tl

    return getattr(tl, name)(*arguments)
