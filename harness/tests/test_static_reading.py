"""Reading PTX and tool output, and how many blocks fit on a multiprocessor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.static import ARCHITECTURES, Compiled, violations
from kernel_pytorch.harness.static.compiled import Traffic
from kernel_pytorch.harness.static.instructions import code_digest, count_instructions
from kernel_pytorch.harness.static.limits import resident_blocks
from kernel_pytorch.harness.technique import Technique


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 128),
        ("ld.global.nc.L1::no_allocate.v2.u64 {%rd1, %rd2}, [%rd3];", 128),
        ("ld.global.v8.f32 {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, [%rd3];", 256),
        ("@!%p1 ld.volatile.global.b16 %rs1, [%rd1];", 16),
        ("ld.relaxed.gpu.global.L1::evict_first.v2.b32 {%r1, %r2}, [%rd1];", 64),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 128),
        ("cp.async.ca.shared.global.L2::128B [%r1], [%rd1], 8;", 64),
        ("{\n.reg .pred p;\nsetp.ne.b32 p, %r1, 0;\n@p cp.async.cg.shared.global [%r1],\n[%rd1],\n16;\n}", 128),
        ("$L__BB0_2:\n.loc 1 20 3\n// begin inline asm\nld.global.f32\n%f1, [%rd1];", 32),
        ("ld.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", 128),
    ],
)
def test_width_of_a_load(line, bits):
    assert count_instructions(line)["loads"] == Traffic(accesses={bits: 1})


@pytest.mark.parametrize(
    "line",
    [
        "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];",
        "ld.param.b64 %rd1, [kernel_param_0];",
        "// ld.global.b32 %r1, [%rd1];",
        ".param .u64 .ptr .global .align 1 kernel_param_0,",
        "prefetch.global.L2 [%rd1];",
        "ld.local.f32 %f1, [%rd1];",
        "ld.shared::cluster.u32 %r1, [%r2];",
        "ld.const.f32 %f1, [%rd1];",
    ],
)
def test_no_load(line):
    assert count_instructions(line)["loads"] == Traffic()


def test_stores_tf32_float64_and_tensor_cores():
    found = count_instructions(
        """
        .reg .f64 %fd<3>;
        { st.global.v2.b32 [%rd1], {%r1, %r2}; }
        ld.param.f64 %fd1, [kernel_param_2];
        cvt.rn.f32.f64 %f1, %fd1;
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f1};
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, %p1, 1, 1, 0, 0;
        wgmma.wait_group.sync.aligned 0;
        @%p1 tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r3, %p1;
        """
    )
    assert found["stores"] == Traffic(accesses={64: 1})
    assert (found["tf32"], found["f64"]) == (2, 1)
    assert found["matrix"] == {"mma": 1, "wgmma": 1, "tcgen05": 1}


def test_the_copy_engine():
    found = count_instructions(
        """
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r4];
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r2, %r3}], [%r1];
        cp.async.bulk.commit_group;
        ld.global.b32 %r1, [%rd1];
        """
    )
    assert (found["loads"].bulk, found["stores"].bulk) == (2, 2)
    assert found["loads"].share(128) == 1.0


def test_share_is_of_bytes_not_of_instructions():
    traffic = Traffic(accesses={128: 3, 32: 3})
    assert traffic.widest == 128
    assert traffic.share(128) == pytest.approx(0.8)
    assert Traffic().share(128) == 1.0


def test_what_ptxas_says_a_kernel_needs():
    needs = pytest.importorskip("kernel_pytorch.harness.static.triton_code").NEEDS
    said = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 8 bytes cumulative stack size
"""
    found = needs.search(said)
    assert found is not None
    assert found.groups() == ("8", "4", "12", "72")


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks"),
    [
        ("sm_90", 8, 32, 0, 8),  # all 64 warps
        ("sm_90", 8, 80, 0, 3),  # 2560 registers a warp, 24 warps
        ("sm_90", 1, 16, 0, 32),  # the number of blocks
        ("sm_90", 4, 32, 100 * 1024, 2),  # shared memory
        ("sm_90", 4, 32, 227 * 1024, 1),
        ("sm_90", 4, 32, 228 * 1024, 0),
        ("sm_120", 8, 32, 0, 6),  # 48 warps
        ("sm_120", 4, 32, 99 * 1024, 1),
    ],
)
def test_resident_blocks(arch, warps, registers, shared, blocks):
    found = resident_blocks(ARCHITECTURES[arch], warps=warps, registers=registers, shared_bytes=shared)
    assert found == blocks


def compiled(**facts):
    about = {"kernel": "k", "arch": "sm_90", "constants": {"BLOCK": 64}, "warps": 4, "case": "here", "bench": True}
    return Compiled(**{**about, "arguments": {"x": "*fp32"}, **facts})


def rules(contract, *kernels):
    technique = Technique("t", "t", "", [], "t", contracts={} if contract is None else {"k": contract})
    return [violation.rule for violation in violations(technique, kernels)]


def test_what_a_kernel_without_a_contract_promises():
    assert rules(None, compiled(loads=Traffic(accesses={16: 9}), registers=255)) == []
    assert rules(None, compiled(spill_bytes=4), compiled(tf32=1), compiled(f64=1)) == [
        "spilled bytes",
        "tf32 instructions",
        "float64 instructions",
    ]


def test_float64_is_allowed_where_an_argument_is_float64():
    assert rules(None, compiled(f64=9, arguments={"x": "*fp64"})) == []


def test_widths_and_tensor_cores_are_promised_at_the_bench_cases():
    contract = KernelContract(min_load_bits=128, matrix_instructions={"sm_90": "wgmma"})
    narrow = {"loads": Traffic(accesses={16: 9}), "arguments": {"x": "*bf16"}}
    assert rules(contract, compiled(**narrow)) == ["width of loads", "tensor-core instructions"]
    assert rules(contract, compiled(**narrow, bench=False)) == []
    assert rules(contract, compiled(loads=Traffic(accesses={128: 1}))) == [], "float32 is not for the tensor cores"
    assert rules(contract, compiled(arch="sm_80", arguments={"x": "*bf16"})) == [], "sm_80 promised nothing"


def test_a_contract_can_be_of_some_constants():
    plain, few = KernelContract(max_registers=9), KernelContract(max_registers=20)
    technique = Technique("t", "t", "", [], "t", contracts={"k": plain, "k<* ROWS=16 *>": few})
    kernels = [
        compiled(registers=15, constants={"HALF": True, "ROWS": rows, "COLUMNS": columns})
        for rows, columns in ((16, 160), (160, 16), (1, 16))
    ]
    assert [v.configuration.count("ROWS=160") for v in violations(technique, kernels)] == [1, 0]
    unused = violations(technique, kernels[1:])[-1]
    assert (unused.kernel, unused.rule) == ("k<* ROWS=16 *>", "launches")


def test_a_bound_can_be_raised():
    contract = KernelContract(max_spill_bytes=8, allow_tf32=True, max_registers=200)
    assert rules(contract, compiled(spill_bytes=8, tf32=3, registers=200)) == []
    assert rules(contract, compiled(spill_bytes=9, registers=201)) == ["spilled bytes", "registers"]


PTX = """
.visible .entry _gate(.param .u64 _gate_param_0)
{
\t.loc 1 20 3 // _gate.py:20:3
\tadd.f32 %f1, %f2, %f3;
}
"""


def test_the_digest_of_code_is_of_instructions_and_not_of_names_and_lines():
    before = code_digest(PTX, "_gate")
    assert code_digest(PTX.replace("_gate", "_renamed"), "_renamed") == before
    assert code_digest(PTX.replace("1 20 3 // _gate.py:20:3", "1 21 3"), "_gate") == before
    assert code_digest(PTX.replace("add", "mul"), "_gate") != before


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"kernel": "renamed"}, False),
        ({"registers": 40}, False),  # follows from the PTX and the assembler
        ({"code": "other"}, True),
        ({"warps": 8}, True),
        ({"grid": (2, 1, 1)}, True),
        ({"times": 2}, True),
    ],
)
def test_launches_of_a_case_are_known_by_code_warps_grid_and_number(change, differs):
    kernels = pytest.importorskip("kernel_pytorch.harness.static.triton_code")._kernels

    def found(grid=(1, 1, 1), times=1, **facts):
        about = {"kernel": "k", "arch": "sm_90", "constants": {}, "arguments": {}, "case": "", "bench": True}
        code = Compiled(**{**about, "warps": 4, "code": "c", **facts})
        what = {"function": "f", "key": "k", "implementation": "gate/triton", "case": "gate, a [x=1] float32"}
        return kernels([SimpleNamespace(**what, grid=grid)] * times, {("f", "k"): code})

    before = found()
    assert [list(cases) for cases in before.values()] == [["a [x=1] float32"]]
    assert (found(**change) != before) == differs


def test_what_ptxas_says_is_kept_beside_a_cached_kernel(monkeypatch, tmp_path):
    """Of a kernel in Triton's cache ptxas says nothing: it is compiled again once, by whatever it came there."""
    module = pytest.importorskip("kernel_pytorch.harness.static.triton_code")
    monkeypatch.setattr(module.knobs.cache, "dir", str(tmp_path))
    runs = []

    class Compiling:
        known = False

        def compile(self, *, float64):
            compiles = module.knobs.compilation.always_compile or not self.known
            self.known = True
            runs.append(compiles)
            if compiles:
                print("Used 40 registers")  # noqa: T201
            return SimpleNamespace(hash="ab" * 32)

    launch = Compiling()
    for _ in range(2):
        assert module._compile(launch, False)[1] == "Used 40 registers\n"
    assert runs == [True, False]
    monkeypatch.setattr(module.knobs.cache, "dir", str(tmp_path / "another"))
    for _ in range(2):
        assert module._compile(launch, False)[1] == "Used 40 registers\n"
    assert runs[2:] == [False, True, False]
