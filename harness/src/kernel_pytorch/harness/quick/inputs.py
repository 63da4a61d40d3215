"""Input sets for quick measurements: copies of the given arguments, rewritten with other values before each sample.

A function that remembers its results is fast on inputs that it has seen, which a model never does.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from kernel_pytorch.harness.errors import said
from kernel_pytorch.harness.oracle import ErrorCheck, Run, failed, in_float64, judge, run
from kernel_pytorch.harness.profiling.events import distinct_bytes, tensor_label

ALIGNMENT = 512
"""Bytes between two copies, as from the CUDA allocator; kernels choose their loads by it."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.75, 1.25
"""Fresh values are the given ones times a factor between these: signs, zeros, infinite masks and order are kept."""

REPEATED = "its inputs have no floating-point value to vary: every call saw the same ones"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a function as a flat list.

    Attributes:
        leaves: tensors and values, in order.
        names: of the leaves, for messages: "argument 0", "scale", "argument 1[0]".
        structure: turns leaves into positional and named arguments again.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, positional: Sequence[Any], named: dict[str, Any] | None = None) -> Arguments:
        """Flatten lists, tuples and dictionaries; a tensor that is given twice stays one tensor."""
        found, structure = tree_flatten_with_path((tuple(positional), named or {}))
        plain = {id(leaf): leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in found}
        return cls(tuple(plain[id(leaf)] for _, leaf in found), tuple(_name(path) for path, _ in found), structure)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other leaves as positional and named arguments."""
        positional, named = tree_unflatten(list(leaves), self.structure)
        return positional, named

    def call(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call a function with other leaves."""
        positional, named = self.unflatten(leaves)
        return function(*positional, **named)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def labels(self) -> tuple[str, ...]:
        """Dtype and shape of each tensor, for tables."""
        return tuple(tensor_label(t.dtype, t.shape) for t in self.tensors)

    @property
    def dtype_name(self) -> str:
        """Dtype of the first floating-point tensor, without the `torch.` prefix."""
        return next((str(t.dtype).removeprefix("torch.") for t in self.tensors if t.is_floating_point()), "none")

    @property
    def device(self) -> torch.device:
        """CUDA if one of the tensors is there, else the CPU."""
        return next((t.device for t in self.tensors if t.device.type == "cuda"), torch.device("cpu"))


class Pool:
    """Copies of the arguments, each in its own memory, with the same strides.

    Floating-point tensors get new values at each `refresh`. Integers and booleans (indices, masks) keep theirs, since
    other values may not be allowed, and so do tensor subclasses and sparse tensors.

    Args:
        arguments: the originals.
        sets: number of copies.
    """

    def __init__(self, arguments: Arguments, sets: int) -> None:
        self._given: list[tuple[Tensor, Tensor]] = []
        self._seed = 0
        copies = {id(leaf): self._copies(leaf, sets) for leaf in {id(t): t for t in arguments.tensors}.values()}
        self.sets = [
            tuple(copies[id(leaf)][index] if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves)
            for index in range(sets)
        ]
        self.varies = any(bool((given != 0).any()) for given, _ in self._given)
        self.refresh()

    def refresh(self) -> None:
        """Write values into all sets that none of them has held before (16-bit tensors of few elements may repeat)."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        for given, memory in self._given:
            # In float32: bfloat16 has so few factors that they would repeat.
            factors = torch.rand(len(memory), 1, generator=generator) * (LARGEST_FACTOR - SMALLEST_FACTOR)
            torch.mul(given, (factors + SMALLEST_FACTOR).to(memory.device), out=memory)

    def write(self, index: int, other: Pool) -> None:
        """Write the values of the first set of another pool of the same arguments into one of these sets."""
        for (_, mine), (_, theirs) in zip(self._given, other._given, strict=True):
            mine[index].copy_(theirs[0])

    def _copies(self, tensor: Tensor, sets: int) -> list[Tensor]:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.numel() == 0:
            return [tensor.clone() for _ in range(sets)]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        given = tensor.as_strided((extent,), (1,))
        padded = math.ceil(extent * tensor.itemsize / ALIGNMENT) * ALIGNMENT // tensor.itemsize
        memory = torch.empty(sets, padded, dtype=tensor.dtype, device=tensor.device)[:, :extent]
        memory.copy_(given.expand(sets, extent))
        if tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
            self._given.append((given.clone(), memory))
        return [memory[index].as_strided(tensor.shape, tensor.stride()) for index in range(sets)]


def touched_bytes(arguments: Arguments, result: Any, function: Callable[..., Any]) -> int:
    """Bytes of the arguments, of a module's own tensors and of the result, each tensor once.

    Tensors in a closure are not counted, and an argument that is read in part is counted whole.
    """
    own = [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    tensors = [t for t in (*arguments.tensors, *own, *outputs) if t.layout == torch.strided]
    distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors}
    return sum(distinct_bytes(t.shape, t.stride(), t.dtype) for t in distinct.values())


def _name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its first key tells positional from named arguments, its second key which of them."""
    start = f"argument {path[1].idx}" if path[0].idx == 0 else path[1].key
    return f"{start}{keystr(path[2:])}"


BUDGET_FACTOR = 4.0
"""The largest that the harness allows: no factor was declared for these implementations."""

Expectation = tuple[Run, Run | None, str]
"""Results of the reference for one set of inputs: in their dtype; in float64, or None and the reason."""


def allowed(expected: Expectation, factors: Iterable[float]) -> str:
    """The allowed error in words, for implementations with these factors."""
    _, truth, reason = expected
    if truth is None:
        return f"the tolerances of torch.testing.assert_close around the reference, because {reason}"
    most = " or ".join(f"{factor:g}" for factor in sorted(set(factors)))
    return f"{most} times the error of the reference itself, against the reference in float64, " \
        "plus one unit in the last place"  # fmt: skip


def expect(reference: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Expectation:
    """Run the reference on these leaves and, if possible, in float64.

    Raises:
        ValueError: it writes into its inputs, so nothing can be compared with it, or returns what cannot be compared.
    """
    found = _observe(reference, arguments, leaves)
    if found.written:
        raise ValueError(f"the reference wrote into {', '.join(found.written)}; give one that leaves its inputs alone")
    try:
        exact = copy.deepcopy(reference).double() if isinstance(reference, torch.nn.Module) else reference
        truth = _observe(exact, arguments, in_float64(leaves))
    except Exception as error:
        return found, None, f"the reference does not run in float64 ({said(error)})"
    reason = _why_no_truth(found.outputs, truth.outputs)
    return found, None if reason else truth, reason


def check(
    function: Callable[..., Any],
    arguments: Arguments,
    leaves: Sequence[Any],
    expected: Expectation,
    factor: float,
    *,
    in_place: bool = False,
) -> list[ErrorCheck]:
    """Run a function and judge its results; one that raises is wrong.

    Args:
        function: the candidate.
        arguments: how it is called.
        leaves: what it is called with.
        expected: the results of the reference for the same leaves.
        factor: how many times the reference's own error is allowed.
        in_place: pass these tensors, not copies, which reveals functions that remember results by address.
    """
    try:
        with torch.no_grad():
            own = Run(_outputs(arguments.call(function, leaves)), {}) if in_place else None
        candidate = own or _observe(function, arguments, leaves)
    except Exception as error:
        return [failed("call", f"raised {said(error)}")]
    reference, truth, _ = expected
    found = judge(candidate, reference, truth or reference, factor)
    if truth is not None:
        return found
    ours, theirs = candidate.quantities(), reference.quantities()
    return [j if math.isinf(j.error_over_budget) else _close(j, ours[j.quantity], theirs[j.quantity]) for j in found]


def problem(error_checks: Sequence[ErrorCheck]) -> str:
    """All that is wrong, empty if nothing is."""
    return "; ".join(f"{j.quantity} {j.message}" for j in error_checks if not j.passed)


def _close(error_check: ErrorCheck, ours: Any, theirs: Any) -> ErrorCheck:
    """The error_check by the tolerances of torch.testing instead of a budget."""
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        message = "is off: " + " ".join(str(error).split())
        return dataclasses.replace(error_check, passed=False, error_over_budget=math.inf, message=message)
    return dataclasses.replace(error_check, passed=True, error_over_budget=0.0, message="")


def _observe(function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Run:
    """The outputs for copies of the leaves, and the names of those that were written into."""
    return run(lambda *own: _outputs(arguments.call(function, own)), arguments.names, leaves)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    """Tensors and numbers of a result, in order."""
    found = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, bool | int | float):
            leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"it returned {type(leaf).__name__}; only tensors and numbers can be compared")
        found.append(leaf.detach())
    if not found:
        raise TypeError("it returned no tensor and no number, so there is nothing to compare")
    return tuple(found)


def _why_no_truth(reference: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> str:
    """Why the results for float64 inputs are no truth, empty if they are one."""
    for theirs, exact in zip(reference, truth, strict=True):
        if not (theirs.is_floating_point() or theirs.is_complex()):
            continue
        if exact.dtype not in (torch.float64, torch.complex128):
            return f"the reference returns {exact.dtype} for float64 inputs"
        if theirs.dtype == exact.dtype:
            return "the inputs are in float64 already"
        if torch.equal(exact, exact.to(theirs.dtype).to(exact.dtype)):
            return f"the reference has no more digits in float64 than in {theirs.dtype}: it is exact, or casts inside"
    return ""
