"""What a recipe is, and what is counted of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernel_pytorch.compile_recipes.finders.numbers import PRODUCTS
from kernel_pytorch.compile_recipes.kernels_lost import attention_lost, fused_operators
from kernel_pytorch.compile_recipes.memory import saved
from kernel_pytorch.compile_recipes.readiness import readiness
from kernel_pytorch.compile_recipes.recorder import record

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments by position and by name."""


class Same(nn.Module):
    """An `after` that computes with the parameters of its `before`."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before = before


def x(*shape: int) -> Tensor:
    """Normal numbers, the same for each shape in each run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Recipe:
    """A change, as code before and after, with an effect that is counted: a file of this folder.

    `name` is that of the file, whose docstring has three paragraphs: `title`, `why`, and "When not:". It has

    - `DETECTOR`, kind of the finding that names it, and `COUNTS`, the quantities that become less: see `count`;
    - `Before`, a module that takes nothing, and `After`, one that takes an instance of `Before`;
    - where it needs them `inputs()`, a tuple for each call, else one tensor `(8, 64)`; quantities of compilation are
      counted over all calls, others on the first;
    - where it needs them `TRAIN`, whether both train; `NAMED`, names of the inputs of `Before`; `given_after(given)`,
      the inputs of `After`; `result_of(result, given)`, what of the result of `Before` is compared; and
      `SILENT = False`, where the assistant names `After` too; `SINCE`, the first torch with this effect.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.name = module.__name__.rpartition(".")[2]
        text = inspect.cleandoc(module.__doc__ or "")
        self.title, why, when_not = (" ".join(part.split()) for part in text.split("\n\n"))
        self.title, self.why = self.title.rstrip("."), why
        self.when_not = when_not.removeprefix("When not: ")
        self.detector: str = module.DETECTOR
        self.counts: tuple[str, ...] = module.COUNTS
        self.silent: bool = getattr(module, "SILENT", True)

    def code(self, name: str) -> str:
        """The source of "Before" or "After"."""
        return inspect.getsource(getattr(self.module, name))

    def modules(self) -> tuple[nn.Module, nn.Module]:
        """Both, in their mode, with the same parameters."""
        torch.manual_seed(0)
        train = getattr(self.module, "TRAIN", False)
        before = self.module.Before().train(train)
        return before, self.module.After(before).train(train)

    def calls(self) -> tuple[list[Call], list[Call]]:
        """The calls of both, in the same order."""
        given, names = self.inputs(), getattr(self.module, "NAMED", ())
        before: list[Call] = [((), dict(zip(names, g, strict=True))) if names else (g, {}) for g in given]
        change = getattr(self.module, "given_after", lambda g: g)
        return before, [(change(g), {}) for g in given]

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """The positional inputs of each call."""
        return [*getattr(self.module, "inputs", lambda: [(x(8, 64),)])()]

    def results(self) -> tuple[Tensor, Tensor]:
        """What both compute of the first inputs, to be compared."""
        modules, calls = self.modules(), self.calls()
        first, second = (m(*c[0][0], **c[0][1]) for m, c in zip(modules, calls, strict=True))
        compared = getattr(self.module, "result_of", lambda result, given: result)
        return compared(first, self.inputs()[0]), second

    def counted(self) -> dict[str, tuple[int, int]]:
        """Each quantity before and after."""
        modules, calls = self.modules(), self.calls()
        return {what: (count(what, modules[0], calls[0]), count(what, modules[1], calls[1])) for what in self.counts}


def count(what: str, module: nn.Module, calls: Sequence[Call]) -> int:
    """A quantity of a module.

    Args:
        what: "breaks", "graphs" and "recompiles" of Dynamo over all calls; "operators", "products", "flops" and "moved"
            bytes of one eager forward; "saved" bytes that autograd keeps; "unfused": fused attention that compilation
            loses; "contiguous": convolutions that are not in channels_last.
        module: in its mode.
        calls: (inputs, kwargs) of each.

    Raises:
        ValueError: there is no such quantity.
    """
    inputs, kwargs = calls[0]
    if what in ("breaks", "graphs", "recompiles"):
        found = readiness(module, calls)
        return found.graphs if what == "graphs" else len(getattr(found, what))
    if what == "saved":
        return sum(k.bytes for k in saved(module, inputs, kwargs))
    nodes = [n for n in record(module, inputs, kwargs).nodes if n.cost.launches]
    if what == "unfused":
        return attention_lost(module, inputs, kwargs, fused_operators([n.name for n in nodes])).count
    if what == "contiguous":
        weights = [n.args[1].value for n in nodes if n.name == "convolution"]
        return sum(not w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    counted = {
        "operators": len(nodes),
        "products": sum(n.name in PRODUCTS for n in nodes),
        "flops": sum(n.cost.flops for n in nodes),
        "moved": sum(n.cost.bytes for n in nodes),
    }
    if what not in counted:
        raise ValueError(f"what is {what!r}; it must be breaks, graphs, recompiles, saved, {', '.join(counted)}, ...")
    return counted[what]
