"""One launch of each group of kernels on a GPU of paper: planned, past the JITFunction and planned anew. A program.

What is handed to CUDA is the same in all three, and after a call of another geometry too.
"""

import importlib
import sys

import torch
import triton
from paper_gpu import OnGpu, calls, on_gpu, plain, use
from torch.overrides import TorchFunctionMode

FUSED, ENTROPY, RMSNORM = (f"kernel_pytorch.{name}" for name in ("fused_ln_act", "linear_cross_entropy", "rmsnorm"))


class SameMemory(TorchFunctionMode):
    """Allocations of each call are those of the first, so that calls can be held against each other."""

    def __init__(self):
        super().__init__()
        self.memory, self.next = [], 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function is torch.empty and arguments == (0,):  # what a plan keeps, to make others like it
            return function(*arguments, **keywords).as_subclass(OnGpu)
        likened = function is torch.Tensor.new_empty and arguments[0].numel() == 0
        if not likened and (function is not torch.empty or str(keywords.get("device")) == "meta"):
            return function(*arguments, **keywords)
        if self.next == len(self.memory):
            self.memory.append(function(*arguments, **keywords).as_subclass(OnGpu))
        self.next += 1
        found = self.memory[self.next - 1]
        assert found.shape == torch.Size(arguments[-1])
        return found


def filled(value, *shape):
    return torch.full(shape, value).as_subclass(OnGpu)


def cases():
    """Launcher, arguments, and those of another geometry, most with half as many rows."""
    seed, x, few, weight = filled(3), on_gpu(64, 1024), on_gpu(32, 1024), on_gpu(1024)
    up, down, bias, target = on_gpu(512, 1024), on_gpu(256, 256), on_gpu(512), filled(1, 64)
    loss, normalizer, statistics = filled(0.5, 64), filled(0.5, 64, 2), filled(0.5, 2, 64)
    gate, gates = ("silu", 1.5, 7.0, 1.0), ("silu", 1.0, None, 0.0, True, True)
    norm, needs = (1e-5, 0.25, "layer", "gelu"), ("float32", "float32", True, True, True, True)
    scalars = -100, 0.1, 1e-4, 20.0
    forward, backward, entropy = "kernels.forward", "kernels.backward", f"{ENTROPY}.kernels.launchers"
    return [
        (f"{FUSED}.gated.{forward}", "gated", (x, None, *gate), (few, None, *gate)),
        (f"{FUSED}.gated.{backward}", "gated_backward", (x, x, x, *gates), (few, few, few, *gates)),
        (f"{FUSED}.bias.{forward}", "bias_act", (x, weight, "gelu"), (few, weight, "gelu")),
        (f"{FUSED}.bias.{forward}", "bias_dropout_add", (x, weight, x, seed, 0.5), (few, weight, few, seed, 0.5)),
        (f"{FUSED}.bias.{backward}", "bias_act_backward", (x, x, weight, "gelu", True, True),
         (few, few, weight, "gelu", True, True)),
        (f"{FUSED}.bias.{backward}", "bias_dropout_add_backward", (x, weight, seed, 0.5, "float32", True, True),
         (few, weight, seed, 0.5, "float32", True, True)),
        (f"{FUSED}.softmax.{forward}", "softmax", (x, x > 0, 0.5), (x, (x > 0)[:1], 0.5)),
        (f"{FUSED}.softmax.{backward}", "softmax_backward", (x, x, x, 0.5, True, True), (x, x, x[:1], 0.5, True, True)),
        (f"{FUSED}.norm.{forward}", "norm_act", (x, x, weight, weight, seed, *norm),
         (few, few, weight, weight, seed, *norm)),
        (f"{FUSED}.norm.{backward}", "norm_act_backward", (x, x, x, weight, weight, seed, statistics, *norm, *needs),
         (few, few, few, weight, weight, seed, filled(0.5, 2, 32), *norm, *needs)),
        (f"{FUSED}.linear.{forward}", "linear_act", (x, up, bias, "gelu", True), (few, up, bias, "gelu", True)),
        (f"{FUSED}.linear.{forward}", "gated_mlp", (x, up, down, "silu", True), (few, up, down, "silu", True)),
        (f"{FUSED}.linear.{backward}", "linear_act_backward",
         (on_gpu(64, 512), None, x, up, bias, "gelu", True, True),
         (on_gpu(32, 512), None, few, up, bias, "gelu", True, True)),
        (f"{FUSED}.linear.{backward}", "gated_mlp_backward", (on_gpu(64, 256), None, x, up, "silu", True, True),
         (on_gpu(32, 256), None, few, up, "silu", True, True)),
        (entropy, "linear_cross_entropy", (x, up, target, bias, *scalars, 0),
         (few, up, target[:32], bias, *scalars, 0)),
        (entropy, "cross_entropy", (x, target, *scalars), (few, target[:32], *scalars)),
        (entropy, "cross_entropy_backward", (loss, normalizer, x, target, *scalars),
         (loss[:32], normalizer[:32], few, target[:32], *scalars)),
        (f"{RMSNORM}.{forward}", "rms_norm", (x, weight, 1e-6, 0.0, "llama"), (few, weight, 1e-6, 0.0, "llama")),
    ]  # fmt: skip


def handed_over(launcher, arguments, memory):
    """What one call hands to CUDA, and how many of its launches went through the JITFunction."""
    calls.clear()
    memory.next = 0
    through, run = [], triton.JITFunction.run
    triton.JITFunction.run = lambda self, *a, **k: (through.append(self), run(self, *a, **k))[1]
    with memory:
        launcher(*arguments)
    triton.JITFunction.run = run
    # Nothing where a tensor is absent is the address 0 past the JITFunction.
    return [str(plain(call)).replace("'nothing'", "0") for call in calls], len(through)


def check(module, name, arguments, others):
    launcher = getattr(importlib.import_module(module), name)
    launcher = launcher("triton") if module.startswith(ENTROPY) else launcher
    forget_plans = importlib.import_module(f"{'.'.join(module.split('.')[:2])}._core.plans").forget_plans
    memory, of_others = SameMemory(), SameMemory()
    planned, jitted = handed_over(launcher, arguments, memory)
    assert jitted == len(planned) > 0, name
    other, jitted = handed_over(launcher, others, of_others)
    assert jitted == len(other) > 0, f"{name}: another geometry was launched as the first"
    for given, own, expected in ((arguments, memory, planned), (others, of_others, other)):
        again, jitted = handed_over(launcher, given, own)
        assert jitted == 0, f"{name}: {jitted} launches went through the JITFunction"
        assert again == expected, (name, again, expected)
        forget_plans()
        anew, jitted = handed_over(launcher, given, own)
        assert jitted == len(anew)
        assert anew == expected, (name, anew, expected)
        handed_over(launcher, arguments, memory)
        handed_over(launcher, others, of_others)


packages = {module.rpartition(".kernels")[0].split(".")[1] for module, *_ in cases()}
use(*(importlib.import_module(f"kernel_pytorch.{package}._core.launch") for package in packages))
for case in cases():
    if len(sys.argv) < 2 or case[1] in sys.argv[1:]:
        check(*case)
