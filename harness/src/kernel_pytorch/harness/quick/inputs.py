"""Inputs of quick measurements: copies of the given arguments that get other values before each sample, and the truth.

A function that remembers its results is fast on inputs that it has seen, which a model never does.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from kernel_pytorch.harness.errors import said
from kernel_pytorch.harness.oracle import ErrorCheck, Run, failed, in_float64, judge, run
from kernel_pytorch.harness.profiling.events import distinct_bytes, tensor_label

ALIGNMENT = 512
"""Bytes between two copies, as from the CUDA allocator; kernels choose their loads by it."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.75, 1.25
"""Fresh values are the given ones times a factor between these: signs, zeros, infinite masks and order are kept."""


class Arguments:
    """The arguments of a function as a flat list.

    Attributes:
        leaves: tensors and values, in order; a tensor that is given twice is one tensor.
        names: of the leaves, for messages: "argument 0", "scale", "argument 1[0]".
        tensors: those among the leaves.
        labels: dtype and shape of each tensor, for tables.
        device: CUDA if one of the tensors is there, else the CPU.
    """

    def __init__(self, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
        found, self._structure = tree_flatten_with_path((tuple(positional), dict(named)))
        plain = {id(leaf): leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in found}
        self.leaves = tuple(plain[id(leaf)] for _, leaf in found)
        starts = [f"argument {path[1].idx}" if path[0].idx == 0 else path[1].key for path, _ in found]
        self.names = [start + keystr(path[2:]) for start, (path, _) in zip(starts, found, strict=True)]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.labels = tuple(tensor_label(t) for t in self.tensors)
        self.device = next((t.device for t in self.tensors if t.device.type == "cuda"), torch.device("cpu"))

    def bind(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Callable[[], Any]:
        """A call of a function with other leaves."""
        positional, named = tree_unflatten(list(leaves), self._structure)
        return functools.partial(function, *positional, **named)

    def touched_bytes(self, result: Any, function: Callable[..., Any]) -> int:
        """Bytes of the arguments, of a module's own tensors and of the result, each tensor once.

        Tensors in a closure are not counted, and an argument that is read in part is counted whole.
        """
        own = [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []
        tensors = [t for t in (*self.tensors, *own, *tree_leaves(result)) if isinstance(t, Tensor)]
        distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors if t.layout == torch.strided}
        return sum(map(distinct_bytes, distinct.values()))


class Pool:
    """Copies of the arguments, each in its own memory, with the same strides.

    Floating-point tensors get new values at each `refresh`. Integers and booleans (indices, masks) keep theirs, since
    other values may not be allowed, and so do tensor subclasses and sparse tensors.

    Args:
        arguments: the originals.
        sets: number of copies.

    Attributes:
        sets: the leaves of each copy.
        varies: whether any value changes.
    """

    def __init__(self, arguments: Arguments, sets: int) -> None:
        self._given: list[tuple[Tensor, Tensor]] = []
        self._seed = 0
        copies = {id(t): self._copies(t, sets) for t in {id(t): t for t in arguments.tensors}.values()}
        columns = [copies.get(id(leaf), [leaf] * sets) for leaf in arguments.leaves]
        self.sets = [tuple(column[index] for column in columns) for index in range(sets)]
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

    def write(self, other: Pool) -> None:
        """Write the values of the first set of another pool of the same arguments into the first of these."""
        for (_, mine), (_, theirs) in zip(self._given, other._given, strict=True):
            mine[0].copy_(theirs[0])

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


class Expected:
    """The results of the reference for one set of inputs: in their dtype and, where that is more exact, in float64.

    Args:
        reference: the function that defines what is right.
        arguments: how it is called.
        leaves: what it is called with.

    Attributes:
        no_truth: why its results for float64 are no truth; empty if they are.

    Raises:
        ValueError: it writes into its inputs, so nothing can be compared with it.
    """

    def __init__(self, reference: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> None:
        self._arguments, self._leaves, self.no_truth = arguments, leaves, ""
        self._found = self._truth = self._observe(reference, leaves)
        if written := self._found.written:
            raise ValueError(f"the reference wrote into {', '.join(written)}; give one that leaves its inputs alone")
        try:
            exact = copy.deepcopy(reference).double() if isinstance(reference, torch.nn.Module) else reference
            self._truth = self._observe(exact, in_float64(leaves))
        except Exception as error:
            self.no_truth = f"the reference does not run in float64 ({said(error)})"
        else:
            for ours, exactly in zip(self._found.outputs, self._truth.outputs, strict=True):
                inexact = ours.is_floating_point() or ours.is_complex()
                if inexact and torch.equal(exactly, exactly.to(ours.dtype).to(exactly.dtype)):
                    self.no_truth = f"the reference has no more digits in float64 than in {ours.dtype}"
                    self._truth = self._found

    def check(self, function: Callable[..., Any], factor: float, seen: Sequence[Any] | None = None) -> list[ErrorCheck]:
        """Run a function and judge its results; one that raises is wrong.

        Args:
            function: the candidate.
            factor: how many times the reference's own error is allowed.
            seen: tensors with the values of the leaves, to be passed themselves and not as copies, which reveals
                functions that remember results by address.
        """
        try:
            if seen is None:
                candidate = self._observe(function, self._leaves)
            else:
                with torch.no_grad():
                    candidate = Run(_outputs(self._arguments.bind(function, seen)()), {})
        except Exception as error:
            return [failed("call", f"raised {said(error)}")]
        found = judge(candidate, self._found, self._truth, factor)
        ours, theirs = candidate.quantities(), self._found.quantities()
        for place, each in enumerate(found if self.no_truth else ()):
            if math.isfinite(each.error_over_budget):  # else no tolerance makes it right
                over, message = 0.0, ""
                try:
                    torch.testing.assert_close(ours[each.quantity], theirs[each.quantity], equal_nan=True)
                except AssertionError as error:
                    over, message = math.inf, "is off: " + " ".join(str(error).split())
                found[place] = dataclasses.replace(each, passed=not over, error_over_budget=over, message=message)
        return found

    def _observe(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Run:
        """The outputs for copies of the leaves, and the names of those that were written into."""
        return run(lambda *own: _outputs(self._arguments.bind(function, own)()), self._arguments.names, leaves)


def problem(error_checks: Sequence[ErrorCheck]) -> str:
    """All that is wrong, empty if nothing is."""
    return "; ".join(f"{each.quantity} {each.message}" for each in error_checks if not each.passed)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    """Tensors and numbers of a result, in order."""
    found = [torch.tensor(r, dtype=torch.float64) if isinstance(r, float) else r for r in tree_leaves(result)]
    found = [torch.tensor(r) if isinstance(r, bool | int) else r for r in found]
    strangers = [type(r).__name__ for r in found if not isinstance(r, Tensor)]
    if strangers or not found:
        raise TypeError(f"it returned {', '.join(strangers) or 'nothing'}; only tensors and numbers can be compared")
    return tuple(r.detach() for r in found)
