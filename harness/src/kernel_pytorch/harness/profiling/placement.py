"""Operators on the roofline: calls grouped by shape, as shares of the machine's measured limits."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from typing import Literal

import torch

from kernel_pytorch.harness.machine import Ceilings, Machine, measure_machine
from kernel_pytorch.harness.profiling.cost import flops, principal_dtype, traffic
from kernel_pytorch.harness.profiling.events import Call
from kernel_pytorch.harness.profiling.records import Attainment, Bound, KernelUse, OperatorUse
from kernel_pytorch.harness.roofline import TOLERANCE, attain, ceiling_for, faster_than_physics

TOO_FAST = (
    "faster than the limit: overcounted, where not all of an input is read or it lay in a nearer cache; or the limit "
    "was measured at a lower clock or on a busy machine"
)


@functools.cache
def local_machine(device: str) -> Machine:
    """This machine with quickly measured ceilings; measured once per process, which takes some seconds."""
    return measure_machine(device, quick=True)


def operator_uses(calls: Iterable[Call], ceilings: Ceilings) -> tuple[OperatorUse, ...]:
    """One row per operator and shapes, the longest first; what took no time is left out."""
    groups: dict[object, list[Call]] = {}
    for call in calls:
        shapes = () if call.kind == "host" else tuple((t.dtype, t.shape, t.strides) for t in call.tensors)
        # With equal inputs, results may still differ in size: a sum over rows, a sum over columns.
        groups.setdefault((call.kind, call.name, call.overload, shapes, call.allocated), []).append(call)
    total = sum(call.seconds for group in groups.values() for call in group)
    rows = [_row(group, total, ceilings) for group in groups.values() if any(call.seconds > 0.0 for call in group)]
    return tuple(sorted(rows, key=lambda row: row.seconds, reverse=True))


def place(
    moved: int | None, arithmetic: int | None, seconds: float, dtype: torch.dtype | None, ceilings: Ceilings
) -> Attainment:
    """Set one call against the machine's limits.

    The limit is that of the memory that its own bytes fit in: the operator before it often just wrote its inputs, which
    then lie in the nearest memory that holds them.

    Args:
        moved: compulsory bytes; None if unknown.
        arithmetic: FLOPs; None if not counted.
        seconds: of one call.
        dtype: of the principal input.
        ceilings: of the machine.
    """
    if moved is None and arithmetic is None:
        return Attainment()
    dtype_name = str(dtype).removeprefix("torch.")
    attained = attain(moved or 0, arithmetic or 0, seconds, ceilings, max(moved or 0, 1), dtype_name)
    problem = faster_than_physics(attained)
    shares: dict[Literal["memory", "compute"], float] = {
        "memory": attained.share_of_peak,
        "compute": attained.share_of_matmul or 0.0,
    }
    return Attainment(
        bytes_per_second=None if moved is None else attained.bytes_per_second,
        share_of_copy=None if moved is None else attained.share_of_copy,
        flops_per_second=None if arithmetic is None else attained.flops_per_second,
        share_of_matmul=None if arithmetic is None else attained.share_of_matmul,
        bound=None if moved is None else _bound(moved, arithmetic or 0, dtype_name, ceilings),
        above=tuple(name for name, share in shares.items() if problem and share > 1.0 + TOLERANCE),
        problem=f"{TOO_FAST} ({problem})" if problem else "",
    )


def _bound(moved: int, arithmetic: int, dtype_name: str, ceilings: Ceilings) -> Bound:
    """The longest of these: the bytes at the copy rate, the FLOPs at the matmul rate, or one launch."""
    matmul = ceilings.matmul_flops_per_second.get(dtype_name)
    limits: dict[Bound, float] = {
        "memory": moved / ceiling_for(ceilings, max(moved, 1)).bytes_per_second,
        "compute": arithmetic / matmul if matmul else 0.0,
        "overhead": ceilings.launch_overhead_seconds,
    }
    return max(limits, key=lambda name: limits[name])


def _row(group: list[Call], total: float, ceilings: Ceilings) -> OperatorUse:
    first = group[0]
    seconds = sum(call.seconds for call in group)
    per_call = statistics.median(call.seconds for call in group)
    moved, arithmetic = traffic(first), flops(first)
    placed = Attainment()
    if per_call > 0.0:
        placed = place(moved.value, arithmetic.value, per_call, principal_dtype(first), ceilings)
    return OperatorUse(
        name=f"{first.name}.{first.overload}" if first.overload else first.name,
        kind=first.kind,
        inputs=tuple(tensor.label for tensor in first.tensors),
        calls=len(group),
        seconds=seconds,
        seconds_per_call=per_call,
        share=seconds / total,
        bytes=moved.value,
        bytes_note=moved.note,
        flops=arithmetic.value,
        flops_note=arithmetic.note,
        attained=placed,
        kernels=_kernels(group),
    )


def _kernels(group: list[Call]) -> tuple[KernelUse, ...]:
    found: dict[str, list[float]] = {}
    for call in group:
        for name, seconds in call.kernels:
            found.setdefault(name, []).append(seconds)
    uses = [KernelUse(name=name, calls=len(times), seconds=sum(times)) for name, times in found.items()]
    return tuple(sorted(uses, key=lambda use: use.seconds, reverse=True))
