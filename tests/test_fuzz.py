"""Malformed calls: some of what `nox -s fuzz` makes, and that it finds what it looks for, planted in an operator."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz" / "fuzz.py"

PLANTED = """
import ctypes
import torch

library = torch.library.Library("kernel_pytorch_planted", "DEF")
library.define("crash(Tensor x) -> Tensor")
library.define("forget(Tensor x) -> Tensor")
library.define("quote(Tensor x) -> Tensor")
library.define("right(Tensor x) -> Tensor")

def crash(x):
    if x.dtype == torch.bool:
        ctypes.string_at(8)
    return x.clone()

def forget(x):
    found = torch.empty_like(x)
    found[..., :1] = x[..., :1]
    return found if x.shape[-1] != 5 else x.clone()

def quote(x):
    if x.dim() != 2:
        raise RuntimeError("aoti_torch_f(x) API call failed at /home/me/torch/include/f.h, line 3")
    return x.clone()

def right(x):
    if x.dtype != torch.float32:
        raise TypeError(f"x: dtype is {x.dtype}; allowed is torch.float32")
    if x.data_ptr() == 0 and x.numel() > 0:
        raise ValueError("x: its storage was freed")
    return x.clone()

for name in ("crash", "forget", "quote", "right"):
    library.impl(name, globals()[name], "CPU")

def examples(recorder):
    with recorder:
        for name in ("crash", "forget", "quote", "right"):
            getattr(torch.ops.kernel_pytorch_planted, name)(torch.ones(2, 5))
"""


def fuzz(*arguments):
    command = [sys.executable, str(FUZZ), "--seed", "7", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_malformed_calls_raise_ordinary_exceptions():
    found = fuzz("--count", 500)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 of 500 calls failed" in found.stdout


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    file = tmp_path_factory.mktemp("planted") / "planted.py"
    file.write_text(PLANTED)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("crash", "ended the process with status -11"),
        ("forget", "returned memory that nothing was written to"),
        ("quote", "raised RuntimeError: aoti_torch_f"),
    ],
)
def test_what_is_planted_is_found_and_runs_again(planted, name, failure):
    found = fuzz("--count", 150, "--instead", planted, "--only", f".{name}.")
    assert found.returncode == 1
    assert failure in found.stdout
    replay = found.stdout.split("--replay '")[1].split("'\n")[0]
    again = fuzz("--instead", planted, "--replay", replay)
    assert again.returncode != 0
    assert "nothing is wrong" not in again.stdout


@pytest.mark.slow
def test_an_operator_that_checks_its_argument_passes(planted):
    found = fuzz("--count", 150, "--instead", planted, "--only", ".right.")
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_public_functions_name_a_tensor_that_is_quantized_or_missing(monkeypatch):
    monkeypatch.syspath_prepend(str(FUZZ.parent))
    calls = importlib.import_module("calls")
    asked = set()
    for call in calls.examples(None):
        if call["target"].startswith("torch.ops"):
            continue
        module, _, function = call["target"].partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        for place, (name, given) in enumerate(zip(call.get("names", parameters), call["args"], strict=False)):
            if not isinstance(given, dict) or (call["target"], name, call["args"][-1] == "native") in asked:
                continue
            asked.add((call["target"], name, call["args"][-1] == "native"))
            required = parameters[name].annotation in ("Tensor", "torch.Tensor")
            for wrong in ({**given, "dtype": "qint8"}, *([None] if required else [])):
                arguments = [wrong if i == place else a for i, a in enumerate(call["args"])]
                with pytest.raises((TypeError, ValueError), match=rf"\b{name}: [^\n]*\Z"):  # of one line
                    calls.run({**call, "args": arguments})
    assert len(asked) > 60
