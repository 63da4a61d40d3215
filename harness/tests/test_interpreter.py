"""Triton's interpreter does less, and computes the same."""

import pytest
import torch

from kernel_pytorch.harness.interpreter import is_interpreting

triton = pytest.importorskip("triton", reason="runs kernels in Triton's interpreter")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled here, not interpreted")


@triton.jit
def _square_sum(x, axis: tl.constexpr):
    return tl.sum(x * x, axis)


@triton.jit
def _kernel(x_ptr, y_ptr, big, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr, _square_sum(x, 0) + tl.cdiv(7, 2))
    tl.store(y_ptr + 1, (big + big).to(tl.float32))


def test_overflow_is_not_computed_beside_the_result():
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug  # so that Triton would drop what the check finds
    assert not interpreter_builder.options.sanitize_overflow


def test_functions_called_by_kernels_compute_the_same_and_triton_is_put_back():
    builtin = tl.core.is_builtin
    x, y = torch.arange(8, dtype=torch.float32), torch.empty(2)
    for _ in range(2):
        _kernel[(1,)](x, y, 2**31 - 1, BLOCK=8)
        assert y.tolist() == [144.0, -2.0]  # integers wrap around, as on a GPU
        assert builtin(tl.load)
        assert builtin(tl.tensor.__add__)


def test_a_function_called_by_a_kernel_replaces_nothing_again(monkeypatch):
    replaced = []
    from triton.runtime import interpreter

    original = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: (replaced.append(given[0]), original(*given)))
    _kernel[(1,)](torch.ones(8), torch.empty(2), 1, BLOCK=8)
    assert replaced.count(tl) == 1
