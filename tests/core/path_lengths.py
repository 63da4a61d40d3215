"""Counts the functions of Python between a public function and the launch of its kernel, on a GPU of paper. A program.

python path_lengths.py PUBLIC_FUNCTION ...
"""

import importlib
import sys

import torch
from paper_gpu import calls, use

BF16 = {"dtype": torch.bfloat16}


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, without a word of `__torch_function__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, is_cpu = True, False

    def get_device(self):
        return 0


def on_gpu(*shape):
    return torch.zeros(shape, **BF16).as_subclass(OnGpu)


def rows(count=1, *parameters):
    """Activations, and parameters of these shapes."""
    return [on_gpu(8, 1024) for _ in range(count)] + [on_gpu(*shape) for shape in parameters]


def heads():
    return [on_gpu(2, 64, 8, 64), on_gpu(2, 64, 2, 64)]


CALLS = {
    "rmsnorm.rms_norm": lambda f: f(*rows(1, [1024])),
    "rmsnorm.add_rms_norm": lambda f: f(*rows(2, [1024])),
    "rmsnorm.head_rms_norm": lambda f: f(on_gpu(8, 4, 64), on_gpu(4, 64)),
    "rmsnorm.add_rms_norm of one tensor twice": lambda f: f(*rows() * 2, on_gpu(1024)),
    "fused_ln_act.layer_norm": lambda f: f(*rows(1, [1024], [1024])),
    "fused_ln_act.add_layer_norm": lambda f: f(*rows(2, [1024], [1024])),
    "fused_ln_act.bias_act": lambda f: f(*rows(1, [1024]), "gelu"),
    "fused_ln_act.swiglu": lambda f: f(*rows(2)),
    "fused_ln_act.softmax": lambda f: f(*rows()),
    "fused_ln_act.linear_act": lambda f: f(*rows(), on_gpu(256, 1024), on_gpu(256), "gelu"),
    "qkv_fusion.rotary_embedding": lambda f: f(*heads(), on_gpu(64, 32), on_gpu(64, 32)),
    "qkv_fusion.qk_norm_rope": lambda f: f(*heads(), on_gpu(64), on_gpu(64), on_gpu(64, 32), on_gpu(64, 32)),
    "flash_attn_triton.flash_attention": lambda f: f(*[on_gpu(2, 4, 128, 64) for _ in range(3)], causal=True),
    "flash_attn_triton.flash_attention_with_lse": lambda f: f(*[on_gpu(2, 4, 128, 64) for _ in range(3)]),
    "linear_cross_entropy.cross_entropy": lambda f: f(
        on_gpu(8, 1024), torch.zeros(8, dtype=torch.int64).as_subclass(OnGpu)
    ),
}


def functions_until_launch(name):
    """The names of the functions that a warm call runs before the first launch, without the public function itself."""
    path, attribute = name.split(" ")[0].split(".")
    package = importlib.import_module(f"kernel_pytorch.{path}")
    module = f"kernel_pytorch.{path}._core"
    core = {part: importlib.import_module(f"{module}.{part}") for part in ("call", "call_kinds", "launch", "levels")}
    core["call_kinds"].PLAIN = (*core["call_kinds"].PLAIN, OnGpu)
    core["levels"].Ladder.unavailable = lambda *arguments: None
    use(core["launch"])
    if path == "linear_cross_entropy":  # on a CPU, which all memory here is, targets are looked at
        importlib.import_module("kernel_pytorch.linear_cross_entropy.functional").is_checked = lambda target: False
    public = getattr(package, attribute)
    arguments = []
    CALLS[name](lambda *given, **keywords: arguments.append((given, keywords)))
    ((given, keywords),) = arguments
    found = []

    def seen(frame, event, argument):
        if event == "call":
            found.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}")

    with torch.no_grad():
        for _ in range(4):
            public(*given, **keywords, level="triton")
        calls.clear()
        sys.setprofile(seen)
        try:
            public(*given, **keywords, level="triton")
        finally:
            sys.setprofile(None)
    assert calls, "nothing was launched"
    launched = next((place for place, what in enumerate(found) if what == "paper_gpu.py:launch"), None)
    assert launched is not None, found
    # What the paper is asked for, a real GPU answers in C. An address that is new to the copy engine is described anew.
    left_out = "paper_gpu.py:", "path_lengths.py:", "launch.py:__missing__"
    return [what for what in found[:launched] if not what.startswith(left_out)][1:]


if __name__ == "__main__":
    for name in sys.argv[1:] or CALLS:
        sys.stdout.write("\t".join([name, *functions_until_launch(name)]) + "\n")
