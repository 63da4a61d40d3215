"""The activations of `activations.py` and their derivatives for Triton kernels: functions of tiles in registers.

They take float32 or float64 and stay in it. HALF says that what becomes of them is rounded to 16 bits, and so is what
they are given, in float32: then forms serve whose error is a small part of that rounding, and which take a half to a
quarter of the instructions. A kernel that moves 16-bit numbers at the speed of an H200's memory has 20 to 30
instructions an element, so these decide whether it does.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def quotient(x, y):
    """`x / y` of float32, off by two units in the last place: a reciprocal and a product, without scaling.

    y is at least 1. From 2^126 on the quotient is 0.
    """
    if INTERPRETED:  # which has no libdevice
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def exp2(x):
    """`2^x` of float32 in one instruction: 0 below 2^-126."""
    if INTERPRETED:  # NumPy warns where the result is infinite
        x = tl.where(x >= 128.0, float("inf"), x)
    return tl.exp2(x)


@triton.jit
def sigmoid(x, HALF: tl.constexpr):
    """`1 / (1 + exp(-x))` without overflow, exact to the last digits in both tails; with HALF down to 2^-126."""
    if HALF:
        return quotient(1.0, 1.0 + exp2(-1.4426950408889634 * x))
    else:
        e = tl.exp(-tl.abs(x))
        return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def slope_of_sigmoid(x, HALF: tl.constexpr):
    """`s * (1 - s)` of `s = sigmoid(x)`, without the difference where s is near one, which cancels there."""
    if HALF:
        s = sigmoid(-tl.abs(x), HALF)
        return s * (1.0 - s)
    else:
        e = tl.exp(-tl.abs(x))
        return e / ((1.0 + e) * (1.0 + e))


@triton.jit
def slope_of_silu(x, ALPHA: tl.constexpr, HALF: tl.constexpr):
    """The derivative of `x * sigmoid(ALPHA * x)`."""
    u = ALPHA * x
    if HALF:
        s = sigmoid(u, HALF)
        return s + (x * s) * (ALPHA * (1.0 - s))  # in this order: u may be infinite where x is not
    else:
        return sigmoid(u, HALF) + u * slope_of_sigmoid(u, HALF)


@triton.jit
def tanh(x, HALF: tl.constexpr):
    """Hyperbolic tangent, also of small numbers.

    Below one by Lambert's continued fraction, which nine terms bring to 2e-16; beyond, `1 - exp(-2|x|)` loses nothing.
    With HALF below 1/8 by its series, to 4e-7 of itself.
    """
    if HALF:
        t = x * x
        small = x * (1.0 + t * (-0.3333333333333333 + t * 0.13333333333333333))
        large = 1.0 - quotient(2.0, 1.0 + exp2(2.8853900817779268 * x))
        return tl.where(tl.abs(x) < 0.125, small, large)
    else:
        e = tl.exp(-2.0 * tl.abs(x))
        large = (1.0 - e) / (1.0 + e)
        t = tl.minimum(x * x, 1.0)
        numerator = 34459425.0 + t * (4729725.0 + t * (135135.0 + t * (990.0 + t)))
        denominator = 34459425.0 + t * (16216200.0 + t * (945945.0 + t * (13860.0 + t * 45.0)))
        return tl.where(tl.abs(x) < 1.0, x * (numerator / denominator), tl.where(x < 0, -large, large))


@triton.jit
def tail_of_normal(x):
    """What gelu and its derivative are made of where results are rounded to 16 bits: `a`, `e` and `ratio`.

    With `a = |x|` and `e = exp(-a^2 / 2)` the normal distribution is `Phi(-a) = e * ratio`. The ratio (Mills' times the
    density at zero) falls slowly from 1/2, and is a polynomial in `a / (1 + 0.35 a)`, the substitution of Hastings
    (Approximations for Digital Computers, 1955; Abramowitz and Stegun 7.1.26). Its coefficients are fitted here, for
    the smallest largest relative error: 1e-5 up to 4.4, a quarter of that around 0.75, where the derivative is a
    difference, and 8e-5 up to 13.4, where bfloat16 alone is left. Relative, so nothing is lost in the tails.

    From 20 on e is zero, and the ratio that of 20: of infinity it would be NaN, as it is of minus infinity, whose gelu
    is NaN in PyTorch (`x * Phi(x)`, infinity times zero).
    """
    a = tl.abs(tl.minimum(x, 20.0))
    e = exp2(-0.7213475204444817 * a * a)
    v = quotient(a, 1.0 + 0.35 * a)
    ratio = -0.005882052034941875 + v * (-0.0033635242181831795 + v * 0.0005465117877280249)
    ratio = 0.49999678379646084 + v * (-0.3988568750021885 + v * (0.10991961169320379 + v * ratio))
    return a, e, ratio


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """The activation of that name; HALF says that it is rounded to 16 bits."""
    if ACTIVATION == "gelu":
        if HALF:
            a, e, ratio = tail_of_normal(x)
            return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * (e * ratio)
        else:
            return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 sigmoid(2u), which does not cancel.
        return x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)), HALF)
    elif ACTIVATION == "silu":
        return x * sigmoid(x, HALF)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, x)  # NaN stays NaN
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive
    elif ACTIVATION == "quick_gelu":
        return x * sigmoid(1.702 * x, HALF)
    elif ACTIVATION == "tanh":
        return tanh(x, HALF)
    elif ACTIVATION == "sigmoid":
        return sigmoid(x, HALF)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return x


@triton.jit
def derivative(x, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """The derivative of the activation of that name; HALF says that it, or its product, is rounded to 16 bits."""
    if ACTIVATION == "gelu":
        if HALF:
            _, e, ratio = tail_of_normal(x)
            # Phi(x) + x phi(x) = [x > 0] + sign(x) e difference, with x and not `a`: infinity times zero is NaN.
            difference = 0.3989422804014327 * tl.abs(x) - ratio
            return tl.where(x > 0, 1.0, 0.0) + tl.where(x > 0, e, -e) * difference
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        u = x * (1.5957691216057308 + 0.07135481627260025 * (x * x))
        t = tl.minimum(x * x, 400.0, propagate_nan=tl.PropagateNan.ALL)  # its sigmoid has long been 0 or 1
        slope_of_u = 1.5957691216057308 + 0.21406444881780073 * t
        if HALF:
            s = sigmoid(u, HALF)
            return s + (x * s) * ((1.0 - s) * slope_of_u)
        else:
            return sigmoid(u, HALF) + x * slope_of_sigmoid(u, HALF) * slope_of_u
    elif ACTIVATION == "silu":
        return slope_of_silu(x, 1.0, HALF)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, 1.0).to(x.dtype)  # of NaN one, as in PyTorch
    elif ACTIVATION == "relu_squared":
        return tl.where(x <= 0, 0.0, 2.0 * x)
    elif ACTIVATION == "quick_gelu":
        return slope_of_silu(x, 1.702, HALF)
    elif ACTIVATION == "tanh":
        return 4.0 * slope_of_sigmoid(2.0 * x, HALF)
    elif ACTIVATION == "sigmoid":
        return slope_of_sigmoid(x, HALF)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return tl.full(x.shape, 1.0, x.dtype)
