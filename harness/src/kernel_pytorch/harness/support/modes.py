"""Rows of the support table about what PyTorch lays around a call: modes, checkpoints, graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.harness.clock.capture import captured, waiting_is_an_error
from kernel_pytorch.harness.oracle import Run
from kernel_pytorch.harness.support.subject import Subject, tensors
from kernel_pytorch.harness.verification import expect_for

NAMESPACES = ("kernel_pytorch", "kernel_pytorch_cuda", "kernel_pytorch_native")
OURS = " or ".join(f"torch.ops.{namespace}" for namespace in NAMESPACES)
AUTOCAST_DTYPE = torch.float16
"""Not bfloat16, which Triton's interpreter cannot compute; a mode casts to either in the same way."""


def check_opcheck(subject: Subject) -> None:
    """`torch.library.opcheck` of every operator of ours that a call and any backward reach, on what reaches it."""
    with _Calls() as reached:
        against = subject.expect()
        own = subject.leaves(against.arguments)
        _gradients(tensors(subject.function(*own)), own, against.output_gradients)
    assert reached.calls, f"reaches no operator in {OURS}: there is nothing to check"
    for operator, arguments, keywords in reached.calls:
        torch.library.opcheck(operator, arguments, keywords)
        _check_fake_strides(operator, arguments, keywords)


def _check_fake_strides(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A fake has the strides of what is really returned; `opcheck` of torch 2.10 does not look at them."""
    with torch.no_grad():
        real = tensors(operator(*arguments, **keywords))
        with FakeTensorMode() as mode:
            own = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            named = {k: mode.from_tensor(a) if isinstance(a, Tensor) else a for k, a in keywords.items()}
            fake = tensors(operator(*own, **named))
    for position, (a, b) in enumerate(zip(fake, real, strict=True)):
        told, true = ([s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (a, b))
        assert told == true, (
            f"{operator}: output {position} of its fake has strides {a.stride()}, in truth {b.stride()}"
        )


def check_autocast(subject: Subject) -> None:
    """Under autocast outputs and gradients have the dtypes that the reference gives there, and are right.

    Once with everything in float32, and once with the data in half precision: what a product before it left behind.
    """
    for dtype in (torch.float32, AUTOCAST_DTYPE):
        arguments = [
            a.to(dtype) if subject.has_rows(name) and a.is_floating_point() else a
            for name, a in zip(subject.names, subject.arguments(), strict=True)
        ]
        with _autocast(subject):
            # What autocast makes of the arguments, and so the dtype of the result, is up to the public function.
            against = expect_for(subject.operation, arguments, subject.device, public=True)

        def call(*own: Any) -> Any:
            with _autocast(subject):
                return subject.function(*own)

        subject.hold(subject.run(call, against), against)


def _autocast(subject: Subject) -> torch.autocast:
    return torch.autocast(subject.device.type, AUTOCAST_DTYPE)


def check_cuda_graphs(subject: Subject) -> None:
    """A forward and any backward, captured once, are right on what is copied into their inputs later."""
    first, later = subject.expect(), subject.expect(seed=1)
    own = subject.leaves(first.arguments)
    incoming = [g.clone() for g in first.output_gradients]

    def call() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = tensors(subject.function(*own))
        return outputs, _gradients(outputs, own, incoming)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what compiles or allocates once does so before the capture
            call()
        with waiting_is_an_error():
            call()
        graph = torch.cuda.CUDAGraph()
        with captured(graph, stream):
            outputs, gradients = call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for a, b in zip([*own, *incoming], [*later.arguments, *later.output_gradients], strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                a.copy_(b)
    graph.replay()
    named = [n for n, a in zip(subject.names, own, strict=True) if isinstance(a, Tensor) and a.requires_grad]
    found = dict.fromkeys(subject.operation.constants) | dict(zip(named, gradients, strict=True))
    subject.hold(Run(tuple(o.detach() for o in outputs), found), later)


def check_selective_checkpointing(subject: Subject) -> None:
    """A policy sees the operators that a call is made of; gradients are right whether it keeps none of them or one."""
    seen: dict[Any, None] = {}
    subject.run(subject.function, subject.expect())  # a first call that compiles would show the policy how it does
    _hold_checkpointed(subject, seen, keep=())
    assert seen, "the policy sees no operator, so it has nothing to choose from"
    ours = [operator for operator in seen if operator.namespace in NAMESPACES]
    _hold_checkpointed(subject, seen, keep=ours or [next(iter(seen))])


def _hold_checkpointed(subject: Subject, seen: dict[Any, None], keep: Sequence[Any]) -> None:
    """Gradients under a policy that keeps these operators, and notes which there are."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not context.is_recompute:
            seen[operator] = None
        return CheckpointPolicy.MUST_SAVE if operator in keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    call = partial(checkpoint, subject.function, use_reentrant=False, context_fn=contexts)
    subject.hold(subject.run(call, subject.expect()), subject.expect())


def check_flop_counter(subject: Subject) -> None:
    """`FlopCounterMode` counts something in the forward, and something more in the backward if there is one."""
    from torch.utils.flop_counter import FlopCounterMode

    against = subject.expect()
    own = subject.leaves(against.arguments)
    with FlopCounterMode(display=False) as counter:
        outputs = tensors(subject.function(*own))
        forward = counter.get_total_flops()
        _gradients(outputs, own, against.output_gradients)
    assert forward > 0, "0 operations are counted in the forward"
    if not subject.operation.differentiable:
        return
    assert counter.get_total_flops() > forward, "0 operations are counted in the backward"


def _gradients(outputs: Sequence[Tensor], arguments: list[Any], incoming: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the arguments that require them; none without incoming gradients."""
    wanted = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    return torch.autograd.grad(outputs, wanted, incoming) if incoming else ()


class _Calls(TorchDispatchMode):
    """Notes every call of an operator of ours: which, and on what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in NAMESPACES:
            self.calls.append((func, tuple(map(_copy, args)), {k: _copy(v) for k, v in kwargs.items()}))
        return func(*args, **kwargs)


def _copy(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)
