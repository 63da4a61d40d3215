# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The activations of `activations.py` and their derivatives for Triton kernels: functions of tiles in registers.

They take float32 or float64 and stay in it. Nothing overflows: exponentials are those of negative numbers.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))` without overflow, exact to the last digits in both tails."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def slope_of_sigmoid(x):
    """`s * (1 - s)` of `s = sigmoid(x)`, without the difference, which cancels where s is near one."""
    e = tl.exp(-tl.abs(x))
    return e / ((1.0 + e) * (1.0 + e))


@triton.jit
def tanh(x):
    """Hyperbolic tangent, also of small numbers.

    Below one by Lambert's continued fraction, which nine terms bring to 2e-16; beyond, `1 - exp(-2|x|)` loses nothing.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    t = tl.minimum(x * x, 1.0)
    numerator = 34459425.0 + t * (4729725.0 + t * (135135.0 + t * (990.0 + t)))
    denominator = 34459425.0 + t * (16216200.0 + t * (945945.0 + t * (13860.0 + t * 45.0)))
    return tl.where(tl.abs(x) < 1.0, x * (numerator / denominator), tl.where(x < 0, -large, large))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of that name."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 sigmoid(2u), which does not cancel.
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, x)  # NaN stays NaN
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive
    elif ACTIVATION == "quick_gelu":
        return x * sigmoid(1.702 * x)
    elif ACTIVATION == "tanh":
        return tanh(x)
    elif ACTIVATION == "sigmoid":
        return sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return x


@triton.jit
def derivative(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation of that name."""
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return sigmoid(u) + x * slope_of_sigmoid(u) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    elif ACTIVATION == "silu":
        return sigmoid(x) + x * slope_of_sigmoid(x)
    elif ACTIVATION == "relu":
        return tl.where(x > 0, 1.0, 0.0).to(x.dtype)
    elif ACTIVATION == "relu_squared":
        return tl.where(x <= 0, 0.0, 2.0 * x)
    elif ACTIVATION == "quick_gelu":
        return sigmoid(1.702 * x) + 1.702 * x * slope_of_sigmoid(1.702 * x)
    elif ACTIVATION == "tanh":
        return 4.0 * slope_of_sigmoid(2.0 * x)
    elif ACTIVATION == "sigmoid":
        return slope_of_sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return tl.full(x.shape, 1.0, x.dtype)
