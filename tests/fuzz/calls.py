"""Calls of operators and public functions as plain data: recorded from valid examples, changed at random, run.

A call is `{"target": ..., "args": [...]}`. A target is `torch.ops` and the operator's name, or a module and a function
of it, then with `"names"` of the arguments. An argument is a number, a text, None, or a tensor: `{"shape": [...],
"dtype": ...}` and what else is unusual about it. So a call fits in one line, which runs again as it is.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACE = "kernel_pytorch"
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATS, "bool", "uint8", "int8", "int32", "int64", "complex64", "float8_e4m3fn", "qint8", "quint8")
SCALARS: tuple[Any, ...] = (0, 1, -1, 2, 0.0, 0.5, 1.0, -0.5, 1e-30, 1e308, 2**31, 2**62, -(2**63), 2**64)
SCALARS += (float("nan"), float("inf"), float("-inf"), None, True, False, "", "x", "silu", "rms", "float64")
KINDS = ("meta", "sparse", "freed", "negated", "nan", "large", "tiny", "grad", "list", "subclass")
SIZES = (0, 1, 2, 3, 5, 8, 17, 64, 129, 257, 300)
HUGE = (2**31 - 1, 2**31, 2**33, 2**40, 2**62)


# Recording.


class _Recorder(TorchDispatchMode):
    """Notes the calls of this workspace's operators that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace.startswith(NAMESPACE):
            given = {**dict(zip((a.name for a in function._schema.arguments), args, strict=False)), **(kwargs or {})}
            values = [given.get(a.name, a.default_value) for a in function._schema.arguments]
            self.calls.append({"target": f"torch.ops.{function}", "args": [describe(value) for value in values]})
        return function(*args, **(kwargs or {}))


def describe(value: Any) -> Any:
    """The plain data of an argument; the numbers in a tensor are not among it, but for integers."""
    if not isinstance(value, Tensor):
        return value
    found: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value.dtype in (torch.int32, torch.int64):
        found["below"] = max(2, int(value.max()) + 1 if value.numel() else 2)
    return found


def examples(instead: str | None) -> list[dict[str, Any]]:
    """Valid calls of every operator and public function, from the smallest cases of the test grids.

    Args:
        instead: path of a Python file with a function `examples`; if given, only what that calls.
    """
    from kernel_pytorch.harness.discovery import discover
    from kernel_pytorch.harness.technique import Level

    recorder, public = _Recorder(), []
    if instead is not None:
        load_file(instead).examples(recorder)
        return recorder.calls
    for technique in discover().techniques.values():
        package = technique.levels.rpartition(".")[0]
        for operation in technique.operations:
            if operation.function and not operation.function.startswith(package.partition(":")[0]):
                continue  # the technique that it belongs to has it too
            cases = [case for case in operation.test_grid.cases("cpu") if case.dtype == torch.float32]
            made = [operation.arguments(case, torch.Generator().manual_seed(0)) for case in cases]
            made = sorted((inputs for inputs in made if 0 < _elements(inputs) < 8000), key=_elements)[-3:]
            here = [i for i in operation.implementations if i.why_absent(torch.device("cpu"), torch.float32) is None]
            kernels = [i for i in here if i.level in (Level.TRITON, Level.CUDA)]
            for inputs in made:
                for implementation in kernels:
                    _differentiate(recorder, implementation.load(), inputs, operation.differentiable)
                    if implementation.level is Level.CUDA:
                        public += _compiled(technique, operation, implementation, inputs)
                public += _public(recorder, package, operation, inputs)
    in_place = [{**c, "target": c["target"].replace("_backward.", "_backward_.")} for c in recorder.calls]
    in_place = [call for call in in_place if call["target"].count("_backward_.") and _exists(call["target"])]
    unique = {repr(call): call for call in [*recorder.calls, *in_place, *public]}
    return list(unique.values())


@functools.cache
def load_file(path: str) -> Any:
    """Run a Python file as a module, once."""
    specification = importlib.util.spec_from_file_location("also", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _elements(inputs: tuple[Any, ...]) -> int:
    return min((value.numel() for value in inputs if isinstance(value, Tensor) and value.dim() > 0), default=0) and sum(
        value.numel() for value in inputs if isinstance(value, Tensor)
    )


def _differentiate(recorder: _Recorder, function: Any, inputs: tuple[Any, ...], backward: bool) -> None:
    given = [
        value.clone().requires_grad_(backward) if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in inputs
    ]
    with recorder:
        result = function(*given)
        results = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])


def _exists(target: str) -> bool:
    _, _, namespace, operator, _ = target.split(".")
    return hasattr(getattr(torch.ops, namespace), operator)


def _compiled(technique: Any, operation: Any, cuda: Any, inputs: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The call that level "cuda" makes of its function, which is public too, in the package of compiled operators.

    None where the level is a function of its own around such ones.
    """
    target, given = cuda.target, [inputs]
    if operation.function:
        name = cuda.level_target().partition(":")[2]
        compiled = technique.ladder().function(name, "cuda")
        if not compiled.__module__.startswith("kernel_pytorch.cuda_ops"):
            return []
        target, given = f"{compiled.__module__}:{compiled.__name__}", []
        with technique.ladder().replaced(name, "cuda", lambda *own: given.append(own) or compiled(*own)):
            cuda.load()(*inputs)
    return [{"target": target, "args": [describe(value) for value in given[0]]}]


def _public(recorder: _Recorder, package: str, operation: Any, inputs: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Calls of the public function at every level that needs no compiler; as it is, where it takes none."""
    named = dict(zip(operation.signature(), inputs, strict=True))
    target = operation.function or f"{package}:{operation.name}"
    module, _, function = target.partition(":")
    with recorder:
        getattr(importlib.import_module(module), function)(**named)
    given = {name: describe(value) for name, value in named.items()}
    for level in ("native", "triton", "cuda") if operation.function else (None,):
        keywords = {**given, **({} if level is None else {"level": level})}
        yield {"target": target, "names": list(keywords), "args": list(keywords.values())}


# Changing.


def changed(call: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The call with some of its arguments malformed; now and then with none."""
    call = copy.deepcopy(call)
    places = range(len(call["args"]))
    tensors = [given for given in call["args"] if isinstance(given, dict)]
    if tensors and chance.random() < 0.1:  # all the rest valid, or another check would come first
        chance.choice(tensors)["kind"] = "freed"
        return call
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3))):
        place = chance.choice(places)
        given = call["args"][place]
        if isinstance(given, dict) and chance.random() < 0.9:
            call["args"][place] = _changed_tensor(given, call["args"], chance)
            found = call["args"][place]
            if "native" in call["args"] and isinstance(found, dict) and found.get("kind") != "freed":
                found.pop("kind", None)  # what PyTorch's own operators do with it is not ours
        else:
            # PyTorch's error messages print tensors in the place of numbers, also those whose memory was freed.
            others = [{k: v for k, v in a.items() if k != "kind"} for a in call["args"] if isinstance(a, dict)]
            call["args"][place] = copy.deepcopy(chance.choice((*SCALARS, not given, *others)))
    if chance.random() < 0.3:  # in another dtype, with everything that fits together still fitting
        own, other = chance.choice(FLOATS), chance.choice(FLOATS)
        for given in call["args"]:
            if isinstance(given, dict) and given["dtype"] == own:
                given["dtype"] = other
    return call


def _changed_tensor(given: dict[str, Any], all_given: list[Any], chance: random.Random) -> Any:
    found = copy.deepcopy(given)
    shape = found["shape"]
    way = chance.choice(("dtype", "size", "size", "size", "rank", "alias", "layout", "kind", "none", "other", "huge"))
    if way == "dtype":
        found["dtype"] = chance.choice(DTYPES)
    elif way == "size" and shape:
        place = chance.randrange(len(shape))
        shape[place] = chance.choice((*SIZES, shape[place] - 1, shape[place] + 1, 2 * shape[place]))
        shape[place] = max(0, min(shape[place], 400))
    elif way == "rank":
        found["shape"] = chance.choice((shape[1:], shape[:-1], [1, *shape], [*shape, 1], [], shape[::-1], [0]))
    elif way == "alias":
        found["alias"] = chance.randrange(len(all_given))
    elif way == "layout":
        found["layout"] = chance.choice(("transposed", "expanded", "stepped", "shifted", "reversed"))
    elif way == "kind":
        found["kind"] = chance.choice(KINDS)
    elif way == "huge" and shape:
        found["layout"] = "expanded"
        shape[chance.randrange(len(shape))] = chance.choice(HUGE)
    elif way == "other":
        others = [other for other in all_given if isinstance(other, dict)]
        return copy.deepcopy(chance.choice(others))
    else:
        return None
    return found


def is_large(call: dict[str, Any]) -> bool:
    """Whether a tensor has so many elements that a call which does everything right may take for ever."""
    return any(isinstance(a, dict) and math.prod(a["shape"]) > 2**24 for a in call["args"])


# Running.


def run(call: dict[str, Any]) -> Any:
    """Make the arguments, which are the same every time, and call.

    Returns:
        What the call returned, and tensors among the arguments, which it may have written to.
    """
    torch.manual_seed(0)
    arguments: list[Any] = []
    for value in call["args"]:
        arguments.append(_build(value, arguments) if isinstance(value, dict) else value)
    module, _, name = call["target"].rpartition(":")
    if module and not module.startswith("torch.ops"):
        function = getattr(importlib.import_module(module), name)
        names = call.get("names", ())
        result = function(**dict(zip(names, arguments, strict=True))) if names else function(*arguments)
    else:
        namespace, operator, overload = call["target"].removeprefix("torch.ops.").split(".")
        result = getattr(getattr(getattr(torch.ops, namespace), operator), overload)(*arguments)
    return result, arguments


def _build(given: dict[str, Any], before: list[Any]) -> Any:
    """A tensor; what cannot be made that way is an ordinary one."""
    if "alias" in given and given["alias"] < len(before) and isinstance(before[given["alias"]], Tensor):
        return before[given["alias"]]
    dtype, shape, layout = getattr(torch, given["dtype"]), given["shape"], given.get("layout")
    if layout == "expanded":
        made = _numbers([1] * len(shape), dtype, given).expand(shape)
    elif layout == "transposed":
        made = _numbers(shape[::-1], dtype, given).permute(*range(len(shape))[::-1])
    elif layout == "stepped" and not is_large({"args": [given]}):
        made = _numbers([2 * size for size in shape], dtype, given)[tuple(slice(None, None, 2) for _ in shape)]
    elif layout == "shifted" and shape:
        made = _numbers([*shape[:-1], shape[-1] + 1], dtype, given)[..., 1:]
    else:
        made = _numbers(shape, dtype, given)
    return _of_kind(made, given.get("kind"))


def _numbers(shape: list[int], dtype: torch.dtype, given: dict[str, Any]) -> Tensor:
    if dtype in (torch.qint8, torch.quint8):
        return torch.quantize_per_tensor(torch.randn(shape), 0.1, 0, dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0, given.get("below", 2), shape).to(dtype)


def _of_kind(made: Tensor, kind: str | None) -> Any:
    if kind == "meta":
        return made.to("meta")
    if kind == "sparse" and made.dim() > 0 and not made.is_quantized:
        return made.to_sparse()
    if kind == "freed" and not made.is_quantized:
        made.untyped_storage().resize_(0)
    if kind == "negated" and (made.is_floating_point() or made.is_complex()):
        return torch._neg_view(made)
    if kind == "list":
        return [made]
    if kind == "subclass":
        return made.as_subclass(torch.nn.Parameter) if made.is_floating_point() else made
    if kind == "grad" and made.is_floating_point():
        return made.detach().requires_grad_()
    fill = {"nan": float("nan"), "large": 1e30, "tiny": -1e-40}.get(kind or "")
    if fill is not None and made.is_floating_point() and made.dtype.itemsize > 1:
        return torch.full_like(made, fill)
    if kind == "large" and made.dtype in (torch.int32, torch.int64):
        return torch.full_like(made, torch.iinfo(made.dtype).max)
    return made
