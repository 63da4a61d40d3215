"""`patch` and `unpatch`: parts of a model computed another way, in place, and the way back.

A patched module gets another `forward` as an attribute of the instance, and nothing else changes: its class, its
parameters, its hooks, its children and the names in its state_dict stay. So patches of several packages commute and
come off in any order, checkpoints and optimizers do not see them, and what wraps a module (DDP, FSDP2, adapters of its
linear layers, gradient checkpointing) goes on working. A deep copy is patched too; a shallow one, and the replicas of
torch.nn.DataParallel, would compute with the parameters of the original: use DDP. A pickled model comes back unpatched,
and so does one that a spawned worker gets; one that cloudpickle carries comes back patched.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as _without_modes  # a private name of PyTorch

from .measured import why_not_measured
from .stock import BELOW, HOOKS, OWNER, class_of, has_foreign_forward, holder_of, owner_of

Forward = Callable[..., Any]
"""What becomes the `forward` of a module; it takes the module first."""

CALLED = "_compiled_call_impl"
"""Attribute of a module that PyTorch calls in the place of its forward and all hooks, if it is not None."""

Finder = Callable[[torch.nn.Module], "Found | str | None"]
"""Whether a module is one that a package computes: what to do, the reason why it is left alone, or None: another."""


@dataclass(frozen=True)
class Found:
    """A module that can be patched.

    Attributes:
        forward: what computes it from now on.
        by: the public function that does, for the report.
        gpu_bound: whether that saves time of the GPU and takes more of the host, as where PyTorch has a kernel for it.
    """

    forward: Forward
    by: str
    gpu_bound: bool = False


@dataclass
class Patched:
    """What `patch` did.

    Attributes:
        replaced: by the path of a module, what computes it now.
        left: by the path of a module that looked like one of these, why it was left alone.
        unmeasured: of each device of the model on which the package was not measured, what to do about it.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line for each device that was not measured, then one for each path, or one that says that there is none."""
        replaced = [f"{path or 'the model'}: {by}" for path, by in self.replaced.items()]
        left = [f"{path or 'the model'}: left alone, {why}" for path, why in self.left.items()]
        nothing = [] if replaced or left else ["no module replaced: none computes what this package does"]
        return "\n".join([*self.unmeasured, *replaced, *left, *nothing])


HOST_TIME = (
    "PyTorch has a kernel for it, and a replacement takes more time of the host; patch(model, gpu_bound=True) replaces"
    " it, which pays where the GPU is the limit, as with large batches"
)
"""Why a module is left alone that only pays where the GPU is the limit."""


def patch(model: torch.nn.Module, package: str, finders: Sequence[Finder], *, gpu_bound: bool = False) -> Patched:
    """Give every module that a finder knows the forward that it names.

    Args:
        model: whose modules are patched, itself among them.
        package: whose patch it is; `unpatch` takes off what has this name.
        finders: asked in this order; the first that knows a module decides.
        gpu_bound: whether modules are patched too that only pays where the GPU is the limit.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted already: patch it before.
    """
    _check_model(model)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    notes = {note for device in devices if (note := why_not_measured(device)) is not None}
    report = Patched(unmeasured=tuple(sorted(notes)))
    with _trials():
        for path, module in model.named_modules():
            if package in (owner_of(module), owner_of(module, BELOW)):
                report.replaced[path] = f"{package}, patched before"
                continue
            found = next((found for find in finders if (found := find(module)) is not None), None)
            if isinstance(found, Found):
                found = _put(module, package, found) if gpu_bound or not found.gpu_bound else HOST_TIME
            if isinstance(found, str):
                report.left[path] = found
            elif found is not None:
                report.replaced[path] = found.by
    return report


def unpatch(model: torch.nn.Module, package: str) -> None:
    """Give every module that `patch` of this package changed the forward of its class again.

    Where accelerate wrapped a patch since, to move weights, its wrapper stays and calls the class's own forward. What
    others wrapped cannot be taken out, which a warning says.
    """
    _check_model(model)
    kept = []
    for path, module in model.named_modules():
        if owner_of(module) == package:
            del holder_of(module).forward
        elif owner_of(module, BELOW) == package:
            module.__dict__[BELOW] = MethodType(forward_of_class(module), module)
        elif _is_below(package, module.__dict__.get("forward")):
            kept.append(path or "the model")
    if kept:
        warnings.warn(
            f"patches of {package} stay in {', '.join(kept)}, whose forward was wrapped since by something else; take "
            "that off, then call unpatch again", stacklevel=3,
        )  # fmt: skip


def _is_below(package: str, forward: Any) -> bool:
    """Whether a forward that was replaced says, as functools.wraps does, that it wraps the patch of this package."""
    while (forward := getattr(forward, "__wrapped__", None)) is not None:
        owner, function = getattr(forward, OWNER, (None, None))
        if owner == package and function is getattr(forward, "__func__", forward):
            return True
    return False


@contextlib.contextmanager
def _trials() -> Iterator[None]:
    """Let finders try modules on made-up inputs: on the CPU, whatever the user's default device and modes are."""
    with (
        _without_modes(), torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):  # fmt: skip
        yield


def forward_of_class(module: torch.nn.Module) -> Forward:
    """The forward of a module's class, which takes the module first."""
    return type(module).forward


def tried(
    module: torch.nn.Module, *inputs: Tensor, children: Mapping[str, torch.nn.Module] | None = None, **attributes: Any
) -> Tensor | None:
    """What a module's forward makes of inputs, in training as in evaluation; None where that differs, or it fails.

    Nothing of the module is called or changed, so it may be on any device, sharded, or have adapters and hooks.

    Args:
        module: gives the class whose forward runs.
        *inputs: on the CPU.
        children: replace its own.
        **attributes: replace its own, such as `_parameters`.
    """
    try:
        first, second = (stand_in(module, children or {}, training=t, **attributes)(*inputs) for t in (False, True))
    except Exception:  # it takes other arguments, or looks at more than these
        return None
    return first if isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second) else None


def stand_in(module: torch.nn.Module, children: Mapping[str, Any], **attributes: Any) -> torch.nn.Module:
    """A module of the same class with other children and attributes, without hooks and with its class's own forward.

    Its other children have stand-ins too. A call runs the forward alone, without the hooks of all modules.
    """
    probe: torch.nn.Module = object.__new__(class_of(module))  # `copy.copy` fails after `fully_shard`
    probe.__dict__.update(module.__dict__)
    given = {**module._modules, **children}
    probe.__dict__["_modules"] = {
        name: stand_in(child, {}) if isinstance(child, torch.nn.Module) else child for name, child in given.items()
    }
    for name in HOOKS:
        probe.__dict__[name] = type(getattr(module, name))()
    probe.__dict__.pop("forward", None)
    probe.__dict__.update(attributes)
    probe.__dict__[CALLED] = MethodType(forward_of_class(module), probe)
    return probe


def agree(ours: Tensor, stock: Tensor | None, tolerance: float) -> bool:
    """Whether two results are the same but for rounding: no element is off by more than a part of its row's largest."""
    if stock is None or ours.shape != stock.shape or ours.dtype != stock.dtype:
        return False
    difference, largest = (ours.double() - stock.double()).abs(), stock.double().abs()
    return bool((difference.amax(-1) <= tolerance * largest.amax(-1)).all())


def is_compiled_inference() -> bool:
    """Whether torch.compile traces inference: then a patched module runs the code of its class.

    TorchInductor makes kernels of that which are as fast, or faster, and Dynamo has fewer guards to check in each call.
    """
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is at work, which computes in float32 what these functions compute in 16 bits."""
    return x.dtype != torch.float32 and is_autocast_enabled(x.device.type)


def is_autocast_enabled(device: str) -> bool:
    """Whether autocast is on for a type of device; "meta" has none, and PyTorch raises for it."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _put(module: torch.nn.Module, package: str, found: Found) -> Found | str:
    """Set the forward, or say why not."""
    owner = owner_of(module)
    if owner is not None or has_foreign_forward(module):
        return f"its forward was replaced before, by {owner or _name_of(holder_of(module).__dict__['forward'])}"
    setattr(found.forward, OWNER, (package, found.forward))
    found.forward.__name__ = "forward"  # what pickle looks for
    holder_of(module).forward = MethodType(found.forward, module)
    return found


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _check_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: given {type(model).__name__}; it must be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise TypeError(f"model: given {type(model).__name__}; patch the model before it is compiled or scripted")
