"""The second norm in decoder layers of Llama and models like it, which reads a sum: `add_rms_norm` computes both.

    h = x + self_attn(input_layernorm(x)),  y = h + mlp(post_attention_layernorm(h))

The first norm reads a sum too, which the layer before it returns: that one stays apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found
from ._core.stock import class_of, has_hooks, owner_of
from .functional import Casting, add_rms_norm

FIRST, ATTENTION, SECOND, FEED = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
HIDDEN = "hidden_states"


class Formula(NamedTuple):
    """What a norm computes.

    Attributes:
        eps_name: the attribute in which its module keeps what is added to the mean square.
        offset: see `rms_norm`.
        casting: see `rms_norm`.
    """

    eps_name: str
    offset: float
    casting: Casting


class _Stub(torch.nn.Module):
    """Replacement for a child of the layer that records its calls."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(args[0] if args else kwargs["hidden_states"])


def proven_keywords(module: torch.nn.Module) -> dict[str, Any] | None:
    """The keywords of a layer that computes the formula above and passes them all to its attention; None for others.

    This runs the layer with stub children, in training and in evaluation, with and without keywords. It refuses layers
    of libraries other than transformers: their forward may treat real tensors in another way than the stubs' outputs.
    """
    if {name for name, child in module._modules.items() if child is not None} != {FIRST, ATTENTION, SECOND, FEED}:
        return None
    own = any(isinstance(value, float) for value in vars(module).values())  # a factor, which may be 1 today
    if own or module._parameters or module._buffers or not class_of(module).__module__.startswith("transformers."):
        return None
    _, first, *others = inspect.signature(inspect.unwrap(patching.forward_of_class(module))).parameters.values()
    named = [each for each in others if each.kind is not each.VAR_KEYWORD]
    if first.name != HIDDEN or any(each.default is each.empty for each in named):
        return None
    defaults = {each.name: each.default for each in named}
    marked = {name: object() for name in defaults}
    right = all(
        _hands_on(module, given, defaults | given, training) for given in ({}, marked) for training in (True, False)
    )
    # A feed-forward may return more than a tensor (a mixture of experts): such a layer is left alone.
    return defaults if right and not _calls_if_right(module, {}, False, feed=lambda x: (x.cos(), None)) else None


def _hands_on(module: torch.nn.Module, given: dict[str, Any], expected: dict[str, Any], training: bool) -> bool:
    """Whether the layer computes the formula, and calls attention with these keywords and all else with a tensor."""
    calls = _calls_if_right(module, given, training)
    if calls is None:
        return False
    args, kwargs = calls.pop(ATTENTION)
    kwargs = {**kwargs}
    right = not args and kwargs.pop(HIDDEN, None) is not None and kwargs.keys() == expected.keys()
    right = right and all(kwargs[name] is value for name, value in expected.items())
    return right and all(len(args) == 1 and not kwargs for args, kwargs in calls.values())


def _calls_if_right(
    module: torch.nn.Module, given: dict[str, Any], training: bool, feed: Callable[[Tensor], Any] = torch.cos
) -> dict[str, Any] | None:
    """How the layer called its children, each once; None if it computes something else, or fails."""
    children = {
        FIRST: _Stub(lambda x: 2.0 * x + 1.0), ATTENTION: _Stub(lambda x: (x.sin(), None)),
        SECOND: _Stub(lambda x: 3.0 * x - 1.0), FEED: _Stub(feed),
    }  # fmt: skip
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    try:
        found = patching.forward_of_class(module)(patching.stand_in(module, children, training=training), x, **given)
    except Exception:  # it takes other arguments, or looks at what they are
        return None
    h = x + (2.0 * x + 1.0).sin()
    if not isinstance(found, Tensor) or not patching.agree(h + (3.0 * h - 1.0).cos(), found, 1e-12):
        return None
    if any(len(child.calls) != 1 for child in children.values()):
        return None
    return {name: child.calls[0] for name, child in children.items()}


def with_sum(
    module: torch.nn.Module, defaults: dict[str, Any], formula: Formula, package: str,
    is_left_to_class: Callable[[Tensor], bool],
) -> Found:  # fmt: skip
    """Let `add_rms_norm` compute the sum and the second norm of a layer.

    Args:
        module: the layer.
        defaults: its keywords, all of which its attention takes.
        formula: of its second norm.
        package: the one that patched the norm too; if other code has replaced its forward since, that forward runs.
        is_left_to_class: whether the layer's own operators are the default for such a tensor.
    """
    stock, kind = patching.forward_of_class(module), type(module._modules[SECOND])

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # TorchInductor fuses the sum with the norm, whichever computes that.
        if args or torch.compiler.is_compiling() or is_left_to_class(hidden_states) or kwargs.keys() - defaults:
            return stock(self, hidden_states, *args, **kwargs)
        first, attention, norm, feed = map(self._modules.__getitem__, (FIRST, ATTENTION, SECOND, FEED))
        other = type(norm) is not kind or has_hooks(norm) or owner_of(norm) != package
        if other or patching.is_autocast(hidden_states):
            return stock(self, hidden_states, **kwargs)
        x = attention(hidden_states=first(hidden_states), **{**defaults, **kwargs})[0]
        weight = norm.weight
        if x.dtype == hidden_states.dtype == weight.dtype and x.shape == hidden_states.shape:
            eps_name, offset, casting = formula
            y, h = add_rms_norm(x, hidden_states, weight, eps=getattr(norm, eps_name), offset=offset, casting=casting)
        else:
            h = hidden_states + x
            y = norm(h)
        return h + feed(y)

    return Found(forward, "add_rms_norm of its second norm", gpu_bound=kind is torch.nn.RMSNorm)  # as its norm
