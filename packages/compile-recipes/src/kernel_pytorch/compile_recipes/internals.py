"""Every private name of PyTorch that this package uses, each behind one function: tests ask for them by name."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

BREAK_LOGGERS = (("torch._dynamo.symbolic_convert", "graph_breaks"), ("torch._dynamo.convert_frame", "graph_breaks"))


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def break_messages() -> Iterator[list[str]]:
    """What Dynamo says about graph breaks, instead of where the user lets it say that; loggers are left as found."""
    handler, before = _Records(), []
    artifacts: list[Any] = [torch._logging.getArtifactLogger(module, name) for module, name in BREAK_LOGGERS]
    told = {getattr(artifact, "logger", artifact) for artifact in artifacts}
    for logger in told | _torch_loggers():
        before.append((logger, logger.level, logger.propagate, [*logger.handlers]))
        if logger in told or logger.handlers:
            logger.handlers[:], logger.propagate = [handler if logger in told else logging.NullHandler()], False
    for logger in told:
        logger.setLevel(logging.DEBUG)
    try:
        yield handler.texts
    finally:
        for logger, level, propagate, handlers in before:
            logger.handlers[:], logger.propagate = handlers, propagate
            if logger.level != level:  # setting it makes every logger of the process forget what it has cached
                logger.setLevel(level)


def _torch_loggers() -> set[logging.Logger]:
    """Those of PyTorch, whose warnings about breaks the report repeats."""
    known = logging.root.manager.loggerDict.items()
    return {logger for name, logger in known if name.startswith("torch") and isinstance(logger, logging.Logger)}


@contextlib.contextmanager
def fresh_dynamo(recompile_limit: int | None = None) -> Iterator[None]:
    """An empty cache of compiled code before and after; what the user compiled is compiled again at its next call."""
    from torch._dynamo import config
    from torch._dynamo.utils import clear_compilation_metrics

    patched = {} if recompile_limit is None else {"recompile_limit": recompile_limit}
    torch._dynamo.reset()
    clear_compilation_metrics()
    try:
        with config.patch(patched) if patched else contextlib.nullcontext():
            yield
    finally:
        torch._dynamo.reset()


def recompile_reasons() -> list[tuple[str, str]]:
    """(`file:line function`, guard that failed) of each recompilation since `fresh_dynamo`."""
    from torch._dynamo.utils import get_compilation_metrics

    found = []
    for m in get_compilation_metrics():
        if m.recompile_reason:
            where = f"{m.co_filename}:{m.co_firstlineno} {m.co_name}"
            found.append((where, re.sub(r"^\d+/\d+: ", "", m.recompile_reason.splitlines()[0])))
    return found


def break_registry() -> dict[str, list[dict[str, Any]]]:
    """PyTorch's own list of graph breaks, by id, such as "GB0124"; empty where this torch has none."""
    file = Path(torch.__path__[0]) / "_dynamo" / "graph_break_registry.json"
    if not file.is_file():
        return {}
    found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text("utf-8"))
    return found


def lowering_backend(
    on_captured: Callable[[torch.fx.GraphModule], object], on_forward: Callable[[torch.fx.GraphModule], object]
) -> Callable[..., Any]:
    """A backend that runs eagerly, and shows each graph as Dynamo captured it and as AOTAutograd lowered its forward.

    The lowered graph is what Inductor would get, after its decompositions and its partitioner.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def boxed(gm: torch.fx.GraphModule, example: Sequence[Any] | None = None) -> Any:
        def run(args: list[Any]) -> Any:
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def forward(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        on_forward(gm)
        return boxed(gm)

    lower = aot_autograd(
        fw_compiler=forward,
        bw_compiler=boxed,
        inference_compiler=forward,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        on_captured(gm)
        return lower(gm, example)

    return backend


def inductor_code(call: Callable[[], object]) -> list[str]:
    """The code that Inductor writes for what a call compiles."""
    from torch._inductor.utils import run_and_get_code

    return list(run_and_get_code(call)[1])


@contextlib.contextmanager
def no_dispatch_modes() -> Iterator[None]:
    """Without the modes that are active, such as FakeTensorMode in a backend."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield
