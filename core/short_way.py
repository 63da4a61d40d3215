"""The function that calls an operator past the dispatcher where it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call_cache import CallCache
from .call_kinds import has_plain_memory, has_transform, is_watched


class Calls(NamedTuple):
    """An operator, its launcher (of one that a library defines: itself), and what calls it below autograd."""

    operator: Any
    kernel: Callable[..., Any]
    below: Callable[..., Any]


def short_way(
    calls: Calls,
    cache: CallCache,
    plain_graph: Callable[..., Any],
    transformed: Callable[..., Any],
    alike: Callable[..., Callable[..., Any]] | None,
) -> Callable[..., Any]:
    """The function that calls an operator past the dispatcher where it has nothing to do.

    Args:
        calls: the operator.
        cache: what is known of earlier calls.
        plain_graph: computes a call with plain tensors that is to be differentiated.
        transformed: computes a call under a transform of torch.func, or says why it cannot.
        alike: makes of a plan and the arguments of a call what does as `plain_graph` for all that match; None if
            there is nothing faster.
    """
    operator, kernel, _ = calls

    def find(arguments: tuple[Any, ...]) -> Known | None:
        """Look up, or inspect, a call with plain tensors; None if there are others."""
        known: Known | None = cache.lookup(arguments)
        if known is None or known.changed(arguments):
            wanted = False
            for argument in arguments:
                if isinstance(argument, Tensor):
                    if not has_plain_memory(argument):
                        return None
                    wanted = wanted or argument.requires_grad
            known = cache.store(arguments, _look(kernel, arguments, wanted))
        return known

    def run(*arguments: Any) -> Any:
        """Call the operator, the shortest way that is right.

        With a subclass (DTensor, FakeTensor) or a mode (FLOP counter, selective checkpointing) that would bypass what
        the user asked for. Transforms of torch.func go to the autograd function, which says what it cannot do.
        """
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if has_transform():
            return transformed(*arguments)
        if is_watched() or (known := find(arguments)) is None:
            return operator(*arguments)
        return plain_graph(*arguments) if known.wanted and torch.is_grad_enabled() else known.run(*arguments)

    def bound(arguments: tuple[Any, ...], result: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        """`run`, and then `result`, for calls that match this one, where neither is_compiling() nor has_transform()."""
        known = find(arguments)
        if known is None or known.state is not None:
            return run if result is None else lambda *arguments: result(run(*arguments))
        lasting = alike is not None and known.wanted
        graph = _from_second_call(plain_graph, alike, known.run) if lasting else plain_graph
        return _bound(operator, known, graph, result)

    run.operator, run.bound = operator, bound  # type: ignore[attr-defined]
    run.__name__ = run.__qualname__ = operator._schema.name.partition("::")[2]
    return run


def _bound(
    operator: Any, known: Known, graph: Callable[..., Any], result: Callable[[Any], Any] | None
) -> Callable[..., Any]:
    """What computes calls that match a known one: `graph` where a gradient is wanted."""
    launch, wanted, alone = known.run, known.wanted, getattr(known.run, "alone", None)

    def run_alike(*arguments: Any) -> Any:
        if is_watched():
            return operator(*arguments)
        return graph(*arguments) if wanted and torch.is_grad_enabled() else launch(*arguments)

    if result is None:
        return run_alike
    if alone is None:
        return lambda *arguments: result(run_alike(*arguments))

    def run_alone(*arguments: Any) -> Any:
        if (wanted and torch.is_grad_enabled()) or is_watched():
            return result(run_alike(*arguments))
        return alone(*arguments)

    return run_alone


def _from_second_call(plain_graph: Callable[..., Any], alike: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
    """`plain_graph` at first, then what `alike` makes: a class, which takes longer than a call, and may come once."""
    made: list[Callable[..., Any]] = []
    called = False

    def graph(*arguments: Any) -> Any:
        nonlocal called
        if not made and called:
            made.append(alike(launch, arguments))
        called = True
        return made[0](*arguments) if made else plain_graph(*arguments)

    return graph


class Known(NamedTuple):
    """What `run` needs to know of a call with plain tensors, cached for matching calls.

    Attributes:
        run: computes the call.
        wanted: whether a tensor requires a gradient.
        state: reads the global state that `run` depends on, see `planned`; None if there is none.
        value: that state when `run` was made.
    """

    run: Callable[..., Any]
    wanted: bool
    state: Callable[..., Any] | None
    value: Any

    def changed(self, arguments: tuple[Any, ...]) -> bool:
        """Whether that state has changed."""
        return self.state is not None and self.state(*arguments) != self.value


def _look(kernel: Any, arguments: tuple[Any, ...], wanted: bool) -> Known:
    """Inspect a call: `run` is the plan of the launcher, or the launcher itself if it has no plans."""
    launcher = kernel.launcher() if hasattr(kernel, "launcher") else kernel
    if not hasattr(launcher, "planned_for"):
        return Known(launcher, wanted, None, None)
    state = launcher.state
    value = None if state is None else state(*arguments)
    return Known(launcher.planned_for(*arguments), wanted, state, value)
