"""The demo at quick size: every level proven and timed, and sentences that follow from the figures."""

import json

import pytest

pytestmark = [pytest.mark.examples, pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")]


def test_every_level_that_runs_is_right_and_timed(example, capsys, tmp_path):
    example("demo").main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count("Fastest") == 3
    for title in ("attention", "block", "norm", "projection"):
        found = {c["name"]: c for c in json.loads((tmp_path / f"{title}.json").read_text())["contenders"]}
        assert {"naive", "PyTorch", "torch.compile", "default"} <= found.keys()
        assert all(c["status"] == "measured" for c in found.values()), title
        assert f"{title}: 1 x" in printed


def test_sentences_follow_from_the_figures(example):
    demo = example("demo")
    figures = {"naive": 4.0, "PyTorch": 2.0, "torch.compile": 3.0, "default": 1.0}
    tables = dict.fromkeys(("attention", "norm", "projection"), figures)
    tables["block"] = {"naive": 3.0, "PyTorch": 2.0, "torch.compile": 1.5, "default": 2.0}
    first, second, third = demo.insights({title: Timed(figures) for title, figures in tables.items()})
    assert "attention default (4.00x of naive)" in first
    assert "block torch.compile (2.00x of naive)" in first
    assert "2.00x of the best PyTorch in attention" in second
    assert "it gives away most in block, 33%" in second
    assert "4.00x over naive on average, the block of them 2.00x" in third


class Timed:
    def __init__(self, figures):
        self.contenders = [Contender(name, seconds) for name, seconds in figures.items()]


class Contender:
    status, reason = "measured", ""

    def __init__(self, name, median):
        self.name, self.seconds = name, type("Interval", (), {"median": median})
