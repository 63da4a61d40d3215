"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_choice, check_like, check_number, check_tensor, shape_of
from kernel_pytorch.fused_ln_act._core.operation import Operation
from kernel_pytorch.fused_ln_act.levels import LADDER

Approximate = Literal["none", "tanh"]
APPROXIMATIONS = ("none", "tanh")


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    level: str | None = None,
) -> Tensor:
    """SwiGLU: `silu(gate) * up`, or of one packed tensor, whose rows hold gate and then up.

    `y = gate * sigmoid(alpha * gate) * (up + offset)`, differentiable in gate and up, any number of times except at
    level "compile" (once). The swiglu of gpt-oss has `alpha=1.702, limit=7.0, offset=1.0`.

    Args:
        gate: `(..., I)`, float16, bfloat16, float32 or float64, any strides, I at least 1; packed `(..., 2I)`.
        up: `(..., I)`, any of these dtypes, on the device of gate; None where gate is packed, which costs no copy.
        alpha: the slope of the sigmoid.
        limit: gate is clamped to at most this, up to at most this far from zero; positive, or None for no clamping. The
            gradient of what is clamped is 0.
        offset: added to up.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        `(..., I)` in the promoted dtype of gate and up.

    Raises:
        TypeError: gate or up is no floating-point tensor of an allowed dtype.
        ValueError: shapes, devices, alpha, limit, offset or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Saved for the backward at level "triton": gate and up, or what packs them, as they came in.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
    """
    return SWIGLU(gate, up, alpha, limit, offset, level)


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Approximate = "none",
    limit: float | None = None,
    level: str | None = None,
) -> Tensor:
    """GEGLU: `gelu(gate) * up`, or of one packed tensor, whose rows hold gate and then up.

    `gate`, `up`, `limit` and `level` are as in `swiglu`; `TypeError` and `RuntimeError` are raised as by
    `swiglu`.

    Args:
        approximate: "none" for the exact GELU, "tanh" for its approximation, as in `torch.nn.functional.gelu`.

    Returns:
        As `swiglu`.

    Raises:
        ValueError: as in `swiglu`, or for approximate.

    Source: as `swiglu`.
    """
    return GEGLU(gate, up, approximate, limit, level)


def reglu(gate: Tensor, up: Tensor | None = None, *, limit: float | None = None, level: str | None = None) -> Tensor:
    """ReGLU: `relu(gate) * up`, or of one packed tensor, whose rows hold gate and then up.

    `gate`, `up`, `limit` and `level` are as in `swiglu`; `TypeError`, `ValueError` and `RuntimeError` are raised
    as by `swiglu`.

    Returns:
        As `swiglu`.

    Source: as `swiglu`.
    """
    return REGLU(gate, up, limit, level)


def check_swish(alpha: float, limit: float | None, offset: float) -> None:
    """Raise unless these are what `swiglu` takes."""
    check_number("alpha", alpha)
    check_limit(limit)
    check_number("offset", offset)


def check_gelu(approximate: str, limit: float | None) -> None:
    """Raise unless these are what `geglu` takes."""
    check_choice("approximate", approximate, APPROXIMATIONS)
    check_limit(limit)


def check_limit(limit: float | None) -> None:
    """Raise unless this is None or a number to clamp at."""
    if limit is None:
        return
    check_number("limit", limit)
    if limit <= 0.0:
        raise ValueError(f"limit: given {limit}; it must be positive, or None")


def _check(gate: Tensor, up: Tensor | None) -> None:
    check_tensor("gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"gate: shape is {shape_of(gate)}; packed with up, its last dimension must be even")
    else:
        check_like("up", up, gate, "gate")


def _check_swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> None:
    _check(gate, up)
    check_swish(alpha, limit, offset)


def _check_geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> None:
    _check(gate, up)
    check_gelu(approximate, limit)


def _check_reglu(gate: Tensor, up: Tensor | None, limit: float | None) -> None:
    _check(gate, up)
    check_limit(limit)


SWIGLU = Operation(LADDER, "swiglu", _check_swiglu)
GEGLU = Operation(LADDER, "geglu", _check_geglu)
REGLU = Operation(LADDER, "reglu", _check_reglu)
