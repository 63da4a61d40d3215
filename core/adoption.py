"""Defaults that a user adopted on a machine, where `kernel-pytorch adopt` measured them: the file, and who reads it.

The file is data of a fixed schema. What is in it can choose among the levels that a package has, and nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import stat
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

PACKAGE = __name__.rpartition("._core.")[0]
"""Import name of the package whose copy of the core this is."""
COMPILED = "kernel-pytorch-cuda-ops"
TECHNIQUE = PACKAGE.rpartition(".")[2].replace("_", "-")
VARIABLE = "KERNEL_PYTORCH_DEFAULTS"
OFF = "off"
SCHEMA_VERSION = 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
MOST_BYTES = 2**20
"""Size limit of the file: a thousand rows take a third of it."""
LONGEST = 200
"""Length limit of a string in it, in characters."""


@dataclass(frozen=True)
class Row:
    """A level that is faster than native for a function, on one device and in one dtype.

    Attributes:
        package: name of the technique, such as "rmsnorm".
        function: of the package.
        dtype: of the principal tensor, such as "bfloat16".
        level: "triton" or "cuda".
        device_type: "cuda" or "cpu".
        device: as `device_name` gives it.
        version: as `version_of` gives it: of the package, and of the one that has its compiled kernels.
        date: of the measurement, ISO.
        torch: its version then.
        triton: its version then; "" where it was not installed.
        kernels: digest of the sources of the kernels; "" where they are not here.
        speedup: over native in the case that gained least, lower end of the interval.
    """

    package: str
    function: str
    dtype: str
    level: str
    device_type: str
    device: str
    version: str
    date: str
    torch: str
    triton: str
    kernels: str
    speedup: float


def place() -> Path | None:
    """Where the file of this user is; None where `KERNEL_PYTORCH_DEFAULTS` is "off" or empty: there is none."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given in ("", OFF) else Path(os.path.expanduser(given))
    if sys.platform == "win32":
        folder = os.environ.get("APPDATA") or "~/AppData/Roaming"
    elif sys.platform == "darwin":
        folder = os.environ.get("XDG_CONFIG_HOME") or "~/Library/Application Support"
    else:
        folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    # Without a home (a container's user without a name) "~" stays, and there is no such file: no error in users' calls.
    return Path(os.path.expanduser(folder)) / "kernel-pytorch" / "defaults.json"


def read(file: Path) -> tuple[Row, ...]:
    """The rows of a file; none where there is no file.

    Raises:
        ValueError: it cannot be read, or is not of the schema; the message says why and does not name the file.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would wait for ever
            raise ValueError("it is not a regular file")
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict) or found.keys() != {"schema_version", "rows"}:
        raise ValueError("it must be an object with schema_version and rows, and nothing else")
    if found["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {found['schema_version']!r}; this version reads {SCHEMA_VERSION}")
    if not isinstance(found["rows"], list):
        raise ValueError("rows must be a list")
    return tuple(_row(index, each) for index, each in enumerate(found["rows"]))


def _row(index: int, found: Any) -> Row:
    names = [field.name for field in fields(Row)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise ValueError(f"row {index} must have {', '.join(names)}, and nothing else")
    for name, value in found.items():
        kinds = (int, float) if name == "speedup" else (str,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"row {index}: {name} is {value!r}; it must be a {kinds[-1].__name__}")
        # Strings are printed on terminals.
        if isinstance(value, str) and not (value.isprintable() and len(value) <= LONGEST):
            raise ValueError(f"row {index}: {name} must be at most {LONGEST} printable characters")
        if not isinstance(value, str) and not (0 < value <= sys.float_info.max):
            raise ValueError(f"row {index}: {name} must be a positive number")
    for name, allowed in (("dtype", DTYPES), ("level", ("triton", "cuda")), ("device_type", ("cuda", "cpu"))):
        if found[name] not in allowed:
            raise ValueError(f"row {index}: {name} is {found[name]!r}; allowed are {', '.join(allowed)}")
    return Row(**found)


@functools.lru_cache
def version_of(level: str) -> str:
    """What is installed of this package, and at level "cuda" of the one that has its compiled kernels."""
    distributions = [PACKAGE.replace(".", "-").replace("_", "-"), *([COMPILED] if level == "cuda" else [])]
    return ", ".join(f"{each} {_version(each)}" for each in distributions)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from sources"


@functools.lru_cache
def device_name(device: torch.device) -> str:
    """Name of a GPU, or the model of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
