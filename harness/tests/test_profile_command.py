"""`kernel-pytorch profile`: a factory in the current folder, one line for what cannot be profiled, files on demand."""

from __future__ import annotations

import json
import sys

import pytest

from kernel_pytorch.harness.commands.common import output
from kernel_pytorch.harness.profiling import profile as profile_file
from kernel_pytorch.harness.profiling.records import Profile

FACTORIES = """
import torch
from torch import nn

class Renamed(nn.Linear):
    pass

Renamed.__name__ = "<b>[red]Renamed"
number = 3

def sized(size):
    return nn.Linear(size, size), torch.ones(1, size)

class Named(nn.Module):
    def forward(self, x, scale=1.0):
        return {"y": x * scale}

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU()), (torch.randn(4, 8),)

def hostile():
    return Renamed(8, 8), [torch.randn(4, 8)]

def with_names():
    return Named(), torch.randn(4, 8), {"scale": 2.0}

def alone():
    return nn.Linear(2, 2)

def four():
    return 1, 2, 3, 4

def no_module():
    return print, (torch.ones(2),)

def no_inputs():
    return nn.Identity(), 3

def bad_names():
    return nn.Identity(), (), {1: 2}

def raising():
    raise RuntimeError("no [weights]")

def failing():
    return nn.Linear(2, 3), (torch.ones(4, 5),)
"""


@pytest.fixture
def profile(command_line, machine, monkeypatch, tmp_path):
    """Run the command where `factories.py` lies, on a machine that takes no time to measure."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(profile_file, "local_machine", lambda device: machine)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    yield lambda *arguments: command_line("profile", *arguments, "--device", "cpu")
    sys.modules.pop("factories", None)


def test_help_names_every_option_and_the_exit_codes(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = command_line("profile", "--help")
    assert printed.code == 0
    for option in ("--device", "--backward", "--steps", "--out", "--top", "--compile", "MODULE:FACTORY"):
        assert option in printed.out
    assert "Exit code: 0" in " ".join(printed.out.split())


def test_the_table_is_printed_and_the_files_are_written(profile, tmp_path):
    out = tmp_path / "new" / "folder"
    printed = profile("factories:make", "--backward", "--steps", "2", "--top", "3", "--out", str(out))
    assert printed.code == 0, printed.err
    assert "Sequential, forward and backward, on Made-up CPU" in printed.out
    assert printed.out.count("aten::") <= 3
    assert "A step takes " in printed.out
    assert sorted(file.name for file in out.iterdir()) == ["profile.json", "trace.json"]
    assert "https://ui.perfetto.dev" in printed.err
    found = Profile.model_validate_json((out / "profile.json").read_text())
    assert (found.steps, found.direction, found.module) == (2, "both", "Sequential")
    assert len(found.operators) > 3
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


def test_the_table_fits_a_terminal_of_80_columns_with_whole_names(profile, monkeypatch):
    wide = profile("factories:make", "--backward", "--steps", "1").out
    monkeypatch.setattr(output, "_width", 80)
    narrow = profile("factories:make", "--backward", "--steps", "1").out
    rows = narrow[: narrow.index("A step takes")].splitlines()
    assert max(map(len, rows)) <= 80
    names = {word for word in wide.split() if word.startswith("aten::")}
    assert names
    assert names & {row.split("  ")[0] for row in rows}, narrow


def test_inputs_may_be_a_list_or_one_tensor_and_have_names(profile):
    assert "Named, forward, on Made-up CPU" in profile("factories:with_names", "--steps", "1").out
    assert "<b>[red]Renamed, forward, on" in profile("factories:hostile", "--steps", "1").out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factories", "given 'factories'; give package.module:factory, as in models.small:make"),
        (":make", "given ':make'; give package.module:factory, as in models.small:make"),
        ("not_here:make", "not_here:make cannot be imported: ModuleNotFoundError: No module named 'not_here'"),
        ("broken:make", "broken:make cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_not"),
        ("factories:nope", "cannot be imported: AttributeError: module 'factories' has no attribute 'nope'"),
        ("factories:number", "factories:number raised TypeError: 'int' object is not callable"),
        ("factories:sized", "raised TypeError: sized() missing 1 required positional argument: 'size'"),
        ("factories:alone", "factories:alone returned Linear; it must return (module, inputs) or "),
        ("factories:four", "returned (int, int, int, int); it must return (module, inputs) or "),
        ("factories:no_module", "returned (builtin_function_or_method, tuple); it must return "),
        ("factories:no_inputs", "factories:no_inputs returned (Identity, int); it must return "),
        ("factories:bad_names", "factories:bad_names could not be profiled: TypeError: keywords must be strings"),
        ("factories:raising", "factories:raising raised RuntimeError: no [weights] ("),
        ("factories:failing", "factories:failing could not be profiled: RuntimeError: "),
    ],
)
def test_what_cannot_be_profiled_is_one_line(profile, target, message):
    printed = profile(target)
    assert (printed.code, printed.out) == (2, "")
    line = printed.err.splitlines()[-1]
    assert line.startswith("kernel-pytorch: ")
    assert message in line


def test_an_error_in_the_factory_names_its_place(profile, tmp_path):
    line = FACTORIES.splitlines().index('    raise RuntimeError("no [weights]")') + 1
    assert profile("factories:raising").err.rstrip().endswith(f"({tmp_path / 'factories.py'}:{line})")


def test_a_folder_that_cannot_be_written_stops_before_anything_runs(profile, tmp_path):
    (tmp_path / "taken").write_text("")
    printed = profile("factories:raising", "--out", str(tmp_path / "taken" / "out"))
    assert printed.code == 2
    assert "cannot write" in printed.err


def test_torch_compile_is_profiled_with_its_kernels(profile, tmp_path, monkeypatch):
    import torch
    from torch._inductor import config

    compile, announced = torch.compile, []

    def without_inductor(module):  # it would take seconds and a compiler
        compiled = compile(module, backend="aot_eager")
        return lambda *inputs: (announced.append(config.cpp.enable_kernel_profile), compiled(*inputs))[1]

    monkeypatch.setattr(torch, "compile", without_inductor)
    printed = profile("factories:make", "--compile", "--backward", "--steps", "1", "--out", str(tmp_path / "out"))
    assert printed.code == 0, printed.err
    assert "Sequential, forward and backward, torch.compile, on" in printed.out
    found = Profile.model_validate_json((tmp_path / "out" / "profile.json").read_text())
    assert found.compiled
    assert any("Torch-Compiled Region" in row.name for row in found.operators)
    assert all(announced), "TorchInductor names its kernels from the first call on, which compiles them"
