"""Record of hardware, software and commit of a measurement."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import torch

from kernel_pytorch.harness.clock.sampling import last_level_cache_bytes
from kernel_pytorch.harness.records import Name, Part


class Environment(Part):
    """Everything except the code that a measurement depends on.

    Attributes:
        python: version.
        torch: version, with its local part ("2.11.0+cu130").
        triton: version; None where it is not installed.
        cuda: version that torch was built with; None for a build without.
        driver: version of the NVIDIA driver; None if unknown.
        device_type: "cpu" or "cuda".
        device_name: of the GPU, or the model of the processor.
        compute_capability: "9.0"; None on a CPU.
        multiprocessors: of the GPU; None on a CPU.
        last_level_cache_bytes: L2 of a GPU; on a CPU all last-level caches that the process may use; None if unknown.
        memory_bytes: of the device.
        cpu_model: the host's processor.
        logical_cpus: of the host.
        torch_threads: that torch uses within one operator.
        float32_matmul_precision: torch's switch; "highest" means that tf32 is off.
        operating_system: name and version of the kernel and of the C library.
        commit: hash of the checkout that the working directory lies in; None outside one.
        dirty: whether that checkout holds uncommitted changes; None outside one.
        triton_interpret: whether Triton kernels run in the interpreter.
    """

    python: str
    torch: str
    triton: str | None
    cuda: str | None
    driver: str | None
    device_type: Literal["cpu", "cuda"]
    device_name: Name
    compute_capability: str | None
    multiprocessors: int | None
    last_level_cache_bytes: int | None
    memory_bytes: int
    cpu_model: Name
    logical_cpus: int
    torch_threads: int
    float32_matmul_precision: str
    operating_system: str
    commit: str | None
    dirty: bool | None
    triton_interpret: bool

    @property
    def slug(self) -> str:
        """Folder name for results of this device: "nvidia-h200", "amd-epyc-2-threads"."""
        name = re.sub(r"\((r|tm|c)\)|\bcpu\b|\bprocessor\b|@.*", " ", self.device_name.lower())
        if self.device_type == "cpu":
            name = f"{name} {self.torch_threads} thread{'s' if self.torch_threads != 1 else ''}"
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def describe_environment(device: torch.device | str) -> Environment:
    """Record the environment of `device`. Raises ValueError naming the device if it is neither CPU nor CUDA."""
    device = torch.device(device)
    commit, dirty = _checkout()
    cpu_model = _cpu_model()
    common = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed_version("triton"),
        "cuda": torch.version.cuda,
        "device_type": device.type,
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "memory_bytes": memory_bytes(device),
        "cpu_model": cpu_model,
        "logical_cpus": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "operating_system": platform.platform(),
        "commit": commit,
        "dirty": dirty,
        "triton_interpret": os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"},
    }
    own: dict[str, object] = {
        "driver": None,
        "device_name": cpu_model,
        "compute_capability": None,
        "multiprocessors": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        own = {
            "driver": driver.splitlines()[0].strip() if driver else None,
            "device_name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
    return Environment.model_validate(common | own)


def now() -> str:
    """The time in UTC, as records have it: ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def memory_bytes(device: torch.device) -> int:
    """Bytes of the memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name[^:\n]*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _checkout() -> tuple[str | None, bool | None]:
    """Hash of HEAD and whether anything is uncommitted; (None, None) outside a checkout or before its first commit."""
    commit = _output_of("git", "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    changes = _output_of("git", "status", "--porcelain")
    return commit.strip(), None if changes is None else bool(changes.strip())


def _output_of(program: str, *arguments: str) -> str | None:
    """Return the output of a program; None if it is absent or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        finished = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout
