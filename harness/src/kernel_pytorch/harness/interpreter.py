"""Triton's interpreter, which checks kernels without a GPU."""

from __future__ import annotations

import functools
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
    return is_interpreting()


def is_interpreting() -> bool:
    """Whether Triton kernels run in the interpreter, which shows their results but not their speed."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
