"""The emulator: what it computes, and that it finds what CUDA forbids, each planted in a kernel that is right."""

import subprocess
from functools import partial
from pathlib import Path

import build_emulated
import build_library
import pytest

EMULATOR = Path(__file__).parents[1] / "csrc" / "tests" / "emulator"
COMPILER = build_library.find_compiler()
PROGRAMS = {file.stem: file.read_text() for file in sorted((EMULATOR / "programs").glob("*.cu"))}
ORDERS = ("forward", "backward", "random")

pytestmark = [
    pytest.mark.skipif(not PROGRAMS, reason="not a checkout"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def compile_for_emulator(*arguments):
    command = [*COMPILER, "-std=c++17", "-O1", "-pthread", f"-I{EMULATOR}", "-include", "ptx.h", *map(str, arguments)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a program, with the emulator that is compiled once."""
    folder = tmp_path_factory.mktemp("emulator")
    objects = [folder / f"{name}.o" for name in ("emulator", "launch")]
    for file in objects:
        compile_for_emulator("-c", EMULATOR / f"{file.stem}.cpp", "-o", file)
    return partial(run_program, objects)


def run_program(objects, source, folder, orders=ORDERS):
    """Exit codes and output of a program, with threads in these orders."""
    (folder / "program.cpp").write_text(build_emulated.translate(source))
    program = folder / "program"
    compile_for_emulator(folder / "program.cpp", *objects, "-o", program)
    ran = [
        subprocess.run(
            [program],
            env={"KERNEL_PYTORCH_EMULATED_ORDER": order},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        for order in orders
    ]
    return [(found.returncode, found.stdout) for found in ran]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, run, tmp_path):
    assert run(PROGRAMS[name], tmp_path) == [(0, "")] * 3


# Program, what is right there, what is planted, what is printed.
MUTANTS = [
    ("block", "__syncthreads();  // all is there", ";", "wrong"),
    ("block", "float row[kThreads];", "float row[kThreads]; if (threadIdx.x == 3) return;", "threads that have left"),
    ("block", "float row[kThreads];", "float row[kThreads]; if (threadIdx.x < 8) __syncthreads();", "for ever"),
    ("block", "__launch_bounds__(kThreads)", "__launch_bounds__(kThreads / 2)", "more threads than the launch bounds"),
    (
        "block",
        "row[threadIdx.x] = x[first",
        "__ldg(reinterpret_cast<const uint4*>(x + 1)); row[threadIdx.x] = x[first",
        "misaligned",
    ),
    ("block", "<<<kBlocks, kThreads>>>", "<<<kBlocks, 32 * kThreads>>>", "a block of (2048, 1, 1)"),
    ("block", "<<<kBlocks, kThreads>>>", "<<<0, kThreads>>>", "a grid of (0, 1, 1)"),
    ("cluster", "cluster.sync();  // all is there", ";", "wrong"),
    ("cluster", "rank + 1) % blocks", "rank + 1)", "a block that the cluster does not have"),
    ("counted", "complete = 0; complete == 0;", "complete = 1; complete == 0;", "more arrivals"),  # nobody waits
    ("counted", "% 2][rank * kThreads", "% 2][rank", "wrong"),  # over the number of a neighbour
    ("counted", "in_block(place, block)", "in_block(place, block + 1)", "a block that the cluster does not have"),
    ("counted", "== 0) {\n      asm", "< 2) {\n      asm", "more arrivals"),
    ("copies", '"n"(1)', '"n"(2)', "wrong"),  # not there yet
    ("copies", "slots[(row + 1) % 2]", "slots[row % 2]", "wrong"),  # written over before it is read
    ("matrices", "lane % 16 * 16 + lane / 16 * 8", "lane % 16 * 16 + lane / 16 * 4", "misaligned"),
    ("matrices", "load_matrix_transposed(right", "load_matrix(right", "wrong"),
    ("rms_norm", "  __syncthreads();\n", "", "wrong"),
    ("rms_norm", "if (columns % 4 != 0) continue;", "", "misaligned"),
    ("rms_norm", "if (column < columns) *rein", "*rein", "wrong"),
    ("matrices", "shared + 256 + ", "shared + 512 + ", "outside of the dynamic shared memory"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "printed"), MUTANTS)
def test_what_is_planted_is_found(name, right, wrong, printed, run, tmp_path):
    assert PROGRAMS[name].count(right) == 1
    found = run(PROGRAMS[name].replace(right, wrong), tmp_path)
    assert any(code != 0 and printed in output for code, output in found), found


def test_an_instruction_that_is_unknown_is_no_program(run, tmp_path):
    source = 'int main() { int x = 0; asm volatile("bar.made.up %0;" : "+r"(x)); }'
    with pytest.raises(AssertionError, match="bar_made_up"):
        run(source, tmp_path)


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        (
            "f<T, 4><<<grid, dim3(8, 4), 0, on>>>(p, n);",
            "::emulator::launch([&] { f<T, 4>(p, n); }, grid, dim3(8, 4), 0, on);",
        ),
        ('asm volatile("" : "+r"(x));', "(void)0;"),
        ('asm("a.b::c.f32 %0, %1;" : "=f"(y) : "f"(g(x)));', "::emulator::ptx::a_b_c_f32(y, g(x));"),
        ("extern __shared__ float row[];", "auto* const row = static_cast<float*>(::emulator::dynamic_shared());"),
    ],
)
def test_translation(source, translated):
    assert build_emulated.translate(source) == translated
