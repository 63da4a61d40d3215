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


def test_types_are_computed_once_and_are_those_of_triton():
    made = [tl.block_type(dtype, [2, tl.constexpr(4)]) for dtype in (tl.float16, tl.int32, tl.float16)]
    assert made[0].name == made[2].name != made[1].name
    assert [each.scalar for each in made] == [tl.float16, tl.int32, tl.float16]
    assert made[0].shape is made[1].shape
    assert made[0] == made[2] != tl.block_type(tl.float16, [4, 2])
    of = {tl.float16: torch.zeros(2, 4), tl.int32: torch.ones(2, 4)}
    tensors = [tl.tensor(of[each.scalar], each) for each in made]
    assert all(t.handle is of[t.dtype] and t.type is made[i] for i, t in enumerate(tensors))
    assert [int(size) for size in tensors[1].shape] == [2, 4]
    assert tensors[1].numel == 8


@pytest.mark.parametrize("shape", [[3], [], [2, 1.5], [2, 4.0]])
def test_a_shape_that_triton_refuses_is_refused_again(shape):
    assert tl.block_type(tl.float32, [2, 4]).numel == 8
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.float32, shape)
