"""The command line as people meet it: help, one line for a mistyped name, files where they were asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import re
from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness import timing
from kernel_pytorch.harness.cli import COMMANDS
from kernel_pytorch.harness.commands import bench as bench_module
from kernel_pytorch.harness.commands import calibrate as calibrate_module
from kernel_pytorch.harness.commands import common
from kernel_pytorch.harness.commands import verify as verify_module
from kernel_pytorch.harness.results import LevelVerification, VerificationReport, load
from kernel_pytorch.harness.technique import Exemption

OPTIONS = {
    "list": ("--device",),
    "verify": ("--level", "--device", "--exhaustive", "--jobs"),
    "bench": (
        *("--quick", "--full", "--level", "--operation", "--direction", "--device"),
        *("--json", "--out", "--machine", "--resume", "--timeout"),
    ),
    "calibrate": ("--device", "--quick", "--slug", "--json"),
}
FOREIGN = '''
import typer

def doctor(model: str = "none") -> None:
    """Examine a model."""
    typer.echo(f"examined {model}")

number = 3
'''


@pytest.fixture
def toy_alone(site, toy, monkeypatch, machine):
    """The toy technique, the only one installed, on a machine that takes no time to measure."""
    site.install_toy()
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)
    for module in (bench_module, calibrate_module):
        monkeypatch.setattr(module, "measure_machine", lambda device, quick=False, on_step=None: machine)
    monkeypatch.setattr(bench_module, "describe_environment", lambda device: machine.environment)
    return site


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option_and_the_exit_codes(command_line, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    printed = command_line(command, "--help")
    assert printed.code == 0
    for option in OPTIONS[command]:
        assert option in printed.out
    if command != "list":
        assert "Exit code: 0" in " ".join(printed.out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_paragraphs_of_help_fill_80_columns(command_line, monkeypatch, command):
    """Every line holds what there is room for: the first word of the next one would not have fitted."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in command_line(command, "--help").out.split("\u256d")[0].splitlines()]
    assert any(lines)
    pairs = [(line, after) for line, after in itertools.pairwise(lines) if line and after]
    early = [line for line, after in pairs if len(f"{line} {after.split()[0]}") <= 78]
    assert early == []


def test_help_of_the_whole_names_the_commands(command_line):
    printed = command_line("--help")
    assert all(command in printed.out for command in OPTIONS)


@pytest.mark.parametrize("command", ["list", "verify", "bench"])
def test_an_unknown_technique_is_one_line(toy_alone, command_line, command):
    printed = command_line(command, "nope")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "kernel-pytorch: no technique 'nope'; installed are: toy\n"


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_an_unknown_level_is_one_line(toy_alone, command_line, command):
    printed = command_line(command, "toy", "--level", "native", "--level", "nope[/red]")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "kernel-pytorch: no level 'nope[/red]'; there are: reference, native, compile, cuda\n"


@pytest.mark.parametrize("command", ["list", "verify", "bench", "calibrate"])
@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_an_unknown_device_is_one_line(toy_alone, command_line, command, device):
    printed = command_line(command, "--device", device)
    assert (printed.code, printed.out) == (2, "")
    assert printed.err.startswith(f"kernel-pytorch: no device '{device}'; available here are: cpu")
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_in_a_process_of_its_own_nothing_else_is_on_stderr(toy_alone):
    printed = toy_alone.run("verify", "toy", "--level", "nope")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "kernel-pytorch: no level 'nope'; there are: reference, native, compile, cuda\n"


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_where_nothing_is_installed_there_is_nothing_to_do(site, command_line, command):
    printed = command_line(command, "--device", "cpu")
    assert printed.code == 1
    assert printed.err.startswith("No technique is installed, so there is nothing to ")


def test_list_shows_each_level_its_state_and_the_default(toy_alone, command_line):
    printed = command_line("list", "--device", "cpu")
    assert printed.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if "│ gate" in line]
    assert rows == [
        ["gate", "reference", "runs", ""],
        ["gate", "native", "runs", "yes"],
        ["gate", "compile", "runs", ""],
        ["gate", "cuda", "cannot run: the toy has no kernel", ""],
    ]
    assert "toy: a gate [small]" in printed.out


def test_list_asks_for_the_default_of_each_operation_where_they_differ(toy_alone, toy, command_line, monkeypatch):
    monkeypatch.setattr(toy, "default", lambda operation, *about: {"gate": "compile"}[operation])
    printed = command_line("list", "--device", "cpu")
    assert [line.split("│")[2].strip() for line in printed.out.splitlines() if "yes" in line] == ["compile"]


def test_list_where_nothing_is_installed_says_what_to_install(site, command_line):
    assert "pip install ./packages/<technique>" in command_line("list").out


@pytest.mark.slow
def test_verify_is_green_and_says_what_could_not_run(toy_alone, command_line):
    printed = command_line("verify", "--device", "cpu", "--jobs", "2")
    assert printed.code == 0, printed.out
    assert "22 of 22" in printed.out
    assert "gate cuda, 22 could not run: the toy has no kernel" in printed.out


def test_verify_says_what_it_did_not_ask_and_why(toy_alone, toy, command_line, monkeypatch, tmp_path):
    exemption = Exemption(("zero rows",), "a good [one]", arguments=("x",), dtypes=(torch.float16,))
    operation = dataclasses.replace(toy.gate, exemptions=[exemption])
    monkeypatch.setattr(verify_module, "Workers", lambda *_: contextlib.nullcontext())  # this process will do
    monkeypatch.setattr(toy, "technique", dataclasses.replace(toy.technique, operations=[operation]))
    path = tmp_path / "found.json"
    printed = command_line("verify", "--device", "cpu", "--level", "native", "--json", str(path))
    assert printed.code == 0
    assert "21 of 21" in printed.out
    said = "gate: zero rows of x in float16: a good [one]"
    assert f"not asked: {said}\n" in printed.out
    assert VerificationReport.model_validate_json(path.read_text()).spared == (said,)


def test_verify_is_red_and_names_what_is_wrong(toy_alone, toy, command_line, monkeypatch):
    monkeypatch.setattr(verify_module, "Workers", lambda *_: contextlib.nullcontext())  # this process will do
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    monkeypatch.setattr(common, "LINE_EVERY", 0.0)
    printed = command_line("verify", "--device", "cpu", "--level", "native")
    assert printed.code == 1
    wrong = [line for line in printed.out.splitlines() if line.startswith("wrong: ")]
    assert sum(": output is off" in line for line in wrong) == 22
    assert "gate native, 1 wrong" in printed.err
    assert wrong[0].startswith("wrong: toy gate level 'native', case plain [rows=4 columns=16] float32: output is off")


def test_a_few_reasons_are_named_and_the_others_counted(toy, machine):
    level = LevelVerification(
        operation="gate", implementation="triton", ran=0, right=0, worst=None, failures=(), not_run=5,
        unavailable=[f"shape {i}" for i in range(5)],
    )  # fmt: skip
    about = {"technique": "toy", "created": "", "environment": machine.environment}
    *_, said = verify_module.table([VerificationReport(**about, levels=[level])]).renderables
    assert str(said) == "gate triton, 5 could not run: shape 0; shape 1; shape 2; 2 more reasons, see --json"
    few = level.model_copy(update={"unavailable": level.unavailable[:3]})
    *_, said = verify_module.table([VerificationReport(**about, levels=[few])]).renderables
    assert str(said).endswith("shape 1; shape 2")


def test_the_machine_is_printed_and_written(toy_alone, machine, command_line, tmp_path):
    path = tmp_path / "new" / "machine.json"
    printed = command_line("calibrate", "--device", "cpu", "--json", str(path))
    assert printed.code == 0
    assert "Made-up CPU" in printed.out
    assert type(machine).model_validate_json(path.read_text()) == machine


@pytest.mark.slow
def test_a_quick_run_writes_the_file_that_it_is_told_to(toy_alone, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "out" / "toy.json"
    printed = command_line("bench", "toy", "--quick", "--level", "native", "--device", "cpu", "--json", str(path))
    assert printed.code == 0, printed.out
    assert "gate, backward" in printed.out
    results = load(path)
    assert results.complete
    assert results.quick
    assert {(m.case.name, m.implementation, m.status) for m in results.measurements} == {
        (case, level, "measured") for case in ("small", "larger") for level in ("reference", "native")
    }
    assert not (tmp_path / "results").exists()
    assert not list(path.parent.glob("*.partial.json"))


@pytest.mark.slow
def test_a_partial_run_writes_nothing_unless_it_is_told_to(toy_alone, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())  # this process will do
    for options in ([], ["--quick"], ["--full", "--level", "compile"], ["--full", "--operation", "gate"]):
        printed = command_line("bench", "toy", "--device", "cpu", *options)
        assert "--json FILE or --out FOLDER writes them" in printed.err
        assert [file.name for file in tmp_path.iterdir()] == ["site"]


def test_where_to_write_is_obeyed_or_refused(toy_alone, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    short = ("bench", "toy", "--quick", "--level", "native", "--device", "cpu")
    file = tmp_path / "kept" / "made-up-2-threads" / "toy.json"
    assert command_line(*short, "--out", "kept").code == 0
    assert load(file).quick
    assert command_line(*short, "--out", "kept").code == 0, "a short run replaces a short one"
    for options, message in {
        ("--out", "kept", "--json", "toy.json"): "--json and --out: give one of them",
        ("--full",): "--quick and --full: give one of them",
    }.items():
        printed = command_line(*short, *options)
        assert (printed.code, printed.out, printed.err) == (2, "", f"kernel-pytorch: {message}\n")
    before = load(file).model_copy(update={"quick": False})
    before.save(file)
    for options in (("--out", "kept"), ("--json", str(file)), ("--out", "kept", "--resume")):
        printed = command_line(*short, *options)
        assert (printed.code, printed.out) == (2, "")
        assert "toy.json holds a full run, which only --full replaces" in printed.err
        assert printed.err.count("\n") == 1
        assert load(file) == before


def test_a_short_run_is_one_case_of_each_operation_and_a_quick_one_two_of_the_first(
    toy_alone, toy, command_line, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    other = dataclasses.replace(toy.gate, name="other")
    monkeypatch.setattr(toy, "technique", dataclasses.replace(toy.technique, operations=[toy.gate, other]))
    measured = {}
    for option in ("", "--quick"):
        path = tmp_path / "toy.json"
        options = filter(None, [option, "--level", "native", "--device", "cpu", "--json", str(path)])
        assert command_line("bench", "toy", *options).code == 0
        measured[option] = {(m.operation, m.case.name) for m in load(path).measurements}
    assert measured[""] == {("gate", "small"), ("other", "small")}
    assert measured["--quick"] == {("gate", "small"), ("gate", "larger")}


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_progress_is_lines_where_there_is_no_terminal(toy_alone, command_line, monkeypatch, command):
    monkeypatch.setattr(common, "LINE_EVERY", 0.0)
    module = verify_module if command == "verify" else bench_module
    monkeypatch.setattr(module, "Workers" if command == "verify" else "Worker", lambda *_: contextlib.nullcontext())
    printed = command_line(command, "toy", "--level", "native", "--device", "cpu")
    lines = {
        "verify": "verify: 22 of 22, [0-9]+ s: gate native",
        "bench": "toy: 2 of 2, [0-9]+ s: gate backward, small",
    }
    assert re.search(lines[command], printed.err), printed.err


def test_a_full_disk_is_one_line_that_says_what_is_saved(toy_alone, command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    whole, written = os.fsync, []

    def fsync(handle):
        written.append(handle)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(handle)

    monkeypatch.setattr("os.fsync", fsync)
    file = tmp_path / "toy.json"
    printed = command_line("bench", "toy", "--level", "native", "--device", "cpu", "--json", str(file))
    assert printed.code == 2
    partial = tmp_path / "toy.partial.json"
    assert printed.err.splitlines()[-1] == (
        f"kernel-pytorch: cannot write {file}: No space left on device; {partial} holds what was saved before; --resume"
        " continues from it"
    )
    assert len(load(partial).measurements) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "toy.partial.json"]


def test_the_version_is_printed(command_line):
    printed = command_line("--version")
    assert printed.code == 0
    assert re.match(r"kernel-pytorch-harness \d+\.\d+\.\d+, torch \d+\.\d+", printed.out)


def test_an_operation_that_does_not_exist_is_named(toy_alone, command_line):
    printed = command_line("bench", "--device", "cpu", "--operation", "gat")
    assert printed.code == 2
    assert "no operation 'gat'; there are: gate" in printed.err


def test_a_report_of_what_is_not_there_says_what_to_give(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["results"]):
        printed = command_line("report", *arguments)
        assert (printed.code, printed.out) == (2, "")
        assert printed.err.startswith(
            "kernel-pytorch: results: no such file or folder; give a results file or a folder"
        )
        assert printed.err.count("\n") == 1


def test_stale_results_are_named_and_those_of_what_is_not_installed_are_not_judged(
    toy_alone, toy, command_line, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    path = tmp_path / "toy.json"
    command_line("bench", "toy", "--quick", "--level", "native", "--device", "cpu", "--json", str(path))
    fresh = load(path)
    other = fresh.model_copy(update={"technique": "other"})
    other.save(tmp_path / "other.json")
    printed = command_line("report", str(tmp_path), "--check-stale")
    assert printed.code == 0
    assert "1 results file, all of the present code" in printed.out
    assert "not checked: technique other is not installed here" in printed.err
    native = fresh.identities["gate/native"].model_copy(update={"sources": {"toy": "other"}})
    fresh.model_copy(update={"identities": fresh.identities | {"gate/native": native}}).save(path)
    printed = command_line("report", str(tmp_path), "--check-stale")
    assert printed.code == 0
    assert f"  listed, {fresh.created[:10]}: the code has changed\n    gate: native\n" in printed.out
    # Where users rest on it, it is an error, unless the record is too old to say.
    row = SimpleNamespace(level="native", record=tmp_path.name, functions=None)
    monkeypatch.setattr(toy, "defaults", (row,), raising=False)
    printed = command_line("report", str(tmp_path), "--check-stale")
    assert printed.code == 1
    assert f"  FAILS, default, {fresh.created[:10]}: the code has changed\n    gate: native\n" in printed.out
    assert "1 default rests on code that was not measured." in printed.out
    fresh.model_copy(update={"identities": {}}).save(path)
    printed = command_line("report", str(tmp_path), "--check-stale")
    assert printed.code == 0
    assert f"  listed, {fresh.created[:10]}: measured before records named the code that ran\n" in printed.out


def test_a_full_run_writes_into_its_folder_and_the_readme(toy_alone, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "packages" / "toy" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("# Toy\n\n<!-- results:begin -->\nNot measured yet.\n<!-- results:end -->\n")
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    printed = command_line("bench", "--full", "--device", "cpu")
    assert printed.code == 0, printed
    folder = tmp_path / "results" / "made-up-2-threads"
    assert load(folder / "toy.json").complete
    *_, results, table = printed.out.splitlines()
    assert results.startswith("written: results/made-up-2-threads/toy.json")
    assert table == "written: packages/toy/README.md"
    assert readme.read_text().startswith("# Toy\n\n<!-- results:begin -->\nMade-up CPU")
    assert "| `gate`, forward | largest" in readme.read_text()
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".png", ".svg"}


def test_a_wrong_level_makes_a_benchmark_fail(toy_alone, toy, command_line, monkeypatch):
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(toy, "unavailable", lambda level, device, dtype: None)
    monkeypatch.setattr(toy, "cuda", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    printed = command_line("bench", "--quick", "--level", "cuda", "--device", "cpu")
    assert printed.code == 1
    assert "gate cuda, forward, small rows=8 columns=64 float32: wrong: output is off by" in printed.out


def test_a_level_of_pytorch_over_its_budget_is_shown_and_fails_nothing(toy_alone, toy, command_line, monkeypatch):
    monkeypatch.setattr(bench_module, "Worker", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    printed = command_line("bench", "--quick", "--level", "native", "--device", "cpu")
    assert printed.code == 0, printed
    assert re.search("gate native, forward, small rows=8 columns=64 float32: error [0-9.]+x of the budget", printed.out)


def test_foreign_commands_appear_and_broken_ones_are_left_out(toy_alone, command_line):
    names = {"examine": "foreign:doctor", "absent": "foreign:nobody", "number": "foreign:number", "lost": "no_such:f"}
    toy_alone.install("foreign", {"kernel_pytorch.commands": names}, foreign=FOREIGN)
    printed = command_line("examine", "--model", "bert")
    assert printed.code == 0
    assert printed.out == "examined bert\n"
    absent, lost, number = printed.err.splitlines()
    why = "AttributeError: module 'foreign' has no attribute 'nobody'"
    assert absent == f"command absent is broken and left out: {why}"
    assert lost == "command lost is broken and left out: ModuleNotFoundError: No module named 'no_such'"
    assert number.startswith("command number is broken and left out: ")
