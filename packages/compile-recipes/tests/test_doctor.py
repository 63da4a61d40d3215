"""`kernel-pytorch doctor`, as it is typed."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kernel_pytorch.compile_recipes.commands.doctor import doctor_command
from kernel_pytorch.harness.cli import Commands

FILE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        print("a line of the model")
        return self.layer(x).relu()


class Broken(Net):
    def forward(self, x):
        return self.missing(x)


def make():
    return Net(), torch.randn(4, 16)


def broken():
    return Broken(), torch.randn(4, 16)


def stock():
    return torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.ReLU()), torch.randn(4, 16)


def nothing():
    return 3
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    (tmp_path / "model_of_mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    app = typer.Typer(cls=Commands)  # as `kernel-pytorch`, which answers errors
    app.command("doctor")(doctor_command)
    app.callback()(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments, "--device", "cpu"])


@pytest.mark.parametrize("target", ["model_of_mine:make", "model_of_mine.py:make"])
def test_it_names_the_break_and_says_nothing_of_what_the_model_prints(doctor, target):
    done = doctor(target)
    assert done.exit_code == 0, done.output
    assert 'model_of_mine.py:11  print("a line of the model")' in done.stdout
    assert "a line of the model\n" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_budget_decides_the_exit_code(doctor, tmp_path):
    (tmp_path / "budget.json").write_text(json.dumps({"breaks": 1}))
    assert doctor("model_of_mine:make", "--short", "--check", "budget.json").exit_code == 0
    (tmp_path / "budget.json").write_text(json.dumps({"breaks": 0}))
    done = doctor("model_of_mine:make", "--short", "--check", "budget.json")
    assert done.exit_code == 1
    assert "breaks: 1, allowed 0" in done.output


def test_reports_are_written(doctor, tmp_path):
    done = doctor("model_of_mine:make", "--short", "--out", "a.json", "--out", "pages/a.html")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "a.json").read_text())["title"] == "Net"
    assert "<h1>Net</h1>" in (tmp_path / "pages" / "a.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:make"], "no_such_module"),
        (["no_such_file.py:make"], "there is no file"),
        (["model_of_mine:nothing"], "it must return"),
        (["model_of_mine:make", "--out", "a.txt"], "must end in .json or .html"),
        (["model_of_mine:make", "--gpu", "b9"], "gpu is 'b9'"),
        (["model_of_mine:make", "--check", "no.json"], "no.json"),
    ],
)
def test_what_cannot_be_done_ends_with_one_line(doctor, arguments, message):
    done = doctor(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_stock_modules_have_their_path_for_a_line(doctor):
    done = doctor("model_of_mine:stock", "--out", "a.json")
    assert "1. 2  bias and activation" in done.stdout
    parts = json.loads(Path("a.json").read_text())["parts"].values()
    assert {f["line"] for part in parts for f in part["findings"]} == {""}


def test_a_model_that_raises_ends_with_2_and_its_line(doctor):
    done = doctor("model_of_mine:broken")
    assert done.exit_code == 2
    assert "model_of_mine.py:17" in done.output
