"""What ptxas said about the CUDA kernels while the library was compiled: registers, spills, shared memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORD = "_kernels.json"

KERNEL = re.compile(
    r"Compiling entry function '(?P<symbol>[^']+)' for '(?P<arch>\w+)'.*?(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
FUNCTION = re.compile(
    r"Function properties for (?P<symbol>\S+)\n[^\n]*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
)
SHARED = re.compile(r"(\d+) bytes smem")
NAME = re.compile(r"(?:void )?(?P<path>[\w:]+)(?:<(?P<template>.*)>)?\(")
DEFINITION = re.compile(r'\.def\(\s*"(\w+)\(')


def write_kernels(package: Path, csrc: Path, nvcc: str | None, logs: dict[str, str]) -> None:
    """Write `_kernels.json` beside the library.

    Args:
        package: where the library is.
        csrc: the sources.
        nvcc: the compiler's path; None where no CUDA code was compiled.
        logs: by operator, what its CUDA code was compiled with the option `-Xptxas -v` said.
    """
    kernels = [{"operator": name, **kernel} for name, log in sorted(logs.items()) for kernel in read_log(log)]
    names = demangled(nvcc, (kernel["name"] for kernel in kernels))
    for kernel in kernels:
        kernel["name"], kernel["template"] = split_name(names[kernel["name"]])
    functions = {
        function: file.parent.name
        for file in sorted(csrc.glob("*/operator.cpp"))
        for function in DEFINITION.findall(file.read_text(encoding="utf-8"))
    }
    lines = ",\n".join(json.dumps(kernel) for kernel in kernels)
    written = package / f"{os.getpid()}-{RECORD}"  # several may build at a time
    written.write_text(f'{{"functions": {json.dumps(functions)},\n"kernels": [\n{lines}\n]}}\n')
    os.replace(written, package / RECORD)


def read_log(log: str) -> list[dict[str, Any]]:
    """Take from what `ptxas -v` printed about a file what each kernel needs, on each architecture.

    Returns:
        For each the symbol ("name"), "arch", "registers" per thread, "spill_bytes" per thread, and "shared_bytes" that
        its code declares. A function that was not inlined may be called by each kernel, so its spills count for each.
    """
    kernels = list(KERNEL.finditer(log))
    entries = {found["symbol"] for found in kernels}
    called = sum(_spills(found) for found in FUNCTION.finditer(log) if found["symbol"] not in entries)
    return [
        {
            "name": found["symbol"],
            "arch": found["arch"],
            "registers": int(found["registers"]),
            "spill_bytes": _spills(found) + called,
            "shared_bytes": int(shared[1]) if (shared := SHARED.search(found["rest"])) else 0,
        }
        for found in kernels
    ]


def _spills(found: re.Match[str]) -> int:
    return max(int(found["stores"]), int(found["loads"]))


def demangled(nvcc: str | None, symbols: Iterable[str]) -> dict[str, str]:
    """Names as they were written in C++, by symbol: by CUDA's cu++filt, else binutils' c++filt, else the symbols."""
    every = sorted(set(symbols))
    beside = [str(Path(nvcc).resolve().parent)] if nvcc else []
    tool = shutil.which("cu++filt", path=os.pathsep.join([*beside, os.environ.get("PATH", "")]))
    tool = tool or shutil.which("c++filt")
    if tool is None or not every:
        return dict(zip(every, every, strict=True))
    done = subprocess.run([tool], input="\n".join(every), capture_output=True, text=True, check=True)
    return dict(zip(every, done.stdout.splitlines(), strict=True))


def split_name(text: str) -> tuple[str, str]:
    """Name and template arguments of a demangled kernel; of namespaces the innermost stays, unless it is the only one.

    `void a::b::scale<float, 4>(float const*, int)` gives `("b::scale", "float, 4")`, `plain` gives `("plain", "")`.
    """
    found = NAME.match(text.replace("(anonymous namespace)::", ""))
    if found is None:
        return text, ""
    path = found["path"].split("::")
    return "::".join(path[-2:] if len(path) > 2 else path[-1:]), (found["template"] or "").strip()
