"""What identifies a measured implementation: facts about the code that ran."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness import provenance
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.implementation import Implementation, Level
from kernel_pytorch.harness.provenance import fingerprint, identify
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.static.cuda_code import KERNELS, LIBRARY
from kernel_pytorch.harness.static.record import load, record_file

RESULTS = Path(__file__).parents[2] / "results"


def gpu(environment, capability="9.0"):
    return environment.model_copy(update={"device_type": "cuda", "compute_capability": capability})


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"sources": {"norm": "c"}}, True),
        ({"sources": {}}, True),
        ({"kernels": {"a": "other", "b": "2"}}, True),
        ({"kernels": {"a": "1"}}, False),  # another case is not compared
        ({"kernels": {"a": "1", "c": "3"}}, False),
        ({"kernels": {"a": "other"}, "made_by": "nvcc 14.0"}, False),  # what another compiler makes says nothing
    ],
)
def test_identities_are_compared_where_both_sides_know(change, differs):
    one = Identity(made_by="nvcc 13.0", sources={"norm": "b"}, kernels={"a": "1", "b": "2"})
    other = one.model_copy(update=change)
    assert one.differs(other) == other.differs(one) == differs


def test_kernels_of_all_techniques_are_compiled_ahead_where_no_record_is_of_them(machine, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        provenance, "inspect", lambda techniques, archs: asked.append(([t.name for t in techniques], archs))
    )
    techniques = [discover().get(name) for name in ("rmsnorm", "qkv-fusion")]
    monkeypatch.setattr(
        provenance, "known", lambda technique, results: None if technique is techniques[1] else "a record"
    )
    provenance.compile_ahead(techniques, machine.environment, tmp_path)
    assert not asked, "a CPU"
    provenance.compile_ahead(techniques, gpu(machine.environment), tmp_path)
    assert asked == [(["qkv-fusion"], ["sm_90"])]


def test_a_level_in_python_is_its_file_and_the_torch_that_runs_it(toy, machine, tmp_path, monkeypatch):
    before = identify(toy.technique, machine.environment)
    assert list(before) == ["gate/reference", "gate/native", "gate/compile"]
    assert before["gate/native"].made_by == f"torch {torch.__version__.partition('+')[0]}"
    text = Path(toy.__file__).read_text()
    (tmp_path / "toy.py").write_text(text.replace('"""A technique', '"""Another'))
    spec = types.SimpleNamespace(origin=str(tmp_path / "toy.py"))
    monkeypatch.setattr(provenance, "find_spec", lambda name: spec if name == "toy" else None)
    assert identify(toy.technique, machine.environment) == before, "a docstring is no code"
    (tmp_path / "toy.py").write_text(text.replace("* factor", "+ factor"))
    after = identify(toy.technique, machine.environment)
    assert after["gate/native"].differs(before["gate/native"])
    assert fingerprint(after) != fingerprint(before)


def test_a_level_without_a_file_of_its_own_is_the_files_that_it_is_made_of(tmp_path, monkeypatch):
    package = tmp_path / "derived_levels"
    package.mkdir()
    for name in ("__init__", "reference", "native"):
        (package / f"{name}.py").write_text(f"{name} = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    derived = Implementation("compile", Level.COMPILE, "derived_levels.compile:gate")
    found = provenance._written(derived)
    assert set(found.sources) == {"reference", "native"}
    (package / "native.py").write_text("native = 2\n")
    assert provenance._written(derived).differs(found)
    assert provenance._written(Implementation("native", Level.NATIVE, "nobody_has_it:gate")) is None
    monkeypatch.setitem(sys.modules, "made_at_run_time", types.ModuleType("made_at_run_time"))
    assert provenance._written(Implementation("native", Level.NATIVE, "made_at_run_time:gate")) is None


@pytest.fixture
def compiled(toy, tmp_path, monkeypatch):
    """The toy with an operator at level "cuda", of a library whose records the test writes."""
    library = torch.library.Library("toy_cuda", "FRAGMENT")
    library.define("gate(Tensor x, Tensor weight, float factor) -> Tensor")
    library.impl("gate", lambda x, weight, factor: torch.empty_like(x), "CompositeExplicitAutograd")
    monkeypatch.setattr(toy, "cuda", lambda *arguments: torch.ops.toy_cuda.gate(*arguments))
    monkeypatch.setattr(toy, "unavailable", lambda level, device, dtype: None)
    package = types.ModuleType("kernel_pytorch.planted")
    package.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "kernel_pytorch.planted", package)

    def write(cuda="b", registers=32, arch="sm_90a"):
        operators = {"gates": {"cpu": "a", "cuda": cuda}, "other": {"cpu": "c", "cuda": "d"}}
        record = {"nvcc": "nvcc 13.0", "compiler": "c++ 12", "operators": operators}
        (tmp_path / LIBRARY).write_text(json.dumps(record))
        kernel = {"operator": "gates", "name": "k", "template": "", "arch": arch}
        kernels = [{**kernel, "registers": registers, "spill_bytes": 0, "shared_bytes": 0}]
        (tmp_path / KERNELS).write_text(json.dumps({"functions": {"gate": "gates"}, "kernels": kernels}))

    yield write
    library._destroy()


def test_a_level_in_cpp_is_the_sources_of_its_operators_and_what_ptxas_said(toy, machine, compiled):
    def found(environment, **facts):
        compiled(**facts)
        return identify(toy.technique, environment)["gate/cuda"]

    before = found(gpu(machine.environment))
    assert (before.made_by, before.sources, list(before.kernels)) == ("nvcc 13.0", {"gates": "b"}, ["gates"])
    assert found(gpu(machine.environment), cuda="changed").differs(before)
    assert found(gpu(machine.environment), registers=40).differs(before)
    elsewhere = found(gpu(machine.environment), arch="sm_80")  # this library has no code for the device
    assert (elsewhere.kernels, elsewhere.differs(before)) == ({}, False)
    on_cpu = found(machine.environment)
    assert (on_cpu.made_by, on_cpu.sources, on_cpu.kernels) == ("c++ 12", {"gates": "a"}, {})


def test_triton_kernels_are_what_the_record_of_compiled_kernels_says():
    pytest.importorskip("triton")
    technique = discover().get("rmsnorm")
    record = load(record_file(RESULTS, "rmsnorm"))
    environment = gpu(describe_environment(torch.device("cpu")))
    if (found := identify(technique, environment, RESULTS, compiling=False)) and "rms_norm/triton" not in found:
        pytest.skip("the record is of other sources or compilers: `nox -s static` compares it")
    assert found["rms_norm/triton"].kernels == record.kernels["sm_90"]["rms_norm/triton"]
    assert found["rms_norm/triton"].made_by == f"Triton {record.triton}"
    assert "rms_norm/triton" not in identify(technique, gpu(environment, "7.5"), RESULTS, compiling=False)


def test_every_level_of_an_installed_technique_is_identified(machine):
    for technique in discover().techniques.values():
        found = identify(technique, machine.environment)
        for operation in technique.operations:
            for i in operation.implementations:
                if i.level in (Level.TRITON, Level.PEER):
                    continue
                if technique.ladder().unavailable(i.level.value, torch.device("cpu"), torch.float32) is None:
                    assert f"{operation.name}/{i.name}" in found


def test_the_operators_of_an_installed_level_in_cpp_are_found(machine):
    technique = discover().get("rmsnorm")
    if (reason := technique.ladder().unavailable("cuda", torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(reason)
    on_cpu, on_gpu = (
        identify(technique, e, compiling=False)["add_rms_norm/cuda"]
        for e in (machine.environment, gpu(machine.environment))
    )
    assert set(on_cpu.sources) == set(on_gpu.sources) == {"rms_norm"}
    assert on_cpu.sources != on_gpu.sources


def test_what_peers_are_made_of_is_not_ours_to_say(toy, machine):
    peer = Implementation("peer:quick", Level.PEER, "toy:native")
    gate = dataclasses.replace(toy.gate, levels=[*toy.gate.levels, peer])
    technique = dataclasses.replace(toy.technique, operations=[gate])
    assert "gate/peer:quick" not in identify(technique, machine.environment)
