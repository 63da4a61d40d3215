"""Checks of each task: cases, with the expected value and the one that the reader's code gives.

The file that a task starts with computes the right values, unless it is a kernel or a formula; then float64 does.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from kernel_pytorch.harness.commands.common import tell
from kernel_pytorch.harness.errors import UserError, said
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.harness.peers import load_file
from kernel_pytorch.harness.tensors import EveryCall

Cases = Iterator[tuple[str, Any, Any]]
WHERE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels of Triton run; on a CPU its interpreter runs them."""


def compilation(module: torch.nn.Module) -> tuple[int, int]:
    """(graph breaks, graphs) of a module that Dynamo compiles for three lengths; nothing is lowered."""
    from torch._dynamo.testing import CompileCounter  # imports take a second

    graphs, breaks = CompileCounter(), torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    before = sum(breaks.values())
    compiled = torch.compile(module, backend=graphs, dynamic=True)
    logging.disable(logging.WARNING)  # Dynamo warns of some breaks; `doctor` says more about all of them
    try:
        for length in (6, 7, 9):
            compiled(torch.randn(2, length, 16))
    finally:
        logging.disable(logging.NOTSET)
        torch._dynamo.reset()
    return sum(breaks.values()) - before, graphs.frame_count


def pair(task: Any, start: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The reader's module and the one of the beginning, with the same parameters."""
    torch.manual_seed(0)
    first, mine = start.Model(), task.Model()
    mine.load_state_dict(first.state_dict(), strict=False)  # a buffer more is welcome
    return mine, first


def compiles(task: Any, start: Any) -> Cases:
    """`first-module` and `breaks`: the same values, no break, one graph for all lengths."""
    mine, first = pair(task, start)
    for x in (torch.randn(3, 5, 16), torch.randn(1, 8, 16), torch.zeros(2, 4, 16)):
        yield f"the result for {len(x)} texts of length {x.shape[1]}", first(x), mine(x)
    breaks, graphs = compilation(mine)
    yield "graph breaks", 0, breaks
    yield "graphs for three lengths with dynamic=True (0: all of it runs in eager)", 1, graphs


def norm(task: Any, start: Any) -> Cases:
    """The same values, gradients and names of parameters, by three operators."""
    mine, first = pair(task, start)
    x = torch.randn(6, 24)
    yield "names of parameters", sorted(first.state_dict()), sorted(mine.state_dict())
    yield "the result", first(x), mine(x)
    for model in (first, mine):
        model(x).square().sum().backward()
    for name, parameter in first.named_parameters():
        yield f"the gradient of {name}", parameter.grad, mine.get_parameter(name).grad
    is_view: list[bool] = []  # what is no view reads its inputs from memory and writes its result
    with torch.no_grad(), EveryCall(lambda operator, *_: is_view.append(operator.is_view)):
        mine(x)
    yield "operators of a forward", 3, is_view.count(False)


def roofline(task: Any, start: Any) -> Cases:
    """FLOPs, bytes and the limit of a product, on a GPU of round figures."""
    for rows, inner, columns, limit in (
        (4096, 4096, 4096, "compute"),
        (1, 4096, 4096, "memory"),
        (100, 64, 9, "memory"),
    ):
        sizes = f"({rows}, {inner}) @ ({inner}, {columns}) in 16 bits"
        flops, moved = 2 * rows * inner * columns, 2 * (rows * inner + inner * columns + rows * columns)
        yield f"FLOPs of {sizes}", flops, task.flops(rows, inner, columns)
        yield f"bytes of {sizes}", moved, task.moved(rows, inner, columns, itemsize=2)
        yield f"the limit of {sizes}", limit, task.limit(flops, moved, 1e15, 4e12)


def masked_sum(task: Any, start: Any) -> Cases:
    """Rows of awkward lengths, with NaN behind the last one, in one launch."""
    for rows, columns in ((3, 4), (3, 5), (1, 1), (4, 130)):
        x = torch.full((rows + 1, columns), float("nan"), device=WHERE)
        x[:rows] = torch.randn(rows, columns)
        with count_launches() as names:
            y = task.row_sum(x[:-1])
        yield f"{rows} rows of {columns}", x[:rows].double().sum(-1), y
        yield f"launches for {rows} rows", 1, len(names)


def packing(task: Any, start: Any) -> Cases:
    """What is kept, where texts begin, and the way back; empty texts too."""
    for lengths in ((3, 1, 2), (2, 0, 4), (0, 0), (5,)):
        size, case = max(*lengths, 1), f"lengths {lengths}"
        mask = torch.arange(size) < torch.tensor(lengths)[:, None]
        x = torch.randn(len(lengths), size, 8)
        tokens, offsets = task.pack(x, mask)
        yield f"tokens that are kept, {case}", sum(lengths), len(tokens)
        yield f"tokens, {case}", x[mask], tokens
        yield f"offsets, {case}", torch.tensor([0, *lengths]).cumsum(0), offsets
        yield f"the way back, {case}", x * mask[..., None], task.unpack(tokens, offsets, size)


def backward(task: Any, start: Any) -> Cases:
    """The gradient against float64, then by differences, in one launch."""
    for rows, columns in ((2, 8), (3, 5), (1, 33)):
        x, dy = torch.randn(2, rows, columns, dtype=torch.float64, device=WHERE)
        x.requires_grad_()
        (expected,) = torch.autograd.grad(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), x, dy)
        y = task.rms_norm(x)
        with count_launches() as names:
            (dx,) = torch.autograd.grad(y, x, dy)
        yield f"dx of {rows} rows of {columns}", expected, dx
        yield f"launches of the backward of {rows} rows", 1, len(names)
    x = torch.randn(2, 3, dtype=torch.float64, device=WHERE, requires_grad=True)
    yield "gradcheck", True, torch.autograd.gradcheck(task.rms_norm, x)


def custom_operator(task: Any, start: Any) -> Cases:
    """The value, the gradient, and that compiler and export see one node for any size."""
    x = torch.randn(4, 6, requires_grad=True)
    yield "the result", x.sigmoid() * x, task.swish(x)
    found = torch.library.opcheck(task.swish, (x,), raise_exception=False)
    for test in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
        yield f"opcheck, {test}", "SUCCESS", str(found[test]).partition("\n")[0]
    (expected,) = torch.autograd.grad((x.sigmoid() * x).sum(), x)
    yield "the gradient", expected, torch.autograd.grad(task.swish(x).sum(), x)[0]

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return task.swish(x) + 1

    rows, file = torch.export.Dim("rows"), io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x.detach(),), dynamic_shapes=({0: rows},)), file)
    file.seek(0)
    x = torch.randn(9, 6)
    yield "exported, saved, loaded, with 9 rows", x.sigmoid() * x + 1, torch.export.load(file).module()(x)


class Task(NamedTuple):
    """A task: its path of learning, how many minutes it takes, its check, and the page of the guide about it."""

    path: str
    minutes: int
    check: Callable[[Any, Any], Cases]
    page: str


TASKS = {
    "first-module": Task("beginner", 15, compiles, "tutorial-first-module"),
    "norm": Task("beginner", 10, norm, "fusion"),
    "roofline": Task("beginner", 15, roofline, "compute-intensity"),
    "breaks": Task("intermediate", 30, compiles, "debugging-compilation"),
    "masked-sum": Task("intermediate", 20, masked_sum, "tutorial-triton"),
    "packing": Task("intermediate", 25, packing, "memory"),
    "backward": Task("advanced", 40, backward, "tutorial-triton"),
    "custom-operator": Task("advanced", 30, custom_operator, "tutorial-triton"),
}


RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Tolerances for a tensor: results are of float32, and what a task can get wrong is far larger."""


def learn_command(
    name: Annotated[str | None, typer.Argument(help="Name of a task; without one they are listed.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="The file of a task, to be checked.")] = None,
) -> None:
    """Copy a task into the current folder, or check it: the first wrong case, expected, got, and the page about it.

    A task is a Python file with a gap. The check compares and counts, and never times. Exit code: 0; 1 for a file that
    is wrong; 2 for a name or a file that does not exist, and where a file would be written over.
    """
    if check is not None:
        task = check.stem.replace("_", "-")
        if task not in TASKS:
            raise UserError(f"{check.name} is no task's file; those are {', '.join(file_of(t).name for t in TASKS)}")
        if not check.is_file():
            raise UserError(f"there is no file {check}")
        found = first_problem(task, check.resolve())
        if isinstance(found, int):
            tell(f"{check.name}: right in {found} cases")
            return
        case, expected, got = found
        tell(f"{check.name} is wrong", f"  case: {case}", f"  expected: {expected}", f"  got: {got}")
        tell(f"  read: docs/guide/{TASKS[task].page}.md")
        raise typer.Exit(1)
    if name is None:
        for task, (path, minutes, *_) in TASKS.items():
            tell(f"{task:16} {path:13} {minutes:3} min  {title(task)}")
        tell("kernel-pytorch learn NAME copies a task; kernel-pytorch learn --check FILE checks it.")
        return
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
    file = Path(file_of(name).name)
    if file.exists():
        raise UserError(f"{file} is there already; move it first")
    shutil.copyfile(file_of(name), file)
    tell(f"{file}: {title(name)}. Then kernel-pytorch learn --check {file}")


def file_of(name: str) -> Path:
    """The file that a task starts with."""
    return Path(__file__).parent / "learning" / "tasks" / f"{name.replace('-', '_')}.py"


def title(name: str) -> str:
    """What a task is about: the first line of its file, without its name."""
    first = file_of(name).read_text("utf-8").partition("\n")[0]
    return first.partition(": ")[2].rstrip('."')


def first_problem(name: str, file: Path) -> tuple[str, str, str] | int:
    """(case, expected, got) of the first case in which a file is wrong; the number of cases, where it is right."""
    case, count = "import", 0
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what the reader's code prints
            # First: an operator that both register shall be the reader's.
            start = load_file(file_of(name), f"kernel_pytorch_start_of_{name}")
            for case, expected, got in TASKS[name].check(load_file(file, f"kernel_pytorch_task_{name}"), start):
                if found := difference(expected, got):
                    return case, *found
                count += 1
    except Exception as error:  # whatever the reader's code raises
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
        where = f" (line {lines[-1]})" if lines else ""
        return f"after {case!r}" if count else case, "no error", f"{said(error)}{where}"
    return count


def difference(expected: Any, got: Any) -> tuple[str, str] | None:
    """Both in a line, if they differ: of two tensors of one shape the elements that differ most, else their shapes.

    Tensors may differ by rounding, and NaN is never right.
    """
    if isinstance(expected, Tensor) and isinstance(got, Tensor) and got.shape == expected.shape:
        ours, truth = got.detach().double(), expected.detach().double()
        if ours.allclose(truth, RELATIVE, ABSOLUTE):
            return None
        off = (ours - truth).abs().nan_to_num(float("inf"))
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        return f"{float(truth[place]):.6g} at {list(place)}", f"{float(ours[place]):.6g}"
    if not isinstance(expected, Tensor) and not isinstance(got, Tensor) and expected == got:
        return None
    text = [f"shape {list(value.shape)}" if isinstance(value, Tensor) else str(value) for value in (expected, got)]
    return text[0], text[1]
