"""Kernels in CUDA C++: what the build of a library said about them, held against contracts and shown."""

from __future__ import annotations

import json

import pytest

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.records import RecordError
from kernel_pytorch.harness.static import cuda_code
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.cuda_code import KERNELS, LIBRARY, find_cuda, library_folder
from kernel_pytorch.harness.static.gate import violations
from kernel_pytorch.harness.static.inspection import inputs_key, inspect
from kernel_pytorch.harness.static.record import changed_kernels, known, load, record_file, summarize
from kernel_pytorch.harness.static.table import markdown
from kernel_pytorch.harness.technique import Technique


def compiled(template, **facts):
    about = {"kernel": "k", "language": "CUDA", "arch": "sm_90", "warps": 4, "case": "k.cu", "bench": True}
    return Compiled(**{**about, "constants": {"template": template}, "arguments": {}, "registers": 9, **facts})


def test_the_contract_of_an_instantiation_goes_before_that_of_its_kernel():
    contracts = {"k": KernelContract(max_registers=8), "k<*, 1>": KernelContract(max_registers=20)}
    technique = Technique("t", "t", "", [], "t", contracts=contracts)
    (broken,) = violations(technique, [compiled("float, 4"), compiled("float, 1")])
    assert (broken.rule, broken.configuration) == ("registers", "4 warps, template=float, 4; k.cu")
    nobody = violations(technique, [compiled("float, 4", registers=8)])
    assert [(broken.kernel, broken.rule) for broken in nobody] == [("k<*, 1>", "launches")]
    assert violations(technique, [compiled("float, 4", registers=8)], complete=False) == []


def test_a_kernel_declares_less_shared_memory_than_a_launch_can_ask_for():
    technique = Technique("t", "t", "", [], "t")
    assert violations(technique, [compiled("float", shared_bytes=48 * 1024)]) == []
    (broken,) = violations(technique, [compiled("float", shared_bytes=48 * 1024 + 4)])
    assert (broken.rule, broken.allowed) == ("shared memory in bytes", "49152")
    assert violations(technique, [compiled("float", shared_bytes=99 * 1024, language="Triton")]) == []


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A technique whose library holds a kernel that spills, for two architectures; it is written as it is given."""
    monkeypatch.setattr(cuda_code, "package_place", lambda technique: tmp_path)

    def write(archs=("sm_80", "sm_90a", "sm_100", "sm_120"), nvcc="nvcc 13.0", source="a", **facts):
        record = {"nvcc": nvcc, "archs": archs, "operators": {"gates": {"cpu": "c", "cuda": source}}}
        (tmp_path / LIBRARY).write_text(json.dumps(record))
        about = {"operator": "gates", "name": "gates::k", "template": "float, 4"}
        needs = {"registers": 40, "spill_bytes": 8, "shared_bytes": 1024} | facts
        kernels = [{**about, "arch": arch, **needs} for arch in archs]
        (tmp_path / KERNELS).write_text(json.dumps({"functions": {}, "kernels": kernels}))
        return Technique("t", "t", "", [], "t")

    return write


def inspected(technique, archs=("sm_80", "sm_90", "sm_100", "sm_120")):
    return summarize(technique, inspect([technique], archs))


def test_what_ptxas_said_is_held_to_contracts(library):
    technique = library()
    record = inspected(technique)
    assert {(b.kernel, b.arch, b.rule, b.found) for b in record.broken} == {
        ("gates::k", arch, "spilled bytes", "8") for arch in ("sm_80", "sm_90", "sm_100", "sm_120")
    }
    allowed = Technique("t", "t", "", [], "t", contracts={"gates::k<float, ?>": KernelContract(8, max_registers=40)})
    assert inspected(allowed).broken == ()
    library(registers=41)
    assert {b.rule for b in inspected(allowed).broken} == {"registers"}
    library(shared_bytes=48 * 1024 + 4)
    assert {b.rule for b in inspected(allowed).broken} == {"shared memory in bytes"}
    library(spill_bytes=0)
    unknown = Technique("t", "t", "", [], "t", contracts={"absent": KernelContract()})
    assert [b.rule for b in inspected(unknown).broken] == ["launches"]


def test_what_the_library_lacks_is_named(library, tmp_path):
    record = inspected(library(archs=("sm_90a",)))
    why = "its library is compiled for sm_90a; KERNEL_PYTORCH_CUDA_ARCHS names others"
    assert record.not_compiled == (why,)
    assert {c.arch for c in record.compiled} == {"sm_90"}
    assert record.key == ""
    assert inspected(library(archs=(), nvcc=None)).not_compiled == ("its library was compiled without nvcc",)
    (tmp_path / KERNELS).unlink()
    with pytest.raises(RecordError, match="install the package of this library again"):
        find_cuda(tmp_path, "sm_90")
    (tmp_path / LIBRARY).unlink()
    assert library_folder(Technique("t", "t", "", [], "t")) is None


def test_a_record_of_other_sources_is_not_the_present_one(library, tmp_path):
    technique = library(spill_bytes=0)
    record = inspected(technique)
    record.save(record_file(tmp_path, "t"))
    assert known(technique, tmp_path) == load(record_file(tmp_path, "t")) == record
    library(archs=("sm_90a",), spill_bytes=0)
    assert known(technique, tmp_path) == record, "another library of the same sources"
    before = inputs_key(technique)
    library(source="b", spill_bytes=0)
    assert inputs_key(technique) != before
    assert known(technique, tmp_path) is None
    assert changed_kernels(record, inspected(technique)) == ["gates/cuda"]


def test_the_table_says_which_compiler_and_what_it_does_not_know(library):
    text = markdown(inspected(library()))
    assert "Compiled by nvcc 13.0 for the library: registers" in text
    assert "Triton" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `gates::k` | sm_90 |")]
    assert row == "| `gates::k` | sm_90 | 1 | 40 | 8 | 1 KiB | - | - | - | - | - | - | - |"
