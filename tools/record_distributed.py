"""Time training steps of a model on several devices, stock and patched, and record them for the page of the guide.

    torchrun --nproc-per-node=2 tools/record_distributed.py [--out FILE] [STRATEGY ...]    in the environment of
                                                                                           `nox -s models`

Stock and patched take turns. On GPUs the record also has the peak memory of a rank, and how much of the time of its
communication other kernels ran too. On CPUs a small model shows that all of it works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kernel_pytorch.compile_recipes import patch
from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.models.works import find_work, prepare
from kernel_pytorch.harness.models.zoo import find_model
from kernel_pytorch.models import distributed

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
STRATEGIES: dict[str, Callable[[Any, DeviceMesh], distributed.Parallelized]] = {
    "ddp": distributed.data_parallel,
    "fsdp": distributed.fully_sharded,
    "tp": distributed.tensor_parallel,
    "tp, sequence": lambda model, mesh: distributed.tensor_parallel(model, mesh, sequence_parallel=True),
}
ROUNDS = 15


def training_step(name: str, mesh: DeviceMesh, patched: bool) -> Callable[[], torch.Tensor]:
    """A step of a new model: forward, backward, AdamW. Ranks that divide layers read the same batch."""
    spec, work = find_model("llama"), find_work("training")
    spec = spec if HAS_GPU else spec.as_tiny()
    torch.manual_seed(0)
    model = prepare(work, spec.build(), DEVICE)
    if patched:
        patch(model)
    model = STRATEGIES[name](model, mesh).model
    groups = [{"params": kind} for kind in distributed.parameter_kinds(model)]
    optimizer = torch.optim.AdamW(groups, 1e-4, fused=True)
    inputs = spec.inputs(work.shape(spec), DEVICE)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of one step that all ranks begin together."""
    dist.barrier()
    wait()
    begin = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begin


def wait() -> None:
    """Wait until the device is done."""
    if HAS_GPU:
        torch.cuda.synchronize()


def measure(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Seconds of both steps, their ratio, their losses; on GPUs communication and memory."""
    steps, found = {}, {}
    for variant in ("stock", "patched"):
        steps[variant] = training_step(name, mesh, variant == "patched")
        losses = [float(steps[variant]()) for _ in range(3)]  # kernels are compiled in the first
        found[variant] = {"losses": losses, **(costs(steps[variant]) if HAS_GPU else {})}
    took: dict[str, list[float]] = {variant: [] for variant in steps}
    for index in range(ROUNDS):
        for variant in sorted(steps, reverse=index % 2 == 1):
            took[variant].append(seconds_of(steps[variant]))
    speedup = compare_paired(took["stock"], took["patched"]).speedup
    for variant, seconds in took.items():
        found[variant]["seconds"] = statistics.median(seconds)
    return {**found, "speedup": f"{speedup.median:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"}


def costs(step: Callable[[], object]) -> dict[str, float]:
    """Peak memory in bytes, other models included; seconds of NCCL's kernels, and the share that others overlap."""
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds_of(step)
    kernels = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    sends = union((e.time_range.start, e.time_range.end) for e in kernels if "nccl" in e.name.lower())
    others = union((e.time_range.start, e.time_range.end) for e in kernels if "nccl" not in e.name.lower())
    sent = sum(end - start for start, end in sends)
    both = sum(max(0.0, min(e, end) - max(s, start)) for s, e in sends for start, end in others)
    peak = float(torch.cuda.max_memory_allocated())
    return {"peak": peak, "communication": sent * 1e-6, "overlapped": both / sent if sent else 1.0}


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without their overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def main() -> None:
    """Measure the strategies one after another; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("strategies", nargs="*", default=[*STRATEGIES], metavar="STRATEGY", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("distributed.json"), help="default: %(default)s")
    options = parser.parse_args()
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    found: dict[str, Any] = {
        "device": describe_environment(DEVICE.type).device_name, "ranks": mesh.size(), "torch": torch.__version__,
        "transformers": transformers.__version__, "strategies": {},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }  # fmt: skip
    for name in options.strategies:
        found["strategies"][name] = measure(name, mesh)
        if mesh.get_rank() == 0:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {found['strategies'][name]['speedup']} of stock; in {options.out}", flush=True)
        if HAS_GPU:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
