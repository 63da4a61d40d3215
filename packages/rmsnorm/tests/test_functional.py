"""The public functions: what they compute, in which dtype, and what they refuse."""

import importlib.util
import sys

import pytest
import torch

from kernel_pytorch.rmsnorm import RMSNorm, add_rms_norm, head_rms_norm, rms_norm
from kernel_pytorch.rmsnorm._core import cuda_level

LEVELS = ["reference", "native", "torchscript", "compile", "triton"]
LEVELS += ["cuda"] if cuda_level.cuda_ops is not None else []
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def llama(x, weight, eps=1e-6):
    """transformers' LlamaRMSNorm, written out."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def gemma(x, weight, eps=1e-6):
    """transformers' GemmaRMSNorm, written out."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reference_is_bitwise_what_the_models_do(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(17, 48, dtype=dtype), torch.randn(48, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, level="reference"), llama(x, weight))
    ours = rms_norm(x, weight, offset=1.0, casting="gemma", level="reference")
    assert torch.equal(ours, gemma(x, weight))


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=[pytest.mark.slow] if level == "compile" else []) for level in LEVELS]
)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "casting", "expected"),
    [
        (torch.float16, torch.float32, "llama", torch.float32),
        (torch.float16, torch.float32, "gemma", torch.float16),
        (torch.float16, torch.float16, "none", torch.float16),
        (torch.float32, torch.float16, "llama", torch.float32),
        (torch.float64, torch.float64, "llama", torch.float64),
        (torch.float64, torch.float32, "gemma", torch.float64),
        (torch.float32, torch.float64, "none", torch.float64),
    ],
)
def test_result_dtype(level, x_dtype, weight_dtype, casting, expected, device):
    x = torch.randn(4, 8, dtype=x_dtype, device=device)
    weight = torch.randn(8, dtype=weight_dtype, device=device)
    assert rms_norm(x, weight, casting=casting, level=level).dtype == expected


@pytest.mark.parametrize("level", LEVELS)
def test_float64_is_computed_in_float64(level, device):
    """Magnitudes of 1e-6, where an eps that went through float32 on its way would show."""
    x = torch.randn(4, 33, dtype=torch.float64, device=device) * 1e-6
    weight = torch.randn(33, dtype=torch.float64, device=device)
    expected = weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, level=level), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_on_the_cpu_is_the_same_whatever_the_number_of_rows(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(1024, 1024).to(dtype), torch.randn(1024).to(dtype)
    level = "native" if cuda_level.cuda_ops is None else "cuda"
    assert torch.equal(rms_norm(x, weight), rms_norm(x, weight, level=level))
    assert torch.equal(rms_norm(x, weight)[:1], rms_norm(x[:1], weight))


def test_head_weight_may_be_expanded(device):
    """Qwen3 shares one weight among its heads."""
    x, weight = torch.randn(5, 3, 8, device=device), torch.randn(8, device=device)
    for level in LEVELS:
        ours = head_rms_norm(x, weight.expand(3, 8), level=level)
        torch.testing.assert_close(ours, rms_norm(x, weight, level="reference"))


def test_new_residual_is_the_sum(device):
    x, residual = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    for level in LEVELS:
        y, new_residual = add_rms_norm(x, residual, level=level)
        assert torch.equal(new_residual, x + residual)
        torch.testing.assert_close(y, rms_norm(x + residual, level="reference"))


x, weight = torch.randn(4, 8), torch.randn(8)
BAD = {
    "weight shape": (lambda: rms_norm(x, weight[:7]), ValueError, r"weight: shape is \(7,\).*must be \(8,\)"),
    "integer x": (lambda: rms_norm(x.long()), TypeError, "x: dtype is torch.int64; allowed are"),
    "integer weight": (lambda: rms_norm(x, weight.long()), TypeError, "weight: dtype is torch.int64"),
    "no tensor": (lambda: rms_norm([1.0]), TypeError, "x: given list"),
    "devices": (lambda: rms_norm(x, weight.to("meta")), ValueError, "weight: device is meta"),
    "empty rows": (lambda: rms_norm(x[:, :0]), ValueError, r"x: shape is \(4, 0\)"),
    "scalar": (lambda: rms_norm(x[0, 0]), ValueError, r"x: shape is \(\)"),
    "level": (
        lambda: rms_norm(x, level="cutlass"),
        ValueError,
        "level: given 'cutlass'; allowed are None, 'reference'",
    ),
    "casting": (lambda: rms_norm(x, casting="bert"), ValueError, "casting: given 'bert'; allowed are 'llama'"),
    "eps": (lambda: rms_norm(x, eps=-1.0), ValueError, "eps: given -1.0"),
    "eps nan": (lambda: rms_norm(x, eps=float("nan")), ValueError, "eps: given nan; it must be finite"),
    "eps inf": (lambda: rms_norm(x, eps=float("inf")), ValueError, "eps: given inf; it must be finite"),
    "eps text": (lambda: rms_norm(x, eps="1e-6"), TypeError, "eps: given str; it must be a Python number"),
    "eps tensor": (lambda: rms_norm(x, eps=torch.tensor(1e-6)), TypeError, "eps: given Tensor"),
    "offset": (lambda: rms_norm(x, offset=None), TypeError, "offset: given NoneType"),
    "offset nan": (lambda: rms_norm(x, offset=float("nan")), ValueError, "offset: given nan"),
    "sparse": (lambda: rms_norm(x.to_sparse()), TypeError, "x: layout is torch.sparse_coo"),
    "module, no tensor": (lambda: RMSNorm(8)(None), TypeError, "x: given NoneType"),
    "module, level": (lambda: RMSNorm(8, level="tritn"), ValueError, "level: given 'tritn'"),
    "residual shape": (lambda: add_rms_norm(x, x[:2]), ValueError, r"residual: shape is \(2, 8\)"),
    "residual dtype": (lambda: add_rms_norm(x, x.int()), TypeError, "residual: dtype is torch.int32"),
    "residual device": (lambda: add_rms_norm(x, x.to("meta")), ValueError, "residual: device is meta"),
    "head weight": (lambda: head_rms_norm(x, weight), ValueError, r"weight: shape is \(8,\).*must be \(4, 8\)"),
    "head x": (lambda: head_rms_norm(weight, weight), ValueError, r"x: shape is \(8,\); it must be \(..., H, D\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs bfloat16 kernels; the interpreter cannot")
def test_unavailable_level_says_why():
    with pytest.raises(RuntimeError, match=r"level 'triton' of rms_norm cannot run here: .*bfloat16"):
        rms_norm(x.bfloat16(), level="triton")


@pytest.mark.parametrize("level", LEVELS)
def test_no_heads(level, device):
    weight = torch.randn(0, 8, device=device)
    assert head_rms_norm(torch.randn(3, 0, 8, device=device), weight, level=level).shape == (3, 0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_rounds_once_where_gemma_and_torch_do(dtype):
    """Activations of 16 bits, weights of 32: autocast's usual pair."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).to(dtype), torch.randn(512)
    assert torch.equal(RMSNorm(512)(x), torch.nn.functional.rms_norm(x.float(), (512,), None, 2**-23).to(dtype))
    ours, reference = (rms_norm(x, weight, casting="gemma", level=level) for level in ("native", "reference"))
    assert (ours != reference).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_under_transforms(dtype, device):
    """vmap and forward-mode derivatives go through PyTorch's operators, whatever the default is."""
    x, weight = torch.randn(3, 4, 8, device=device, dtype=dtype), torch.randn(8, device=device, dtype=dtype)
    mapped = torch.func.vmap(lambda rows: rms_norm(rows, weight))(x)
    torch.testing.assert_close(mapped, rms_norm(x, weight, level="native"))
    _, tangent = torch.func.jvp(lambda rows: rms_norm(rows, weight), (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape


def test_without_its_package_level_cuda_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernel_pytorch.cuda_ops", None)
    specification = importlib.util.spec_from_file_location("without_package", cuda_level.__file__)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    reason = module.unavailable(torch.device("cpu"), torch.float32)
    assert "is not installed (in a checkout of kernel-pytorch: pip install ./packages/cuda-ops)" in reason


def test_the_limit_of_a_compiler_says_what_to_do():
    x = torch.randn(2, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        rms_norm(x, casting="llama", level="compile")
        with pytest.raises(RuntimeError, match=r"'compile' of rms_norm.*at most 1 times.*config\.recompile_limit"):
            rms_norm(x, casting="none", level="compile")
    torch._dynamo.reset()
