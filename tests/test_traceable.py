"""Every public function and module of every package, at its default level: imported, compiled in one piece, exported.

Compiled for sizes as they are and, with `dynamic=True`, for any: forward and backward.

What is tried is found by the packages' public names, so a new one without a call is an error. A package may name its
calls itself, as `CALLS` in its `tests/traced.py`, in the form of those below, as `NOT_TRACED` what
has none, and why, and as `DTYPES` other dtypes than those below.
"""

import importlib
import runpy
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
NAMES = sorted(file.parent.name for file in ROOT.glob("packages/*/src/kernel_pytorch/*/__init__.py"))
DTYPES = [torch.float32, torch.bfloat16]  # on a CPU the default levels of both differ


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


X, ROW, TARGET = normal(3, 16), normal(16), torch.tensor([1, 5, 15])
HEADS, TURNS = normal(2, 5, 4, 8), normal(5, 4)
Q = normal(1, 2, 5, 8)

# By public name: what is called with the function or the class, and tensors. A class is given what it is made with:
# arguments, and then keywords.
CALLS = {
    "rms_norm": (lambda f, x, w: f(x, w), (X, ROW)),
    "add_rms_norm": (lambda f, x, r, w: f(x, r, w), (X, X + 1, ROW)),
    "head_rms_norm": (lambda f, x, w: f(x, w), (HEADS, normal(4, 8))),
    "layer_norm": (lambda f, x, w, b: f(x, w, b), (X, ROW, ROW)),
    "add_layer_norm": (lambda f, x, r, w, b: f(x, r, w, b), (X, X + 1, ROW, ROW)),
    "layer_norm_act": (lambda f, x, w, b: f(x, w, b, activation="gelu"), (X, ROW, ROW)),
    "add_layer_norm_act": (lambda f, x, r, w, b: f(x, r, w, b, activation="gelu"), (X, X + 1, ROW, ROW)),
    "rms_norm_act": (lambda f, x, w: f(x, w, activation="silu"), (X, ROW)),
    "add_rms_norm_act": (lambda f, x, r, w: f(x, r, w, activation="silu"), (X, X + 1, ROW)),
    "swiglu": (lambda f, gate, up: f(gate, up), (X, X + 1)),
    "geglu": (lambda f, gate: f(gate), (X,)),
    "reglu": (lambda f, gate, up: f(gate, up), (X, X + 1)),
    "bias_act": (lambda f, x, b: f(x, b, "gelu"), (X, ROW)),
    "bias_dropout_add": (lambda f, x, b, r, seed: f(x, b, r, 0.5, seed), (X, ROW, X + 1, torch.tensor(7))),
    "softmax": (lambda f, x, mask: f(x, 0.5, mask), (X, X > -1.0)),
    "linear_act": (lambda f, x, w, b: f(x, w, b, "gelu"), (X, normal(8, 16), normal(8))),
    "gated_mlp": (lambda f, x, first, second: f(x, first, second), (X, normal(8, 16), normal(16, 4))),
    "cross_entropy": (lambda f, logits, target: f(logits, target), (X, TARGET)),
    "linear_cross_entropy": (lambda f, x, w, target: f(x, w, target), (X, normal(16, 16), TARGET)),
    "rotary_embedding": (lambda f, x, cos, sin: f(x, cos, sin), (HEADS, TURNS, TURNS)),
    "rotary_qk": (
        lambda f, q, k, cos, sin, positions: f(q, k, cos, sin, positions),
        (HEADS, HEADS + 1, TURNS, TURNS, torch.tensor([4, 0, 1, 1, 3])),
    ),
    "qk_norm_rope": (
        lambda f, q, k, qw, kw, cos, sin: f(q, k, qw, kw, cos, sin),
        (HEADS, HEADS + 1, normal(8), normal(8), TURNS, TURNS),
    ),
    "flash_attention": (lambda f, q, k, v: f(q, k, v), (Q, Q + 1, Q + 2)),
    "RMSNorm": (lambda m, x: m(x), (X,), (16,)),
    "LayerNorm": (lambda m, x: m(x), (X,), (16,)),
    "LayerNormAct": (lambda m, x: m(x), (X,), (16, "gelu")),
    "AddLayerNorm": (lambda m, x, r: m(x, r), (X, X + 1), (16,)),
    "SwiGLU": (lambda m, x: m(x), (X,), ()),
    "GEGLU": (lambda m, x: m(x), (X,), ()),
    "LinearAct": (lambda m, x: m(x), (X,), (16, 8, "gelu")),
    "MLP": (lambda m, x: m(x), (X,), (16, 24)),
    "GatedMLP": (lambda m, x: m(x), (X,), (16, 24)),
    "CrossEntropyLoss": (lambda m, logits, target: m(logits, target), (X, TARGET), ()),
    "LinearCrossEntropy": (lambda m, x, target: m(x, target), (X, TARGET), (16, 16)),
}
# What reads or changes models: nothing that is traced.
OF_MODELS = {"assert_ready", "fuse", "fusion_report", "optimize", "patch", "unfuse", "unpatch"}
CONSTANT = {"cos", "sin", "new_q", "k_cache", "v_cache"}  # of the arguments above: those without a gradient


def public(package):
    """What a package offers to call: functions and modules, not what they are given, as a cache."""
    module = importlib.import_module(f"kernel_pytorch.{package}")
    without = OF_MODELS | traced(package).get("NOT_TRACED", {}).keys()
    found = {name: getattr(module, name) for name in module.__all__ if name not in without}
    return [name for name, called in found.items() if isinstance(called, types.FunctionType) or is_module(called)]


def is_module(called):
    return isinstance(called, type) and issubclass(called, torch.nn.Module)


def cases():
    for package in NAMES:
        try:
            found = public(package)
        except ImportError as error:  # kernels that are not compiled here
            reason = str(error).partition("\n")[0]
            yield pytest.param(package, "", None, id=package, marks=pytest.mark.skip(reason=reason))
            continue
        for name in found:
            for dtype in traced(package).get("DTYPES", DTYPES):
                yield pytest.param(package, name, dtype, id=f"{package}.{name}-{str(dtype).removeprefix('torch.')}")


def traced(package, root=ROOT):
    """What a package says in its `tests/traced.py`; nothing if it has none."""
    files = root.glob(f"packages/*/src/kernel_pytorch/{package}/../../../tests/traced.py")
    return next((runpy.run_path(str(file)) for file in files), {})


def prepared(package, name, dtype):
    """A function of tensors alone, those tensors, and the module that is in it, if one is."""
    calls = CALLS | traced(package).get("CALLS", {})
    assert name in calls, f"kernel_pytorch.{package}.{name} is public, and not tried: add a call to its tests/traced.py"
    call, tensors, *arguments = calls[name]
    subject = getattr(importlib.import_module(f"kernel_pytorch.{package}"), name)
    assert isinstance(subject, types.FunctionType) != bool(arguments), f"{name}: only classes have arguments here"
    if arguments:
        torch.manual_seed(0)
        positional, keywords = (*arguments, {})[:2]
        subject = subject(*positional, **keywords).to(dtype)
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return call, subject, tensors


def results(call, subject, tensors, names):
    """Outputs, and the gradients of what is differentiable."""
    own = [
        t.clone().requires_grad_(t.is_floating_point() and name not in CONSTANT)
        for t, name in zip(tensors, names, strict=True)
    ]
    outputs = call(subject, *own)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    leaves = [t for t in own if t.requires_grad]
    leaves += list(subject.parameters()) if isinstance(subject, torch.nn.Module) else []
    if not leaves:
        return outputs
    return outputs + list(torch.autograd.grad(sum(o.float().square().sum() for o in outputs), leaves))


def test_every_public_name_is_called():
    for package, name, dtype in {each.values for each in cases() if each.values[1]}:
        prepared(package, name, dtype)


@pytest.mark.support
@pytest.mark.parametrize(("package", "name", "dtype"), list(cases()))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_is_compiled_in_one_piece(package, name, dtype, dynamic):
    call, subject, tensors = prepared(package, name, dtype)
    names = call.__code__.co_varnames[1:]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    eager = results(call, subject, tensors, names)
    for ours, theirs in zip(results(compiled, subject, tensors, names), eager, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.support
@pytest.mark.parametrize(("package", "name", "dtype"), list(cases()))
def test_it_is_exported(package, name, dtype):
    call, subject, tensors = prepared(package, name, dtype)

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = subject if isinstance(subject, torch.nn.Module) else torch.nn.Identity()

        def forward(self, *given):
            return call(self.inner if isinstance(subject, torch.nn.Module) else subject, *given)

    module = torch.export.export(Exported(), tuple(tensors)).module()
    with torch.no_grad():
        ours, theirs = module(*tensors), call(subject, *tensors)
    torch.testing.assert_close(ours, theirs)


def test_a_public_name_without_a_call_is_found(monkeypatch):
    monkeypatch.delitem(CALLS, "rms_norm")
    with pytest.raises(AssertionError, match=r"kernel_pytorch.rmsnorm.rms_norm is public, and not tried: add"):
        prepared("rmsnorm", "rms_norm", torch.float32)


def test_a_package_names_its_own_calls(tmp_path):
    (tmp_path / "packages/new/src/kernel_pytorch/new_one").mkdir(parents=True)
    (tmp_path / "packages/new/tests").mkdir()
    (tmp_path / "packages/new/tests/traced.py").write_text("CALLS = {'f': (lambda f, x: f(x), (1,))}")
    assert list(traced("new_one", tmp_path)["CALLS"]) == ["f"]
    assert traced("other", tmp_path) == {}


def test_every_package_is_found():
    assert {"rmsnorm", "fused_ln_act", "linear_cross_entropy", "cuda_ops"} <= set(NAMES)
