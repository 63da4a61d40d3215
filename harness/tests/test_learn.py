"""The tasks of `kernel-pytorch learn`: each begins wrong, its solution is right, what is half right is told apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.commands.learn import TASKS, difference, file_of, first_problem, title

ROOT = Path(__file__).parents[2]
Edits = list[tuple[str, str]]


def counted(name: str) -> Edits:
    """A number on a module as a buffer."""
    return [(f"self.{name} = 0", f'self.register_buffer("{name}", torch.zeros((), dtype=torch.int64))')]


MASKED = [("column)\n    tl.store", "column, mask=column < columns, other=0.0)\n    tl.store")]
BACKWARD = [
    (
        "    rstd = tl.load(rstd_ptr + row)\n",
        "    rstd = tl.load(rstd_ptr + row)\n"
        "    hat = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0) * rstd\n"
        "    mean = tl.sum(dy * hat, axis=0) / columns\n",
    ),
    ("column, dy * rstd,", "column, (dy - hat * mean) * rstd,"),
]
FAKE = """

@swish.register_fake
def _(x):
    return torch.empty_like(x)
"""
GRADIENT = """

def backward(ctx, dy):
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return dy * s * (1 + x * (1 - s))


swish.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
"""
SCALE = [
    ("        largest = y.abs().max().item()\n        if largest > 0.5:\n            y = y * (0.5 / largest)\n", ""),
    ("return y.mean(1)", "return (y * (0.5 / y.abs().max().clamp(min=0.5))).mean(1)"),
]
BREAKS = [
    (
        "        if h.norm() > 10:\n            h = h / (h.norm().item() / 10)\n",
        "        h = h / (h.norm() / 10).clamp(min=1)\n",
    ),
    ('        print("a step", end="\\r")\n', ""),
    (
        "        rows = []\n        for text in y:\n            kept = text[text.sum(-1) > 0]\n"
        "            rows.append(kept.mean(0) if len(kept) else torch.zeros(16))\n        return torch.stack(rows)\n",
        "        kept = (y.sum(-1, keepdim=True) > 0).to(y.dtype)\n"
        "        return (y * kept).sum(1) / kept.sum(1).clamp(min=1)\n",
    ),
]
NORM = [
    ("        variance = centred.square().mean(-1, keepdim=True)\n", ""),
    ("        centred = x - x.mean(-1, keepdim=True)\n", ""),
    (
        "centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias",
        "nn.functional.layer_norm(x, (24,), self.weight, self.bias)",
    ),
    ("0.5 * h * (1 + torch.erf(h / 2**0.5))", "nn.functional.gelu(h)"),
]
ROOFLINE = [
    ("return 0\n\n\ndef moved", "return 2 * rows * inner * columns\n\n\ndef moved"),
    ("return 0\n\n\ndef limit", "return itemsize * (rows * inner + inner * columns + rows * columns)\n\n\ndef limit"),
    ('return "compute"', 'return "compute" if flops / flops_per_second > moved / bytes_per_second else "memory"'),
]
PACKING = [
    (
        "    batch, length, _ = x.shape\n    return x.flatten(0, 1), torch.arange(batch + 1) * length",
        "    return x[mask], torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])",
    ),
    (
        "    return tokens.unflatten(0, (-1, length))",
        "    mask = torch.arange(length) < offsets.diff()[:, None]\n"
        "    x = tokens.new_zeros(*mask.shape, tokens.shape[-1])\n    x[mask] = tokens\n    return x",
    ),
]
SOLUTIONS: dict[str, Edits] = {
    "first-module": counted("calls") + SCALE,
    "norm": NORM,
    "roofline": ROOFLINE,
    "breaks": counted("steps") + BREAKS,
    "masked-sum": MASKED,
    "packing": PACKING,
    "backward": BACKWARD,
    "custom-operator": [(".numpy()))\n", f".numpy()))\n{FAKE}{GRADIENT}")],
}
HALF = [
    ("first-module", SCALE, "graphs for three lengths"),
    ("first-module", [("0.5 / largest", "0.4 / largest")], "the result for 3 texts"),
    ("breaks", BREAKS[:2], "graphs for three lengths"),
    ("norm", NORM[3:], "operators of a forward"),
    ("norm", [*NORM, ("self.weight = nn.Parameter(torch", "self.gain = self.weight = nn.Parameter(torch")], "names of"),
    ("roofline", ROOFLINE[:2], "the limit of (1, 4096)"),
    ("masked-sum", [(MASKED[0][0], MASKED[0][1].replace("<", "<="))], "3 rows of 5"),
    ("packing", PACKING[:1], "the way back, lengths (3, 1, 2)"),
    ("backward", [*BACKWARD, ("(dy - hat * mean) * rstd", "(dy + hat * mean) * rstd")], "dx of 2 rows of 8"),
    ("custom-operator", [(".numpy()))\n", f".numpy()))\n{GRADIENT}")], "opcheck, test_faketensor"),
    ("custom-operator", [(".numpy()))\n", f".numpy()))\n{FAKE}")], "opcheck, test_aot_dispatch_dynamic"),
    ("packing", [("x.flatten(0, 1)", "x.no_such_attribute")], "import"),
    ("packing", [*PACKING, ("offsets.diff()", "offsets.undefined()")], "after 'offsets, lengths (3, 1, 2)'"),
    ("masked-sum", [("import torch\n", "import no_such_module\n")], "import"),
]


def edited(name: str, edits: Edits, folder: Path) -> Path:
    """A task's file, after changes."""
    text = file_of(name).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / file_of(name).name
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", TASKS)
def test_a_task_begins_wrong_and_its_solution_is_right(name, tmp_path):
    found = first_problem(name, edited(name, [], tmp_path))
    assert not isinstance(found, int)
    assert found[1] != found[2]
    right = first_problem(name, edited(name, SOLUTIONS[name], tmp_path))
    assert isinstance(right, int), right
    assert right >= 4


@pytest.mark.parametrize(("name", "edits", "case"), HALF)
def test_what_is_half_right_is_told_with_its_case(name, edits, case, tmp_path):
    found = first_problem(name, edited(name, edits, tmp_path))
    assert not isinstance(found, int)
    assert found[0].startswith(case), found


def test_a_page_explains_each_task():
    guide = ROOT / "docs" / "guide"
    for name, task in TASKS.items():
        assert (guide / f"{task.page}.md").is_file(), task.page
        assert f"learn {name}" in (guide / "learning-paths.md").read_text()


def test_values_are_compared_by_what_they_are():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for expected, got in ((x.double(), x + 1e-7), ("SUCCESS", "SUCCESS"), (3, 3)):
        assert difference(expected, got) is None
    assert difference(x, x.tolist()) == ("shape [2, 2]", "[[1.0, 2.0], [3.0, 4.0]]")
    assert difference(x, x[0]) == ("shape [2, 2]", "shape [2]")
    assert difference(x, x + torch.tensor([[0.0, 0.0], [0.5, 0.0]])) == ("3 at [1, 0]", "3.5")
    assert difference(x, torch.full_like(x, float("nan"))) == ("1 at [0, 0]", "nan")
    assert difference(0, 3) == ("0", "3")
    assert difference(2, x) == ("2", "shape [2, 2]")


def test_the_command_lists_copies_and_checks(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = command_line("learn").out
    for name, task in TASKS.items():
        assert re.search(rf"^{name} +{task.path} +{task.minutes} min  {title(name)}$", listed, re.MULTILINE)
        assert title(name)
    copied = command_line("learn", "roofline")
    assert (copied.code, Path("roofline.py").read_text()) == (0, file_of("roofline").read_text())
    wrong = command_line("learn", "--check", "roofline.py")
    assert wrong.code == 1
    assert wrong.out.splitlines() == [
        "roofline.py is wrong",
        "  case: FLOPs of (4096, 4096) @ (4096, 4096) in 16 bits",
        "  expected: 137438953472",
        "  got: 0",
        "  read: docs/guide/compute-intensity.md",
    ]
    edited("roofline", SOLUTIONS["roofline"], tmp_path)
    right = command_line("learn", "--check", "roofline.py")
    assert (right.code, right.out) == (0, "roofline.py: right in 9 cases\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-task"], "there is no task 'no-such-task'; there are: first-module, "),
        (["roofline"], "roofline.py is there already"),
        (["--check", "norm.py"], "there is no file norm.py"),
        (["--check", "other.py"], "other.py is no task's file; those are first_module.py, "),
    ],
)
def test_mistakes_end_with_one_line(arguments, message, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("roofline.py").write_text("mine")
    found = command_line("learn", *arguments)
    assert found.code == 2
    assert message in found.err
    assert Path("roofline.py").read_text() == "mine"
