"""An operator declared once; its registration, its autograd function and the way past the dispatcher follow.

    rms_norm = declare("rms_norm(Tensor x, float eps) -> (Tensor y, Tensor rstd)", launch=..., fake=..., gradient=...)

Each level is a separate operator with the same schema: Triton's is `kernel_pytorch::<name>`, that of CUDA C++ is
`kernel_pytorch_cuda::<name>`, which the compiled library defines. Modules of core list the private names of PyTorch
that they use at their top.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from .after_import import after_import
from .call import Bound, CachedCall
from .call_kinds import has_plain_memory, has_transform, needs_grad
from .direct_calls import check_memory
from .gradients import autograd_rules
from .plans import Plan, Planned
from .registration import LazyLauncher, below_autograd, check_schema, on_one_device, with_arguments
from .sharding import Sharding, shard

TRITON, CUDA, NATIVE = "kernel_pytorch", "kernel_pytorch_cuda", "kernel_pytorch_native"
"""Namespaces of operators, by level."""

# A private name of PyTorch; those of DTensor are in `sharding.py`.
_alive = torch._C._functorch.unwrap_if_dead  # a tensor that outlives its transform of torch.func is wrapped still

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
    sharding: Callable[..., Iterable[Sharding]]


class Calls(NamedTuple):
    """An operator, its launcher, and what calls it below autograd: also the launcher of a library's operator."""

    operator: Any
    launcher: Callable[..., Any]
    below: Callable[..., Any]


class OperatorCall(CachedCall):
    """An operator, called past the dispatcher where it has nothing to do.

    With a subclass (DTensor, FakeTensor) or a mode (FLOP counter, selective checkpointing) going past it would skip
    what the user asked for.

    Attributes:
        calls: the operator, its launcher, and what calls it below autograd.
        operator: as the dispatcher knows it.
        sharding: see `declare`.

    Args:
        calls: the operator, its launcher, and what calls it below autograd.
        plain_graph: computes a call with plain tensors that is to be differentiated, around the launcher.
        transformed: computes a call under a transform of torch.func, or says why it cannot.
        lasting: makes a faster `plain_graph` for all calls of a kind, from the function that launches and the
            arguments of one call; None if there is none.
        sharding: see `declare`.
    """

    def __init__(
        self,
        calls: Calls,
        plain_graph: Callable[..., Any],
        transformed: Callable[..., Any],
        lasting: Callable[..., Callable[..., Any]] | None = None,
        sharding: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.calls, self.operator, self.sharding = calls, calls.operator, sharding
        self._plain_graph, self._transformed, self._lasting = plain_graph, transformed, lasting
        self.__name__ = self.__qualname__ = calls.operator._schema.name.partition("::")[2]

    def uncached(self, *arguments: Any) -> Any:
        """Call the operator; under transforms of torch.func the autograd function, which says what it cannot do."""
        if not torch.compiler.is_compiling() and has_transform():
            return self._transformed(*arguments)
        return self.operator(*arguments)

    def bind(self, arguments: tuple[Any, ...], again: bool, result: Callable[[Any], Any] | None = None) -> Bound:
        """Plan the launch; see `CachedCall.bind`.

        Args:
            arguments: of the operator.
            again: whether such a call came before.
            result: what users see of the operator's results; None for all.
        """
        launcher = self.calls.launcher
        launcher = launcher.imported() if isinstance(launcher, LazyLauncher) else launcher
        state = launcher.state if isinstance(launcher, Planned) else None
        value = None if state is None else state(*arguments)
        run, alone = launcher.plan_for(*arguments) if isinstance(launcher, Planned) else Plan(launcher)
        if needs_grad(*arguments):
            run = self._lasting(run, arguments) if again and self._lasting is not None else self._plain_graph
        elif result is not None and alone is not None:
            run, result = alone, None
        return Bound(run, result=result, observed=self.operator, state=state, value=value)


def declare(
    schema: str,
    *,
    fake: Callable[..., Any],
    launch: str | Callable[[], Callable[..., Any]] | None = None,
    backward: Callable[..., Any] | None = None,
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., tuple[Tensor | None, ...]] | None = None,
    formula: Callable[..., Any] | None = None,
    follows: Mapping[str, Sequence[str]] | None = None,
    keys: Sequence[str] = ("CUDA", "CPU"),
    space: str = TRITON,
    flops: Callable[..., int] | None = None,
    sharding: Callable[..., Iterable[Sharding]] | None = None,
) -> OperatorCall:
    """Make the operator and return the function that calls it, by position, the shortest way that is right.

    `fake`, `formula`, `flops` and `sharding` take the arguments of the operator, or one object `a` that holds them by
    name.

    Args:
        schema: without namespace; names matter, see `gradient`. A result without a name is called y.
        fake: what is allocated: same shapes, dtypes and strides.
        launch: `module:function`, the launcher, or a function that returns it. It is imported at the first call of all,
            so that Triton is imported neither with the package nor while Dynamo traces. None where a library in C++ has
            defined the operator already.
        backward: the operator of the same level that `gradient` is called with, as its first argument.
        gradient: asks by the names of its parameters for what it needs: `d<output>`, inputs, outputs (both are saved),
            scalars, `saved`, `needs`, a bool for each input tensor, and `dtypes`, its dtype, or None for one that
            is absent. It returns a gradient for each of these. An output whose `d<output>` it leaves out has none.
        save: asks in the same way for inputs, outputs and scalars, and returns what `gradient` gets as `saved`; where
            what is saved depends on scalars.
        formula: the same function in PyTorch that autograd can follow, used where a graph is wanted and there is no
            `gradient`: for second derivatives. With neither, wanting a graph is an error.
        follows: by output, the input tensors that it is computed from, if not from all: it has a gradient only if all
            of them are there, and one of them has.
        keys: of the dispatcher, that the launcher is for; "CompositeExplicitAutograd" is every kind of device.
        space: the namespace of an operator with a launcher.
        flops: of the shapes of the arguments, as `register_flop_formula` wants it.
        sharding: `rule(placements, *arguments)` yields acceptable placements of outputs and of tensor arguments, in
            order, or by name those that are not replicated; `placements` is the module `torch.distributed.tensor`.

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
    fake = with_arguments(operator._schema, fake)
    formula, flops, sharding = (rule and with_arguments(operator._schema, rule) for rule in (formula, flops, sharding))

    call = operator._op  # what OpOverload.__call__ calls, less one frame
    below = below_autograd(call)
    launcher = below
    if launch is not None:
        launcher = LazyLauncher(launch)
        for key in keys:
            library.impl(name, launcher, key)
    torch.library.register_fake(f"{space}::{name}", on_one_device(name, fake), lib=library)

    calls = Calls(operator, launcher, below)
    gradient = _with_backward(gradient, backward)
    dispatched_graph, run = _differentiable(calls, gradient, save, follows or {}, formula, sharding=sharding)
    library.impl(name, _autograd_kernel(operator, below, dispatched_graph), "Autograd")
    if flops is not None:
        after_import("torch.utils.flop_counter", lambda counter: counter.register_flop_formula(packet)(flops))
    if sharding is not None:
        after_import("torch.distributed.tensor", lambda placements: shard(placements, operator, sharding))
    return run


def with_gradient(
    run: OperatorCall,
    gradient: Callable[..., Any],
    save: Callable[..., tuple[Tensor | None, ...]] | None = None,
    backward: Callable[..., Any] | None = None,
    held: Sequence[str] = (),
) -> OperatorCall:
    """The function that calls an operator which `declare` made, differentiated in another way; see there.

    Args:
        run: what `declare` returned.
        gradient: see `declare`.
        save: see `declare`.
        backward: see `declare`.
        held: outputs that `gradient` asks for, and that callers of this function throw away: where the dispatcher has
            nothing to do the graph holds them past all hooks of saved tensors, so that `gradient` may write over them
            where `frees_graph` says that no later backward reads them.
    """
    return _differentiable(run.calls, _with_backward(gradient, backward), save, {}, None, held, run.sharding)[1]


def _with_backward(
    gradient: Callable[..., Any] | None, backward: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    return gradient if gradient is None or backward is None else functools.partial(gradient, backward)


def _differentiable(
    calls: Calls,
    gradient: Callable[..., Any] | None,
    save: Callable[..., tuple[Tensor | None, ...]] | None,
    follows: Mapping[str, Sequence[str]],
    formula: Callable[..., Any] | None,
    held: Sequence[str] = (),
    sharding: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], OperatorCall]:
    """What computes a call that is to be differentiated, and the function that users call."""
    operator, launcher, below = calls
    name = operator._schema.name.partition("::")[2]
    if gradient is None:
        transformed = formula if formula is not None else _refused(operator)
        return transformed, OperatorCall(calls, transformed, transformed, sharding=sharding)
    own = gradient

    def lasting(launch: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        rules = autograd_rules(operator._schema, own, save, follows, held, arguments)
        return _apply(_function(name, launch, rules))

    rules = autograd_rules(operator._schema, gradient, save, follows, ())
    plain_rules = autograd_rules(operator._schema, gradient, save, follows, held) if held else rules
    # For plain tensors a graph is built around the launcher itself, for all others around the operator.
    plain, dispatched = _function(name, launcher, plain_rules), _function(name, below, rules)
    return _apply(dispatched), OperatorCall(calls, _apply(plain), dispatched.apply, lasting, sharding)


def _autograd_kernel(operator: Any, below: Callable[..., Any], graph: Callable[..., Any]) -> Callable[..., Any]:
    """Function that the dispatcher calls: for subclasses, modes and traces, and for direct calls of the operator."""
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
            if isinstance(a, Tensor) and (a.is_cpu or a.is_cuda) and has_plain_memory(a):
                check_memory(arguments_of[place].name, a)
        return graph(*arguments) if needs_grad(*arguments) else below(*arguments)

    return autograd


def _function(name: str, forward: Callable[..., Any], rules: dict[str, Any]) -> Any:
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), **rules})


def _apply(function: Any) -> Callable[..., Any]:
    """`function.apply`, without its look at the signature of `forward`, which takes longer than a small kernel."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _refused(operator: Any) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError(f"{operator._schema.name} has no gradient: call it under torch.no_grad()")

    return refuse


def per_element(factor: int, *places: int) -> Callable[..., int]:
    """The FLOP formula of an operator that does `factor` operations for each element of its first argument.

    Given places, it is of each element of the arguments there, of those that are not None.
    """

    def formula(*shapes: Any, **names: Any) -> int:
        return factor * sum(torch.Size(shapes[i]).numel() for i in places or (0,) if shapes[i] is not None)

    return formula


def like_first(first: Tensor, *others: Any) -> Tensor:
    """The fake of an operator whose result is like its first argument."""
    return first.new_empty(first.shape)
