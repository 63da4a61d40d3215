"""Operators of one eager forward on the roofline of a GPU, and the launches in what Inductor writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .costs import GPUS, Gpu
from .internals import fresh_dynamo, inductor_code
from .recorder import Graph
from .records import Finding, Part, mib, microseconds
from .state import call

DEFAULT_GPU = "h100"


def gpu_of(name: str | None) -> tuple[str, Gpu]:
    """The GPU of that name; for None the one that is here, else an H100. "here" measures this machine.

    Raises:
        ValueError: no such GPU is known.
    """
    if name == "here":
        return _measured()
    if name is None and torch.cuda.is_available():
        device = torch.cuda.get_device_name().lower()
        name = next((known for known in GPUS if known in device), None)
    name = name or DEFAULT_GPU
    if name not in GPUS:
        raise ValueError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}, or 'here'")
    return name, GPUS[name]


def _measured() -> tuple[str, Gpu]:
    """The ceilings of this machine, by the harness."""
    from kernel_pytorch.harness.machine import measure_ceilings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device, quick=True)
    copy = max(point.bytes_per_second for point in ceilings.bandwidth)
    return f"this {device.type}", Gpu(
        copy, max(ceilings.matmul_flops_per_second.values()), ceilings.launch_overhead_seconds
    )


def efficiency(g: Graph, name: str, gpu: Gpu) -> Part:
    """FLOPs, bytes, intensity and least time of each kind of operator, the longest first."""
    calls = [n for n in g.nodes if n.cost.launches]
    groups: dict[str, list[Any]] = {}
    for n in calls:
        groups.setdefault(n.name, []).append(n)
    part = Part()
    for kind, nodes in groups.items():
        seconds = sum(n.cost.least_seconds(gpu) for n in nodes)
        flops, moved = sum(n.cost.flops for n in nodes), sum(n.cost.bytes for n in nodes)
        limits = [n.cost.limit(gpu) for n in nodes]
        limit = max(set(limits), key=limits.count)
        evidence = {
            "count": len(nodes), "flops": flops, "bytes": moved, "least_seconds": seconds, "limit": limit,
            "intensity": flops / moved if moved else 0.0,
        }  # fmt: skip
        what = f"{kind}: {len(nodes)} calls, at least {microseconds(seconds)}, bound by {limit}"
        longest = max(nodes, key=lambda n: n.cost.least_seconds(gpu))
        part.findings.append(Finding("operator", what, longest.line, (longest.path,), evidence=evidence))
    part.findings.sort(key=lambda f: -f.evidence["least_seconds"])
    part.facts = {
        "gpu": name,
        "source": gpu.source,
        "operators": len(calls),
        "flops": sum(n.cost.flops for n in calls),
        "bytes": sum(n.cost.bytes for n in calls),
        "least_seconds": sum(f.evidence["least_seconds"] for f in part.findings),
        "summary": "",
    }
    part.facts["summary"] = (
        f"{len(calls)} operators, {part.facts['flops'] / 1e9:.2f} GFLOP, {mib(part.facts['bytes'])} moved; one eager "
        f"forward takes at least {microseconds(part.facts['least_seconds'])} on {name} ({gpu.source})"
    )
    return part


def launches(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[int, int]:
    """(launches, distinct kernels) of one forward compiled by Inductor, counted in its code on the module's device."""
    with fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(module)
        code = inductor_code(lambda: call(compiled, inputs, kwargs))
    found = re.findall(r"^ +(triton_\w+)\.run\(|^ +(cpp_fused\w*)\(", "\n".join(code), re.MULTILINE)
    return len(found), len(set(found))
