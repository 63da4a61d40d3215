"""The support table: recorded, merged over devices, and checked against the present code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from kernel_pytorch.harness import availability
from kernel_pytorch.harness.commands import support as command_module
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.isolation import CallOutcome
from kernel_pytorch.harness.records import RecordError
from kernel_pytorch.harness.static import StaticRecord
from kernel_pytorch.harness.static.record import record_file
from kernel_pytorch.harness.support import (
    CAPABILITIES,
    check_declaration,
    examination,
    load,
    load_all,
    markdown,
    problems,
    recorded,
    up_to_date,
)
from kernel_pytorch.harness.support import (
    record as record_module,
)

QUICK = [c for c in CAPABILITIES if c.name in ("fullgraph", "CUDA graphs", "determinism")]


def other_native(known):
    """Identities of which one is of other code."""
    other = known.identities["gate/native"].model_copy(update={"sources": {"toy": "other"}})
    return known.identities | {"gate/native": other}


# Records.


def test_a_record_comes_back_as_it_was_saved(record, tmp_path):
    saved = record()
    path = saved.save_in(tmp_path / "made-up")
    assert path == tmp_path / "made-up" / "support" / "toy.json"
    assert load(path) == saved
    assert load_all(tmp_path, "toy") == {path: saved}
    assert load_all(tmp_path, "another") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not a support record of schema version 1 \(file: "),
        ('{"schema_version": 2}', r"not a support record of schema version 1 \(schema_version: "),
        (b"\xff", "codec can't decode"),
    ],
)
def test_what_is_no_record(tmp_path, text, message):
    path = tmp_path / "toy.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError, match=message):
        load(path)
    with pytest.raises(RecordError, match="No such file"):
        load(tmp_path / "absent.json")


def test_what_was_found_out_about_other_code_does_not_count(record, toy):
    identities = other_native(record())
    before = record(identities=identities | {"gate/lost": identities["gate/native"]})
    kept, changed = up_to_date(before, toy.technique)
    assert changed == ["gate/lost", "gate/native"]
    assert {o.implementation for o in kept.outcomes} == {"reference", "compile"}
    assert kept.absent == before.absent


def test_a_row_that_does_not_exist_cannot_be_declared(toy):
    native = dataclasses.replace(toy.gate.implementation("native"), unsupported={"double backwards": "mistyped"})
    operation = dataclasses.replace(toy.gate, levels=[toy.gate.reference, native])
    with pytest.raises(KeyError, match="no row 'double backwards'; it has fullgraph, dynamic shapes, opcheck"):
        check_declaration(operation)


# What is recorded of the present code.


@pytest.fixture
def results(site, toy, record, tmp_path):
    """The toy installed, with one record: the folder of results."""
    site.install_toy()
    record().save_in(tmp_path / "results" / "made-up")
    return tmp_path / "results"


def test_what_is_recorded_can_be_checked(results, command_line):
    printed = command_line("support", "toy", "--check", "--results", str(results))
    assert (printed.code, printed.out) == (0, "everything is recorded of the present code\n")
    (results / "made-up" / "support" / "toy.json").unlink()
    printed = command_line("support", "--check", "--results", str(results))
    assert printed.code == 1
    asks = "`kernel-pytorch support toy --changed --json results/<device>` asks again"
    assert f"gate/reference is not recorded; {asks}" in printed.out


def test_changed_code_is_named_unless_another_device_knows_it(results, record, toy):
    path = record(identities=other_native(record())).save_in(results / "made-up")
    assert "| | reference | compile |" in markdown(toy.technique, recorded(toy.technique, results))
    asks = "`kernel-pytorch support toy --changed --json results/<device>` asks again"
    assert problems("toy", results) == [f"{path}: gate/native has changed since; {asks}"]
    record("Another CPU").save_in(results / "another")
    assert problems("toy", results) == []


def test_what_is_wrong_is_not_published(results, record, toy, command_line):
    record(noes=[(("native", "export"), ("wrong", "does not work"))]).save_in(results / "made-up")
    words = "a record with wrong outcomes is not published: toy gate level 'native', export: does not work"
    with pytest.raises(RecordError, match=words):
        recorded(toy.technique, results)
    printed = command_line("support", "toy", "--check", "--results", str(results))
    assert printed.code == 2
    assert words in printed.err


@pytest.mark.usefixtures("results")
def test_bad_input_ends_in_one_line(command_line):
    lines = {
        ("nope",): "kernel-pytorch: no technique 'nope'; installed are: toy",
        ("nope", "--check"): "kernel-pytorch: no technique 'nope'; installed are: toy",
        ("--device", "tpu"): "kernel-pytorch: no device 'tpu'",
    }
    for arguments, line in lines.items():
        printed = command_line("support", *arguments)
        assert (printed.code, printed.out) == (2, "")
        assert printed.err.startswith(line)
        assert printed.err.count("\n") == 1


# The command.


@pytest.fixture
def quick(site, toy, monkeypatch):
    """The toy alone, asked in this process about three rows."""
    site.install_toy()
    monkeypatch.setattr(examination, "CAPABILITIES", QUICK)
    monkeypatch.setattr(record_module, "SUPPORT_ROWS", [row.name for row in QUICK])
    monkeypatch.setattr(command_module, "Workers", lambda *_: contextlib.nullcontext())


def test_help_names_every_option_and_the_exit_codes(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = command_line("support", "--help")
    assert printed.code == 0
    for option in ("--device", "--json", "--check", "--results", "--timeout"):
        assert option in printed.out
    assert "Exit code: 0" in " ".join(printed.out.split())


@pytest.mark.usefixtures("quick")
def test_the_command_prints_and_writes_what_came_out(command_line, tmp_path):
    printed = command_line("support", "toy", "--device", "cpu", "--json", str(tmp_path))
    assert printed.code == 0, printed
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if "│ " in line]
    assert lines == [
        ["fullgraph", "yes", "yes", "yes"],
        ["CUDA graphs", *["not tested here (1)"] * 3],
        ["determinism", "yes", "yes", "yes"],
    ]
    assert "(1) needs a CUDA device\n`cuda` is not here: the toy has no kernel\n" in printed.out
    found = load(tmp_path / "support" / "toy.json")
    assert len(found.outcomes) == 9
    assert [a.implementation for a in found.absent] == ["cuda"]
    assert found.environment.device_type == "cpu"
    assert printed.err.splitlines()[0].endswith(": gate reference: fullgraph")


@pytest.mark.usefixtures("quick")
def test_the_command_is_red_when_the_declaration_is_wrong(toy, command_line, monkeypatch):
    calls = []

    def drifting(x, weight, factor):
        calls.append(x)
        return toy.reference(x, weight, factor) + 1e-6 * (len(calls) % 2)

    monkeypatch.setattr(toy, "native", drifting)
    printed = command_line("support", "toy", "--device", "cpu")
    assert printed.code == 1
    wrong = "wrong: toy gate level 'native', determinism: does not work, and is not declared as unsupported: "
    assert f"\n{wrong}AssertionError: result 0: Tensor-likes are not equal!" in printed.out


@pytest.mark.usefixtures("quick")
def test_the_command_needs_a_compiler(command_line, monkeypatch, tmp_path):
    monkeypatch.setattr(availability, "_cpp_compiler", lambda: None)
    printed = command_line("support", "toy", "--device", "cpu", "--json", str(tmp_path / "out"))
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "kernel-pytorch: the support table needs a C++ compiler: $CXX, g++ or clang++ on PATH\n"
    assert not (tmp_path / "out").exists()


class FragileWorkers:
    """Workers that one level kills; the others run here."""

    map = staticmethod(map)

    def call(self, function, *arguments):
        if "native" in arguments:
            return CallOutcome(failure="its process was killed by SIGABRT")
        return CallOutcome(value=function(*arguments, lambda stage: None))


def of_this_machine(record, **fields):
    return record(environment=describe_environment("cpu"), **fields)


@pytest.fixture
def asked(site, toy, monkeypatch):
    """Ask again beside a known record: the implementations that were asked about, and the new record."""
    site.install_toy()
    monkeypatch.setattr(examination, "CAPABILITIES", [c for c in QUICK if c.name == "determinism"])

    def ask(known):
        labels: list[str] = []
        found = examination.examine_technique(
            toy.technique,
            torch.device("cpu"),
            known=known,
            on_question=lambda label: labels.append(label.split(":")[0]),
        )
        return labels, found

    return ask


def test_only_what_changed_is_asked_again(asked, record, toy):
    every = ["gate reference", "gate native", "gate compile"]
    assert asked(None)[0] == every
    known = of_this_machine(record)
    labels, found = asked(known)
    assert labels == []
    assert [o.implementation for o in found.outcomes] == ["reference", "native", "compile"]
    changed = of_this_machine(record, identities=other_native(known))
    assert asked(changed)[0] == ["gate native"]
    wrong = tuple(o.model_copy(update={"answer": "wrong"}) for o in known.outcomes)
    assert asked(of_this_machine(record, outcomes=wrong))[0] == every


@pytest.mark.parametrize("field", ["torch", "triton", "device_name"])
def test_another_machine_is_asked_everything(asked, record, field):
    there = describe_environment("cpu").model_copy(update={field: "another"})
    assert len(asked(record(environment=there))[0]) == 3


def test_changed_needs_the_record(command_line, site):
    site.install_toy()
    printed = command_line("support", "toy", "--changed")
    assert printed.code == 2
    assert "needs --json DIR" in printed.err


def test_a_check_that_ends_its_process_costs_itself_alone(site, toy, monkeypatch):
    site.install_toy()
    monkeypatch.setattr(examination, "CAPABILITIES", [c for c in QUICK if c.name == "determinism"])
    found = examination.examine_technique(toy.technique, torch.device("cpu"), workers=FragileWorkers())
    assert [(o.implementation, o.answer) for o in found.outcomes] == [
        ("reference", "yes"),
        ("native", "wrong"),
        ("compile", "yes"),
    ]
    assert found.outcomes[1].error == "its process was killed by SIGABRT"


def test_reports_do_not_read_records_as_results(record, command_line, tmp_path):
    record().save_in(tmp_path / "results" / "made-up")
    kernels = {"triton": "", "nvcc": "", "broken": (), "not_compiled": (), "compiled": ()}
    StaticRecord(technique="toy", **kernels).save(record_file(tmp_path / "results", "toy"))
    printed = command_line("report", str(tmp_path / "results"))
    assert printed.code == 2
    assert printed.err.startswith("kernel-pytorch: no results in ")


# The generated tests.


CHILD = """
import pytest
from kernel_pytorch.harness.pytest_plugin import support_cases

CASES = [c for c in support_cases("toy") if c.values[2].name in ("fullgraph", "CUDA graphs", "determinism")]

@pytest.mark.parametrize(("operation", "implementation", "row"), CASES)
def test_support(check_support, operation, implementation, row):
    check_support("toy", operation, implementation, row)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is skipped is counted as on a CPU")
def test_every_cell_is_a_test(site, tmp_path):
    site.install_toy()
    source = (site.folder / "toy.py").read_text()
    planted = source.replace("x, weight).sigmoid()", "x, weight).sigmoid().add(torch.rand(()))")
    planted = planted.replace('"toy:compiled"', '"toy:compiled", unsupported={"fullgraph": "planted"}')
    assert planted.count("planted") == planted.count("torch.rand(())") == 1
    (site.folder / "toy.py").write_text(planted)
    (tmp_path / "test_toy.py").write_text(CHILD)
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        "--import-mode=importlib",
        "-W",
        "error",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert pytest.RunResult.parse_summary_nouns(done.stdout.splitlines()) == {
        "passed": 3,  # the reference in both rows, compile is deterministic
        "failed": 3,  # native in both rows, compile where its declaration is out of date
        "skipped": 6,  # cuda everywhere, CUDA graphs of the others
    }
    for text in (
        "the toy has no kernel",
        "needs a CUDA device",
        "declared as unsupported, but works: remove it",
        "does not work, and is not declared as unsupported\nAssertionError: result 0: Tensor-likes are not equal!",
    ):
        assert text in done.stdout
