"""What a CUDA source and its PTX hold, what ptxas says about them, and which contract speaks of which instantiation."""

from __future__ import annotations

import pytest

from kernel_pytorch.harness.contracts import CudaUnit, KernelContract
from kernel_pytorch.harness.sources import digest, kernel_files
from kernel_pytorch.harness.static import Compiled, Inspection, summarize, violations
from kernel_pytorch.harness.static.compiled import Traffic
from kernel_pytorch.harness.static.entries import demangle, entries, parse_signature
from kernel_pytorch.harness.static.inspection import Findings
from kernel_pytorch.harness.static.instructions import count_instructions
from kernel_pytorch.harness.static.kernel_sources import UnitsError, cuda_units, kernel_digest, units_digest
from kernel_pytorch.harness.static.resources import AssemblerLog, Resources
from kernel_pytorch.harness.static.table import markdown
from kernel_pytorch.harness.technique import Implementation, Level, Technique

PTX = """
.version 9.0
.target sm_80
.extern .shared .align 16 .b8 tile[];
.func  (.param .b32 func_retval0) _Z4deepf(
\t.param .b32 _Z4deepf_param_0
)
{
\tadd.f64 %fd1, %fd2, %fd3;
\tst.param.f32 [func_retval0+0], %f1;
}
.func  (.param .b32 func_retval0) _Z5otherf(
\t.param .b32 _Z5otherf_param_0
)
{
\tld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
\tcall.uni (retval0),
\t_Z4deepf,
\t(
\tparam0
\t);
}
.visible .entry _ZN1a12scale_kernelIfLi4EEEvPKT_PS1_fl(
\t.param .u64 .ptr .align 1 p0
)
.maxntid 16, 16, 1
.minnctapersm 2
{
\t.reg .f64 \t%fd<7>;
$L__BB0_1:
\tld.v2.u32 {%r1, %r2}, [%rd1];
\tcall.uni (retval0),
\t_Z5otherf,
\t(
\tparam0
\t);
}
.weak .entry plain(
\t.param .u64 p0
)
{
\tmov.u32 %r1, tile;
\tst.shared.v4.b32 [%r1], {%r1, %r2, %r3, %r4};
\tst.global.u16 [%rd1], %rs1;
}
"""


def test_a_ptx_file_is_taken_apart_and_what_a_kernel_calls_is_its_own():
    scale, plain = entries(PTX)
    assert (scale.name, scale.template, scale.warps, scale.dynamic_shared) == ("scale_kernel", "float, 4", 8, False)
    assert scale.types == {"template float": "fp32", "0": "*fp32", "1": "*fp32"}
    assert scale.functions == ("_Z5otherf", "_Z4deepf")
    found = count_instructions(scale.code)
    assert (found.loads, found.f64) == (Traffic(accesses={64: 1, 128: 1}), 1)
    assert (plain.name, plain.template, plain.warps, plain.dynamic_shared) == ("plain", None, None, True)
    assert count_instructions(plain.code).stores == Traffic(accesses={16: 1})
    assert entries(".version 9.0") == []


@pytest.mark.parametrize(
    ("symbol", "name", "template", "parameters"),
    [
        ("_ZN2kp1kI13__nv_bfloat16Li8EEEvPKT_PS2_fl", "k", "__nv_bfloat16, 8",
         ["__nv_bfloat16 const*", "__nv_bfloat16*", "float", "long"]),
        ("_ZN36_GLOBAL__N__f487fc9e_4_b_cu_31b856bd4anonILNS_4ModeE1ELb1EfEEvPfi", "anon", "(Mode)1, true, float",
         ["float*", "int"]),
        ("_ZN36_GLOBAL__N__f487fc9e_4_b_cu_31b856bd7structyENS_1PE", "structy", None, ["P"]),
        ("_ZN2kp1kINS_4PairIfdEEEEvT_", "k", "kp::Pair<float, double>", ["kp::Pair<float, double>"]),
        ("f", "f", None, []),
    ],
)  # fmt: skip
def test_names_of_kernels(symbol, name, template, parameters):
    assert parse_signature(demangle(symbol)) == (name, template, parameters)


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("ld.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", 128),
        ("ld.volatile.u8 %rs1, [%rd1];", 8),
        ("ld.global.nc.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", 128),
        ("ld.global.nc.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];", 256),
        ("{\n.reg .pred p;\nsetp.ne.b32 p, %r1, 0;\n@p cp.async.cg.shared.global [%r1],\n[%rd1],\n16;\n}", 128),
        ("$L__BB0_2:\n.loc 1 20 3\n// begin inline asm\nld.global.f32\n%f1, [%rd1];", 32),
    ],
)
def test_width_of_a_load_as_nvcc_writes_it(line, bits):
    assert count_instructions(line).loads == Traffic(accesses={bits: 1})


@pytest.mark.parametrize(
    "line", ["ld.local.f32 %f1, [%rd1];", "ld.shared::cluster.u32 %r1, [%r2];", "ld.const.f32 %f1, [%rd1];",
             "st.async.shared::cluster.b32 [%r1], %r2, [%r3];",
             "mapa.u64 %rd54, %rd53, %r206; ld.f32 %f1, [%rd54+4];",
             "cvta.shared.u64 %rd1, %rd2; add.s64 %rd3, %rd1, %rd9; st.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};"]
)  # fmt: skip
def test_what_is_not_in_global_memory(line):
    found = count_instructions(line)
    assert found.loads == found.stores == Traffic()


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    256 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 300 bytes cumulative stack size, 4096 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 12.050 ms
ptxas info    : Function properties for _Z4slowPKfi
    0 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 360 bytes cmem[0]
"""


def test_what_ptxas_says():
    log = AssemblerLog(LOG)
    assert log.resources("_Z1kPf", ("_Z4slowPKfi",)) == Resources(registers=40, stack_bytes=300, spill_bytes=24)
    assert log.shared_bytes("_Z1kPf") == 4096
    assert (log.resources("plain"), log.shared_bytes("plain")) == (Resources(10, 0, 0), 0)
    with pytest.raises(ValueError, match="ptxas -v said nothing about absent; it spoke of _Z1kPf, plain"):
        log.resources("absent")


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
def unit(tmp_path):
    (tmp_path / "include" / "deep").mkdir(parents=True)
    (tmp_path / "k.cu").write_text('asm("// no comment"); /* a\ncomment */ int x = 1\'000; // another\n')
    (tmp_path / "include" / "deep" / "a.cuh").write_text("int y;\n")
    return CudaUnit(tmp_path / "k.cu", (tmp_path / "include",), ("-O3", "-isystem", str(tmp_path)))


def test_the_digest_changes_with_all_that_is_compiled_and_not_with_comments(unit, tmp_path):
    def change(path, old, new):
        text = (tmp_path / path).read_text()
        assert old in text
        (tmp_path / path).write_text(text.replace(old, new))
        return units_digest([unit])

    before = units_digest([unit])
    assert change("k.cu", "another", "and another") == before
    assert change("k.cu", "a\ncomment", "a\n\nlonger comment") == before
    assert units_digest([CudaUnit(unit.source, unit.include, ("-O3", "-isystem", "/elsewhere"))]) == before
    assert units_digest([CudaUnit(unit.source, unit.include, ("-O2", "-isystem", str(tmp_path)))]) != before
    asm = change("k.cu", "// no comment", "// no  comment")
    assert asm != before, "text is no comment"
    header = change("include/deep/a.cuh", "int y", "long y")
    assert header != asm
    (tmp_path / "beside.h").write_text("int z;\n")
    assert units_digest([unit]) != header
    assert units_digest([]) == ""


def test_the_digest_of_a_technique_holds_both_languages(unit, monkeypatch):
    triton = Implementation("triton", Level.TRITON, "kernel_pytorch.harness.sources:digest")
    operation = type("Operation", (), {"implementations": [triton]})
    alone = kernel_digest(Technique("t", "t", "", [operation], "t"))
    assert alone == digest(sorted(kernel_files(triton)))
    monkeypatch.setattr("kernel_pytorch.harness.sources.units", lambda: [unit], raising=False)
    both = kernel_digest(Technique("t", "t", "", [operation], "t", cuda_units="kernel_pytorch.harness.sources:units"))
    of_cuda = kernel_digest(Technique("t", "t", "", [], "t", cuda_units="kernel_pytorch.harness.sources:units"))
    assert len({alone, both, of_cuda, ""}) == 4
    assert kernel_digest(Technique("t", "t", "", [], "t")) == ""


def test_a_unit_that_is_not_there_is_named(unit, monkeypatch, tmp_path):
    technique = Technique("t", "t", "", [], "t", cuda_units="kernel_pytorch.harness.sources:units")
    with pytest.raises(UnitsError, match=r"t: cuda_units='kernel_pytorch.harness.sources:units' cannot be loaded"):
        cuda_units(technique)
    wrong = CudaUnit(unit.source, (tmp_path / "nowhere",))
    monkeypatch.setattr("kernel_pytorch.harness.sources.units", lambda: [wrong], raising=False)
    with pytest.raises(UnitsError, match=r"the CUDA unit k\.cu names .*nowhere, which is not there"):
        cuda_units(technique)


def test_the_table_says_which_compiler_and_what_it_does_not_know():
    technique = Technique("t", "t", "", [], "t")
    kernels = (compiled("float", warps=None), compiled("double", dynamic_shared=True, shared_bytes=1024))
    findings = Findings(compiled=kernels, nvcc="13.0.88", instantiations=2)
    text = markdown(summarize([Inspection(technique, "sm_90", findings, cached=False)]))
    assert "Compiled by nvcc 13.0.88: every instantiation" in text
    assert "Triton" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `k`")]
    assert "| 1 KiB + dynamic |" in row
    assert row.endswith("| unknown |")
