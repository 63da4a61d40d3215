"""Task roofline: say what a matrix product costs, and what limits it.

`(rows, inner) @ (inner, columns)`. Each input is read once, the result is written once. An addition and a
multiplication are two operations. `kernel-pytorch learn --check roofline.py` asks three products about it.
"""


def flops(rows: int, inner: int, columns: int) -> int:
    """Floating-point operations of the product."""
    return 0


def moved(rows: int, inner: int, columns: int, itemsize: int) -> int:
    """Bytes that must be read and written, with `itemsize` bytes a number."""
    return 0


def limit(flops: int, moved: int, flops_per_second: float, bytes_per_second: float) -> str:
    """What takes longer on a GPU with these rates: "compute" or "memory"."""
    return "compute"
