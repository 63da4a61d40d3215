"""Attention that leaves its fused kernel under `torch.compile`: counted in eager, and in the graph that is lowered.

A library may build another mask under `torch.compile` than in eager: one that every fused kernel refuses. PyTorch then
computes attention as two products and a softmax, in silence. Nothing needs to be compiled to see it: the operators of
the lowered graph say it. The rules of a CPU differ from those of a GPU, so the device must be the one that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .internals import break_messages, fresh_dynamo, lowering_backend
from .recorder import is_foreign
from .records import Finding
from .state import call

FUSED = re.compile(r"^_scaled_dot_product_(flash|efficient|cudnn|fused)\w*attention")
SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Call:
    """A captured call of `scaled_dot_product_attention`, its mask, and why a fused kernel refuses it, where known."""

    line: str
    mask: str = ""
    suspicion: str = ""


@dataclass
class Lost:
    """What was counted."""

    eager: int  # fused operators in one eager forward
    compiled: int = 0  # fused operators in the lowered graphs
    calls: list[Call] = field(default_factory=list)  # those of graphs in which some were lost
    error: str = ""  # why the graphs could not be lowered; "" if they could

    @property
    def count(self) -> int:
        """How many fused operators compilation loses."""
        return 0 if self.error else max(self.eager - self.compiled, 0)


def fused_operators(names: Sequence[str]) -> int:
    """How many of the names are operators of fused attention."""
    return sum(FUSED.match(name) is not None for name in names)


def attention_lost(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, eager: int
) -> Lost:
    """Count fused attention in the lowered graphs of a module, in its mode.

    Args:
        module: on the device that is meant.
        inputs: of a call.
        kwargs: named inputs of the call.
        eager: fused operators of one eager forward; without any nothing can be lost, and nothing is compiled.
    """
    found = Lost(eager)
    if not eager:
        return found
    captured: list[list[Call]] = []

    def keep(gm: torch.fx.GraphModule) -> None:
        captured.append([_call(n) for n in gm.graph.nodes if n.target is SDPA])

    def count(gm: torch.fx.GraphModule) -> None:
        names = [_name(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        fused = fused_operators(names)
        found.compiled += fused
        if captured and fused < len(captured[-1]):
            found.calls += [c for c in captured[-1] if c not in found.calls]

    with fresh_dynamo(), break_messages(), torch.set_grad_enabled(module.training):
        try:
            call(torch.compile(module, backend=lowering_backend(keep, count)), inputs, kwargs)
        except Exception as error:  # readiness says more about it
            found.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return found


def findings(lost: Lost) -> list[Finding]:
    """One finding for each line whose attention is lost."""
    if not lost.count:
        return []
    groups: dict[str, list[Call]] = {}
    for c in sorted(lost.calls, key=lambda c: not c.suspicion):
        groups.setdefault(c.line, []).append(c)
    evidence = {"eager": lost.eager, "compiled": lost.compiled}
    return [
        Finding(
            "attention-lost",
            f"torch.compile loses fused attention: {lost.eager} fused operators in eager, {lost.compiled} compiled. "
            + (group[0].suspicion or (f"mask {group[0].mask}" if group[0].mask else "no mask; see its inputs")),
            line, recipe="attention_mask", applies="by hand", change=_change(group[0]),
            evidence=evidence | {"mask": group[0].mask, "suspicion": group[0].suspicion},
        )
        for line, group in groups.items()
    ]  # fmt: skip


def _change(c: Call) -> str:
    if not c.mask:
        return "pass contiguous tensors of one dtype, with heads of a width that is a multiple of 8"
    return "pass no mask where it hides nothing (attention_mask=None, is_causal=True), else mask.contiguous()"


def _name(target: Any) -> str:
    return getattr(getattr(target, "_overloadpacket", target), "__name__", str(target))


def _call(node: torch.fx.Node) -> Call:
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    value = mask.meta.get("example_value") if isinstance(mask, torch.fx.Node) else None
    line = user_line_of(node)
    if not isinstance(mask, torch.fx.Node) or not isinstance(value, Tensor):
        return Call(line)
    made = user_line_of(mask) or "an input"
    what = f"{tuple(value.shape)}, strides {tuple(value.stride())}, {value.dtype}, made at {made.rpartition('/')[2]}"
    return Call(line, what, _suspicion(value))


def _suspicion(mask: Tensor) -> str:
    if mask.requires_grad:
        return "its mask needs a gradient, which no fused kernel gives"
    if mask.stride(-1) != 1 and mask.shape[-1] != 1:
        return f"its mask has a last stride of {mask.stride(-1)}; fused kernels on CUDA demand 1"
    return ""


def user_line_of(node: torch.fx.Node) -> str:
    """`file:line` of the innermost frame of the user that made a node; "" if it has none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [f"{file}:{line}" for file, line in frames if not is_foreign(file)]
    return mine[-1] if mine else ""
