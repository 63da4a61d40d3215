"""The two methods of an autograd function: what it saves, and how the gradient of an operator gets what it asks for."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import getter

WHOLE = ("needs", "dtypes", "saved")
KINDS = ("gradient", "input", "output", "scalar", "held", *WHOLE)

# Private names of PyTorch.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def asks(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a gradient, or a `save`, that takes `*given` ask for these names."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return mark


def autograd_rules(
    schema: Any,
    gradient: Callable[..., Any],
    save: Callable[..., tuple[Tensor | None, ...]] | None,
    follows: Mapping[str, Sequence[str]],
    held: Sequence[str],
    alike: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """`setup_context` and `backward`, by the names that `gradient` and `save` ask for.

    Given the arguments of a call last, the rules are for calls of the same scalars and dtypes: no graph stores those.
    """
    inputs, tensors, outputs, of_kind, ordered = _places(schema, gradient, held)
    saved = () if save is None else inspect.signature(save).parameters
    save_plan = [_asked(name, inputs, outputs, tensors, schema.name) for name in saved]
    followed, save_in, save_out, hold = (of_kind[kind] for kind in ("gradient", "input", "output", "held"))
    hidden = [place for place in range(len(outputs)) if place not in followed]
    made_of = {outputs.index(name): [inputs.index(source) for source in of] for name, of in follows.items()}
    take_in, take_out, take_scalars, take_tensors = map(getter, (save_in, save_out, of_kind["scalar"], tensors))
    take_held, take_hidden = getter(hold), getter(hidden)

    def constants(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.dtype | None]]:
        return take_scalars(arguments), [None if t is None else t.dtype for t in take_tensors(arguments)]

    known = None if alike is None else constants(alike)

    def setup_context(ctx: Any, arguments: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        more = () if save is None else save(*[(results if k == "output" else arguments)[i] for k, i in save_plan])
        ctx.save_for_backward(*take_in(arguments), *take_out(results), *more)
        still = [results[o] for o, of in made_of.items() if _is_constant(of, arguments, ctx.needs_input_grad)]
        if hidden or still:
            ctx.mark_non_differentiable(*take_hidden(results), *still)
        ctx.set_materialize_grads(False)  # an unused output's gradient is None, not zeros to be read
        if known is None:
            ctx.constants = constants(arguments)
        if hold:
            ctx.held, ctx.readers = list(take_held(results)), []

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradients[i] is None for i in followed):
            return (None,) * len(inputs)
        if not hold:
            return in_order(ctx, gradients, [])
        with _held(ctx, schema.name) as held:
            return in_order(ctx, gradients, held)

    def in_order(ctx: Any, gradients: Sequence[Tensor | None], held: list[Tensor]) -> tuple[Tensor | None, ...]:
        kept, end = ctx.saved_tensors, len(save_in) + len(save_out)
        needs, (scalars, dtypes) = [*take_tensors(ctx.needs_input_grad)], known or ctx.constants
        arguments = ordered((*gradients, needs, dtypes, kept[end:], *kept[:end], *scalars, *held))
        found: list[Tensor | None] = [None] * len(inputs)
        for place, needed, dtype, result in zip(tensors, needs, dtypes, gradient(*arguments), strict=True):
            if needed and result is not None:
                found[place] = result if result.dtype == dtype else result.to(dtype)
        return tuple(found)

    return {"setup_context": staticmethod(setup_context), "backward": staticmethod(backward)}


def _is_constant(sources: Sequence[int], arguments: Sequence[Any], needs: Sequence[bool]) -> bool:
    """Whether what is made of these alone has no gradient."""
    return any(arguments[i] is None for i in sources) or not any(needs[i] for i in sources)


def _places(
    schema: Any, gradient: Callable[..., Any], held: Sequence[str]
) -> tuple[list[str], list[int], list[str], dict[str, list[int]], Callable[..., Any]]:
    """Names of arguments, which of them are tensors, names of results; places of what `gradient` asks for."""
    inputs = [a.name for a in schema.arguments]
    outputs = [result.name or "y" for result in schema.returns]
    tensors = [i for i, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
    plan = [_asked(name, inputs, outputs, tensors, schema.name) for name in inspect.signature(gradient).parameters]
    plan = [("held", place) if kind == "output" and outputs[place] in held else (kind, place) for kind, place in plan]
    of_kind = {kind: [place for k, place in plan if k == kind] for kind in KINDS}
    return inputs, tensors, outputs, of_kind, getter(_order(plan, len(outputs), of_kind))


@contextlib.contextmanager
def _held(ctx: Any, name: str) -> Iterator[list[Tensor]]:
    """Yield the tensors that a graph holds; remove them from it if this backward frees the graph.

    If others of the same graph run meanwhile, in other threads or around this one, this backward gets copies. The order
    of the lines below keeps threads apart: a reader joins the list before it looks, and the one that takes looks last.
    """
    frees = frees_graph()
    if not frees:
        ctx.readers.append(None)
    try:
        held: list[Tensor] | None = ctx.held
        if held is None:  # an earlier one may have written over it, and then failed
            raise RuntimeError(
                f"{name}: trying to backward through the graph a second time; specify retain_graph=True the first time"
            )
        if frees:
            ctx.held = None
        yield [tensor.clone() for tensor in held] if frees and ctx.readers else held
    finally:
        if not frees:
            ctx.readers.pop()


def frees_graph() -> bool:
    """Whether the running backward frees its graph: it does not retain it, and no CUDA graph captures it for replay."""
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not _keeps_graph() and not captured


def is_batched(gradient: Tensor) -> bool:
    """Whether this is a batch of gradients, which `torch.autograd.grad(..., is_grads_batched=True)` passes."""
    return bool(_is_batched(gradient))


def _order(plan: Sequence[tuple[str, int]], outputs: int, of_kind: Mapping[str, Sequence[int]]) -> list[int]:
    """Positions in the tuple of `in_order`: gradients of outputs, whole lists, then what was kept."""
    begins, end = dict(zip(WHOLE, itertools.count(outputs), strict=False)), outputs + len(WHOLE)
    for kind in ("input", "output", "scalar", "held"):
        begins[kind], end = end, end + len(of_kind[kind])
    counts = {kind: itertools.count(begins[kind]) for kind in ("input", "output", "scalar", "held")}
    return [
        place if kind == "gradient" else begins[kind] if kind in WHOLE else next(counts[kind]) for kind, place in plan
    ]


def _asked(name: str, inputs: list[str], outputs: list[str], tensors: list[int], of: str) -> tuple[str, int]:
    """What a parameter of a gradient stands for, and where it is."""
    if name in inputs:
        place = inputs.index(name)
        return ("input" if place in tensors else "scalar", place)
    if name in outputs:
        return ("output", outputs.index(name))
    if name[:1] == "d" and name[1:] in outputs:
        return ("gradient", outputs.index(name[1:]))
    if name in WHOLE:
        return (name, 0)
    raise TypeError(f"the gradient of {of} asks for {name!r}, which is in none of {inputs + outputs}")
