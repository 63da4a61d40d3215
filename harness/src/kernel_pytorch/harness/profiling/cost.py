"""Compulsory bytes and floating-point operations of one recorded call, or the reason why they are unknown."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from kernel_pytorch.harness.machine import TOLERANCE, Ceilings, Machine, attain, faster_than_physics, measure_machine
from kernel_pytorch.harness.profiling.events import Call, distinct_bytes, resolve, tensor_label
from kernel_pytorch.harness.profiling.records import Attainment, Bound, KernelUse, OperatorUse

WRITES_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""Operators whose first argument is written and not read."""

READS_SOME = {"embedding", "index_select", "index", "gather", "take", "take_along_dim", "nll_loss_forward",
              "_unsafe_index", "_embedding_bag", "_embedding_bag_forward_only"}  # fmt: skip
"""Operators that read a part of their first argument, no more than they write."""

WRITES_SOME = {"index_put_", "_index_put_impl_", "_unsafe_index_put", "index_add_", "scatter_", "scatter_add_"}
"""Operators that touch a part of their first argument, no more than the others hold."""

TOO_FAST = (
    "faster than the limit: overcounted, where not all of an input is read or it lay in a nearer cache; or the limit "
    "was measured at a lower clock or on a busy machine"
)

Count = tuple[int | None, str]
"""A number of bytes or FLOPs, None where it is not known; why it is not, or what it leaves out."""


def traffic(call: Call) -> Count:
    """Compulsory bytes of one call: each input read once, each output written once, temporaries left out.

    Outputs are what the call allocated and kept, and what its schema says it writes into. A view moves nothing.
    """
    if call.kind in ("kernel", "host"):
        return None, "not known: no operator launched it"
    if any(t.layout != torch.strided for t in call.tensors):
        return None, "not known: an argument is sparse"
    if call.kind == "function":
        if not call.tensors:
            return None, "not known: the profiler recorded no tensor"
        least = "at least: what it kept from its forward, and what it writes in place, is not recorded"
        return _bytes(call.tensors) + call.allocated, least
    operator, name = resolve(call.name, call.overload), call.name.rpartition("::")[2]
    if "empty" in name:
        return 0, "memory is set aside, not written"
    declared = operator._schema.arguments
    uses = [(i, t) for i, given in enumerate(call.arguments) for t in tree_leaves(given) if isinstance(t, Tensor)]
    writes = [i for i, argument in enumerate(declared) if argument.is_write]
    output = _bytes(t for i, t in uses if i in writes) + call.allocated
    if output == 0 and name in ("_local_scalar_dense", "item"):
        return sum(t.dtype.itemsize for t in call.tensors), ""
    returns_tensor = any("Tensor" in str(value.type) for value in operator._schema.returns)
    if torch.Tag.inplace_view in operator.tags or (output == 0 and returns_tensor):
        return 0, "a view: nothing is moved"
    # An `out=`, or the target of a copy, is written without being read.
    overwritten = [i for i in writes if declared[i].kwarg_only or (i == 0 and name in WRITES_ONLY)]
    read = [t for i, t in uses if i not in overwritten]
    first = sum(distinct_bytes(t) for i, t in uses if i == 0)
    others = [t for i, t in uses if i != 0 and i not in overwritten]
    if name in READS_SOME:
        return output + min(first, output) + _bytes(others), ""
    untouched = max(0, first - sum(map(distinct_bytes, others))) if name in WRITES_SOME and 0 in writes else 0
    return output + _bytes(read) - 2 * untouched, ""


def flops(call: Call) -> Count:
    """Floating-point operations of one call, by the formulas of `torch.utils.flop_counter`."""
    # It imports Triton, which nothing here needs.
    from torch.utils.flop_counter import flop_registry

    operator = resolve(call.name, call.overload) if call.kind == "operator" else None
    if operator is None:
        return None, "not counted: no operator"
    formula = flop_registry.get(operator.overloadpacket)
    if formula is None and "_flash_attention_for_cpu" in call.name:
        # The same product of matrices; torch before 2.15 has no formula for the CPU's operator.
        formula = flop_registry.get(getattr(torch.ops.aten, call.name[len("aten::") :].replace("_for_cpu", "")))
    if formula is None:
        return None, "not counted: torch has no formula for it"
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for declared, value in zip(operator._schema.arguments, call.arguments, strict=False):
        if value is None and declared.has_default_value():
            value = declared.default_value
        if declared.kwarg_only:
            named[declared.name] = value
        else:
            positional.append(value)
    try:  # what it returns, as tensors without memory
        outputs = operator(*positional, **{k: v for k, v in named.items() if k not in ("device", "generator")})
    except Exception:  # an argument that the profiler does not record; most formulas read no output
        outputs = None
    shapes, options = tree_map_only(Tensor, lambda t: t.shape, (positional, named))
    try:
        full = int(formula(*shapes, **options, out_val=outputs))
    except Exception as error:
        return None, f"not counted: the formula failed ({type(error).__name__})"
    given = dict(zip((a.name for a in operator._schema.arguments), call.arguments, strict=False))
    if given.get("is_causal") is not True:
        return full, ""
    # Row i sees the first i + 1 columns; torch's formulas count the whole square.
    rows, columns = given["query"].shape[-2], given["key"].shape[-2]
    square = min(rows, columns)
    seen = square * (square + 1) // 2 + max(0, rows - columns) * columns
    return full * seen // max(rows * columns, 1), "without those that the causal mask leaves out"


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors, each counted once, however often it was given."""
    return sum({id(t): distinct_bytes(t) for t in tensors}.values())


@functools.cache
def local_machine(device: str) -> Machine:
    """This machine with quickly measured ceilings; measured once per process, which takes some seconds."""
    return measure_machine(device, quick=True)


def place(
    moved: int | None, arithmetic: int | None, seconds: float, dtype: torch.dtype | None, ceilings: Ceilings
) -> Attainment:
    """Set one call against the machine's limits.

    `bound` is the longest of these: the bytes at the copy rate, the FLOPs at the matmul rate, or one launch. The limit
    is that of the memory that its own bytes fit in: the operator before it often just wrote its inputs, which
    then lie in the nearest memory that holds them.

    Args:
        moved: compulsory bytes; None if unknown.
        arithmetic: FLOPs; None if not counted.
        seconds: of one call; without any there are no rates.
        dtype: of the principal input.
        ceilings: of the machine.
    """
    if seconds <= 0.0 or (moved is None and arithmetic is None):
        return Attainment()
    dtype_name = str(dtype).removeprefix("torch.")
    found = attain(moved or 0, arithmetic or 0, seconds, ceilings, max(moved or 0, 1), dtype_name)
    rates: dict[str, Any] = {}
    if moved is not None:
        rates |= {"bytes_per_second": found.bytes_per_second, "share_of_copy": found.share_of_copy}
        needed: dict[Bound, float] = {"memory": found.share_of_copy, "compute": found.share_of_matmul or 0.0}
        needed["overhead"] = ceilings.launch_overhead_seconds / seconds
        rates["bound"] = max(needed, key=lambda name: needed[name])
    if arithmetic is not None:
        rates |= {"flops_per_second": found.flops_per_second, "share_of_matmul": found.share_of_matmul}
    if problem := faster_than_physics(found):
        shares = {"memory": found.share_of_peak, "compute": found.share_of_matmul or 0.0}
        rates["above"] = tuple(name for name, share in shares.items() if share > 1.0 + TOLERANCE)
        rates["problem"] = f"{TOO_FAST} ({problem})"
    return Attainment(**rates)


def operator_uses(calls: Iterable[Call], ceilings: Ceilings) -> tuple[OperatorUse, ...]:
    """One row per operator and shapes, the longest first; what took no time is left out."""
    groups: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        shapes = (
            ()
            if call.kind == "host"
            else tuple((t.dtype, t.shape, t.layout == torch.strided and t.stride()) for t in call.tensors)
        )
        # With equal inputs, results may still differ in size: a sum over rows, a sum over columns.
        groups[call.kind, call.name, call.overload, shapes, call.allocated].append(call)
    total = sum(call.seconds for group in groups.values() for call in group)
    rows = [_row(group, total, ceilings) for group in groups.values() if any(call.seconds > 0.0 for call in group)]
    return tuple(sorted(rows, key=lambda row: row.seconds, reverse=True))


def _row(group: list[Call], total: float, ceilings: Ceilings) -> OperatorUse:
    first = group[0]
    seconds = sum(call.seconds for call in group)
    per_call = statistics.median(call.seconds for call in group)
    (moved, bytes_note), (arithmetic, flops_note) = traffic(first), flops(first)
    dtype = next((t.dtype for t in first.tensors if t.is_floating_point() or t.is_complex()), None)
    launches: dict[str, list[float]] = defaultdict(list)
    for name, each in (kernel for call in group for kernel in call.kernels):
        launches[name].append(each)
    kernels = [KernelUse(name=name, calls=len(times), seconds=sum(times)) for name, times in launches.items()]
    return OperatorUse(
        name=f"{first.name}.{first.overload}" if first.overload else first.name,
        kind=first.kind,
        inputs=tuple(map(tensor_label, first.tensors)),
        calls=len(group),
        seconds=seconds,
        seconds_per_call=per_call,
        share=seconds / total,
        bytes=moved,
        bytes_note=bytes_note,
        flops=arithmetic,
        flops_note=flops_note,
        attained=place(moved, arithmetic, per_call, dtype, ceilings),
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.seconds, reverse=True)),
    )
