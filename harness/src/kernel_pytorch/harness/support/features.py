"""What the rows of the support table ask; sharded.py has what two processes do for one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.checks import Skipped, check_deterministic, check_rows_independent, check_second_derivatives
from kernel_pytorch.harness.clock.cuda import graph_of
from kernel_pytorch.harness.isolation import Announce
from kernel_pytorch.harness.oracle import Run
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.support.subject import Shared, Subject, absence, declared_no, subject_named
from kernel_pytorch.harness.tensors import EveryCall, as_tuple, leaves, wanting
from kernel_pytorch.harness.verification import expect_for

GPU_ROWS = 64
"""How many times as many rows a GPU gets: few rows give its atomic additions too little to do to change their order."""
AOTINDUCTOR = "AOTInductor"


def check_fullgraph(subject: Subject) -> None:
    """A caller is captured with its backward in one graph (`fullgraph=True`), and what that computes is right.

    The graph runs uncompiled; `check_dynamic_shapes` tests TorchInductor's code.
    """
    against = subject.expect()
    subject.hold(subject.run(_compile_caller(subject, backend="aot_eager"), against), against)


def check_dynamic_shapes(subject: Subject) -> None:
    """Compiled with `dynamic=True`, another number of rows needs no other graph, and is right too."""
    compiled = _compile_caller(subject, dynamic=True)
    subject.hold(subject.run(compiled, subject.expect()), subject.expect())
    with torch._dynamo.config.patch(error_on_recompile=True):
        subject.hold(subject.run(compiled, subject.expect(rows=2)), subject.expect(rows=2))


def _compile_caller(subject: Subject, **options: Any) -> Callable[..., Any]:
    """A compiled function that calls the implementation, as a network does."""
    function = subject.function
    return torch.compile(lambda *arguments: function(*arguments), fullgraph=True, **options)


def check_export(subject: Subject) -> None:
    """`torch.export` with a dynamic number of rows; what it exports is right at another number."""
    outputs = _export([subject]).module()(*_inputs([subject], rows=2))
    subject.hold(Run(tuple(outputs[0]), {}), subject.expect(rows=2))


def check_aotinductor(subject: Subject) -> None:
    """The exported program, compiled into a library and loaded again, is right at both numbers of rows.

    The compiler takes most of the time to read headers, so all implementations of a technique go into one library; if
    that fails, each gets its own. Libraries are loaded in another process where there is one. On a GPU that process
    first loads the library of a sum: if that fails, nothing of ours has been tested.

    Raises:
        Skipped: not even the sum can be loaded here.
    """
    shared, worker = subject.shared, subject.shared.worker
    if worker is not None and shared.device.type == "cuda":
        device = str(shared.device)
        reason = shared.once_for_all(f"{AOTINDUCTOR} sum", lambda: worker.call(_load_a_sum, device).failure)
        if reason:
            raise Skipped(f"this torch cannot load what AOTInductor makes here, not even of a sum: {reason}")

    def together() -> dict[str, str]:
        every = [Subject(shared, o, i) for o in shared.technique.operations for i in o.implementations]
        try:
            return _package(shared, [s for s in every if declared_no(s, AOTINDUCTOR) is None and absence(s) is None])
        except Exception:  # the one that failed fails again when it is tested alone
            return {}

    wrong = shared.once_for_all(AOTINDUCTOR, together).get(subject.label)
    if wrong is None:
        wrong = _package(shared, [subject])[subject.label]
    assert not wrong, wrong


def _package(shared: Shared, subjects: Sequence[Subject]) -> dict[str, str]:
    """The error of each of them, compiled into one library; empty for what is right."""
    if shared.worker is None:
        return _hold_packaged(subjects)
    names = [(subject.operation.name, subject.implementation.name) for subject in subjects]
    outcome = shared.worker.call(_hold_packaged_apart, shared.technique.name, names, str(shared.device))
    assert not outcome.failure, outcome.failure
    return dict(outcome.value)


def _hold_packaged_apart(
    technique: str, names: list[tuple[str, str]], device: str, announce: Announce
) -> dict[str, str]:
    return _hold_packaged([subject_named(technique, *each, device) for each in names])


def _hold_packaged(subjects: Sequence[Subject]) -> dict[str, str]:
    wrong = {subject.label: "" for subject in subjects}
    with _loaded(_export(subjects)) as loaded:
        for rows in (1, 2):
            for subject, outputs in zip(subjects, loaded(*_inputs(subjects, rows)), strict=True):
                try:
                    subject.hold(Run(tuple(outputs), {}), subject.expect(rows))
                except AssertionError as error:
                    wrong[subject.label] = str(error)
    return wrong


def _load_a_sum(device: str, announce: Announce) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    x = torch.ones(4, device=device)
    with _loaded(torch.export.export(Sum(), (x,))) as loaded:
        loaded(x)


@contextlib.contextmanager
def _loaded(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """Compile a program with AOTInductor and load the library."""
    with scratch_folder() as folder:
        target = str(Path(folder) / "package.pt2")
        yield torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=target))


def _inputs(subjects: Sequence[Subject], rows: int = 1) -> tuple[Tensor, ...]:
    """The inputs of an exported program of these subjects: the tensors of each operation once, in order."""
    operations = {subject.operation.name: subject for subject in subjects}
    return tuple(a for s in operations.values() for a in s.expect(rows).arguments if isinstance(a, Tensor))


def _export(subjects: Sequence[Subject]) -> torch.export.ExportedProgram:
    """Export a program that gives the outputs of each subject, with a dynamic number of rows for each operation."""
    operations = {subject.operation.name: subject for subject in subjects}
    functions = [(subject.operation.name, subject.function) for subject in subjects]

    class Exported(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
            rest = iter(inputs)
            own = {
                name: [next(rest) if isinstance(a, Tensor) else a for a in subject.expect().arguments]
                for name, subject in operations.items()
            }
            return [as_tuple(function(*own[name])) for name, function in functions]

    shapes = []
    for name, subject in operations.items():
        rows = torch.export.Dim(f"rows_of_{name}", min=2)
        given = zip(subject.names, subject.expect().arguments, strict=True)
        shapes += [{0: rows} if subject.has_rows(each) else None for each, a in given if isinstance(a, Tensor)]
    return torch.export.export(Exported(), _inputs(subjects), dynamic_shapes={"inputs": tuple(shapes)})


NAMESPACES = ("kernel_pytorch", "kernel_pytorch_cuda", "kernel_pytorch_native")
OURS = " or ".join(f"torch.ops.{namespace}" for namespace in NAMESPACES)
AUTOCAST_DTYPE = torch.float16
"""Not bfloat16, which Triton's interpreter cannot compute; a mode casts to either in the same way."""


def check_opcheck(subject: Subject) -> None:
    """`torch.library.opcheck` of every operator of ours that a call and any backward reach, on what reaches it."""
    reached: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if operator.namespace in NAMESPACES:
            reached.append((operator, *tree_map_only(Tensor, copy, (arguments, keywords))))

    def copy(argument: Tensor) -> Tensor:
        return argument.detach().clone().requires_grad_(argument.requires_grad)

    with EveryCall(note):
        against = subject.expect()
        own = subject.leaves(against.arguments)
        _gradients(as_tuple(subject.function(*own)), own, against.output_gradients)
    assert reached, f"reaches no operator in {OURS}: there is nothing to check"
    for operator, arguments, keywords in reached:
        torch.library.opcheck(operator, arguments, keywords)
        _check_fake_strides(operator, arguments, keywords)


def _check_fake_strides(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A fake has the strides of what is really returned; `opcheck` of torch 2.10 does not look at them."""
    with torch.no_grad():
        real = as_tuple(operator(*arguments, **keywords))
        with FakeTensorMode() as mode:
            own, named = tree_map_only(Tensor, mode.from_tensor, (arguments, keywords))
            fake = as_tuple(operator(*own, **named))
    for position, (a, b) in enumerate(zip(fake, real, strict=True)):
        told, true = ([s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (a, b))
        assert told == true, (
            f"{operator}: output {position} of its fake has strides {a.stride()}, in truth {b.stride()}"
        )


def check_autocast(subject: Subject) -> None:
    """Under autocast outputs and gradients have the dtypes that the reference gives there, and are right.

    Once with everything in float32, and once with the data in half precision, as matrix products leave it.
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
        outputs = as_tuple(subject.function(*own))
        return outputs, _gradients(outputs, own, incoming)

    graph, (outputs, gradients) = graph_of(call)
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
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen: dict[Any, None] = {}
    keep: list[Any] = []

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not context.is_recompute:
            seen[operator] = None
        return CheckpointPolicy.MUST_SAVE if operator in keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    call = partial(checkpoint, subject.function, use_reentrant=False, context_fn=contexts)
    against = subject.expect()
    subject.run(subject.function, against)  # so that the policy does not see the operators of a compiler
    subject.hold(subject.run(call, against), against)
    assert seen, "the policy sees no operator, so it has nothing to choose from"
    keep += [operator for operator in seen if operator.namespace in NAMESPACES] or [next(iter(seen))]
    subject.hold(subject.run(call, against), against)


def check_flop_counter(subject: Subject) -> None:
    """`FlopCounterMode` counts something in the forward, and something more in the backward if there is one."""
    from torch.utils.flop_counter import FlopCounterMode

    against = subject.expect()
    own = subject.leaves(against.arguments)
    with FlopCounterMode(display=False) as counter:
        outputs = as_tuple(subject.function(*own))
        forward = counter.get_total_flops()
        _gradients(outputs, own, against.output_gradients)
    assert forward > 0, "0 operations are counted in the forward"
    counted = counter.get_total_flops() > forward
    assert counted or not subject.operation.differentiable, "0 operations are counted in the backward"


def check_double_backward(subject: Subject) -> None:
    """`gradcheck` and `gradgradcheck` in float64, along random directions."""
    check_second_derivatives(*subject.bound(subject.arguments()), fast=True)


def check_determinism(subject: Subject) -> None:
    """The same call gives the same bits again, outputs and gradients."""
    backward = subject.operation.differentiable
    # What is for inference may be for few rows alone.
    rows = GPU_ROWS if subject.device.type == "cuda" and backward else 1
    check_deterministic(*subject.bound(subject.arguments(rows)), backward=backward)


def check_batch_invariance(subject: Subject) -> None:
    """A row alone, or in a smaller batch, has the bits that it has in the whole batch; so has its gradient."""
    data = [subject.has_rows(name) for name in subject.names]
    arguments = leaves(subject.arguments(), [has_rows and subject.operation.differentiable for has_rows in data])
    torch._dynamo.reset()
    check_rows_independent(subject.function, arguments, data=data)


def check_sharded(subject: Subject) -> None:
    """DTensors sharded by rows, and `fully_shard`: two processes compute what one does."""
    # Importing DTensor takes half a second, and only this row needs it.
    from kernel_pytorch.harness.support.sharded import check_sharded

    processes = subject.shared.processes
    assert processes is not None
    processes.call(check_sharded, subject.shared.technique.name, subject.operation.name, subject.implementation.name)


def _gradients(outputs: Sequence[Tensor], arguments: list[Any], incoming: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the arguments that require them; none without incoming gradients."""
    return torch.autograd.grad(outputs, wanting(arguments), incoming) if incoming else ()
