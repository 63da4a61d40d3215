"""The public functions of the norm: what they compute, in which dtype, and what they refuse."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act import (
    add_layer_norm,
    add_layer_norm_act,
    add_rms_norm_act,
    layer_norm,
    layer_norm_act,
    rms_norm_act,
)

LEVELS = ["reference", "native", "torchscript", pytest.param("compile", marks=pytest.mark.slow), "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


@pytest.mark.parametrize("level", LEVELS)
def test_equals_what_pytorch_composes(level, device):
    torch.manual_seed(0)
    x, residual = torch.randn(5, 7, 32, device=device), torch.randn(5, 7, 32, device=device)
    weight, bias = torch.randn(32, device=device), torch.randn(32, device=device)
    expected = F.layer_norm(x, (32,), weight, bias)
    torch.testing.assert_close(layer_norm(x, weight, bias, level=level), expected)
    ours = layer_norm_act(x, weight, bias, activation="gelu", level=level)
    torch.testing.assert_close(ours, F.gelu(expected))
    y, h = add_layer_norm_act(x, residual, weight, bias, activation="relu", level=level)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, F.relu(F.layer_norm(h, (32,), weight, bias)))
    y, h = add_rms_norm_act(x, residual, weight, activation="silu", level=level)
    torch.testing.assert_close(y, F.silu(F.rms_norm(h, (32,), weight, 1e-6)))


@pytest.mark.parametrize("level", ["reference", "native", "torchscript", "triton"])
def test_dropout_stands_where_the_docstring_says(level, device):
    """On x before the sum with a residual; on the result without one."""
    x, seed = torch.ones(64, 32, device=device), torch.tensor(9, device=device)
    y, h = add_layer_norm(x, torch.zeros_like(x), dropout_p=0.5, seed=seed, level=level)
    assert set(h.unique().tolist()) == {0.0, 2.0}
    assert (y != 0).all()
    y = layer_norm_act(
        x, None, torch.ones(32, device=device), activation="identity", dropout_p=0.5, seed=seed, level=level
    )
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y != 0, h != 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype", "weight_dtype", "expected"),
    [
        (torch.float16, torch.float16, torch.float32, torch.float16),
        (torch.float16, torch.float32, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float64, torch.float64),
    ],
)
def test_result_dtype(level, x_dtype, residual_dtype, weight_dtype, expected, device):
    x, residual = (torch.randn(4, 8, dtype=d, device=device) for d in (x_dtype, residual_dtype))
    weight = torch.randn(8, dtype=weight_dtype, device=device)
    torch._dynamo.reset()
    y, h = add_layer_norm(x, residual, weight, level=level)
    assert (y.dtype, h.dtype) == (expected, expected)
    assert layer_norm(x, weight, level=level).dtype == x_dtype


@pytest.mark.parametrize("level", LEVELS)
def test_float64_is_computed_in_float64(level, device):
    """Magnitudes of 1e-3, where an eps that went through float32 on its way would show."""
    x = torch.randn(4, 33, dtype=torch.float64, device=device) * 1e-3
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    torch._dynamo.reset()
    torch.testing.assert_close(layer_norm(x, level=level), expected, rtol=1e-12, atol=1e-15)
    ours = layer_norm_act(x, activation="tanh", level=level)
    torch.testing.assert_close(ours, expected.tanh(), rtol=1e-12, atol=1e-15)


def test_default_is_native_on_the_cpu():
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    assert torch.equal(layer_norm(x, weight), F.layer_norm(x, (96,), weight))


x, weight = torch.randn(4, 8), torch.randn(8)
seed = torch.tensor(0)
BAD = {
    "weight shape": (lambda: layer_norm(x, weight[:7]), ValueError, r"weight: shape is \(7,\).*must be \(8,\)"),
    "bias shape": (lambda: layer_norm(x, None, weight[:7]), ValueError, r"bias: shape is \(7,\).*must be \(8,\)"),
    "integer x": (lambda: layer_norm(x.long()), TypeError, "x: dtype is torch.int64; allowed are"),
    "integer bias": (lambda: layer_norm(x, None, weight.long()), TypeError, "bias: dtype is torch.int64"),
    "no tensor": (lambda: layer_norm([1.0]), TypeError, "x: given list"),
    "devices": (lambda: layer_norm(x, weight.to("meta")), ValueError, "weight: device is meta"),
    "empty rows": (lambda: layer_norm(x[:, :0]), ValueError, r"x: shape is \(4, 0\)"),
    "scalar": (lambda: layer_norm(x[0, 0]), ValueError, r"x: shape is \(\)"),
    "level": (lambda: layer_norm(x, level="cutlass"), ValueError, "level: given 'cutlass'; allowed are None, 'refer"),
    "eps": (lambda: layer_norm(x, eps=-1.0), ValueError, "eps: given -1.0"),
    "eps nan": (lambda: layer_norm(x, eps=float("nan")), ValueError, "eps: given nan; it must be finite"),
    "eps text": (lambda: layer_norm(x, eps="1e-6"), TypeError, "eps: given str; it must be a Python number"),
    "sparse": (lambda: layer_norm(x.to_sparse()), TypeError, "x: layout is torch.sparse_coo"),
    "no residual": (lambda: add_layer_norm(x, None), TypeError, "residual: given NoneType; it must be a torch.Tensor"),
    "residual shape": (lambda: add_layer_norm(x, x[:2]), ValueError, r"residual: shape is \(2, 8\)"),
    "residual dtype": (lambda: add_layer_norm(x, x.int()), TypeError, "residual: dtype is torch.int32"),
    "residual device": (lambda: add_layer_norm(x, x.to("meta")), ValueError, "residual: device is meta"),
    "activation": (
        lambda: rms_norm_act(x, activation="swish"),
        ValueError,
        "activation: given 'swish'; allowed are 'gelu', 'gelu_tanh'",
    ),
    "probability": (
        lambda: add_layer_norm(x, x, dropout_p=1.0),
        ValueError,
        "dropout_p: given 1.0; it must be at least",
    ),
    "negative": (lambda: add_layer_norm(x, x, dropout_p=-0.1), ValueError, "dropout_p: given -0.1"),
    "seed": (lambda: add_layer_norm(x, x, dropout_p=0.1, seed=3), TypeError, "seed: given int; it must be a torch.Ten"),
    "seed dtype": (
        lambda: add_layer_norm(x, x, dropout_p=0.1, seed=torch.tensor(1.0)),
        TypeError,
        "seed: dtype is torch.float32; allowed is torch.int64",
    ),
    "seed shape": (
        lambda: add_layer_norm(x, x, dropout_p=0.1, seed=torch.zeros(2, dtype=torch.int64)),
        ValueError,
        r"seed: shape is \(2,\); it must be \(\)",
    ),
    "seed device": (
        lambda: add_layer_norm(x, x, dropout_p=0.1, seed=seed.to("meta")),
        ValueError,
        "seed: device is meta; it must be that of x",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs bfloat16 kernels; the interpreter cannot")
def test_unavailable_level_says_why():
    with pytest.raises(RuntimeError, match=r"level 'triton' of layer_norm cannot run here: .*bfloat16"):
        layer_norm(x.bfloat16(), level="triton")
