"""What level `cuda` says of a device: whether it runs there, why not, and where it is the default."""

import subprocess
import sys

import build_library
import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY, levels
from kernel_pytorch.cuda_ops.library import Library


@pytest.mark.parametrize(("archs", "compiled"), [((), "not compiled"), (("sm_90a",), "for sm_90a by nvcc 13.5")])
def test_a_cpu_says_where_the_cuda_code_was_verified(monkeypatch, archs, compiled):
    library = Library(LIBRARY.file, "c++ 1", "nvcc 13.5", archs, ("base",), False, "", {})
    monkeypatch.setattr(levels, "LIBRARY", library)
    said = f"CPU backend for base, by c++ 1; CUDA code {compiled}, verified on compute capability: 9.0"
    assert levels.describe("cuda", torch.device("cpu")) == said


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100",), (10, 3), True),
        (("sm_100a",), (10, 3), False),
        (("sm_120",), (12, 1), True),
        ((), (9, 0), False),
    ],
)
def test_which_cards_an_architecture_serves(archs, capability, runs):
    library = Library(LIBRARY.file, "", "", archs, (), False, "", {})
    assert library.runs_on(capability) is runs


def test_levels_say_why_not():
    cpu = torch.device("cpu")
    assert levels.unavailable("cuda", cpu, torch.float64) is None
    assert "dtype is torch.int8; the CPU backend takes float16" in levels.unavailable("cuda", cpu, torch.int8)
    assert "device is meta" in levels.unavailable("cuda", torch.device("meta"), torch.float32)
    assert "CUDA kernels take float16, bfloat16, float32" in levels.unavailable(
        "cuda", torch.device("cuda"), torch.double
    )


def test_without_cuda_code_a_card_says_what_brings_it(monkeypatch):
    monkeypatch.setattr(levels, "LIBRARY", Library(LIBRARY.file, "", None, (), (), False, "", {}))
    reason = levels.unavailable("cuda", torch.device("cuda"), torch.float32)
    assert "was built without CUDA; get nvcc (pip install 'nvidia-cuda-nvcc" in reason
    assert build_library.AGAIN.partition(": ")[2].strip("`") in reason


def test_a_card_that_was_not_verified_is_nobodys_default(monkeypatch):
    """Where the kernels could run, and where not even that."""
    card = torch.device("cuda")
    monkeypatch.setattr(levels, "LIBRARY", Library(LIBRARY.file, "", "nvcc", ("sm_90a",), (), False, "", {}))
    monkeypatch.setattr(levels, "compute_capability", lambda device: (9, 0))
    assert levels.unavailable("cuda", card, torch.float32) is None
    monkeypatch.setattr(levels, "VERIFIED", frozenset())
    assert levels.default("rotary_embedding", card, torch.float32) == "native"
    monkeypatch.setattr(levels, "VERIFIED", frozenset({(9, 0)}))
    assert levels.default("rotary_embedding", card, torch.float32) == "cuda"
    monkeypatch.setattr(levels, "compute_capability", lambda device: (10, 0))
    assert "compute capability is 10.0" in levels.unavailable("cuda", card, torch.float32)
    assert levels.default("rotary_embedding", card, torch.float32) == "native"


REFUSED = """
import importlib
import torch

parse = torch._C.parse_schema
torch._C.parse_schema = lambda text: parse(text.replace("_cuda::bias_act(Tensor x", "_cuda::bias_act(Tensor y"))
for _ in range(2):
    try:
        importlib.import_module("kernel_pytorch.cuda_ops")
    except ImportError as error:
        print(error)
import kernel_pytorch.rmsnorm
from kernel_pytorch.rmsnorm._core import cuda_level

print(cuda_level.unavailable(torch.device("cpu"), torch.float32))
"""


def test_a_library_of_other_schemas_is_refused_each_time_with_the_same_words():
    """What registered its operators before the one that does not fit cannot register them again."""
    ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    said = ran.stdout.splitlines()
    assert said == said[:1] * 3
    assert "bias_act(Tensor y" in said[0]
    assert "; installed is kernel_pytorch_cuda::bias_act(Tensor x" in said[0]
