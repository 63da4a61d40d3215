"""The row of the support table about many devices: the same function on DTensors, and as a module under FSDP2.

The functions here run in every process of a group at once. What they return is gathered, so that it can be held against
what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kernel_pytorch.harness.oracle import Run
from kernel_pytorch.harness.support.subject import Subject, subject_named
from kernel_pytorch.harness.tensors import as_tuple, is_float, leaves, wanting
from kernel_pytorch.harness.verification import Expected


def check_sharded(mesh: Any, technique: str, operation: str, implementation: str) -> None:
    """In a child: hold the subject of these names."""
    device = f"cuda:{torch.cuda.current_device()}" if mesh.device_type == "cuda" else mesh.device_type
    hold_sharded(mesh, subject_named(technique, operation, implementation, device))


def hold_sharded(mesh: Any, subject: Subject) -> None:
    """Data sharded by rows, parameters replicated; then the same with the parameters under `fully_shard`."""
    # An even number: the processes share the caches of torch.compile, which go by the shape of the whole.
    against = subject.expect(rows=2)
    data = [name for name in subject.names if subject.has_rows(name)]
    outputs, gradients = run_sharded(mesh, subject.function, against, dict.fromkeys(data, Shard(0)))
    subject.hold(gather(outputs, gradients), against)
    candidate = run_fully_sharded(mesh, subject.function, against, data, subject.operation.constants)
    if candidate is not None:
        subject.hold(candidate, against)


def run_sharded(
    mesh: Any, function: Callable[..., Any], against: Expected, placements: Mapping[str, Any]
) -> tuple[tuple[DTensor, ...], dict[str, DTensor | None]]:
    """Outputs, and gradients by name, of a function on DTensors; incoming gradients are placed like the outputs.

    The mesh is one-dimensional, the arguments are the same in every process. `placements` are those of arguments by
    name; what is not named is replicated.
    """
    given = zip(against.names, against.arguments, strict=True)
    placed = [distribute(a, mesh, placements.get(n, Replicate())) if isinstance(a, Tensor) else a for n, a in given]
    own = leaves(placed, bool(against.output_gradients))
    outputs = as_tuple(function(*own))
    if not against.output_gradients:
        return outputs, {}
    incoming = [
        distribute(g, mesh, Replicate() if o.placements[0].is_partial() else o.placements[0])
        for g, o in zip(against.output_gradients, outputs, strict=True)
    ]
    wanted = [name for name, a in zip(against.names, own, strict=True) if wanting([a])]
    gradients = torch.autograd.grad(outputs, wanting(own), incoming, allow_unused=True)
    return outputs, dict(zip(wanted, gradients, strict=True))


def distribute(tensor: Tensor, mesh: Any, placement: Any) -> DTensor:
    """A tensor that every process has, as a DTensor; as a pending sum of equal parts if that is the placement."""
    if placement.is_partial():
        return DTensor.from_local(tensor.detach() / mesh.size(), mesh, [placement])
    return distribute_tensor(tensor.detach().clone(), mesh, [placement], src_data_rank=None)  # so nothing is sent


def gather(outputs: Sequence[DTensor], gradients: Mapping[str, DTensor | None]) -> Run:
    """The whole of every tensor, in every process."""
    whole = {name: None if g is None else g.full_tensor() for name, g in gradients.items()}
    return Run(tuple(o.detach().full_tensor() for o in outputs), whole)


class _Module(torch.nn.Module):
    """A function some of whose arguments are parameters of a module."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], parameters: Sequence[str]) -> None:
        super().__init__()
        self._function, self._arguments = function, arguments
        for name in parameters:
            self.register_parameter(name, torch.nn.Parameter(arguments[name].detach().clone()))

    def forward(self, **data: Tensor) -> Any:
        """Call the function with this data."""
        return self._function(*(self._arguments | dict(self.named_parameters()) | data).values())


def run_fully_sharded(
    mesh: Any, function: Callable[..., Any], against: Expected, data: Sequence[str], constants: Sequence[str]
) -> Run | None:
    """The same as a module under `fully_shard`, each process with its share of the rows; None without parameters.

    FSDP averages the gradients of the processes, and the sum is what is returned.
    """
    arguments = dict(zip(against.names, against.arguments, strict=True))
    parameters = [name for name, a in arguments.items() if is_float(a) and name not in (*data, *constants)]
    if not parameters:
        return None
    module = fully_shard(_Module(function, arguments, parameters), mesh=mesh)
    rank, count, backward = mesh.get_local_rank(), mesh.size(), bool(against.output_gradients)
    whole = {name: a for name, a in arguments.items() if isinstance(a, Tensor) and name in data}
    parts = leaves([a.chunk(count)[rank] for a in whole.values()], backward, copy=True)
    own: dict[str, Tensor] = dict(zip(whole, parts, strict=True))
    with torch.set_grad_enabled(backward):
        outputs = as_tuple(module(**own))

    def joined(local: Tensor, like: Tensor) -> Tensor:
        local = local.detach().contiguous()
        shape, stride = like.shape, torch.empty(like.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()

    found = tuple(joined(o, like) for o, like in zip(outputs, against.reference.outputs, strict=True))
    if not backward:
        return Run(found, {})
    torch.autograd.backward(outputs, [g.chunk(count)[rank].clone() for g in against.output_gradients])
    gradients: dict[str, Tensor | None] = dict.fromkeys(constants)
    gradients |= {name: joined(a.grad, whole[name]) for name, a in own.items() if a.grad is not None}
    gradients |= {name: parameter.grad.full_tensor() * count for name, parameter in module.named_parameters()}
    return Run(found, {name: gradients[name] for name in against.names if name in gradients})
