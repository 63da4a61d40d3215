"""Attention by hand inside a forward, made one call: the forward of one instance, rewritten as Dynamo captures it.

The new forward is the class's own, compiled by Dynamo with a backend that rewrites the graph and runs it eagerly. So
guards, modes, side effects and graph breaks are Dynamo's business, autograd derives the new operator, and undoing is to
delete the forward. Under an outer `torch.compile` the inner one is inlined, and the class's own code is compiled.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kernel_pytorch.compile_recipes._core.patching import Forward, forward_of_class
from kernel_pytorch.compile_recipes.finders.attention import Attention, find_attention
from kernel_pytorch.compile_recipes.internals import break_messages, no_dispatch_modes
from kernel_pytorch.compile_recipes.recorder import Graph, Node, Recorder, chain
from kernel_pytorch.compile_recipes.settings import drops
from kernel_pytorch.compile_recipes.state import preserved

from .changes import Context, Done, put

METHODS = {torch.Tensor.matmul, torch.Tensor.bmm, "matmul", "bmm", "__matmul__"}
PRODUCTS = {operator.matmul, torch.matmul, torch.bmm, *METHODS}
MOST_SHAPES = 256
"""Whose rewritten graphs are kept."""


class Owners(fx.Interpreter):
    """Runs a graph under the recorder, and notes by which node of it each recorded operator was called."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.recorder = Recorder(gm)
        self.owner: dict[Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        start = len(self.recorder.graph.nodes)
        out = super().run_node(n)
        for node in self.recorder.graph.nodes[start:]:
            self.owner[node] = n
        return out

    def record(self, inputs: Sequence[Any]) -> Graph:
        """Run the graph."""
        with torch.no_grad(), self.recorder:
            self.run(*inputs)
        return self.recorder.graph


def rewrite(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Put `scaled_dot_product_attention` where two products with a softmax are proven to be it.

    Returns:
        For each such place the obstacle to rewriting it, "" if it was rewritten.
    """
    devices = {t.device for t in inputs if isinstance(t, Tensor) and t.is_cuda}
    with no_dispatch_modes(), torch.random.fork_rng(devices):
        owners = Owners(gm)
        graph = owners.record(inputs)
        found = find_attention(graph, {})
    obstacles = [_obstacle(a) or _replace(gm, a, owners.owner[a.first], owners.owner[a.second]) for a in found]
    if "" in obstacles:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return obstacles


def _obstacle(a: Attention) -> str:
    if any(drops(n) for n in chain(a.first, a.second)):
        return "dropout stands between its products"
    if a.mask is not None:
        return "a mask stands between its products"
    return "" if a.call and a.keys_turned else "it is not proven to be one call with keys on the right"


def _replace(gm: fx.GraphModule, a: Attention, one: fx.Node, two: fx.Node) -> str:
    """Rewrite one place; return the obstacle to it, or ""."""
    q, keys, v = [*one.args, None, None][:2] + [*two.args, None, None][1:2]
    products = one.target in PRODUCTS and two.target in PRODUCTS
    if not products or not all(isinstance(n, fx.Node) for n in (q, keys, v)) or two.args[0] is v:
        return "its products are not matmul or bmm of two tensors"
    if _given_between(one, two):
        return "a tensor that its forward is given, as a mask is, stands between its products"
    with gm.graph.inserting_before(two):
        k = gm.graph.call_method("transpose", (keys, -1, -2))
        options = {"is_causal": a.is_causal, "scale": a.scale}
        new = gm.graph.call_function(F.scaled_dot_product_attention, (q, k, v), options)
    new.meta = dict(two.meta)
    two.replace_all_uses_with(new)
    return ""


def _given_between(one: fx.Node, two: fx.Node) -> bool:
    """Whether an input tensor of the graph, such as a mask, enters the computation between two products.

    The values of inputs were made up for the proof, so a mask that hides nothing there proves nothing. Sizes of inputs
    are no values.
    """
    below = _reached([one], lambda n: n.users)
    between = [n for n in _reached([two], lambda n: n.all_input_nodes) if n in below and n not in (one, two)]
    beside = [n for node in (*between, two) for n in node.all_input_nodes if n not in below and n is not two.args[1]]
    above = _reached(beside, lambda n: () if n.target in ("size", "dim", getattr) else n.all_input_nodes)
    return any(n.op in ("placeholder", "get_attr") and isinstance(n.meta.get("example_value"), Tensor) for n in above)


def _reached(start: Sequence[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(start)
    while pending:
        if (n := pending.pop()) not in found:
            found.add(n)
            pending += following(n)
    return found


def _value(t: Any, shape: Any) -> Any:
    """A value like an input of a graph, in this shape; of what is no tensor, the value itself."""
    if not isinstance(t, Tensor):
        return shape
    if not t.is_floating_point():
        return torch.zeros(shape, dtype=t.dtype, device=t.device)
    # A scale or a table of one element stays what it is only if it is real.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(t.dtype).to(t.device)


def rewriting_backend(seen: list[list[str]]) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """A backend for `torch.compile` that runs a graph eagerly, rewritten for each shape in which that is proven.

    One graph serves many shapes, but a proof holds in its own alone: a window is no causal mask in longer sequences.
    What `rewrite` returns is appended to `seen`.
    """

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        @lru_cache(MOST_SHAPES)
        def forward_in(*shapes: Any) -> Callable[..., Any]:
            rewritten = fx.GraphModule(gm, copy.deepcopy(gm.graph))
            try:
                seen.append(rewrite(rewritten, [*map(_value, examples, shapes)]))
            except Exception as error:  # values of a user's own kind: the graph stays as it is
                seen.append([f"its graph does not run on made-up values, {type(error).__name__}: {error}"])
            return rewritten.forward if "" in seen[-1] else gm.forward

        return lambda *args: forward_in(*(a.shape if isinstance(a, Tensor) else a for a in args))(*args)

    return backend


def rewrite_attention(model: torch.nn.Module, context: Context) -> Done | str:
    """Rewrite the forward of each module in which attention by hand was proven."""
    paths = {p.path for p in context.patterns if p.kind == "attention" and p.what.startswith("equal to")}
    modules = {id(m) for name, m in model.named_modules() if name in paths}
    if not modules:
        return "no attention by hand was proven to be one call"
    seen: list[list[str]] = []
    compiled: dict[type, Any] = {}

    def make(module: torch.nn.Module) -> Forward:
        return _forward(module, seen, compiled)

    done = put(model, "rewriting", dict.fromkeys(modules, make), "forwards rewritten")
    if isinstance(done, str):
        return done
    with torch.no_grad(), break_messages(), preserved(model):
        for _ in range(2):
            before = len(seen)
            model(*context.inputs, **context.kwargs)
    obstacles = dict.fromkeys(o for each in seen for o in each)
    if "" not in obstacles:
        done.undo()
        return f"it cannot be rewritten: {'; '.join(obstacles) or 'a graph break stands between its products'}"
    if len(seen) > before:
        done.undo()
        return "its forward would be compiled again in each call"
    return Done(f"attention as one call, {done.what}", done.undo)


def _copied(function: Any) -> Any:
    """Copy a function with a separate code object: Dynamo counts recompilations by code object."""
    if not isinstance(function, FunctionType):
        return function
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__.replace(), *parts)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _forward(module: torch.nn.Module, seen: list[list[str]], compiled: dict[type, Any]) -> Forward:
    own = forward_of_class(module)
    if type(module) not in compiled:
        compiled[type(module)] = torch.compile(_copied(own), backend=rewriting_backend(seen))
    rewritten = compiled[type(module)]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        return rewritten(self, *args, **kwargs)

    return forward
