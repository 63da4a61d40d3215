"""Compile csrc/ into the library that `kernel_pytorch.cuda_ops` loads: CPU code always, CUDA code where nvcc is.

    python build_library.py [--output FOLDER] [--sanitize]

Needs nothing but the standard library, a C++17 compiler and the headers of an installed torch, whichever version from
2.10 on and for whichever device: the code keeps to torch's stable ABI. What is read from the environment:

    CXX                        the C++ compiler, with a launcher or options where needed; else c++, g++ or clang++
    CUDA_HOME                  where bin/nvcc is; else PATH, else the nvidia-cuda-nvcc package
    KERNEL_PYTORCH_CUDA_ARCHS  like "sm_80,sm_90a"; empty for no CUDA; else those of ARCHS that nvcc knows
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import build_check
import build_kernels
from build_compile import BuildError, compile_all, run
from source_digests import operator_digests

LIBRARY = "_library.so"
RECORD = "_library.json"
PRODUCTS = (LIBRARY, RECORD, build_kernels.RECORD)

ASKED_ARCHS = "KERNEL_PYTORCH_CUDA_ARCHS"
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
OLDEST = 80
TARGET = "0x020a000000000000"  # torch 2.10: what is newer is not used, so that every later torch loads the library

# What a file cpu.cpp is compiled for, once each; chosen among at run time (csrc/include/kernel_pytorch/cpu/isa.h).
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
INSTRUCTION_SETS = {"base": (), "avx2": AVX2, "avx512": AVX512}

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Sums are reordered only where the source says so; infinities and NaN mean what they mean.
CPU = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")

# Without --no-cache-dir pip would take the wheel that it built before, without a library.
COMMAND = "pip install --force-reinstall --no-deps --no-cache-dir ./packages/cuda-ops"
AGAIN = f"install this package again from its checkout: `{COMMAND}`"
NO_TORCH = f"torch was not found when it was installed; install torch first, then {AGAIN}"
OLD_TORCH = "the torch found when it was installed has no stable ABI that is new enough; it needs torch 2.10 or later"
NO_COMPILER = (
    f"no C++ compiler was found when it was installed; install g++ (`apt-get install g++`) or set CXX, then {AGAIN}"
)
CRASHES = (
    "the library that {compiler} made does not work, and was removed: {problem}. Where libgcc is linked statically, "
    f"errors cannot reach PyTorch; set CXX to another one, then {AGAIN}"
)


def build(
    package: Path, csrc: Path, work: Path, *, sanitize: bool = False, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Compile, unless the library that is there was compiled of the same things, and write it and its record.

    Args:
        package: where the library goes.
        csrc: the sources.
        work: for object files.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, for CPU code alone.
        say: called with a line about progress, now and then.

    Returns:
        The record: `problem` (why there is no library, or None), `compiler`, `nvcc`, `archs`, `instruction_sets`,
        `sanitized`, `digest` and `operators`: by operator and device the digests by which results know what they
        speak of.
    """
    package.mkdir(parents=True, exist_ok=True)
    torch, compiler = find_torch(), find_compiler()
    if torch is None or compiler is None or not (torch / "include/torch/csrc/stable/ops.h").is_file():
        problem = NO_TORCH if torch is None else _no_compiler() if compiler is None else OLD_TORCH
        (package / LIBRARY).unlink(missing_ok=True)
        return write_record(package, {"problem": problem})
    nvcc = None if sanitize else find_nvcc()
    archs = wanted_archs(nvcc)
    record = {
        "problem": None,
        "compiler": version(compiler),
        "nvcc": version([nvcc]) if nvcc and archs else None,
        "archs": archs,
        "instruction_sets": list(instruction_sets()),
        "sanitized": sanitize,
        "digest": digest(csrc),
        "operators": operator_digests(csrc),
    }
    if all((package / file).is_file() for file in PRODUCTS) and _read(package) == record:
        say("cuda-ops: nothing to compile, the library is of the present sources")
        return record
    nvcc = nvcc if archs else None
    work = folder_for(work, "sanitized" if sanitize else "objects", torch, compiler, nvcc, archs)
    options = sanitizers(work) if sanitize else ()
    link_folder(work / "csrc", csrc)
    steps = list(_compilations(work, compiler, nvcc, archs, options))
    printed = compile_all(work, steps, say)
    linked = package.resolve() / f"{os.getpid()}-{LIBRARY}"  # several may build at a time
    link = [*compiler, "-shared", *options, "-o", str(linked), *(target for _, target in steps)]
    # What comes out of archives, as a libstdc++ that the compiler links statically, is not mixed with PyTorch's copy.
    link += ["-Ltorch/lib", "-ltorch_cpu", "-ldl", "-Wl,--exclude-libs,ALL", *([] if sanitize else ["-Wl,-z,defs"])]
    if nvcc is not None:
        link += [f"-L{folder}" for folder in _cuda_libraries(nvcc)] + ["-lcudart_static", "-lrt", "-lpthread"]
    run(link, work)
    say("cuda-ops: linked; trying the library in a process of its own")
    problem = None if sanitize else build_check.problem_of(linked, torch, record["operators"])
    if problem is not None:
        for file in (linked, package / LIBRARY):
            file.unlink(missing_ok=True)
        return write_record(package, {"problem": CRASHES.format(compiler=record["compiler"], problem=problem)})
    os.replace(linked, package / LIBRARY)
    logs = {name.partition(".")[0]: log for name, log in printed.items() if name.endswith(".cuda.o")}
    build_kernels.write_kernels(package, csrc, nvcc, logs)
    return write_record(package, record)


def sanitizers(work: Path) -> tuple[str, ...]:
    """Options for what is watched; what is known of its sources for messages begins in `work`."""
    return (*SANITIZERS, f"-ffile-prefix-map={work.resolve()}=.")


def folder_for(
    work: Path, kind: str, torch: Path, compiler: Sequence[str], nvcc: str | None = None, archs: Sequence[str] = ()
) -> Path:
    """The folder in which compilers run, one for each choice of settings, made if it is missing.

    Compilers get names relative to it, through links to the sources and to torch: so no path of this machine comes into
    the library, and none is there for a shell that nvcc runs to stumble over.
    """
    versions = [version([nvcc]) if nvcc else "", version(compiler), (torch / "version.py").read_text()]
    settings = [str(torch), *compiler, nvcc, *versions, *archs]
    folder = work / "-".join([kind, *archs, hashlib.sha256(repr(settings).encode()).hexdigest()[:8]])
    folder.mkdir(parents=True, exist_ok=True)
    link_folder(folder / "torch", torch)
    return folder


def link_folder(link: Path, target: Path) -> None:
    """Make a link to a folder, or make it anew if it leads elsewhere."""
    if link.is_symlink() and link.resolve() == target.resolve():
        return
    made = link.with_name(f"{os.getpid()}-{link.name}")  # several may build at a time
    made.symlink_to(target.resolve(), target_is_directory=True)
    os.replace(made, link)


def summary(record: dict[str, Any]) -> str:
    """One line for people: what was built of what."""
    if record["problem"] is not None:
        return f"kernel_pytorch.cuda_ops is installed without its library: {record['problem']}"
    if record["archs"]:
        cuda = f"CUDA for {', '.join(record['archs'])} ({record['nvcc']})"
    elif record["sanitized"]:
        cuda = "no CUDA: sanitizers watch CPU code alone"
    elif os.environ.get(ASKED_ARCHS) == "":
        cuda = f"no CUDA: {ASKED_ARCHS} is empty"
    else:
        cuda = "no CUDA: nvcc was not found"
    return f"built with {record['compiler']}: CPU for {', '.join(record['instruction_sets'])}; {cuda}"


def _no_compiler() -> str:
    given = os.environ.get("CXX")
    return f"CXX: given {given!r}, which is no program; {NO_COMPILER}" if given else NO_COMPILER


def _compilations(
    work: Path, compiler: Sequence[str], nvcc: str | None, archs: Sequence[str], options: Sequence[str]
) -> Iterator[tuple[list[str], str]]:
    """Every command that compiles a file in `work`, with the object that it makes; those that take longest first."""
    csrc = work / "csrc"
    include = "-Icsrc/include"

    def step(command: Sequence[str], source: Path, name: str) -> tuple[list[str], str]:
        target = f"{source.parent.name}.{name}.o"
        return [*command, include, "-c", source.relative_to(work).as_posix(), "-o", target], target

    if nvcc is not None:
        program, *flags_of_host = _without_launcher(compiler)
        codes = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
        flags = [
            "-O3",
            "-std=c++17",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            "--compress-mode=size",
            "-Xptxas=-v",
            f"-ccbin={program}",
            *(f"-Xcompiler={flag}" for flag in flags_of_host),
            *codes,
        ]
        for source in [*sorted(csrc.glob("*/cuda.cu")), *sorted(csrc.glob("*.cu"))]:
            yield step([nvcc, *flags], source, source.stem)
    with_torch = ["-isystem", "torch/include", f"-DTORCH_TARGET_VERSION={TARGET}"]
    with_torch += ["-DKP_WITH_CUDA"] if nvcc is not None else []
    for source in [*sorted(csrc.glob("*/operator.cpp")), *sorted(csrc.glob("*.cpp"))]:
        yield step([*compiler, *COMMON, "-O2", *with_torch, *options], source, source.stem)
    for source in sorted(csrc.glob("*/cpu.cpp")):
        for name, flags in instruction_sets().items():
            yield step([*compiler, *COMMON, *CPU, *flags, *options, f"-DKP_ISA={name}"], source, name)


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Those that this kind of processor may have."""
    return INSTRUCTION_SETS if platform.machine() == "x86_64" else {"base": ()}


def find_torch() -> Path | None:
    """The folder of the torch that is installed where this package goes, isolated build or not; never a download."""
    specification = importlib.util.find_spec("torch")
    if specification is not None and specification.origin is not None:
        return Path(specification.origin).parent
    candidates = [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    return next((folder for folder in candidates if folder.is_dir()), None)


def find_compiler() -> list[str] | None:
    """The command that runs the C++ compiler, by its full path, with the launcher and the options that CXX names."""
    named = os.environ.get("CXX")
    candidates = [["c++"], ["g++"], ["clang++"]]
    if named:
        try:
            candidates = [[named], shlex.split(named)]
        except ValueError:  # a quotation mark that is not closed
            candidates = [[named]]
    for candidate in candidates:
        # Words that are no programs are options and what they are given.
        words = [word if word.startswith("-") else shutil.which(word) or word for word in candidate]
        if words and shutil.which(words[0]):
            return words
    return None


def _without_launcher(compiler: Sequence[str]) -> Sequence[str]:
    """The compiler and its options: nvcc takes one program."""
    programs = [place for place, word in enumerate(compiler) if shutil.which(word)]
    return compiler[programs[-1] :]


def find_nvcc() -> str | None:
    """CUDA's compiler, by its full path."""
    folders = [Path(os.environ["CUDA_HOME"]) / "bin"] if os.environ.get("CUDA_HOME") else []
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin"), reverse=True)
    for folder in [*map(str, folders), None, *map(str, packages)]:
        if found := shutil.which("nvcc", path=folder):
            return found
    return None


def wanted_archs(nvcc: str | None) -> list[str]:
    """The architectures that CUDA code is compiled for, of those that nvcc knows."""
    if nvcc is None:
        return []
    known = set(subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split())
    asked = os.environ.get(ASKED_ARCHS)
    if asked is None:
        return [arch for arch in ARCHS if arch in known or arch.rstrip("a") in known]
    archs = [arch for arch in re.split(r"[\s,;]+", asked) if arch]
    for arch in archs:
        number = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if number is None or arch.rstrip("af") not in known or int(number[1]) < OLDEST:
            # nvcc does not list architectures with an "a"; the message also names those that are built by default.
            named = known | {arch for arch in ARCHS if arch.rstrip("a") in known}
            numbered = sorted((int(re.sub(r"\D", "", name)), name) for name in named)
            allowed = ", ".join(name for number, name in numbered if number >= OLDEST)
            meant = f"sm_{arch}" if f"sm_{arch}" in named else None
            hint = f" (did you mean {meant}?)" if meant else ""
            raise BuildError(
                f"{ASKED_ARCHS}: given {arch!r}{hint}; the kernels need sm_{OLDEST}, and {nvcc} knows {allowed}"
            )
    return archs


def digest(csrc: Path) -> str:
    """Digest of everything that the library is compiled from, including this file."""
    found = hashlib.sha256()
    for file in sorted(csrc.rglob("*")):
        place = file.relative_to(csrc).parts
        if file.suffix in (".h", ".cuh", ".cpp", ".cu") and place[0] != "tests":
            found.update("/".join(place).encode() + b"\0" + file.read_bytes())
    found.update(Path(__file__).read_bytes())
    return found.hexdigest()[:16]


def _cuda_libraries(nvcc: str) -> list[Path]:
    root = Path(nvcc).resolve().parents[1]
    listed = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    top = re.search(r"^#\$ TOP=(.*)$", listed, re.MULTILINE)
    roots = [root, *([Path(top[1]).resolve()] if top else [])]
    return [
        folder
        for base in roots
        for folder in (base / "lib64", base / "lib", base / "targets/x86_64-linux/lib")
        if folder.is_dir()
    ]


def version(compiler: Sequence[str]) -> str:
    """A compiler, in one line."""
    lines = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()
    release = next((line for line in lines if "release" in line), None)
    return f"nvcc {release.split('release ')[1].split(',')[0]}" if release else lines[0]


def _read(package: Path) -> dict[str, Any] | None:
    try:
        return json.loads((package / RECORD).read_text())
    except (OSError, ValueError):
        return None


def write_record(package: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write the record beside the library, at once: another build may read it."""
    written = package / f"{os.getpid()}-{RECORD}"
    written.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(written, package / RECORD)
    return record


def main() -> None:
    """Build from the command line."""
    root = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=root / "src" / "kernel_pytorch" / "cuda_ops")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    arguments = parser.parse_args()
    try:
        say = functools.partial(print, flush=True)
        print(summary(build(arguments.output, root / "csrc", root / "build", sanitize=arguments.sanitize, say=say)))
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
