"""How much of a copy's speed each numbered row kernel reaches, by the length of a row.

    python packages/cuda-ops/benchmarks/rungs.py --operator rms_norm --columns 1024 131072

Every rung takes turns with a copy that moves as many bytes, on tensors of the same size whatever the length of a
row, so that one figure says what an idea of csrc/*/kernels is worth. A backward has no rungs: it is the one that the
launcher picks. It takes a GPU: on a CPU every rung is the CPU backend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.clock import Interval, Subject, measure, median_interval, on_clock_stream, sets_needed

Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

OPERATORS = torch.ops.kernel_pytorch_cuda
KERNELS = Path(__file__).resolve().parents[1] / "csrc"
COPY = "copy"
PICKED = "picked"
"""The rung that the launcher takes by itself."""

COLUMNS = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
ELEMENTS = 2**26
BLOCK = 2**20  # elements: a copy of no whole number of them is slower, which would flatter everything else
EPS = 1e-6


@dataclass(frozen=True)
class Kernel:
    """One operator, or the backward of one.

    Attributes:
        name: its name for `--operator`.
        folder: the folder of csrc/ whose kernel files are its rungs; None if only the launcher's choice exists.
        moved: tensors of the size of x that a call reads and writes.
        inputs: how many tensors of the size of x it reads.
        call: `(tensors, vectors) -> outputs`, of `inputs` tensors `(rows, columns)`, two vectors `(columns,)`
            and positive numbers `(rows,)` and `(2, rows)`.
    """

    name: str
    folder: str | None
    moved: int
    inputs: int
    call: Call

    def rungs(self) -> dict[str, int]:
        """The numbers that the operator takes, by what a table calls them."""
        files = sorted((KERNELS / self.folder / "kernels").glob("[0-9]_*.cuh")) if self.folder else []
        return {file.stem: int(file.stem.partition("_")[0]) for file in files} | {PICKED: 0}


def _rms_norm(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.rms_norm(x[0], vectors[0], EPS, 0.0, "none")


def _add_rms_norm(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.add_rms_norm(x[0], x[1], vectors[0], EPS, 0.0, "none")


def _rms_norm_backward(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.rms_norm_backward(x[0], None, x[1], vectors[0], vectors[2], EPS, 0.0, True, True)


def _add_rms_norm_backward(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.rms_norm_backward(x[0], x[2], x[1], vectors[0], vectors[2], EPS, 0.0, True, True)


def _layer_norm(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.norm_act(x[0], None, *vectors[:2], None, EPS, 0.0, "layer", "identity")


def _add_layer_norm(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.norm_act(*x[:2], *vectors[:2], None, EPS, 0.0, "layer", "identity")


def _layer_norm_gelu(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.norm_act(x[0], None, *vectors[:2], None, EPS, 0.0, "layer", "gelu")


def _of_layer_norm(dh: int | None, activation: str) -> Call:
    def call(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
        dtype = str(x[0].dtype).removeprefix("torch.")
        added = x[dh] if dh is not None else None
        tensors = (x[0], added, x[1], *vectors[:2], None, vectors[3])
        of_residual = dtype if dh is not None else ""
        scalars = (EPS, 0.0, "layer", activation, dtype, of_residual, True, dh is not None, True, True)
        return OPERATORS.norm_act_backward(*tensors, *scalars)

    return call


def _softmax(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.softmax(x[0], None, 1.0)


def _softmax_backward(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.softmax_backward(x[0], x[1], None, 1.0, True, False)


def _bias_act(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.bias_act(x[0], vectors[0], "silu")


def _swiglu(x: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
    return OPERATORS.gated(x[0], x[1], "silu", 1.0, None, 0.0)


KERNELS_TIMED = (
    Kernel("rms_norm", "rms_norm", 2, 1, _rms_norm),
    Kernel("add_rms_norm", "rms_norm", 4, 2, _add_rms_norm),
    Kernel("rms_norm_backward", None, 3, 2, _rms_norm_backward),
    Kernel("add_rms_norm_backward", None, 4, 3, _add_rms_norm_backward),
    Kernel("layer_norm", "norm_act", 2, 1, _layer_norm),
    Kernel("add_layer_norm", "norm_act", 4, 2, _add_layer_norm),
    Kernel("layer_norm_gelu", "norm_act", 2, 1, _layer_norm_gelu),
    Kernel("layer_norm_backward", None, 3, 2, _of_layer_norm(None, "identity")),
    Kernel("add_layer_norm_backward", None, 5, 3, _of_layer_norm(2, "identity")),
    Kernel("layer_norm_gelu_backward", None, 3, 2, _of_layer_norm(None, "gelu")),
    Kernel("softmax", "softmax", 2, 1, _softmax),
    Kernel("softmax_backward", None, 3, 2, _softmax_backward),
    Kernel("bias_act", "bias_act", 2, 1, _bias_act),
    Kernel("swiglu", "gated", 3, 2, _swiglu),
)


def shares(
    kernel: Kernel,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    elements: int,
    rounds: int,
    chosen: Sequence[str] = (),
) -> dict[str, Interval]:
    """Speed over that of a copy, median and 99 % interval, by rung; without those that refuse the shape.

    If `chosen` is not empty, only rungs whose names begin with one of its entries are measured.
    """
    rows = max(1, elements // columns)
    size = rows * columns * dtype.itemsize
    sets = sets_needed(kernel.moved * size, device)
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int, wide: bool = False) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device)
        return drawn if wide else drawn.to(dtype)

    with on_clock_stream(device), torch.no_grad():
        vectors = [tensor(columns), tensor(columns), tensor(rows, wide=True).abs(), tensor(2, rows, wide=True).abs()]
        pool = [[tensor(rows, columns) for _ in range(kernel.inputs)] for _ in range(sets)]
        wanted = kernel.moved * rows * columns // 2
        whole = max(1, round(wanted / BLOCK)) * BLOCK if wanted >= BLOCK else wanted
        halves = [tensor(whole) for _ in range(sets)]

        def call_of(number: int) -> Callable[[int], object]:
            def call(index: int) -> object:
                with rung(number):
                    return kernel.call(pool[index], vectors)

            return call

        calls: dict[str, Callable[[int], object]] = {COPY: lambda index: halves[index].clone()}
        for name, number in kernel.rungs().items():
            if chosen and not name.startswith(tuple(chosen)):
                continue
            call = call_of(number)
            try:
                call(0)
            except RuntimeError:  # rows too long, too short or not aligned for it
                continue
            calls[name] = call
        subjects = [Subject(name, call, sets, kernel.moved * size) for name, call in calls.items()]
        timings = measure(subjects, device, rounds=rounds)
    copied = [sample * wanted / whole for sample in timings.pop(COPY).samples]
    return {
        name: median_interval([of_copy / own for of_copy, own in zip(copied, timing.samples, strict=True)])
        for name, timing in timings.items()
    }


def table(kernel: Kernel, found: dict[int, dict[str, Interval]]) -> Table:
    """Rungs below each other, lengths of a row beside each other."""
    printed = Table()
    for heading in ("rung", *map(str, found)):
        printed.add_column(heading, justify="left" if heading == "rung" else "right")
    for name in kernel.rungs():
        cells = (by_rung.get(name) for by_rung in found.values())
        printed.add_row(
            name, *(f"{cell.median:.3f} ± {(cell.high - cell.low) / 2:.3f}" if cell else "-" for cell in cells)
        )
    return printed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names, and print a table for each operator and dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [kernel.name for kernel in KERNELS_TIMED]
    parser.add_argument("--operator", nargs="+", choices=names, default=names, help="all if omitted")
    parser.add_argument("--rung", nargs="+", default=[], help="beginnings of names: 3 picked; all if omitted")
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16"])
    parser.add_argument("--columns", nargs="+", type=int, default=COLUMNS, help="lengths of a row")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of x, whatever the length of a row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, console = torch.device(options.device), Console(width=200)
    if device.type == "cpu":
        console.print("On a CPU every rung is the CPU backend: these figures compare nothing.")
    for kernel in (kernel for kernel in KERNELS_TIMED if kernel.name in options.operator):
        for name in options.dtype:
            dtype, found = getattr(torch, name), {}
            for columns in options.columns:
                found[columns] = shares(
                    kernel,
                    columns,
                    dtype,
                    device,
                    elements=options.elements,
                    rounds=options.rounds,
                    chosen=options.rung,
                )
            size = options.elements * dtype.itemsize / 2**20
            console.print(
                f"\n{kernel.name}, {name}, x of {size:g} MiB: speed over that of a copy", table(kernel, found)
            )


if __name__ == "__main__":
    main()
