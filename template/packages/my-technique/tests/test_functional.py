"""The public function: what it computes, in which dtype, and what it refuses."""

import math
import subprocess
import sys

import pytest
import torch

from kernel_pytorch.my_technique import MyTechnique, my_technique
from kernel_pytorch.my_technique.levels import LADDER

LEVELS = LADDER.levels("my_technique")


@pytest.mark.parametrize("level", LEVELS)
def test_shape_dtype_and_strides_of_any_kind(level, device):
    x = torch.randn(3, 4, 5, device=device)
    for given in (x.half().transpose(0, 2), x.double()[:, ::2], x[:0], x[0, 0, 0]):
        y = my_technique(given, beta=0.5, level=level)
        assert (y.shape, y.dtype) == (given.shape, given.dtype)
        expected = my_technique(given.contiguous(), beta=0.5, level="reference")
        torch.testing.assert_close(y, expected)


def test_default_is_native_on_the_cpu():
    x = torch.randn(64, 64).bfloat16()
    native = my_technique(x, beta=0.5, level="native")
    assert torch.equal(my_technique(x, beta=0.5), native)


X = torch.randn(4, 8)
BAD = {
    "no tensor": ({"x": [1.0]}, TypeError, "x: given list"),
    "integers": ({"x": X.long()}, TypeError, "x: dtype is torch.int64; allowed are"),
    "sparse": ({"x": X.to_sparse()}, TypeError, "x: layout is torch.sparse_coo"),
    "text": ({"beta": "1"}, TypeError, "beta: given str; it must be a Python number"),
    "zero": ({"beta": 0.0}, ValueError, "beta: given 0.0; it must be above 0"),
    "nan": ({"beta": math.nan}, ValueError, "beta: given nan"),
    "infinite": ({"beta": math.inf}, ValueError, "beta: given inf"),
    "level": ({"level": "cutlass"}, ValueError, "level: given 'cutlass'; allowed are None, 'reference'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    given, error, message = BAD[name]
    with pytest.raises(error, match=message):
        my_technique(**({"x": X, "beta": 1.0} | given))


def test_the_module_refuses_what_the_function_refuses():
    with pytest.raises(ValueError, match=r"beta: given -1.0"):
        MyTechnique(beta=-1.0)
    with pytest.raises(ValueError, match="level: given 'tritn'"):
        MyTechnique(beta=1.0, level="tritn")


def test_the_limit_of_a_compiler_says_what_to_do():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        my_technique(X, beta=1.0, level="compile")
        with pytest.raises(RuntimeError, match=r"'compile' of my_technique.*at most 1 times"):
            my_technique(X.double(), beta=1.0, level="compile")
    torch._dynamo.reset()


def test_importing_imports_no_triton():
    program = "import sys, kernel_pytorch.my_technique; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
