"""Whether a changed model still computes what the original did, and whether that pays.

The truth is the original in float64. A result may be off by twice what the original is off, in its own dtype, plus
rounding: in evaluation and in training, outputs and gradients, on the given inputs and on others.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_pytorch.harness.environment import memory_bytes

from .measuring import ROUNDS, Inputs, check_rounds, memory_use, performance
from .memory import MASKS
from .readiness import readiness
from .state import Loss, call, device_of, leaves_of, loss_of, preserved

BUDGET = 2.0
"""Allowed error, in multiples of the error of the original."""
LEAST_SHARE = 0.1
"""Share of the largest gradient that is the scale of rounding in the small ones."""
SEED = 20


@dataclass
class Verdict:
    """What `validate_optimization` found; its four parts can be indexed by name.

    Attributes:
        correctness_check: "passed", "failures" (a line each), how much was "compared", and whether "by_blocks": the
            changed modules alone, because a float64 copy of the whole does not fit into memory.
        performance_improvement: "speedup", "low", "high", "verdict"; empty if nothing was timed.
        memory_efficiency: "peak" and "saved" bytes, each (before, after).
        compilation_success: "breaks", "graphs", "recompiles", each (before, after), and "error".
    """

    correctness_check: dict[str, Any] = field(default_factory=dict)
    performance_improvement: dict[str, Any] = field(default_factory=dict)
    memory_efficiency: dict[str, Any] = field(default_factory=dict)
    compilation_success: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> dict[str, Any]:
        parts = vars(self)
        if name not in parts:
            raise KeyError(f"no part {name!r}; there are: {', '.join(parts)}")
        return parts[name]  # type: ignore[no-any-return]

    @property
    def passed(self) -> bool:
        """Whether every comparison held."""
        return bool(self.correctness_check.get("passed"))

    def __str__(self) -> str:
        """A line for each part."""
        c, p, m = self.correctness_check, self.performance_improvement, self.memory_efficiency
        how = ", of the changed modules alone" if c.get("by_blocks") else ""
        lines = [f"correctness: {'passed' if self.passed else 'FAILED'}, {c.get('compared', 0)} comparisons{how}"]
        lines += [f"  {failure}" for failure in c.get("failures", ())]
        if p:
            lines.append(f"time: {p['speedup']:.2f}x [{p['low']:.2f}, {p['high']:.2f}], {p['verdict']}")
        lines += [f"{name}: {before} -> {after} bytes" for name, (before, after) in m.items()]
        lines += [f"{name}: {value}" for name, value in self.compilation_success.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Pair:
    """Two modules that are compared, on which inputs and how: see `validate`."""

    original: torch.nn.Module
    optimized: torch.nn.Module
    given: Inputs
    loss: Loss | None = None
    masked: bool = False
    partial: bool = False


def validate(
    original: torch.nn.Module,
    optimized: torch.nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    *,
    rounds: int = ROUNDS,
    compile: bool = True,
    masked: bool = False,
    partial: bool = False,
) -> Verdict:
    """Compare two modules, as `validate_optimization` says; both are left as they were.

    `compile`: whether to compare what Dynamo makes of both. `masked`: whether positions that a mask among the inputs
    hides may differ. `partial`: whether an output that has a loss may be without its other tensors.
    """
    check_rounds(rounds)
    given: Inputs = (tuple(inputs), dict(kwargs or {}))
    verdict = Verdict()
    with preserved(original), preserved(optimized):
        whole = fits(original)
        check = correctness if whole else by_blocks
        verdict.correctness_check = check(Pair(original, optimized, given, loss, masked, partial))
        verdict.correctness_check["by_blocks"] = not whole
    with preserved(original), preserved(optimized):
        if rounds:
            verdict.performance_improvement = performance(original, optimized, given, loss, rounds)
        verdict.memory_efficiency = memory_use(original, optimized, given, loss)
    if compile:
        found = []
        for module in (original, optimized):
            with preserved(module):
                found.append(readiness(module, [given]))
        before, after = found
        verdict.compilation_success = {
            "breaks": (len(before.breaks), len(after.breaks)),
            "graphs": (before.graphs, after.graphs),
            "recompiles": (len(before.recompiles), len(after.recompiles)),
            "error": after.error,
        }
    return verdict


def correctness(pair: Pair) -> dict[str, Any]:
    """Outputs and gradients of both against the original in float64; see `validate`."""
    failures: list[str] = []
    compared = skipped = 0
    original, loss, masked = pair.original, pair.loss, pair.masked
    with precise(original) as truth:
        for mode in (False, True):
            for name, arguments in variations(pair.given).items():
                where = f"{'training' if mode else 'evaluation'}, {name} inputs"
                try:
                    expected = results(truth, doubled(arguments), loss, mode, masked=masked)
                    stock = results(original, arguments, loss, mode, masked=masked)
                except Exception:
                    if name == "given" and mode == original.training:
                        raise
                    skipped += 1  # it takes no such inputs, or has no such mode
                    continue
                if mode and not repeatable(original, arguments, loss, stock):
                    skipped += 1  # random in training beyond dropout
                    continue
                try:
                    ours = results(pair.optimized, arguments, loss, mode, masked=masked)
                except Exception as error:
                    failures.append(f"{where}: raises {type(error).__name__}: {error}".partition("\n")[0])
                    continue
                summands = max((t.numel() for t in tree_leaves(arguments) if isinstance(t, Tensor)), default=1)
                found = differences(expected, stock, ours, pair.partial, summands)
                failures += [f"{where}: {problem}" for problem in found]
                compared += len(expected)
    return {"passed": not failures and compared > 0, "failures": failures, "compared": compared, "skipped": skipped}


def fits(module: torch.nn.Module) -> bool:
    """Whether a copy in float64 fits into half of the memory."""
    needed = sum(8 * t.numel() for t in (*module.parameters(), *module.buffers()))
    return needed < memory_bytes(device_of(module)) // 2


def by_blocks(pair: Pair) -> dict[str, Any]:
    """Each changed module by itself, on the inputs that it gets: for models whose float64 copy does not fit."""
    stock = dict(pair.original.named_modules())
    changed: dict[str, torch.nn.Module] = {}
    for path, m in pair.optimized.named_modules():
        differs = path not in stock or type(m) is not type(stock[path]) or "forward" in m.__dict__
        if path and differs and not any(path.startswith(f"{outer}.") for outer in changed):
            changed[path] = m
    seen: dict[str, Inputs] = {}
    hooks = [
        stock[path].register_forward_pre_hook(
            lambda m, args, kwargs, path=path: seen.setdefault(path, (args, kwargs)) and None, with_kwargs=True
        )
        for path in changed
        if path in stock
    ]
    try:
        with torch.no_grad():
            call(pair.original, *pair.given)
    finally:
        for hook in hooks:
            hook.remove()
    found = {path: correctness(Pair(stock[path], changed[path], arguments)) for path, arguments in seen.items()}
    failures = [f"{path}: {failure}" for path, check in found.items() for failure in check["failures"]]
    failures += [f"{path}: it was not called, so it is not proven" for path in changed.keys() - seen.keys()]
    compared = sum(check["compared"] for check in found.values())
    return {"passed": not failures and compared > 0, "failures": failures, "compared": compared, "skipped": 0}


@contextlib.contextmanager
def precise(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A copy in float64, in which modules that compute in a fixed dtype still do so."""
    yield copy.deepcopy(module).double()


def results(
    module: torch.nn.Module,
    arguments: Inputs,
    loss: Loss | None,
    training: bool,
    seed: int = SEED,
    masked: bool = False,
) -> dict[str, Tensor]:
    """Outputs, and the gradients of parameters and floating-point inputs, by name. Dropout is switched off."""
    modes = {m: m.training for m in module.modules()}
    drops = {m: m.p for m in module.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)}
    module.train(training)
    for m in drops:
        m.p = 0.0
    try:
        with torch.random.fork_rng(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Dynamo, about inputs that are no leaves
            torch.manual_seed(seed)
            leaves, fresh = _leaves(arguments)
            output = call(module, *fresh)
            own = getattr(output, "loss", None)
            outputs = [t for t in leaves_of(output) if t.is_floating_point() and t is not own]
            if masked:
                outputs = [_shown(t, arguments) for t in outputs]
                output = outputs if loss is None and not hasattr(output, "loss") else output
            found = {f"output {i}": t for i, t in enumerate(outputs)}
            found |= {"loss": own} if isinstance(own, Tensor) else {}
            named = {n: p for n, p in module.named_parameters() if p.requires_grad} | leaves
            total = loss_of(output, loss)
            if total.requires_grad and named:
                gradients = torch.autograd.grad(total, [*named.values()], allow_unused=True)
                pairs = zip(named, gradients, strict=True)
                found |= {f"gradient of {n}": g for n, g in pairs if g is not None}
            return {name: t.detach() for name, t in found.items()}
    finally:
        for m, mode in modes.items():
            m.training = mode
        for m, p in drops.items():
            m.p = p


def _shown(t: Tensor, arguments: Inputs) -> Tensor:
    """A result without what the mask among the inputs hides, if it has a place for each of its positions."""
    for name in MASKS:
        mask = arguments[1].get(name)
        if isinstance(mask, Tensor) and mask.shape == t.shape[: mask.dim()]:
            return t * mask.to(t.dtype).view(*mask.shape, *[1] * (t.dim() - mask.dim()))
    return t


def _leaves(arguments: Inputs) -> tuple[dict[str, Tensor], Inputs]:
    """The floating-point inputs as leaves with gradients, and the arguments with these."""
    leaves: dict[str, Tensor] = {}

    def leaf(t: Any) -> Any:
        if isinstance(t, Tensor) and t.is_floating_point():
            t = t.detach().clone().requires_grad_()
            leaves[f"input {len(leaves)}"] = t
        return t

    return leaves, tree_map(leaf, arguments)


def repeatable(module: torch.nn.Module, arguments: Inputs, loss: Loss | None, before: dict[str, Tensor]) -> bool:
    """Whether a second run with another seed gives the same: else there is nothing to compare with."""
    again = results(module, arguments, loss, True, SEED + 1)
    return all(
        torch.allclose(t, again[name], rtol=1e-2, atol=1e-3 * float(t.abs().amax()) if t.numel() else 0.0)
        for name, t in before.items()
        if name in again
    )


def differences(
    truth: Mapping[str, Tensor],
    stock: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    partial: bool = False,
    summands: int = 1,
) -> Iterator[str]:
    """A line for each result that is off by more than its budget, or missing; parameters may have other names.

    `truth` is in float64. `summands`: of which the gradient of a parameter is a sum; rounding grows with their root.
    """
    outputs = [name for name in truth if not name.startswith("gradient of")]
    gradients = [float(t.abs().amax()) for name, t in truth.items() if name not in outputs and t.numel()]
    largest = max(gradients, default=0.0)
    for name in truth:
        if name not in ours:
            if name in outputs and not (partial and name != "loss" and "loss" in ours):
                yield f"{name} is missing"
            continue
        expected, got = truth[name], ours[name].double()
        if expected.shape != got.shape:
            yield f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
            continue
        if not expected.numel():
            continue
        error, own = (got - expected).abs(), (stock[name].double() - expected).abs()
        # A gradient that cancels to nothing, as that of a key's bias, is rounding of the large ones.
        scale = max(float(expected.abs().amax()), LEAST_SHARE * largest if name.startswith("gradient of") else 0.0)
        rounding = torch.finfo(stock[name].dtype).eps * scale
        growth = max(4.0, summands**0.5) if name.startswith("gradient of") else 4.0
        allowed = BUDGET * float(own.amax()) + growth * rounding
        if not bool((error <= allowed).all()):
            yield f"{name}: off by {float(error.amax()):.1e}, allowed {allowed:.1e}"


def variations(given: Inputs) -> dict[str, Inputs]:
    """The given inputs, others of the same kind, and fewer."""

    def other(t: Any, name: str = "") -> Any:
        if not isinstance(t, Tensor) or t.dtype == torch.bool or name in MASKS or t.numel() < 2:
            return t
        g = torch.Generator().manual_seed(SEED)
        if t.is_floating_point():
            scale, shift = t.detach().float().std(), t.detach().float().mean()
            return (torch.randn(t.shape, generator=g).to(t.device) * scale + shift).to(t.dtype)
        return t.flatten()[torch.randperm(t.numel(), generator=g).to(t.device)].view(t.shape)

    args, kwargs = given
    others = {k: tree_map(lambda t, k=k: other(t, k), v) for k, v in kwargs.items()}
    found = {"given": given, "other": (tree_map(other, args), others)}
    sizes = [t.shape[0] for t in tree_leaves(given) if isinstance(t, Tensor) and t.dim()]
    if sizes and sizes[0] > 1:

        def fewer(t: Any) -> Any:
            return t[: sizes[0] // 2] if isinstance(t, Tensor) and t.dim() and t.shape[0] == sizes[0] else t

        found["fewer"] = tree_map(fewer, given)
    return found


def doubled(arguments: Inputs) -> Inputs:
    """Floating-point tensors in float64."""

    def double(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    return tree_map(double, arguments)  # type: ignore[no-any-return]
