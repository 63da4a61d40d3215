"""Device times stand for changed sources where the kernels compile to the same code, and nowhere else."""

from __future__ import annotations

import subprocess

import pytest

from kernel_pytorch.harness import carrying
from kernel_pytorch.harness.carrying import CarryError, carry
from kernel_pytorch.harness.report import provenance
from kernel_pytorch.harness.results import Results
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.instructions import code_digest
from kernel_pytorch.harness.static.record import StaticRecord

LABEL = "gate/triton"
PTX = """
.version 8.7
.target sm_90a
.visible .entry kernel(.param .u64 x) .maxntid 128
{
\t.loc\t1 20 30
$L__func_begin0:
\tld.global.b32 %r1, [%rd1];  // x.py:20:30
$L__tmp1:
\t@%p1 add.f32 %f1, %f1, %f2;
\tret;
}
\t.file\t1 "/a/x.py"
\t.section\t.debug_abbrev
\t{
.b8 1
\t}
"""


def compiled(code="one", arch="sm_90", **changed):
    about = {"kernel": "k", "arch": arch, "constants": {"BLOCK": 8}, "arguments": {"x": "*fp32"}, "warps": 4}
    return Compiled(**(about | {"case": "gate, a", "bench": True, "code": code} | changed))


def record(kernels, *found, triton="3.7.1"):
    return StaticRecord(
        technique="toy", sources="now", kernels={LABEL: kernels}, triton=triton, nvcc="", broken=(), not_compiled=(),
        compiled=found,
    )  # fmt: skip


@pytest.fixture
def results(machine):
    environment = machine.environment.model_copy(update={"device_type": "cuda", "compute_capability": "9.0"})
    return Results(
        technique="toy", created="2026-01-01T00:00:00+00:00", quick=False, sources={LABEL: "path"}, measurements=(),
        kernels={LABEL: "before"}, machine=machine.model_copy(update={"environment": environment}),
    )  # fmt: skip


@pytest.fixture
def here(toy, tmp_path, monkeypatch):
    """A checkout of results; the function commits a record of compiled kernels, and returns the commit."""
    monkeypatch.setattr(carrying, "kernel_digest", lambda technique: "now")
    monkeypatch.setattr(carrying, "technique_digests", lambda *arguments: {LABEL: "after"})

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")

    def commit(of):
        of.save(tmp_path / "results")
        git("add", "-A")
        git("commit", "-qm", "a record")
        return git("rev-parse", "HEAD")

    commit.folder, commit.toy = tmp_path / "results", toy.technique
    return commit


def test_the_same_code_is_carried_and_says_so(results, here):
    measured = here(record("before", compiled(), compiled("other", arch="sm_80")))
    here(record("between", compiled("two")))
    here(record("after", compiled(case="gate, b"), compiled("changed", arch="sm_80")))
    found, lines = carry(results, here.toy, here.folder)
    assert found.kernels == {LABEL: "after"}
    assert (found.carried[LABEL].kernels, found.carried[LABEL].commit) == ("before", measured)
    assert lines == [f"{LABEL}: carried: the PTX of all 1 kernels of the bench grids for sm_90, by Triton 3.7.1"]
    assert f"{LABEL}: carried from commit {measured[:12]}" in provenance(found)[0]
    assert carry(found, here.toy, here.folder)[1] == []


def test_what_was_carried_is_compared_with_what_was_measured(results, here, monkeypatch):
    measured = here(record("before", compiled()))
    here(record("after", compiled()))
    once = carry(results, here.toy, here.folder)[0]
    here(record("later", compiled()))
    monkeypatch.setattr(carrying, "technique_digests", lambda *arguments: {LABEL: "later"})
    twice = carry(once, here.toy, here.folder)[0]
    assert twice.kernels == {LABEL: "later"}
    assert (twice.carried[LABEL].kernels, twice.carried[LABEL].commit) == ("before", measured)


@pytest.fixture
def compiled_gate(results, here, monkeypatch):
    """Results of a level "cuda" that was compiled from the unit `gate`; the function makes a record of it."""
    monkeypatch.setattr(carrying, "technique_digests", lambda *arguments: {"gate/cuda": "after"})
    monkeypatch.setattr(carrying, "_unit_of", lambda technique, label: (technique, label.partition("/")[0]))

    def unit(digest, *found, nvcc="13.0"):
        facts = {"technique": "toy", "sources": "now", "triton": "", "broken": (), "not_compiled": ()}
        return StaticRecord(kernels={"gate/cuda": digest}, nvcc=nvcc, compiled=found, **facts)

    unit.results = results.model_copy(update={"kernels": {"gate/cuda": "before"}})
    return unit


def in_cpp(code="one", case="gate/cuda.cu", **changed):
    return compiled(code, language="CUDA", case=case, **changed)


def test_the_same_code_of_a_unit_in_cpp_is_carried(compiled_gate, here):
    here(compiled_gate("before", in_cpp(), in_cpp("two", case="other/cuda.cu")))
    here(compiled_gate("after", in_cpp(), in_cpp("three", case="other/cuda.cu")))
    found, lines = carry(compiled_gate.results, here.toy, here.folder)
    assert found.kernels == {"gate/cuda": "after"}
    assert lines == ["gate/cuda: carried: the PTX of all 1 kernels of gate for sm_90, by Nvcc 13.0"]


@pytest.mark.parametrize(
    ("codes", "compiler", "why"),
    [
        (("one", "two"), "13.0", "2 of 2 kernels compile to something else on sm_90"),
        (("one", "one"), "13.1", "Nvcc 13.0 compiled what was measured, 13.1 what is here"),
        (("", ""), "13.0", "no kernel was compiled for sm_90"),  # of records without digests nothing is known
    ],
)
def test_other_code_of_a_unit_in_cpp_is_not_carried(codes, compiler, why, compiled_gate, here):
    here(compiled_gate("before", in_cpp(codes[0])))
    here(compiled_gate("after", in_cpp(codes[1]), nvcc=compiler))
    found, lines = carry(compiled_gate.results, here.toy, here.folder)
    assert found == compiled_gate.results
    assert why in lines[0]


def test_results_without_digests_of_kernels_are_refused(results, here):
    here(record("after", compiled()))
    with pytest.raises(CarryError, match="older than the digests of kernels"):
        carry(results.model_copy(update={"kernels": {}}), here.toy, here.folder)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (record("after", compiled("two")), "2 of 2 kernels compile to something else on sm_90"),
        (record("after", compiled(constants={"BLOCK": 16})), "2 of 2 kernels compile to something else"),
        (record("after", compiled(), compiled("two", kernel="more")), "1 of 2 kernels compile to something else"),
        (record("after", compiled(), triton="3.8.0"), "Triton 3.7.1 compiled what was measured, 3.8.0 what is here"),
        (record("after", compiled(arch="sm_80")), "no kernel was compiled for sm_90"),
        (record("after", compiled(bench=False)), "no kernel was compiled for sm_90"),
    ],
)
def test_anything_else_is_not_carried(now, why, results, here):
    here(record("before", compiled()))
    here(now)
    found, lines = carry(results, here.toy, here.folder)
    assert found == results
    assert len(lines) == 1
    assert why in lines[0]


def test_what_no_commit_knows_is_not_carried(results, here):
    here(record("another", compiled()))
    here(record("after", compiled()))
    assert "no committed record of compiled kernels is of the sources" in carry(results, here.toy, here.folder)[1][0]


def test_a_record_of_other_sources_is_refused(results, here, monkeypatch):
    here(record("before", compiled()))
    monkeypatch.setattr(carrying, "kernel_digest", lambda technique: "changed since")
    with pytest.raises(CarryError, match="is of other sources; `kernel-pytorch static toy --json"):
        carry(results, here.toy, here.folder)


def test_times_of_a_cpu_are_not_carried(results, here):
    environment = results.machine.environment.model_copy(update={"device_type": "cpu", "compute_capability": None})
    of_cpu = results.model_copy(update={"machine": results.machine.model_copy(update={"environment": environment})})
    with pytest.raises(CarryError, match="times of a CPU are not carried"):
        carry(of_cpu, here.toy, here.folder)


@pytest.mark.parametrize(
    "same", [("1 20 30", "1 77 8"), ("// x.py:20:30", "// x.py:77:8"), ('"/a/x.py"', '"/b/y.py"'), (".b8 1", ".b8 2")]
)
def test_where_code_came_from_is_no_part_of_it(same):
    assert code_digest(PTX.replace(*same)) == code_digest(PTX)


@pytest.mark.parametrize("other", [("@%p1 ", "@%p2 "), ("add.f32", "mul.f32"), ("128", "256"), ("sm_90a", "sm_90")])
def test_everything_else_is(other):
    assert code_digest(PTX.replace(*other)) != code_digest(PTX)
