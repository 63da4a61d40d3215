"""Settings that cost time or memory, or that are wrong: precision, implementations, modes and gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .recorder import Graph, Node
from .records import Finding
from .state import call, device_of

RANDOM = ("bernoulli", "native_dropout", "_fused_dropout", "dropout")
HOST_SHARE = 0.9
"""Share of the whole time that the host spends before it waits for the device: beyond it the host is the bottleneck."""
LONG_WAITS = 5e-3
"""Seconds beside which waiting for an idle device, some 50 us, takes no time."""


def setting_findings(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, graph: Graph, saved_bytes: int
) -> list[Finding]:
    """What is set in a way that costs, by the module's modes, one recorded forward, and what a forward keeps."""
    found = [*_modes(module, saved_bytes), *_dropout(module, graph), *_transformers(module)]
    if device_of(module, (inputs, kwargs)).type == "cuda":
        found += [*_precision(module), *_host(module, inputs, kwargs)]
    return found


def _modes(module: torch.nn.Module, saved_bytes: int) -> list[Finding]:
    found = []
    trainable = any(p.requires_grad for p in module.parameters())
    if not module.training:
        inside = [name for name, m in module.named_modules() if m.training and name]
        if inside:
            what = f"{len(inside)} modules are in training mode inside a model in evaluation: {', '.join(inside[:3])}"
            found.append(_setting(what, "model.eval()", paths=tuple(inside)))
        if torch.is_grad_enabled() and trainable and saved_bytes:
            what = "evaluation with gradients enabled: each forward keeps what a backward would need"
            change = "with torch.inference_mode(): y = model(x)"
            found.append(Finding("note", what, change=change, gain_bytes=saved_bytes))  # so is the analysis itself run
    elif not trainable and next(module.parameters(), None) is not None:
        found.append(_setting("training mode, though no parameter needs a gradient", "model.eval()"))
    return found


def _dropout(module: torch.nn.Module, graph: Graph) -> list[Finding]:
    if module.training or any(m.training for m in module.modules()):
        return []
    lines: dict[str, str] = {}
    for n in graph.nodes:
        if drops(n):
            lines.setdefault(n.line, n.path)
    what, change = "dropout is active in evaluation", "F.dropout(x, p, training=self.training)"
    return [_setting(what, change, line, (path,), "dropout_in_evaluation") for line, path in lines.items()]


def drops(n: Node) -> bool:
    """Whether an operator drops values at random, with a probability above 0."""
    if n.name not in RANDOM:
        return False
    p = next((a for a in n.args if isinstance(a, float | int) and not isinstance(a, bool)), 0.5)
    return p < 1 if n.name == "bernoulli" else p > 0


def _transformers(module: torch.nn.Module) -> list[Finding]:
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != "eager":
        return []
    change = 'model.set_attn_implementation("sdpa")'
    return [_setting("attention runs as written out by hand: attn_implementation is 'eager'", change)]


def _precision(module: torch.nn.Module) -> list[Finding]:
    wide = [p for p in module.parameters() if p.dtype == torch.float32]
    if not wide or torch.is_autocast_enabled("cuda"):
        return []
    found = []
    if torch.get_float32_matmul_precision() == "highest":
        change = 'torch.set_float32_matmul_precision("high")'
        found.append(_setting("float32 products run without tensor cores", change))
    change = 'model.bfloat16(), or with torch.autocast("cuda", torch.bfloat16):'
    found.append(_setting(f"{sum(p.numel() for p in wide) / 1e6:.1f} M weights are float32 on a GPU", change))
    return found


def _host(module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Finding]:
    """Whether the host takes longer to launch a forward than the device to run it."""

    def run(calls: int) -> tuple[float, float]:
        """Seconds until all calls returned, and until the device was done."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call(module, inputs, kwargs)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        return launched, time.perf_counter() - begin

    with torch.no_grad():
        run(3)
        launched, whole = run(1)
        if whole < LONG_WAITS:
            launched, whole = run(min(100, math.ceil(LONG_WAITS / whole)))
    if launched < HOST_SHARE * whole:
        return []
    change = 'torch.compile(model, mode="reduce-overhead"), or larger batches'
    return [_setting("the host takes longer to launch a forward than the device to run it", change)]


def _setting(what: str, change: str, line: str = "", paths: tuple[str, ...] = (), recipe: str = "") -> Finding:
    return Finding("setting", what, line, paths, recipe, change)
