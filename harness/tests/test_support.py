"""The support table: recorded, merged over devices, written into a README, and held against it."""

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
from kernel_pytorch.harness.commands.support import problems
from kernel_pytorch.harness.isolation import Outcome as IsolatedOutcome
from kernel_pytorch.harness.readme import ReadmeError, read_block, write_block
from kernel_pytorch.harness.results import ResultsError
from kernel_pytorch.harness.sources import technique_digests
from kernel_pytorch.harness.support import (
    CAPABILITIES,
    check_declaration,
    examination,
    load,
    load_all,
    table,
    up_to_date,
)

QUICK = [c for c in CAPABILITIES if c.name in ("fullgraph", "CUDA graphs", "determinism")]
README = "# Toy\n\n<!-- support:begin -->\nold\n<!-- support:end -->\nafter\n"


# Records.


def test_a_record_comes_back_as_it_was_saved(record, tmp_path):
    saved = record()
    path = saved.save(tmp_path / "made-up")
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
    with pytest.raises(ResultsError, match=message):
        load(path)
    with pytest.raises(ResultsError, match="No such file"):
        load(tmp_path / "absent.json")


def test_what_was_found_out_about_other_sources_does_not_count(record, toy):
    before = record(sources=technique_digests(toy.technique, "cpu") | {"gate/native": "other", "gate/lost": "gone"})
    kept, changed = up_to_date(before, toy.technique)
    assert changed == ["gate/lost", "gate/native"]
    assert {o.implementation for o in kept.outcomes} == {"reference", "compile"}
    assert kept.absent == before.absent


def test_a_row_that_does_not_exist_cannot_be_declared(toy):
    native = dataclasses.replace(toy.gate.implementation("native"), unsupported={"double backwards": "mistyped"})
    operation = dataclasses.replace(toy.gate, implementations=[toy.gate.reference, native])
    with pytest.raises(KeyError, match="no row 'double backwards'; it has fullgraph, dynamic shapes, opcheck"):
        check_declaration(operation)


# READMEs.


def test_a_block_is_replaced_and_nothing_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert read_block(readme, "support") == "old\n"
    write_block(readme, "support", "new\n")
    assert readme.read_text() == README.replace("old", "new")
    with pytest.raises(
        ReadmeError, match=r"README\.md has no <!-- results:begin --> and <!-- results:end -->, each on"
    ):
        write_block(readme, "results", "new\n")
    with pytest.raises(ReadmeError, match=r"no file .*absent\.md"):
        read_block(tmp_path / "absent.md", "support")


@pytest.fixture
def package(site, toy, record, tmp_path):
    """The toy installed, with a README and one record: the folder and where its results are."""
    site.install_toy()
    readme = tmp_path / "packages" / "toy" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(README)
    record().save(tmp_path / "results" / "made-up")
    return readme, tmp_path / "results"


def test_a_readme_is_written_and_then_holds_what_is_recorded(package, command_line):
    readme, results = package
    arguments = ("support", "--readme", str(readme), "--results", str(results))
    printed = command_line(*arguments, "--check")
    assert printed.code == 1
    assert "does not hold what is recorded; `kernel-pytorch support --readme" in printed.out
    assert "old" in readme.read_text()
    assert command_line(*arguments).code == 0
    printed = command_line(*arguments, "--check")
    assert (printed.code, printed.out) == (0, f"{readme} holds what is recorded of the present sources\n")
    assert "| fullgraph | yes | yes | yes |" in readme.read_text()
    assert readme.read_text().endswith("<!-- support:end -->\nafter\n")


def test_changed_sources_are_named_unless_another_device_knows_them(package, record, toy, command_line):
    readme, results = package
    old = technique_digests(toy.technique, "cpu") | {"gate/native": "of other sources"}
    path = record(sources=old).save(results / "made-up")
    command_line("support", "--readme", str(readme), "--results", str(results))
    assert "| | reference | compile |" in readme.read_text()
    assert problems(readme, results) == [
        f"{path}: gate/native has changed since; `kernel-pytorch support toy --json results/<device>` asks again"
    ]
    record("Another CPU").save(results / "another")
    (only,) = problems(readme, results)
    assert "does not hold what is recorded" in only
    command_line("support", "--readme", str(readme), "--results", str(results))
    assert problems(readme, results) == []


def test_what_is_wrong_comes_into_no_readme(package, record, command_line):
    readme, results = package
    record(noes=[(("native", "export"), ("wrong", "does not work"))]).save(results / "made-up")
    printed = command_line("support", "--readme", str(readme), "--results", str(results))
    assert printed.code == 2
    assert "what is wrong belongs into no table: toy gate level 'native', export: does not work" in printed.err
    assert readme.read_text() == README


def test_bad_input_ends_in_one_line(package, tmp_path, command_line):
    readme, _ = package
    lines = {
        ("--check",): "kernel-pytorch: --check compares a README with what is recorded: give --readme too",
        ("--readme", str(readme), "--results", str(tmp_path)): "kernel-pytorch: no record in ",
        ("--readme", str(tmp_path / "README.md")): "kernel-pytorch: no technique ",
        ("nope",): "kernel-pytorch: no technique 'nope'; installed are: toy",
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
    monkeypatch.setattr(table, "CAPABILITIES", QUICK)
    monkeypatch.setattr(command_module, "Workers", lambda *_: contextlib.nullcontext())


def test_help_names_every_option_and_the_exit_codes(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = command_line("support", "--help")
    assert printed.code == 0
    for option in ("--device", "--json", "--readme", "--check", "--results", "--timeout"):
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
    assert printed.err.splitlines() == [f"asking gate {level}" for level in ("reference", "native", "compile")]


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
            return IsolatedOutcome(failure="its process was killed by SIGABRT")
        return IsolatedOutcome(value=function(*arguments, lambda stage: None))


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
    record().save(tmp_path / "results" / "made-up")
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
