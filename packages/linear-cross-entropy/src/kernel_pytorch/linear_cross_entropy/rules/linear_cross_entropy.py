"""`linear_cross_entropy` and its gradients: `cross_entropy` of `hidden @ weight.T + bias` without those logits.

There are two ways. `linear_cross_entropy` gives the loss of each token, and `linear_cross_entropy_backward` computes
the logits again. `linear_cross_entropy_with_gradients` gives one loss for all tokens, and computes the gradients with
it, from the logits that are there; its backward multiplies them by the incoming one.

DTensor may shard hidden states and targets over every dimension of tokens, with replicated parameters; each rank holds
its own tokens' part of the gradients of weight and bias. A weight that is sharded over the vocabulary, or over the
hidden dimension, is gathered first, by DTensor. Where gradients are to be differentiated again (`create_graph=True`)
they are computed by plain PyTorch that autograd can follow, and that holds all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.call_kinds import needs_grad
from .._core.gradients import asks
from .._core.operator import Rules
from .._core.sharding import by_rows
from .cross_entropy import BACKWARD, FORWARD, LOSSES, SCALARS, fake, gradient_of_logits, wide_dtype


@asks("backward dloss normalizer hidden weight target bias ignore_index label_smoothing z_loss softcap chunk needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor, None, Tensor]:
    """Gradients of hidden, weight and bias."""
    *inputs, needs = given
    need_dhidden, need_dweight, _, need_dbias = needs
    dhidden, dweight, dbias = backward(*inputs, need_dhidden, need_dweight, need_dbias)
    return dhidden, dweight, None, dbias


def flops(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """A product, and what is made of each logit."""
    return _logits(hidden, weight) * (2 * int(weight[1]) + FORWARD)


def _logits(hidden: Any, weight: Any) -> int:
    """How many there are, of shapes."""
    return torch.Size(hidden[:-1]).numel() * int(weight[0])


# The loss of all tokens is a sum, the losses of an operator that returns a `normalizer` are rows.
OF_TOKENS = "hidden target normalizer dloss dhidden"
SHARDING = by_rows(f"{OF_TOKENS} loss", sums="dweight dbias")


LINEAR_CROSS_ENTROPY_RULES: Rules = {
    "schema": f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {SCALARS},"
    f" SymInt chunk) -> {LOSSES}",
    "fake": fake,
    "gradient": gradient,
    "flops": flops,
    "sharding": SHARDING,
}


# The gradients.


def fake_backward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    like_bias = a.weight if a.bias is None else a.bias
    return (
        a.hidden.new_empty(a.hidden.shape if a.need_dhidden else (0,)),
        a.weight.new_empty(a.weight.shape if a.need_dweight else (0,)),
        like_bias.new_empty(a.weight.shape[:1] if a.need_dbias and a.bias is not None else (0,)),
    )


def formula(
    dloss: Tensor, normalizer: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in PyTorch that autograd can follow, with all logits."""
    need_dhidden, need_dweight, need_dbias = rest[-3:]
    wide = wide_dtype(hidden.dtype)
    data, matrix = hidden.to(wide), weight.to(wide)
    logits = data @ matrix.t()
    logits = logits if bias is None else logits + bias.to(wide)
    found = gradient_of_logits(logits, dloss, target, *rest[:4])
    rows = found.reshape(-1, found.shape[-1])
    like_bias = weight if bias is None else bias
    return (
        (found @ matrix).to(hidden.dtype) if need_dhidden else hidden.new_empty((0,)),
        (rows.t() @ data.reshape(-1, data.shape[-1])).to(weight.dtype) if need_dweight else weight.new_empty((0,)),
        rows.sum(0).to(like_bias.dtype) if need_dbias and bias is not None else like_bias.new_empty((0,)),
    )


def flops_backward(dloss: Any, normalizer: Any, hidden: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """The product again, and one for each of the two gradients that are products."""
    need_dhidden, need_dweight, _ = rest[-3:]
    return _logits(hidden, weight) * (2 * weight[1] * (1 + need_dhidden + need_dweight) + BACKWARD)


LINEAR_CROSS_ENTROPY_BACKWARD_RULES: Rules = {
    "schema": "linear_cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor hidden, Tensor weight,"
    f" Tensor target, Tensor? bias, {SCALARS}, SymInt chunk, bool need_dhidden, bool need_dweight, bool need_dbias)"
    " -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    "fake": fake_backward,
    "formula": formula,
    "flops": flops_backward,
    "sharding": SHARDING,
}


# Loss and gradients together.


def fake_with_gradients(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    wide, kept = wide_dtype(a.hidden.dtype), dtype_of_gradient(a.hidden.dtype)
    return (
        a.hidden.new_empty((), dtype=wide),
        a.hidden.new_empty(a.hidden.shape if a.need_dhidden else (0,), dtype=kept),
        a.weight.new_empty(a.weight.shape if a.need_dweight else (0,), dtype=kept),
        a.weight.new_empty(a.weight.shape[:1] if a.need_dbias and a.bias is not None else (0,), dtype=wide),
    )


def dtype_of_gradient(dtype: torch.dtype) -> torch.dtype:
    """What a gradient has before the incoming one is known: float32 for float16, whose exponents may not reach."""
    return torch.float32 if dtype == torch.float16 else dtype


@asks(
    "scale dloss hidden weight target bias divisor ignore_index label_smoothing z_loss softcap dhidden "
    "dweight dbias needs"
)
def gradient_with_gradients(scale: Callable[..., Tensor], *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias: from the forward, or from a formula if they are differentiated again."""
    dloss, hidden, weight, target, bias, divisor, *scalars, dhidden, dweight, dbias, needs = given
    need_dhidden, need_dweight, _, need_dbias, _ = needs
    if needs_grad(dloss, hidden, weight, bias):
        of_tokens = (dloss if divisor is None else dloss / divisor).expand(target.shape)
        followed = formula(
            of_tokens, dloss, hidden, weight, target, bias, *scalars, need_dhidden, need_dweight, need_dbias
        )
        return followed[0], followed[1], None, followed[2], None
    return (
        scale(dhidden, dloss, hidden) if need_dhidden else None,
        scale(dweight, dloss, weight) if need_dweight else None,
        None,
        scale(dbias, dloss, weight) if need_dbias else None,
        None,
    )


def flops_with_gradients(hidden: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """The product, and one for each of the two gradients that are products."""
    need_dhidden, need_dweight, _ = rest[-3:]
    return _logits(hidden, weight) * (2 * weight[1] * (1 + need_dhidden + need_dweight) + FORWARD + BACKWARD)


LINEAR_CROSS_ENTROPY_WITH_GRADIENTS_RULES: Rules = {
    "schema": "linear_cross_entropy_with_gradients(Tensor hidden, Tensor weight, Tensor target, Tensor? bias,"
    f" Tensor? divisor, {SCALARS}, bool need_dhidden, bool need_dweight, bool need_dbias)"
    " -> (Tensor loss, Tensor dhidden, Tensor dweight, Tensor dbias)",
    "fake": fake_with_gradients,
    "gradient": gradient_with_gradients,
    "flops": flops_with_gradients,
    "sharding": by_rows(OF_TOKENS, sums="loss dweight dbias"),
}
