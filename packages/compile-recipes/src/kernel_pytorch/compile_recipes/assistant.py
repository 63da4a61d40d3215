"""Read a user's model and say what to change: the order of the parts of an analysis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import kernels_lost, memory
from .apply import Optimized, optimize
from .costs import Gpu
from .efficiency import efficiency, gpu_of, launches
from .finders import find
from .fusion import fusion_findings
from .kernels_lost import Lost, fused_operators
from .readiness import Readiness, readiness
from .recorder import MEMORY_LIMIT, record
from .records import ALL, BY_HAND, Finding, Part, Report, mib
from .settings import setting_findings
from .state import Loss, call, check_module, device_of, innermost_line, loss_of, preserved
from .suggestions import advice, suggestions
from .validation import ROUNDS, Verdict, validate

MOST_SHAPES = 4
MOST_LINES = 10
Stage = Callable[[str], None]


class CompilerOptimizationAssistant:
    """Reads a model, says what to change, changes it and proves it.

    ```python
    import torch
    from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant

    model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    report = CompilerOptimizationAssistant().analyze_component(model, torch.randn(2, 16, 64))
    print(report["fusion_opportunities"].findings)
    ```
    """

    def analyze_component(
        self,
        module: torch.nn.Module,
        *inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        loss: Loss | None = None,
        shapes: Sequence[Sequence[Any]] = (),
        gpu: str | None = None,
        count_launches: bool = False,
        memory_limit: int = MEMORY_LIMIT,
        on_stage: Stage | None = None,
    ) -> Report:
        """Run a module a few times and say what to change.

        Parameters, buffers, attributes, gradients, hooks, mode and random state are as before when it returns; what was
        compiled before is compiled again at its next call. Training or evaluation follows `module.training`.

        Args:
            module: not compiled, on one device.
            *inputs: of a call; small ones are enough.
            kwargs: named inputs of the call, such as a batch of Hugging Face.
            loss: function of the output, whose gradients are computed; default `output.loss`, else the mean square.
            shapes: further inputs, at most 4, each a tuple, or a dictionary of named inputs: what recompiles?
            gpu: "h100", "h200" or "a100" for the least times there, "here" to measure this machine; default the GPU
                that is here, else an H100.
            count_launches: compile with Inductor too, and count what it launches.
            memory_limit: bytes of values that are kept; operators beyond it are counted, but not searched for patterns.
            on_stage: called with the name of each stage before it begins.

        Returns:
            A report with the parts "compilation_readiness", "fusion_opportunities", "memory_bottlenecks",
            "kernel_efficiency" and "optimization_suggestions". If the module raises, the exception is its only finding,
            with the user's line.

        Raises:
            TypeError: `module` is no module, or compiled or scripted already, or `kwargs` is no mapping.
            ValueError: there are more than 4 shapes, or the GPU is not known.
        """
        check_module(module, kwargs)
        calls = _calls(inputs, kwargs, shapes)
        stage = on_stage or (lambda name: None)
        return _analyzed(module, calls, loss, gpu_of(gpu), count_launches, memory_limit, stage)

    def optimize(self, module: torch.nn.Module, *inputs: Any, **options: Any) -> Optimized:
        """Make what can be made, and keep what is right and not slower; see `optimize`."""
        return optimize(module, *inputs, **options)

    def validate_optimization(
        self,
        original: torch.nn.Module,
        optimized: torch.nn.Module,
        *inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        loss: Loss | None = None,
        rounds: int = ROUNDS,
    ) -> Verdict:
        """Say whether a changed module computes what the original does, and whether that pays.

        Args:
            original: the definition.
            optimized: another module that computes the same; its parameters may have other names.
            *inputs: of a call.
            kwargs: named inputs of the call.
            loss: function of the output; default `output.loss`, else the mean square.
            rounds: of the paired clock, at least 8; 0 to time nothing.

        Returns:
            A verdict with "correctness_check": outputs and gradients against the original in float64, in training and
            evaluation, on these inputs and on others, each off by at most twice what the original is off;
            "performance_improvement": the paired ratio with its interval; "memory_efficiency" and
            "compilation_success", each before and after.

        Raises:
            TypeError: one of them is no module, or is scripted.
            ValueError: there are fewer than 8 rounds.
        """
        for module in (original, optimized):
            if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
                raise TypeError(f"given {type(module).__name__}; it must be a torch.nn.Module")
        return validate(original, optimized, inputs, kwargs, loss, rounds=rounds)


def _calls(inputs: Any, kwargs: Any, shapes: Sequence[Any]) -> list[tuple[Sequence[Any], Mapping[str, Any] | None]]:
    """(inputs, kwargs) of each call, the typical one first."""
    if any(isinstance(s, torch.Tensor) or not isinstance(s, (Sequence, Mapping)) for s in shapes):
        raise TypeError("shapes: each is a tuple of inputs, such as (x,), or a dictionary of named ones")
    if len(shapes) > MOST_SHAPES:
        raise ValueError(f"shapes: given {len(shapes)}; at most {MOST_SHAPES} are tried")
    return [(inputs, kwargs), *((((), s) if isinstance(s, Mapping) else (s, kwargs)) for s in shapes)]


def _analyzed(
    module: torch.nn.Module,
    calls: Sequence[Any],
    loss: Loss | None,
    gpu: tuple[str, Gpu],
    count_launches: bool,
    memory_limit: int,
    on_stage: Stage,
) -> Report:
    """The report, stage by stage; the module is put back after each."""

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        on_stage(name)
        with preserved(module):
            yield

    inputs, kwargs = calls[0]
    report = Report(type(module).__name__, _facts(module, inputs, kwargs))
    try:
        with stage("recording one forward"):
            graph = record(module, inputs, kwargs, memory_limit)
    except Exception as error:  # the user's own
        report["compilation_readiness"].findings.append(_of_error(error))
        report.parts["optimization_suggestions"].findings = suggestions(report.findings)
        return report
    if graph.dropped:
        report.facts["beyond the memory limit"] = f"{graph.dropped} operators, not searched for patterns"
    with stage("finding patterns"), torch.no_grad():
        findings = fusion_findings(module, find(graph), gpu[1])
        report.parts["fusion_opportunities"] = Part({"rerun": graph.rerun}, findings)
        report.parts["kernel_efficiency"] = efficiency(graph, *gpu)
    with stage("saved activations"):
        report.parts["memory_bottlenecks"] = memory_part(module, inputs, kwargs, loss)
    with stage("settings"):
        kept = report["memory_bottlenecks"].facts.get("saved", 0)
        settings = setting_findings(module, inputs, kwargs, graph, kept)
    fused = fused_operators([n.name for n in graph.nodes])
    del graph
    with stage("graph breaks and recompilations"):
        ready = readiness(module, calls, export=True)
    with stage("attention under torch.compile"):
        lost = kernels_lost.attention_lost(module, inputs, kwargs, fused)
    report.parts["compilation_readiness"] = readiness_part(ready, lost, settings)
    report["compilation_readiness"].facts["shapes"] = len(calls) - 1
    if count_launches:
        with stage("launches, by Inductor"):
            total, distinct = launches(module, inputs, kwargs)
        facts = report["kernel_efficiency"].facts
        facts |= {"launches": total, "kernels": distinct}
        facts["summary"] += f"; compiled by Inductor it launches {total}, of {distinct} kernels"
    report.parts["optimization_suggestions"].findings = suggestions(report.findings)
    return report


def readiness_part(ready: Readiness, lost: Lost, settings: Sequence[Finding]) -> Part:
    """Lost attention, breaks, recompilations and settings as findings."""
    part = Part(
        {
            "graphs": ready.graphs,
            "breaks": len(ready.breaks),
            "recompiles": len(ready.recompiles),
            "export": ready.export,
        }
    )
    if lost.eager and not lost.error:
        lines = "kept under torch.compile" if not lost.count else f"{lost.count} of them lost under torch.compile"
        part.facts |= {"attention_lost": lost.count, "attention": f"{lost.eager} fused in eager, {lines}"}
    part.findings += kernels_lost.findings(lost)
    for b in ready.breaks:
        how = "the whole function runs in eager" if b.eager else "graph break"
        cause = f"{how}: {b.cause}" + (f" ({b.gb})" if b.gb else "")
        evidence = {"gb": b.gb, "cause": b.cause, "whole_function": b.eager}
        part.findings.append(
            Finding("graph-break", cause, b.line, recipe=b.recipe, change=advice(b.recipe), evidence=evidence)
        )
    for where, why in ready.recompiles:
        place, _, function = where.rpartition(" ")
        what, recipe = f"{function} is compiled again: {why.partition('  #')[0]}", _recipe_of_guard(why)
        part.findings.append(
            Finding("recompile", what, place, recipe=recipe, change=advice(recipe), evidence={"guard": why})
        )
    if ready.error:
        part.findings.append(
            Finding("error", f"compilation fails where eager runs: {ready.error}", change="see the error")
        )
    if ready.export:
        part.findings.append(Finding("export", f"torch.export refuses it: {ready.export}", ready.export_line))
    part.findings += settings
    return part


def _recipe_of_guard(why: str) -> str:
    if "size mismatch" in why:
        return "dynamic_shape"
    return "module_counter" if "nn.Module" in why or "self." in why else "python_scalar"


def memory_part(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, loss: Loss | None
) -> Part:
    """Saved activations by line, what checkpointing saves, and the share of padding."""
    try:
        kept = memory.saved(module, inputs, kwargs)
    except RuntimeError as error:  # torch.func inside of a forward switches off what they are counted with
        if "saved tensor hooks" not in str(error):
            raise
        return Part({"unknown": "the module uses torch.func, which hides what is saved"})
    parameters = sum(p.numel() * p.itemsize for p in module.parameters())
    total = sum(k.bytes for k in kept)
    part = Part({"saved": total, "tensors": len(kept), "parameters": parameters})
    part.facts["peak"] = _peak(module, inputs, kwargs, loss)
    training = module.training
    for group in [*memory.by_line(kept).values()][:MOST_LINES]:
        size = sum(k.bytes for k in group)
        shapes = ", ".join(dict.fromkeys("x".join(map(str, k.shape)) for k in group[:4]))
        paths = tuple(dict.fromkeys(k.path for k in group))
        what = f"{mib(size)} kept for the backward in {len(group)} tensors ({shapes})"
        evidence = {"bytes": size, "tensors": len(group)}
        part.findings.append(Finding("saved", what, group[0].line, paths, evidence=evidence))
    for c in memory.checkpointing(module, kept)[:1] if training else []:
        part.findings.append(
            Finding(
                "checkpointing",
                f"checkpointing the {c.blocks} blocks of {c.path or 'the model'} keeps {mib(c.then)} of {mib(c.now)}",
                paths=(c.path,), recipe="checkpointing", gain_bytes=c.now - c.then, applies=ALL,
                change="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # one more forward",
                evidence={"now": c.now, "then": c.then, "blocks": c.blocks},
            )
        )  # fmt: skip
    share = memory.padding_share(inputs, kwargs)
    part.facts["padding"] = share
    if share > 0.1:
        what = f"{share:.0%} of the positions are padding"
        change = "optimize(model, ..., apply='all') packs the encoder, or sort the batches by length"
        part.findings.append(Finding("padding", what, recipe="padding", change=change, gain_bytes=int(share * total)))
    return part


def _peak(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, loss: Loss | None
) -> int | None:
    """Most bytes of a step beyond parameters: forward, and backward where the module trains."""
    from kernel_pytorch.harness.memory import peak

    def step() -> None:
        output = call(module, inputs, kwargs)
        wanted = [p for p in module.parameters() if p.requires_grad]
        if module.training and wanted:
            torch.autograd.grad(loss_of(output, loss), wanted, allow_unused=True)

    try:
        with torch.set_grad_enabled(module.training):
            return peak(step, device_of(module, (inputs, kwargs)))
    except (RuntimeError, TypeError):  # an output without gradients, or memory that does not suffice
        return None


def _facts(module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "mode": "training" if module.training else "evaluation",
        "device": str(device_of(module, (inputs, kwargs))),
        "torch": torch.__version__,
    }


def _of_error(error: Exception) -> Finding:
    first = str(error).strip().partition("\n")[0]
    return Finding(
        "error", f"the module raises {type(error).__name__}: {first}", innermost_line(error), applies=BY_HAND,
        change="make one eager call work first",
    )  # fmt: skip
