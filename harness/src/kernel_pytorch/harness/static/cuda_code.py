"""The CUDA kernels of a technique, as ptxas spoke of them when its library was compiled: nothing is compiled here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.sources import package_place
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.technique import Technique

LIBRARY = "_library.json"
"""Beside a compiled library: `nvcc`, and by operator and type of device the digest of its `operators`' sources."""
KERNELS = "_kernels.json"
"""Beside it: by function the operator that it is of (`functions`), and what each kernel needs (`kernels`)."""


def library_folder(technique: Technique) -> Path | None:
    """The folder of the compiled library of a technique's package; None if it has none."""
    folder = package_place(technique)
    return folder if (folder / LIBRARY).is_file() else None


def read_library(folder: Path) -> dict[str, Any]:
    """What the two records beside a library hold, together.

    Raises:
        UserError: one of them cannot be read; the library was compiled by an older version, or only in part.
    """
    try:
        found = {k: v for name in (LIBRARY, KERNELS) for k, v in json.loads((folder / name).read_text("utf-8")).items()}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: install the package of this library again ({error})") from error
    if found.get("problem"):
        raise UserError(f"{folder}: {found['problem']}")
    return found


def cuda_sources(folder: Path) -> dict[str, str]:
    """By operator the digest of the sources of a library's CUDA code. Raises as `read_library`."""
    return {name: digests["cuda"] for name, digests in read_library(folder)["operators"].items()}


def find_cuda(folder: Path, arch: str) -> tuple[tuple[Compiled, ...], str]:
    """The kernels that a library holds for an architecture, or why it has none. Raises as `read_library`."""
    library = read_library(folder)
    if not library.get("nvcc"):
        return (), "its library was compiled without nvcc"
    found = tuple(
        Compiled(
            kernel=kernel["name"],
            language="CUDA",
            arch=arch,
            constants={"template": kernel["template"]} if kernel["template"] else {},
            arguments={},
            warps=None,
            case=kernel["operator"],
            bench=True,
            **{name: kernel[name] for name in ("registers", "spill_bytes", "shared_bytes")},
        )
        for kernel in library["kernels"]
        if kernel["arch"] == ARCHITECTURES[arch].target
    )
    held = ", ".join(library["archs"])
    return found, "" if found else f"its library is compiled for {held}; KERNEL_PYTORCH_CUDA_ARCHS names others"
