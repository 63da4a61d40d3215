"""Compile the CUDA kernels of csrc/ for a CPU, by the emulator of csrc/tests/emulator, in place of the CPU backend.

    python build_emulated.py FOLDER [--sanitize]

What comes out is loaded with `KERNEL_PYTORCH_LIBRARY=FOLDER`: the same operators, of CPU tensors, computed by the CUDA
kernels, so that every test of it tests the kernels. C++ knows no launches, no PTX and no dynamic shared
memory; those are rewritten, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import build_library as library

INSTRUCTION_SET = "CUDA, emulated"
"""Entry of the library's record in place of the CPU backend's instruction sets."""

OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread", "-w")
CONTRACTED = ("-mfma", "-ffp-contract=fast")  # products are added without rounding, as nvcc has it

LAUNCH = re.compile(r"(?P<kernel>[A-Za-z_]\w*\s*(?:<[^;{}]*?>)?)\s*<<<(?P<shape>[^;]*?)>>>\((?P<arguments>[^;]*?)\);")
DYNAMIC = re.compile(r"extern __shared__(?: __align__\(\w+\))? (?P<type>[\w ]+) (?P<name>\w+)\[\];")
ASSEMBLY = re.compile(r"asm(?: volatile)?\((?P<text>(?:\s*\"[^\"]*\")+)(?P<operands>[^;]*)\);")
DECLARATIONS = re.compile(r"^\{(\s*\.reg[^;]*;)*\s*")
OPERAND = re.compile(r"\"[^\"]*\"\((?P<expression>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
BOUNDS = re.compile(r"__launch_bounds__\((?P<threads>[^,()<]*(?:<[^<>]*>)?[^,()<]*)[^{;]*?\{")


def translate(source: str) -> str:
    """CUDA C++ as C++ that the emulator's headers make sense of."""
    source = BOUNDS.sub(lambda found: f"{found[0]} ::emulator::check_bounds({found['threads']});", source)
    source = LAUNCH.sub(
        lambda found: f"::emulator::launch([&] {{ {found['kernel']}({found['arguments']}); }}, {found['shape']});",
        source,
    )
    source = DYNAMIC.sub(
        lambda found: f"auto* const {found['name']} = static_cast<{found['type']}*>(::emulator::dynamic_shared());",
        source,
    )
    source = ASSEMBLY.sub(_instruction, source)
    source = source.replace("  torch::stable::accelerator::DeviceGuard guard_;\n", "")
    return source.replace(".is_cuda()", ".is_cpu()")


def _instruction(found: re.Match[str]) -> str:
    """A call of the emulator's function of that name; an empty text only holds the compiler back."""
    text = "".join(re.findall(r"\"([^\"]*)\"", found["text"])).replace("\\n", " ").strip()
    if not text:
        return "(void)0;"
    text = DECLARATIONS.sub("", text)
    name = re.sub(r"\W+", "_", text.split()[0].rstrip(";"))
    operands = ", ".join(match["expression"] for match in OPERAND.finditer(found["operands"]))
    return f"::emulator::ptx::{name}({operands});"


def build(folder: Path, csrc: Path, work: Path, *, sanitize: bool = False) -> dict[str, Any]:
    """Compile, and write the library and its record to a folder.

    Args:
        folder: where the library goes.
        csrc: the sources.
        work: for translated sources and object files.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer.

    Returns:
        The record, as that of `build_library.build`.

    Raises:
        BuildError: torch or a compiler is missing, or the compiler failed.
    """
    torch, compiler = library.find_torch(), library.find_compiler()
    if torch is None or compiler is None:
        raise library.BuildError(library.NO_TORCH if torch is None else library.NO_COMPILER)
    work = library.folder_for(work, "emulated-sanitized" if sanitize else "emulated", torch, compiler)
    sources = _write_translated(csrc, csrc / "tests" / "emulator", work / "csrc")
    options = [*OPTIONS, *(CONTRACTED if _has_fma() else ()), *(library.sanitizers(work) if sanitize else ())]
    includes = ["-Icsrc/include", "-isystem", "torch/include"]
    includes += [f"-DTORCH_TARGET_VERSION={library.TARGET}", "-DKP_WITH_CUDA"]
    steps = []
    for source in sources:
        before = ["-include", "ptx.h"] if source.suffix == ".cu" else []
        target = f"{source.parent.name}.{source.stem}.o"
        files = ["-x", "c++", "-c", source.relative_to(work).as_posix(), "-o", target]
        steps.append(([*compiler, *options, *includes, *before, *files], target))
    library.compile_all(work, steps, functools.partial(print, flush=True))
    folder.mkdir(parents=True, exist_ok=True)
    output = ["-o", str(folder.resolve() / library.LIBRARY), *(target for _, target in steps)]
    link = [*compiler, "-shared", "-pthread", *(library.SANITIZERS if sanitize else ()), *output]
    library.run([*link, "-Ltorch/lib", "-ltorch_cpu", "-ldl"], work)
    record = {
        "problem": None,
        "compiler": library.version(compiler),
        "nvcc": None,
        "archs": [],
        "instruction_sets": [INSTRUCTION_SET],
        "sanitized": sanitize,
        "digest": library.digest(csrc),
        "operators": library.operator_digests(csrc),
    }
    return library.write_record(folder, record)


def _write_translated(csrc: Path, emulator: Path, target: Path) -> list[Path]:
    """Write the translated sources and the replacement of the CPU backend; return the files to compile."""
    shutil.rmtree(target, ignore_errors=True)
    for file in sorted(csrc.rglob("*")):
        place = file.relative_to(csrc)
        if file.suffix in (".h", ".cuh", ".cpp", ".cu") and place.parts[0] != "tests" and file.name != "cpu.cpp":
            copy = target / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(translate(file.read_text()))
    for header in emulator.glob("*.h"):
        shutil.copy(header, target / "include")
    shutil.copy(emulator / "isa.h", target / "include" / "kernel_pytorch" / "cpu")
    for source in emulator.glob("*.cpp"):
        shutil.copy(source, target)
    shutil.move(target / "host.cpp", target / "operator.cpp")
    (target / "isa.cpp").unlink()
    return [*sorted(target.glob("*/cuda.cu")), *sorted(target.glob("*.cu")), *sorted(target.rglob("*.cpp"))]


def _has_fma() -> bool:
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def main() -> None:
    """Build from the command line."""
    root = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    arguments = parser.parse_args()
    work = root / "build"
    try:
        print(library.summary(build(arguments.folder, root / "csrc", work, sanitize=arguments.sanitize)))
    except library.BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
