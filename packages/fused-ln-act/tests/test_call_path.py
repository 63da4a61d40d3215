"""How much Python stands between a call of few elements and its kernel: more of it takes longer than the kernel."""

import sys

import pytest
import torch

from kernel_pytorch.fused_ln_act import softmax, swiglu
from kernel_pytorch.fused_ln_act._core import cuda_level
from kernel_pytorch.fused_ln_act.levels import LADDER

ROW = torch.linspace(-2.0, 2.0, 256)[None]


def frames(call):
    """How many Python functions one call runs."""
    found = []
    for _ in range(3):
        call()
    sys.setprofile(lambda frame, event, argument: found.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda: swiglu(ROW.bfloat16(), ROW.bfloat16()), 30),
        (lambda: softmax(ROW, 0.5), 25),
    ],
    ids=["swiglu", "softmax"],
)
def test_the_default_on_a_cpu_is_reached_by_few_functions(call, most):
    if cuda_level.cuda_ops is None:
        pytest.skip("kernel_pytorch.cuda_ops is not here")
    assert frames(call) <= most + 1  # the call itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_alike_calls_are_asked_about_once(dtype, mask, monkeypatch):
    asked = []
    monkeypatch.setattr(LADDER, "unavailable", lambda level, device, dtype: asked.append(dtype))
    monkeypatch.setattr(LADDER, "_resolved", {})
    for _ in range(2):
        x = ROW.to(dtype)
        LADDER.resolve("softmax", "cuda", x, {None: None, "bool": x > 0, "float": x}[mask])
    assert asked == {None: [dtype], "bool": [dtype, torch.bool], "float": [dtype, dtype]}[mask]
