"""One eager run of a module as a graph: each operator with its value, the user's line and the path of the module.

Dynamo is not used: what it cannot capture (prints, `.item()`, branches on data) simply runs, so the graph is always
whole. A write in place becomes a separate node, and tensors that share its memory are renewed at their next read.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .costs import NO_COST, Cost, cost_of
from .state import call

FOREIGN = (torch.__path__[0], sysconfig.get_path("stdlib") + "/contextlib", "<")
"""Where a line is not the user's."""
MEMORY_LIMIT = 4 * 2**30
"""Bytes of values that a graph keeps; operators after that are recorded without their values."""
FACTORIES = ("arange", "linspace", "logspace", "eye", "zeros", "ones", "full", "tril_indices", "triu_indices")


@dataclass(frozen=True)
class Shape:
    """What is left of a value beyond the memory limit."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Node:
    """A call of an operator, or a tensor that was there before."""

    name: str  # of the operator, without overload; "parameter", "input" and "renewed" are ours
    op: Callable[..., Any] | None = None  # computes it without writing to its arguments; None for what was there before
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    value: Any = None  # a tensor, a tuple, a number, or a `Shape` beyond the memory limit
    line: str = ""  # `file:line` of the user's code
    path: str = ""  # of the innermost module; of a parameter its name
    cost: Cost = NO_COST  # FLOPs and bytes of the call
    site: int = 0  # the user's call that is being computed: see `site`
    index: int = 0
    inputs: list[Node] = field(default_factory=list)
    users: list[Node] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"%{self.index} {self.name}"


class Graph:
    """What was recorded, in the order of execution.

    Attributes:
        nodes: all of them.
        rerun: how many operators `again` has run: what finders cost.
        dropped: how many nodes have no value because of the memory limit.
        stock: paths of PyTorch's own modules of several operators: `RMSNorm` on a CPU, `MultiheadAttention`.
        placeless: the user's lines that make a tensor without saying on which device, as `torch.arange(n)` does.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.rerun = 0
        self.dropped = 0
        self.stock: set[str] = set()
        self.placeless: set[str] = set()

    def add(self, node: Node) -> Node:
        """Append a node and connect it with what it reads."""
        node.index = len(self.nodes)
        node.inputs = list(dict.fromkeys(n for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)))
        for n in node.inputs:
            n.users.append(node)
        self.nodes.append(node)
        return node

    def again(self, y: Node, x: Node, new: Any) -> Any:
        """The value that `y` has when `x` has the value `new` and all else is as recorded.

        NaN where an operator refuses the new values, as one may whose shape depends on them: then nothing is proven.
        """
        values = {x: new}
        for n in sorted(between(x, y), key=lambda n: n.index):
            if n.op is not None and any(i in values for i in n.inputs):

                def value(a: Any) -> Any:
                    return values.get(a, a.value) if isinstance(a, Node) else a

                args, kwargs = tree_map(value, (n.args, n.kwargs))
                self.rerun += 1
                try:
                    values[n] = n.op(*args, **kwargs)
                except (RuntimeError, IndexError, ValueError, TypeError):
                    return torch.full_like(y.value, float("nan")) if isinstance(y.value, Tensor) else None
        return values.get(y, y.value)


def between(x: Node, y: Node) -> set[Node]:
    """What `y` is computed from that came after `x`, `y` included."""
    found: set[Node] = set()
    rest = [y]
    while rest:
        n = rest.pop()
        if n.index > x.index and n not in found:
            found.add(n)
            rest += n.inputs
    return found


def chain(x: Node, y: Node) -> list[Node]:
    """What lies on a way from `x` to `y`, `y` included, in the order of execution."""
    found: dict[Node, None] = {}
    for n in sorted(between(x, y), key=lambda n: n.index):
        if any(i is x or i in found for i in n.inputs):
            found[n] = None
    return list(found)


def up(node: Node, depth: int, stop: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    """What a node is computed from, at most `depth` steps away, nearest first; not beyond nodes that `stop` names."""
    return _around(node, depth, lambda n: [] if n is not node and stop(n) else n.inputs)


def down(node: Node, depth: int, stop: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    """What is computed from a node; see `up`."""
    return _around(node, depth, lambda n: [] if n is not node and stop(n) else n.users)


def _around(node: Node, depth: int, step: Callable[[Node], list[Node]]) -> list[Node]:
    seen: dict[Node, None] = {}
    front = [node]
    for _ in range(depth):
        front = list(dict.fromkeys(m for f in front for m in step(f) if m not in seen))
        if not front:
            break
        seen |= dict.fromkeys(front)
    return list(seen)


class Paths:
    """Follows which module runs: `path` is its name. A context manager."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(m): name for name, m in module.named_modules()}
        self._stack = [""]
        self._hooks: list[Any] = []

    @property
    def path(self) -> str:
        """Name of the innermost module that runs."""
        return self._stack[-1]

    def __enter__(self) -> Paths:
        def enter(module: torch.nn.Module, args: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if len(self._stack) > 1:
                self._stack.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


class Recorder(TorchDispatchMode):
    """Use as `with Recorder(module) as recorder: module(*inputs)`; the graph is `recorder.graph`.

    Random dropout is replaced by its mean, which is the identity: a pattern holds with or without it.
    """

    def __init__(self, module: torch.nn.Module, memory_limit: int = MEMORY_LIMIT) -> None:
        super().__init__()
        self.graph = Graph()
        own = torch.nn.RMSNorm, torch.nn.MultiheadAttention
        self.graph.stock = {path for path, m in module.named_modules() if type(m) in own}
        self._paths = Paths(module)
        self._known = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self._nodes: dict[int, tuple[Any, Node, int]] = {}  # of a tensor: itself, its node, how many writes that knows
        self._writes: dict[int, list[tuple[Node, Tensor]]] = defaultdict(list)
        self._aliases: dict[int, list[Node]] = defaultdict(list)
        self._kept: dict[int, int] = {}  # bytes by address of the memory
        self._left = memory_limit

    def __enter__(self) -> Recorder:
        self._paths.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._paths.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        nodes = tree_map(lambda t: self.node_of(t) if isinstance(t, Tensor) else t, (tuple(args), kwargs))
        written = _written(function, args)
        for t in written:  # the nodes that share this memory keep what they saw
            for n in self._aliases[memory(t)]:
                if isinstance(n.value, Tensor) and memory(n.value) == memory(t):
                    n.value = n.value.clone()
        function = _without_chance(function)
        out = function(*args, **kwargs)
        name = function.__name__ if not hasattr(function, "_overloadpacket") else function._overloadpacket.__name__
        name = name.rstrip("_") if written else name
        node = Node(name, _on_copies(function, written, args), nodes[0], nodes[1], out)
        node.line, node.path, node.cost = user_line(), self._paths.path, cost_of(function, args, kwargs, out)
        node.site = site()
        self.graph.add(node)
        for t in written:
            self._writes[memory(t)].append((node, t))
        if isinstance(out, Tensor):
            self._know(out, node)
        elif isinstance(out, tuple | list):
            for i, t in enumerate(out):
                if isinstance(t, Tensor):
                    part = Node("getitem", lambda v, i: v[i], (node, i), {}, t, node.line, node.path)
                    self._know(t, self.graph.add(part))
        return out

    def node_of(self, tensor: Tensor) -> Node:
        """The node whose value a tensor has now."""
        held, node, known = self._nodes.get(id(tensor), (lambda: None, None, 0))
        if node is None or held() is not tensor:
            name = self._known.get(id(tensor), "")
            node = self.graph.add(Node("parameter" if name else "input", value=tensor, path=name))
            self._know(tensor, node)
            known = len(self._writes[memory(tensor)])
        missed = self._writes[memory(tensor)][known:]
        if missed:
            node = self.graph.add(_renewed(tensor, node, missed))
            self._know(tensor, node)
        return node

    def _know(self, tensor: Tensor, node: Node) -> None:
        address = memory(tensor)
        self._nodes[id(tensor)] = (weakref.ref(tensor), node, len(self._writes[address]))
        self._aliases[address].append(node)
        if node.op is None or address in self._kept:
            return
        size = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        if size > self._left:
            node.value = Shape(tuple(tensor.shape), tensor.dtype)
            self.graph.dropped += 1
            return
        self._left -= size
        self._kept[address] = size


def record(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Graph:
    """Record one forward without gradients."""
    with torch.no_grad(), Recorder(module, memory_limit) as recorder:
        output = call(module, inputs, kwargs)
        for t in tree_leaves(output):  # what was written and not read since
            if isinstance(t, Tensor):
                recorder.node_of(t)
    if any(n.name in FACTORIES for n in recorder.graph.nodes):  # again, since a recorded operator always has a device
        with torch.no_grad(), Placeless() as found:
            call(module, inputs, kwargs)
        recorder.graph.placeless = found.lines
    return recorder.graph


class Placeless(TorchFunctionMode):
    """Collects the user's lines that make a tensor without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in FACTORIES and (kwargs or {}).get("device") is None:
            self.lines.add(user_line())
        return function(*args, **kwargs or {})


def memory(t: Tensor) -> int:
    """Address of the memory of a tensor."""
    if t.layout is not torch.strided or t.device.type == "meta":
        return id(t)
    return t.untyped_storage().data_ptr() or id(t)


def user_line() -> str:
    """`file:line` of the innermost frame of the user below this package's call of the module; "" if there is none."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _user_frame(generated: bool = False) -> FrameType | None:
    """The innermost frame of the user's code, or of code that was generated, as of a `torch.fx.GraphModule`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_foreign(file := frame.f_code.co_filename) and not (generated and file[0] == "<"):
        frame = frame.f_back if frame.f_code is not call.__code__ else None
    return frame


def site() -> int:
    """The user's call that is being computed: one number for all operators of one call of PyTorch's."""
    frame, places = _user_frame(generated=True), []
    while frame is not None and frame.f_code is not call.__code__:  # all, since a helper may be called several times
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))


def place_of(line: str, path: str) -> str:
    """The user's line, else the path of the module, the same in each layer."""
    return line or re.sub(r"\d+", "#", path)


OURS = __file__.rpartition("recorder.py")[0]


def is_foreign(file: str) -> bool:
    """Whether a file is no code of the user: PyTorch's, this package's, or generated."""
    return file.startswith(FOREIGN) or (file.startswith(OURS) and "/recipes/" not in file[len(OURS) - 1 :])


def _written(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    pairs = zip(args, function._schema.arguments, strict=False)
    return [a for a, s in pairs if s.alias_info and s.alias_info.is_write and isinstance(a, Tensor)]


def _without_chance(function: Any) -> Any:
    """The operator, or what gives the mean of its random result."""
    name = function._overloadpacket.__name__
    if name in ("native_dropout", "_fused_dropout"):

        def dropout(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)

        return dropout
    if name == "bernoulli_" and function._overloadname == "float":

        def bernoulli_(x: Tensor, p: float = 0.5, **_: Any) -> Tensor:
            return x.fill_(p)

        return bernoulli_
    return function


def _on_copies(function: Any, written: Sequence[Tensor], args: Sequence[Any]) -> Callable[..., Any]:
    """An operator that writes, without the writing."""
    if not written:
        return function  # type: ignore[no-any-return]
    places = [i for i, a in enumerate(args) if any(a is w for w in written)]

    def functional(*args: Any, **kwargs: Any) -> Any:
        copies = [a.clone() if i in places else a for i, a in enumerate(args)]
        function(*copies, **kwargs)
        return copies[places[0]]

    return functional


def _renewed(tensor: Tensor, node: Node, missed: Sequence[tuple[Node, Tensor]]) -> Node:
    """A node with the value that a tensor has after writes to its memory by others."""

    def place(t: Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.storage_offset()

    mine, places = place(tensor), [place(t) for _, t in missed]
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize

    def renewed(old: Tensor, *new: Tensor) -> Tensor:
        buffer = old.new_zeros(elements)
        for value, where in ((old, mine), *zip(new, places, strict=True)):
            buffer.as_strided(*where).copy_(value)
        return buffer.as_strided(*mine)

    written = [n for n, _ in missed]
    return Node("renewed", renewed, (node, *written), {}, tensor, written[-1].line, written[-1].path)
