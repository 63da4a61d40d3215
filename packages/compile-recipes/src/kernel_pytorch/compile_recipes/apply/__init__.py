"""Changes to a model, one at a time, each kept only if it is right and does not cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_pytorch.compile_recipes.finders import find
from kernel_pytorch.compile_recipes.internals import fresh_dynamo
from kernel_pytorch.compile_recipes.measuring import check_rounds
from kernel_pytorch.compile_recipes.readiness import LIMIT
from kernel_pytorch.compile_recipes.recorder import record
from kernel_pytorch.compile_recipes.records import ALL, SAFE
from kernel_pytorch.compile_recipes.state import Loss, check_module, preserved
from kernel_pytorch.compile_recipes.validation import ROUNDS, Verdict, validate

from .attention import keep_flag, use_sdpa
from .changes import LAST, Change, Context, Done, technique_changes
from .packing import pack_encoders
from .rewrite import rewrite_attention

SHORT = 0.8
"""Share of a GPU's memory: a step that needs more is short of memory."""


def changes() -> list[Change]:
    """Every change, in the order in which they are made."""
    return [
        Change("sdpa", SAFE, use_sdpa),
        Change("rewrite attention", SAFE, rewrite_attention),
        Change("causal flag", SAFE, keep_flag),
        *technique_changes(),
        Change("packing", ALL, pack_encoders),
        *LAST,
    ]


@dataclass
class Optimized:
    """What `optimize` did.

    Attributes:
        module: the module that was given, changed in place.
        applied: by name of a change, what it did and its verdict.
        rejected: by name of a change, why it was not made or was taken back.
    """

    module: torch.nn.Module
    applied: dict[str, tuple[str, Verdict]] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _masked: bool = field(default=False, repr=False)

    def revert(self) -> torch.nn.Module:
        """Take every change off again, the last first: parameters and results are those before, bit for bit."""
        while self._undo:
            self._undo.pop()()
        self.applied.clear()
        return self.module

    def __str__(self) -> str:
        """A line for each change."""
        lines = []
        for name, (what, verdict) in self.applied.items():
            time = verdict.performance_improvement
            paid = f", {time['speedup']:.2f}x [{time['low']:.2f}, {time['high']:.2f}]" if time else ""
            lines.append(f"{name}: {what}{paid}")
        lines += [f"{name}: not made, {why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def optimize(
    module: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    apply: str | Sequence[str] = SAFE,
    rounds: int = ROUNDS,
    on_stage: Callable[[str], None] | None = None,
) -> Optimized:
    """Change a module in place, one change at a time, and keep what is right and not slower in the whole module.

    Each change is compared with a copy of the original: outputs and gradients, in training and evaluation, on the given
    inputs and on others, against float64; then timed in turns with it. `revert` puts back parameters and behaviour
    bit for bit. An exception or Ctrl-C leaves the module as it was. What was compiled before is compiled again.

    Args:
        module: not compiled, in the mode in which it will run.
        *inputs: of a call.
        kwargs: named inputs of the call.
        loss: function of the output; default `output.loss`, else the mean square.
        apply: "safe": parameters stay the same objects, and the output has all its tensors (patches of installed
            techniques, attention as one call, the causal flag); "all": also packed projections and encoders,
            channels_last, compilation of blocks, checkpointing where memory is short, and a loss without its logits;
            or names of changes.
        rounds: of the paired clock, at least 8; 0 keeps every change that is right, and times nothing.
        on_stage: called with the name of each change before it is tried.

    Returns:
        What was applied, with its verdict, and what was not, with the reason.

    Raises:
        TypeError: `module` is no module, or compiled or scripted already, or `kwargs` is no mapping.
        ValueError: `apply` names no change, or there are fewer than 8 rounds.
    """
    check_module(module, kwargs)
    check_rounds(rounds)
    wanted = _wanted(apply)
    stage = on_stage or (lambda name: None)
    with preserved(module):
        graph = record(module, inputs, kwargs)
        with torch.no_grad():
            patterns = find(graph)
    context = Context(inputs, dict(kwargs or {}), patterns, _is_short(module, apply), apply != SAFE)
    original = copy.deepcopy(module)
    result = Optimized(module)
    try:
        with fresh_dynamo(LIMIT):  # what validation compiles does not count against the user's recompile limit
            for change in wanted:
                stage(change.name)
                _try(change, original, result, context, loss, rounds)
    except BaseException:
        result.revert()
        raise
    return result


def _try(
    change: Change, original: torch.nn.Module, result: Optimized, context: Context, loss: Loss | None, rounds: int
) -> None:
    """Make one change, and take it back if it is wrong or costs."""
    try:
        done = change.make(result.module, context)
    except (RuntimeError, TypeError, ValueError) as error:
        done = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(done, str):
        result.rejected[change.name] = done
        return
    result._undo.append(done.undo)
    verdict = validate(
        original, result.module, context.inputs, context.kwargs, loss, rounds=rounds, compile=False,
        masked=done.masked or result._masked, partial=context.partial,
    )  # fmt: skip
    why = _why_not(verdict, done)
    if why:
        result._undo.pop()()
        result.rejected[change.name] = why
    else:
        result.applied[change.name] = (done.what, verdict)
        result._masked |= done.masked


def _why_not(verdict: Verdict, done: Done) -> str:
    if not verdict.passed:
        failures = verdict.correctness_check["failures"]
        wrong = failures[0] if failures else "nothing could be compared"
        how = "outputs differ" if wrong.endswith("is missing") else "it is wrong"
        return f"taken back, {how}: {wrong} ({done.what})"
    time = verdict.performance_improvement
    if time.get("verdict") == "slower":
        return f"taken back, it is slower: {time['speedup']:.2f}x [{time['low']:.2f}, {time['high']:.2f}] ({done.what})"
    return ""


def _wanted(apply: str | Sequence[str]) -> list[Change]:
    every = changes()
    if apply in (SAFE, ALL):
        return [c for c in every if apply == ALL or c.applies == SAFE]
    names = [apply] if isinstance(apply, str) else [*apply]
    known = {c.name for c in every}
    if strangers := [name for name in names if name not in known]:
        allowed = ", ".join(["safe", "all", *sorted(known)])
        raise ValueError(f"apply: no change {strangers[0]!r}; there are: {allowed}")
    return [c for c in every if c.name in names]


def _is_short(module: torch.nn.Module, apply: str | Sequence[str]) -> bool:
    """Whether the user names checkpointing, or a step needs most of its GPU's memory."""
    if apply == "checkpointing" or (not isinstance(apply, str) and "checkpointing" in apply):
        return True
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < (1 - SHORT) * total
