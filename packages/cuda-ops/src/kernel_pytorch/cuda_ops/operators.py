"""Helpers that all operators of the library share to run under PyTorch's dispatcher and autograd."""

from __future__ import annotations

from typing import Any

import torch

from . import library  # noqa: F401  (loading it defines the operators)
from ._core.operator import OperatorCall
from .arguments import check, explained

operators = torch.ops.kernel_pytorch_cuda
registrations = torch.library.Library("kernel_pytorch_cuda", "FRAGMENT")


def count_writes(name: str) -> None:
    """Count each call of an operator as a write to the tensors that it overwrites, so that autograd detects it.

    Args:
        name: an operator whose schema names these tensors, as `Tensor(a!)`. PyTorch counts such writes only for its
            native operators and those of `torch.library.custom_op`, not for operators that a library defines.
    """
    operator = getattr(operators, name).default
    written = [place for place, a in enumerate(operator._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def run(keys: Any, *arguments: Any) -> Any:
        result = operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)
        for place in written:
            torch.autograd.graph.increment_version(arguments[place])
        return result

    registrations.impl(name, run, "ADInplaceOrView", with_keyset=True)


def call(function: str, run: OperatorCall, *arguments: Any) -> Any:
    """Call an operator for a public function, whose name errors begin with.

    Args:
        function: that the user called.
        run: what `declare` made of the operator.
        arguments: of the operator.

    Raises:
        TypeError: an argument is not of its kind, or a tensor is sparse or nested.
        ValueError: a number is not finite, or eps negative.
        RuntimeError: the arguments do not fit, or the kernel could not be launched.
    """
    if torch.compiler.is_compiling():
        return run(*arguments)
    operator = run.operator
    check(function, operator, arguments)
    try:
        return run(*arguments)
    except Exception as error:
        better = explained(function, operator, arguments, error)
        if better is None:
            raise
        raise better from None
