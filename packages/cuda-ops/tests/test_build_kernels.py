"""What ptxas says about the kernels is read from what it prints while they are compiled."""

import json
import shutil
import subprocess

import build_kernels
import build_library
import pytest

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    256 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 300 bytes cumulative stack size, 4096 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 12.050 ms
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 360 bytes cmem[0]
"""
CALLED = """ptxas info    : Function properties for _Z4slowPKfi
    0 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
"""


def test_what_ptxas_says():
    spilling = {"name": "_Z1kPf", "arch": "sm_80", "registers": 40, "spill_bytes": 8, "shared_bytes": 4096}
    plain = {"name": "plain", "arch": "sm_90a", "registers": 10, "spill_bytes": 0, "shared_bytes": 0}
    assert build_kernels.read_log(LOG) == [spilling, plain]
    assert [k["spill_bytes"] for k in build_kernels.read_log(LOG + CALLED)] == [24, 16], "any of them may call it"
    assert build_kernels.read_log("") == []


@pytest.mark.parametrize(
    ("symbol", "name", "template"),
    [
        ("_ZN1a12scale_kernelIfLi4EEEvPKT_PS1_fl", "scale_kernel", "float, 4"),
        ("_ZN2kp4norm1kI13__nv_bfloat16Li8EEEvPKT_PS3_fl", "norm::k", "__nv_bfloat16, 8"),
        ("_ZN36_GLOBAL__N__f487fc9e_4_b_cu_31b856bd4anonILNS_4ModeE1ELb1EfEEvPfi", "anon", "(Mode)1, true, float"),
        ("_ZN2kp1kINS_4PairIfdEEEEvT_", "k", "kp::Pair<float, double>"),
        ("plain", "plain", ""),
    ],
)
def test_names_of_kernels(symbol, name, template):
    if shutil.which("c++filt") is None:
        pytest.skip("there is no c++filt")
    found, arguments = build_kernels.split_name(build_kernels.demangled(None, [symbol])[symbol])
    assert (found, arguments.replace("(anonymous namespace)::", "")) == (name, template)


def test_without_a_demangler_names_are_symbols(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *arguments, **options: None)
    assert build_kernels.demangled(None, ["_Z1kPf"]) == {"_Z1kPf": "_Z1kPf"}


def test_the_record_names_functions_and_kernels_of_operators(tmp_path):
    csrc = build_library.Path(build_library.__file__).parent / "csrc"
    build_kernels.write_kernels(tmp_path, csrc, None, {"rms_norm": LOG})
    found = json.loads((tmp_path / build_kernels.RECORD).read_text())
    assert found["functions"]["add_rms_norm"] == "rms_norm"
    assert found["functions"]["rotary_qk"] == "rotary_embedding"
    assert [(k["operator"], k["arch"], k["registers"]) for k in found["kernels"]] == [
        ("rms_norm", "sm_80", 40),
        ("rms_norm", "sm_90a", 10),
    ]


SPILLING = """
// Two blocks of 1024 threads leave 32 registers a thread, and each holds 64 numbers until it knows their sum.
__global__ void __launch_bounds__(1024, 2) spilling(const float* x, float* y) {
  float held[64], sum = 0;
#pragma unroll
  for (int k = 0; k < 64; ++k) held[k] = x[k * 1024 + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 64; ++k) sum += held[k];
#pragma unroll
  for (int k = 0; k < 64; ++k) y[k * 1024 + threadIdx.x] = held[k] - sum;
}
"""


@pytest.mark.slow
def test_a_kernel_that_spills_is_seen_in_what_nvcc_prints(tmp_path):
    nvcc = build_library.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    (tmp_path / "k.cu").write_text(SPILLING)
    command = [nvcc, "-cubin", "-arch=sm_80", "-Xptxas=-v", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (kernel,) = build_kernels.read_log(done.stderr)
    assert (kernel["arch"], kernel["registers"] <= 32, kernel["spill_bytes"] > 0) == ("sm_80", True, True)
