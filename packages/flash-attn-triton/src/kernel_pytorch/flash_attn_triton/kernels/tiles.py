"""What the forward and the backward do with a tile of scores: Triton functions.

Scores are in units of `log2`: `s * log2(e)`, so that exponentials are one instruction. They are kept as `x`, which
`factor_of` times is the score, and a weight is `exp2(fma(x, factor, -base))`. The forward and the backward compute it
with the same roundings: scores of 1e9 are 128 apart, and another rounding would be another weight.

`row` and `column` are indices of queries and keys that broadcast to the shape of the tile, whichever of them runs along
which axis.
"""

import triton
import triton.language as tl

from kernel_pytorch.flash_attn_triton._core.philox import threshold

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST_FACTOR = 2.0**-64
"""Below, -inf times a factor could become NaN."""
threshold_of = triton.constexpr_function(threshold)


@triton.constexpr_function
def factor_of(scale, softcap, alibi, bias):
    """What `scores_of` leaves to be multiplied by: 1.0 where something is added to the scores; it is positive."""
    factor = (softcap if softcap > 0.0 else scale) * LOG2E.value
    return 1.0 if alibi != "none" or bias == "float" or factor < LEAST_FACTOR else factor


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32: a continued fraction below one, where `exp(2x) - 1` would cancel."""
    t = x * x
    large = t >= 1.0  # not NaN
    e = tl.exp2(tl.minimum(x * (2.0 * LOG2E), 100.0))
    above = tl.where(large, e - 1.0, x * (945.0 + t * (105.0 + t)))
    return above / tl.where(large, e + 1.0, 945.0 + t * (420.0 + t * 15.0))


@triton.jit
def load_rows(base, row, stride, rows, d, depth, MASKED: tl.constexpr, WHOLE_HEAD: tl.constexpr):
    """Rows of queries, keys or values `(len(row), len(d))`; zeros beyond the last row and the head size."""
    pointers = base + row[:, None] * stride + d[None, :]
    if WHOLE_HEAD:
        if MASKED:
            return tl.load(pointers, mask=row[:, None] < rows, other=0.0)
        else:
            return tl.load(pointers)
    else:
        if MASKED:
            return tl.load(pointers, mask=(row[:, None] < rows) & (d[None, :] < depth), other=0.0)
        else:
            return tl.load(pointers, mask=d[None, :] < depth, other=0.0)


@triton.jit
def sequence(cumulative_ptr, batch, length, total, VARLEN: tl.constexpr):
    """Where the sequence starts, and how long it is: with VARLEN it is one of several that are packed.

    total: tokens of all sequences. What lies beyond, as wrong numbers say, is foreign memory, and not of a sequence.
    """
    start = 0
    if VARLEN:
        start = tl.minimum(tl.maximum(tl.load(cumulative_ptr + batch), 0), total)
        length = tl.minimum(tl.maximum(tl.load(cumulative_ptr + batch + 1), start), total) - start
    return start, length


@triton.jit
def first_row_of(head_of_batch, head, start, lse_rows, VARLEN: tl.constexpr):
    """Where the statistics of a head's queries begin: `(B, H, Sq)`, or `(H, all queries)` with VARLEN."""
    if VARLEN:
        return head * lse_rows + start
    else:
        return head_of_batch * lse_rows


@triton.jit
def scores_of(
    products, place, key, row, column, rows, columns, slope, bias_base, bias_stride_m, bias_stride_n,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile over `factor_of`, and the derivative of the soft cap; `visible` masks them.

    products: of queries and keys, float32. place: of each query among the keys, and key: of each key, from any common
    origin in the tile, so that the difference is exact in float32. slope: of ALiBi. ALIBI: "none", "past" if no query
    sees a key after it, or "both".
    """
    slope_of_cap = 1.0
    slope *= LOG2E
    x = products
    if SOFTCAP > 0.0:
        x = tanh(products * (SCALE / SOFTCAP))
        slope_of_cap = 1.0 - x * x
    if factor_of(SCALE, SOFTCAP, ALIBI, BIAS) == 1.0:
        x *= (SOFTCAP if SOFTCAP > 0.0 else SCALE) * LOG2E
    if ALIBI != "none":  # the distance is exact, so nothing far away is rounded
        distance = place.to(tl.float32) - key.to(tl.float32)
        x = tl.fma(tl.abs(distance) if ALIBI == "both" else distance, -slope, x)
    if BIAS != "none":
        exists = (row < rows) & (column < columns)
        bias = tl.load(bias_base + row * bias_stride_m + column * bias_stride_n, mask=exists, other=0)
        if BIAS == "bool":
            x = tl.where(bias != 0, x, float("-inf"))
        else:
            x = tl.fma(bias.to(tl.float32), LOG2E, x)
    return x, slope_of_cap


@triton.jit
def weights_of(x, base, FACTOR: tl.constexpr):
    """`exp2` of scores minus `base`."""
    return tl.exp2(tl.fma(x, tl.full((), FACTOR, tl.float32), -base))


@triton.jit
def limits(row, rows, columns, left, right, HAS_RIGHT: tl.constexpr):
    """The place of each query among the keys, and the first (if there is a limit) and the last key that it sees."""
    place = row + (columns - rows)
    last_key = tl.minimum(place + right, columns - 1) if HAS_RIGHT else place * 0 + columns - 1
    return place, place - left, last_key


@triton.jit
def visible(x, key, first_key, last_key, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Scores, -inf for keys that a query does not see. FIRST, LAST: whether the tile has keys beyond that limit."""
    if LAST:
        x = tl.where(key <= last_key, x, float("-inf"))
    if FIRST:
        x = tl.where(key >= first_key, x, float("-inf"))
    return x


@triton.jit
def finite(x):
    """What is subtracted from scores: x, or zero where it is -inf, since -inf minus -inf is NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def with_sink(acc, top, total, sink):
    """Add a logit that has no value to the softmax of each row."""
    new_top = tl.maximum(top, sink)
    base = finite(new_top)
    shrink = tl.exp2(top - base)
    return acc * shrink[:, None], new_top, total * shrink + tl.exp2(sink - base)


@triton.jit
def normalizer_of(top, total):
    """What is subtracted from scores, and what `exp2` of that is multiplied by to be a weight.

    That is lse, and what rounding took off it. Where that is too much, as of scores beyond 1e5, it is the maximum, and
    one over the sum: the logarithm of the sum is nothing beside a maximum of 1e9.
    """
    top = finite(top)
    total = tl.where(total == 0.0, 1.0, total)
    log = tl.log2(total)
    base = top + log
    back = base - top
    rest = (top - (base - back)) + (log - back)
    fits = tl.abs(rest) < 0.002  # half of the last place of bfloat16
    return tl.where(fits, base, top), tl.where(fits, tl.exp2(-rest), 1.0 / total)


@triton.jit
def kept(seed, matrix, row, column, rows, columns, P: tl.constexpr):
    """`1 / (1 - P)` where dropout keeps a weight, else 0; see `philox.py`. matrix: int64, of batch and head.

    One Philox serves four columns. It is written once an element; the compiler sees that counters are equal.
    """
    counter = (matrix * rows + row) * ((columns + 3) // 4) + column // 4
    a, b, c, d = tl.randint4x(seed, counter)
    place = column % 4
    word = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    THRESHOLD: tl.constexpr = threshold_of(P)
    SCALE: tl.constexpr = 1.0 / (1.0 - P)
    return tl.where((word >> 1).to(tl.int32) >= THRESHOLD, SCALE, 0.0)


@triton.jit
def gradient_of_scores(
    products, dp, base, delta, place, key, first_key, last_key, row, column, rows, columns, slope,
    bias_base, bias_stride_m, bias_stride_n, seed, matrix,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Weights of a tile with dropout, gradients of its scores behind the soft cap, and the derivative of that.

    Weights lack the factor of `normalizer_of`, which do, delta and so dp have.
    """
    x, slope_of_cap = scores_of(
        products, place, key, row, column, rows, columns, slope, bias_base, bias_stride_m, bias_stride_n,
        SCALE, SOFTCAP, ALIBI, BIAS,
    )  # fmt: skip
    x = visible(x, key, first_key, last_key, FIRST, LAST)
    p = weights_of(x, base, factor_of(SCALE, SOFTCAP, ALIBI, BIAS))
    weights = p
    if DROPOUT_P > 0.0:
        factor = kept(seed, matrix, row, column, rows, columns, DROPOUT_P)
        weights = p * factor
        dp = dp * factor
    return weights, p * (dp - delta), slope_of_cap


@triton.jit
def keys_seen(
    first, last, rows, columns, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, COLUMNS: tl.constexpr
):
    """Which keys the queries from `first` to `last` see: `(start, full_start, full_end, end)`.

    Some of these queries see a key in [start, end); all of them see all in [full_start, full_end). All but `end` are
    multiples of COLUMNS. So these are the edges of three parts, of which the first and the last one are masked.
    """
    shift = columns - rows
    start = 0
    end = columns
    full_start = 0
    full_end = columns
    if HAS_LEFT:
        start = tl.maximum(first + shift - left, 0) // COLUMNS * COLUMNS
        full_start = tl.cdiv(tl.maximum(last + shift - left, 0), COLUMNS) * COLUMNS
    if HAS_RIGHT:
        end = tl.minimum(columns, tl.maximum(last + shift + right + 1, 0))
        full_end = tl.minimum(columns, tl.maximum(first + shift + right + 1, 0))
    full_start = tl.maximum(start, tl.minimum(full_start, tl.cdiv(end, COLUMNS) * COLUMNS))
    full_end = tl.maximum(full_start, full_end // COLUMNS * COLUMNS)
    return start, full_start, full_end, end


@triton.jit
def queries_seeing(
    first, last, rows, columns, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr
):
    """Which queries see the keys from `first` to `last`, as `keys_seen`."""
    shift = columns - rows
    start = 0
    end = rows
    full_start = 0
    full_end = rows
    if HAS_RIGHT:
        start = tl.maximum(first - shift - right, 0) // ROWS * ROWS
        full_start = tl.cdiv(tl.maximum(last - shift - right, 0), ROWS) * ROWS
    if HAS_LEFT:
        end = tl.minimum(rows, tl.maximum(last - shift + left + 1, 0))
        full_end = tl.minimum(rows, tl.maximum(first - shift + left + 1, 0))
    full_start = tl.maximum(start, tl.minimum(full_start, tl.cdiv(end, ROWS) * ROWS))
    full_end = tl.maximum(full_start, full_end // ROWS * ROWS)
    return start, full_start, full_end, end
