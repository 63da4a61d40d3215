"""Index arithmetic that host and device share, on the host: every program of csrc/tests, compiled and run."""

import shutil
import subprocess
from pathlib import Path

import build_library
import pytest

CSRC = Path(__file__).parents[1] / "csrc"
COMPILER = build_library.find_compiler()
PROGRAMS = sorted((CSRC / "tests").glob("*.cpp"))

pytestmark = [
    pytest.mark.skipif(not PROGRAMS, reason="not a checkout"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def run(source, csrc, folder):
    """The exit code of a program of csrc/tests, under UndefinedBehaviorSanitizer, and what it printed."""
    program = folder / source.stem
    options = ["-std=c++17", "-Wall", "-Wextra", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    command = [*COMPILER, *options, f"-I{csrc / 'include'}", f"-I{csrc}", str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    found = subprocess.run([program], capture_output=True, text=True, check=False)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda source: source.stem)
def test_index(source, tmp_path):
    code, printed = run(source, CSRC, tmp_path)
    assert code == 0, printed


ROTATION = "../../rotary_embedding/rotary_embedding.h"
# Program of csrc/tests, header, what is right there, what is planted.
MUTANTS = [
    ("test_index", "index.h", "return row * columns", "return static_cast<int32_t>(row * columns)"),
    ("test_index", "index.h", "begin + size + (part < rest ? 1 : 0)", "begin + size"),
    ("test_index", "index.h", "smaller(columns - column, width)", "smaller(columns - column, width + 1)"),
    ("broadcast", "index.h", "b.step[last] == step * size", "b.step[last] != 0"),
    ("test_philox", "philox.h", "a = static_cast<uint32_t>(of_c >> 32) ^ b", "a = static_cast<uint32_t>(of_c >> 32)"),
    ("test_philox", "philox.h", "return row * ceil_divide(columns, kPhiloxWords)", "return row * columns"),
    ("test_rotary", "rotary.h", "column - pairs, column - pairs, true", "column - pairs, column, true"),
    ("test_rotary", "rotary.h", "first + width : first + pairs", "first + width : first + width"),
    ("test_positions", ROTATION, "position >= 0 && position < rows", "position < rows"),
    ("test_positions", ROTATION, "position >= 0 && position < rows", "position >= 0 && position <= rows"),
    ("test_positions", ROTATION, "remainder(token, positions.count)", "token % rows"),
    ("test_positions", ROTATION, "const int64_t position = positions.wide", "const int position = positions.wide"),
    ("test_positions", ROTATION, "return remainder(token, rows)", "return token"),
    ("test_layout", "cuda/layout.h", "return {1 << i,", "return {i,"),
    ("test_layout", "cuda/layout.h", "return int64_t{reached} *", "return int64_t{reached} * 2 *"),
    ("test_layout", "cuda/layout.h", "blocks <= 8 ? 120 : 112", "132"),
    (
        "test_layout",
        "cuda/layout.h",
        "while (layout.cluster < blocks_for())",
        "while (2 * layout.cluster < blocks_for())",
    ),
    ("test_layout", "index.h", "(value | divisor) < (int64_t{1} << 32)", "divisor < (int64_t{1} << 32)"),
]


@pytest.mark.parametrize(("program", "name", "right", "wrong"), MUTANTS)
def test_wrong_arithmetic_is_found(program, name, right, wrong, tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC / "include", csrc / "include")
    shutil.copytree(CSRC / "rotary_embedding", csrc / "rotary_embedding")
    header = csrc / "include" / "kernel_pytorch" / name
    assert header.read_text().count(right) == 1
    header.write_text(header.read_text().replace(right, wrong))
    code, printed = run(CSRC / "tests" / f"{program}.cpp", csrc, tmp_path)
    assert code > 0
    assert printed
