"""An operator declared once; its registration, its autograd function and the short way past the dispatcher follow.

    rms_norm = declare("rms_norm(Tensor x, float eps) -> (Tensor y, Tensor rstd)", launch=..., fake=..., gradient=...)

Each level is an operator of its own with the same schema: Triton's is `kernel_pytorch::<name>`, that of CUDA C++ is
`kernel_pytorch_cuda::<name>`, which the compiled library defines. Private names of PyTorch are used here, in
`gradients.py` and in `registration.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .after_import import after_import
from .call_cache import PLAIN, CallCache
from .direct_calls import check_memory
from .gradients import autograd_rules
from .registration import below_autograd, check_schema, lazy, on_one_device
from .sharding import shard

TRITON, CUDA, NATIVE = "kernel_pytorch", "kernel_pytorch_cuda", "kernel_pytorch_native"
"""Namespaces of operators, by level."""

# Private names of PyTorch; those of DTensor are in `sharding.py`.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_alive = torch._C._functorch.unwrap_if_dead  # a tensor that outlives its transform of torch.func is wrapped still
_has_storage = torch._C._has_storage
_trace = torch._C._get_tracing_state

_libraries: list[torch.library.Library] = []  # a registration lasts as long as its library


class Rules(TypedDict, total=False):
    """What holds of an operator at every level, as arguments of `declare`: written once in a package's `rules/`."""

    schema: str
    fake: Callable[..., Any]
    gradient: Callable[..., Any]
    save: Callable[..., tuple[Tensor | None, ...]]
    formula: Callable[..., Any]
    follows: Mapping[str, Sequence[str]]
    flops: Callable[..., int]
    sharding: Callable[..., Iterable[tuple[Sequence[Any], Sequence[Any]]]]


def declare(
    schema: str,
    *,
    fake: Callable[..., Any],
    launch: Callable[[], Callable[..., Any]] | None = None,
    backward: Callable[..., Any] | None = None,
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., tuple[Tensor | None, ...]] | None = None,
    formula: Callable[..., Any] | None = None,
    follows: Mapping[str, Sequence[str]] | None = None,
    keys: Sequence[str] = ("CUDA", "CPU"),
    space: str = TRITON,
    flops: Callable[..., int] | None = None,
    sharding: Callable[..., Iterable[tuple[Sequence[Any], Sequence[Any]]]] | None = None,
) -> Callable[..., Any]:
    """Make the operator and return the function that calls it, by position, the shortest way that is right.

    Args:
        schema: without namespace; names matter, see `gradient`. A result without a name is called y.
        fake: what is allocated: same shapes, dtypes and strides.
        launch: imports the launcher and returns it: called once, at the first call of all, so that Triton is imported
            neither with the package nor while Dynamo traces. (A string would hide the kernels from type checkers and
            from the digest of the sources.) None where a library in C++ has defined the operator already.
        backward: the operator of the same level that `gradient` is called with, as its first argument.
        gradient: asks by the names of its parameters for what it needs: `d<output>`, inputs, outputs (both are saved),
            scalars, `saved`, and of each tensor that goes in `needs`, a bool, and `dtypes`, None for one that is
            absent. It returns a gradient for each of these. An output whose `d<output>` it does not ask for has none.
        save: asks in the same way for inputs, outputs and scalars, and returns what `gradient` gets as `saved`; where
            what is saved depends on scalars.
        formula: the same function in PyTorch that autograd can follow, used where a graph is wanted and there is no
            `gradient`: for second derivatives. With neither, wanting a graph is an error.
        follows: by output, the tensors that go in of which alone it is made: it has a gradient only if all of them are
            there, and one of them has.
        keys: of the dispatcher, that the launcher is for; "CompositeExplicitAutograd" is every kind of device.
        space: the namespace of an operator with a launcher.
        flops: of the shapes of the arguments, as `register_flop_formula` wants it.
        sharding: `rule(placements, *arguments)` yields acceptable placements of outputs and of tensor arguments, where
            `placements` is the module `torch.distributed.tensor`.

    Raises:
        ImportError: the library defines the operator with another schema.
    """
    name = schema.partition("(")[0]
    space = CUDA if launch is None else space
    library = torch.library.Library(space, "FRAGMENT")
    _libraries.append(library)
    if launch is not None:
        library.define(schema)
    packet = getattr(getattr(torch.ops, space), name)
    operator = packet.default
    check_schema(operator, f"{space}::{schema}", fake.__module__)

    call = operator._op  # what OpOverload.__call__ calls, less one frame
    below = below_autograd(call)
    kernel = below
    if launch is not None:
        kernel = lazy(launch)
        for key in keys:
            library.impl(name, kernel, key)
    torch.library.register_fake(f"{space}::{name}", on_one_device(name, fake), lib=library)

    calls = _Calls(operator, kernel, below)
    gradient = _with_backward(gradient, backward)
    graph, run = _differentiable(calls, gradient, save, follows or {}, formula)
    library.impl(name, _autograd_kernel(operator, below, graph), "Autograd")
    run.calls, run.sharding = calls, sharding  # type: ignore[attr-defined]
    if flops is not None:
        after_import("torch.utils.flop_counter", lambda counter: counter.register_flop_formula(packet)(flops))
    if sharding is not None:
        after_import("torch.distributed.tensor", lambda placements: shard(placements, operator, sharding))
    return run


def with_gradient(
    run: Any,
    gradient: Callable[..., Any],
    save: Callable[..., tuple[Tensor | None, ...]] | None = None,
    backward: Callable[..., Any] | None = None,
    held: Sequence[str] = (),
) -> Callable[..., Any]:
    """The function that calls an operator which `declare` made, differentiated in another way; see there.

    Args:
        run: what `declare` returned.
        gradient: see `declare`.
        save: see `declare`.
        backward: see `declare`.
        held: outputs that `gradient` asks for, and that callers of this function throw away: where the dispatcher has
            nothing to do the graph holds them past all hooks of saved tensors, so that `gradient` may write over them
            where `frees_graph` says that nobody comes back for them.
    """
    return _differentiable(run.calls, _with_backward(gradient, backward), save, {}, None, held)[1]


def _with_backward(
    gradient: Callable[..., Any] | None, backward: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    return gradient if gradient is None or backward is None else functools.partial(gradient, backward)


class _Calls(NamedTuple):
    """An operator, its launcher (of one that a library defines: itself), and what calls it below autograd."""

    operator: Any
    kernel: Callable[..., Any]
    below: Callable[..., Any]


def _differentiable(
    calls: _Calls,
    gradient: Callable[..., Any] | None,
    save: Callable[..., tuple[Tensor | None, ...]] | None,
    follows: Mapping[str, Sequence[str]],
    formula: Callable[..., Any] | None,
    held: Sequence[str] = (),
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What computes a call that is to be differentiated, and the function that users call."""
    operator, kernel, below = calls
    name = operator._schema.name.partition("::")[2]
    cache = CallCache()

    def launched(*arguments: Any) -> Any:
        known: _Known | None = cache.lookup(arguments)
        return kernel(*arguments) if known is None or known.changed(arguments) else known.run(*arguments)

    if gradient is not None:
        rules = autograd_rules(operator._schema, gradient, save, follows, ())
        short_rules = autograd_rules(operator._schema, gradient, save, follows, held) if held else rules
        # Of plain tensors a graph is made around the launcher itself, of all others around the operator.
        shortest, dispatched = _function(name, launched, short_rules), _function(name, below, rules)
        plain_graph, graph, transformed = _apply(shortest), _apply(dispatched), dispatched.apply
    else:
        plain_graph = graph = transformed = formula if formula is not None else _refused(operator)

    return graph, _short_way(calls, cache, plain_graph, transformed)


def _short_way(
    calls: _Calls, cache: CallCache, plain_graph: Callable[..., Any], transformed: Callable[..., Any]
) -> Callable[..., Any]:
    """The function that calls an operator past the dispatcher where it has nothing to do.

    Args:
        calls: the operator.
        cache: what is known of earlier calls.
        plain_graph: computes a call with plain tensors that is to be differentiated.
        transformed: computes a call under a transform of torch.func, or says why it cannot.
    """
    operator, kernel, _ = calls

    def find(arguments: tuple[Any, ...]) -> _Known | None:
        """Look up, or inspect, a call with plain tensors; None if there are others."""
        known: _Known | None = cache.lookup(arguments)
        if known is None or known.changed(arguments):
            wanted = False
            for argument in arguments:
                if isinstance(argument, Tensor):
                    if not _has_plain_memory(argument):
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

    def bound(arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """`run` for calls that match this one, where neither is_compiling() nor has_transform()."""
        known = find(arguments)
        if known is None or known.state is not None:
            return run
        launch, wanted = known.run, known.wanted

        def run_alike(*arguments: Any) -> Any:
            if is_watched():
                return operator(*arguments)
            return plain_graph(*arguments) if wanted and torch.is_grad_enabled() else launch(*arguments)

        return run_alike

    run.operator, run.bound = operator, bound  # type: ignore[attr-defined]
    run.__name__ = run.__qualname__ = operator._schema.name.partition("::")[2]
    return run


class _Known(NamedTuple):
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


def _look(kernel: Any, arguments: tuple[Any, ...], wanted: bool) -> _Known:
    """Inspect a call: `run` is the plan of the launcher, or the launcher itself if it has no plans."""
    launcher = kernel.launcher() if hasattr(kernel, "launcher") else kernel
    if not hasattr(launcher, "planned_for"):
        return _Known(launcher, wanted, None, None)
    state = launcher.state
    value = None if state is None else state(*arguments)
    return _Known(launcher.planned_for(*arguments), wanted, state, value)


def _autograd_kernel(operator: Any, below: Callable[..., Any], graph: Callable[..., Any]) -> Callable[..., Any]:
    """What the dispatcher calls: of subclasses, modes and traces, and for whoever calls the operator itself."""
    arguments_of = operator._schema.arguments
    defaults = tuple(a.default_value for a in arguments_of if a.has_default_value())
    required = [(place, a.name) for place, a in enumerate(arguments_of) if str(a.type) == "Tensor"]
    name = operator._schema.name

    def autograd(*arguments: Any) -> Any:
        if has_transform() and any(isinstance(a, Tensor) and a.is_floating_point() for a in arguments):
            # Here it would run, and be wrong: tangents get lost, and so do gradients of gradients.
            raise NotImplementedError(
                f"{name}: transforms of torch.func and forward-mode differentiation need a function of the package at "
                "level 'native', not the operator"
            )
        missing = len(arguments_of) - len(arguments)
        arguments += defaults[len(defaults) - missing :] if missing else ()
        for place, argument in required:
            if arguments[place] is None:  # PyTorch hands it on as a tensor without a type
                raise TypeError(f"{name.partition('::')[2]}: {argument}: given None; it must be a tensor")
        arguments = tuple(_alive(a) if isinstance(a, Tensor) else a for a in arguments)
        for place, a in enumerate(arguments):
            if isinstance(a, Tensor) and (a.is_cpu or a.is_cuda) and _has_plain_memory(a):
                check_memory(arguments_of[place].name, a)
        return graph(*arguments) if wants_graph(*arguments) else below(*arguments)

    return autograd


def _function(name: str, forward: Callable[..., Any], rules: dict[str, Any]) -> Any:
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), **rules})


def _apply(function: Any) -> Callable[..., Any]:
    """`function.apply`, which looks at the signature of `forward` in every call: longer than a small kernel takes."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _refused(operator: Any) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError(f"{operator._schema.name} has no gradient: call it under torch.no_grad()")

    return refuse


# What a call is like.


def wants_graph(*values: Any) -> bool:
    """Whether what is computed of these, of which some are tensors, is to be differentiated."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to do: plain Tensors and Parameters, no dispatch mode, no transform."""
    return (
        _dispatch_modes() == 0
        and _transforms() is None
        and all(tensor is None or _has_plain_memory(tensor) for tensor in tensors)
    )


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether the numbers are those in the tensor's own memory, so that a kernel may read them there.

    Batched gradients (`is_grads_batched`) and tensors that outlive a transform of torch.func have no storage, tensors
    of zeros that forward-mode differentiation makes and those of functionalization hold none, and a view such as
    `z.conj().imag` has a bit that says that its numbers are to be negated. The dispatcher handles these.
    """
    return (
        type(tensor) in PLAIN
        and _has_storage(tensor)
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._is_functional_tensor(tensor)
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, vmap for example, or forward-mode differentiation.

    Kernels of one's own have no rules for those. What torch.compile traces says no: it may not ask.
    """
    return not torch.compiler.is_compiling() and has_transform()


def is_exporting() -> bool:
    """Whether torch.export traces. Before torch 2.12 `torch.compiler.is_exporting` says so of torch.compile too."""
    return bool(torch.compiler._is_exporting_flag)


def has_transform() -> bool:
    """The same, for what is not traced."""
    return _transforms() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether a dispatch mode or a tracer wants to see operators."""
    return _dispatch_modes() > 0 or _trace() is not None


def per_element(factor: int) -> Callable[..., int]:
    """The FLOP formula of an operator that does `factor` operations for each element of its first argument."""
    return lambda shape, *args, **kwargs: factor * torch.Size(shape).numel()
