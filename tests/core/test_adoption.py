"""The file of what a user adopted: what is read of it, when, and what becomes of one that is malformed."""

import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from kernel_pytorch.rmsnorm import levels as package
from kernel_pytorch.rmsnorm._core import adoption
from kernel_pytorch.rmsnorm._core import levels as core
from kernel_pytorch.rmsnorm._core.levels import Default, Ladder

CPU = torch.device("cpu")
ROW = {
    "package": "rmsnorm", "function": "rms_norm", "dtype": "float32", "level": "cuda", "device_type": "cpu",
    "device": adoption.device_name(CPU), "version": adoption.version_of("cuda"), "date": "2026-01-02",
    "torch": "2.13.0", "triton": "", "kernels": "", "speedup": 1.25,
}  # fmt: skip


class Compiled:
    """Compiled kernels that run everywhere."""

    def unavailable(self, device, dtype):
        return None

    def describe(self, device):
        return ""

    def function(self, name):
        return print


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The place of the file, which does not exist yet."""
    found = tmp_path / "defaults.json"
    monkeypatch.setenv(adoption.VARIABLE, str(found))
    return found


def write(file, *changes, **document):
    rows = [{**ROW, **change} for change in changes]
    file.write_text(json.dumps({"schema_version": 1, "rows": rows, **document}))


def ladder(*defaults):
    """Of the package, before it has read anything; without rows of its own unless they are given."""
    return Ladder(package.LADDER.functions, defaults, Compiled())


def test_an_adopted_row_is_the_default_of_its_function_and_dtype(file):
    write(file, {})
    found = ladder()
    assert found.default("rms_norm", CPU, torch.float32) == "cuda"
    assert found.default("add_rms_norm", CPU, torch.float32) == "native"
    assert found.default("rms_norm", CPU, torch.bfloat16) == "native"
    assert found.default("rms_norm", torch.device("meta"), torch.float32) == "native"
    assert found.resolve("rms_norm", None, torch.ones(1)) is found._levels["rms_norm", "cuda"]


def test_the_package_s_own_rows_come_first(file, monkeypatch):
    write(file, {})
    monkeypatch.setattr(core, "_no_triton", lambda device, dtype: None)
    assert ladder(Default("triton", record="a", device="cpu")).default("rms_norm", CPU, torch.float32) == "triton"
    assert ladder(Default("triton", record="a")).default("rms_norm", CPU, torch.float32) == "cuda"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "Another CPU"}, None),
        ({"device_type": "cuda"}, None),
        ({"package": "fused-ln-act"}, None),
        ({"version": "kernel-pytorch-rmsnorm 0.0.1"}, "measured with kernel-pytorch-rmsnorm 0.0.1; installed is"),
        ({"function": "layer_norm"}, "rmsnorm has no level 'cuda' of layer_norm"),
    ],
)
def test_a_row_of_something_else_is_not_used(file, change, reason):
    write(file, change)
    found = ladder()
    assert found.default("rms_norm", CPU, torch.float32) == "native"
    said = found.why_ignored(adoption.read(file)[0])
    assert (said is None) == (reason is None)
    assert reason is None or reason in said


def test_what_cannot_run_is_not_used(file):
    write(file, {"level": "triton", "version": adoption.version_of("triton")})
    assert ladder().default("rms_norm", CPU, torch.float64) == "native"


def test_what_is_traced_is_native_and_reads_no_file(file, monkeypatch):
    write(file, {})
    found, read = ladder(), []
    monkeypatch.setattr(adoption, "place", lambda: read.append(1))
    traced = torch.compile(lambda x: x + len(found.chosen("rms_norm", None, x)), backend="eager", fullgraph=True)
    assert traced(torch.zeros(())) == len("native")
    assert found.default("rms_norm", CPU, torch.float32, traced=True) == "native"
    assert not read


def test_the_file_is_read_once_and_not_before_a_default_is_asked_for(file, monkeypatch):
    write(file, {})
    read, own = [], adoption.read
    monkeypatch.setattr(adoption, "read", lambda file: [read.append(1), own(file)][1])
    found, x = ladder(), torch.ones(1)
    found.resolve("rms_norm", "native", x)
    assert not read
    for _ in range(3):
        found.resolve("rms_norm", None, x)
        found.default("rms_norm", CPU, torch.bfloat16)
    assert read == [1]


MALFORMED = {
    "no JSON": "{",
    "no object": "[]",
    "nested too deep": "[" * 100_000,
    "no rows": '{"schema_version": 1}',
    "more than the schema has": '{"schema_version": 1, "rows": [], "import": "os"}',
    "another schema": '{"schema_version": 2, "rows": []}',
    "rows that are none": '{"schema_version": 1, "rows": {}}',
    "a row that is none": '{"schema_version": 1, "rows": [1]}',
    "a level that is none": json.dumps({"schema_version": 1, "rows": [{**ROW, "level": "os:system"}]}),
    "native, which is no kernel": json.dumps({"schema_version": 1, "rows": [{**ROW, "level": "native"}]}),
    "a dtype that is none": json.dumps({"schema_version": 1, "rows": [{**ROW, "dtype": "int8"}]}),
    "a field that is none": json.dumps({"schema_version": 1, "rows": [{**ROW, "rows": "4"}]}),
    "a field that is missing": json.dumps({"schema_version": 1, "rows": [{k: ROW[k] for k in list(ROW)[:-1]}]}),
    "a number for a name": json.dumps({"schema_version": 1, "rows": [{**ROW, "function": 3}]}),
    "a list for a name": json.dumps({"schema_version": 1, "rows": [{**ROW, "level": ["cuda"]}]}),
    "too large": '{"schema_version": 1, "rows": []}' + " " * adoption.MOST_BYTES,
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_ignored_with_one_warning(file, text):
    file.write_text(text)
    found = ladder()
    with pytest.warns(RuntimeWarning) as caught:
        assert found.default("rms_norm", CPU, torch.float32) == "native"
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{file} is ignored by kernel_pytorch.rmsnorm: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.default("add_rms_norm", CPU, torch.float32) == "native"


def test_bytes_that_are_no_text_and_a_folder(file):
    file.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ValueError, match="it is not JSON"):
        adoption.read(file)
    file.unlink()
    assert adoption.read(file) == ()
    file.mkdir()
    with pytest.raises(ValueError, match="it is not a regular file"):
        adoption.read(file)


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv(adoption.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert adoption.place() == tmp_path / "kernel-pytorch" / "defaults.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adoption.place() == tmp_path / ".config" / "kernel-pytorch" / "defaults.json"
    monkeypatch.setenv(adoption.VARIABLE, "~/mine.json")
    assert adoption.place() == tmp_path / "mine.json"
    for off in ("", "off"):
        monkeypatch.setenv(adoption.VARIABLE, off)
        assert adoption.place() is None
        assert ladder().adopted == ()


def test_importing_and_calling_by_name_touch_no_file(file):
    """In a fresh process, with a file that cannot be read and warnings as errors."""
    file.write_text("{")
    program = """
        import warnings
        warnings.simplefilter("error", RuntimeWarning)
        import torch
        from kernel_pytorch.rmsnorm import rms_norm
        rms_norm(torch.ones(2, 8), level="native")
        try:
            rms_norm(torch.ones(2, 8))
        except RuntimeWarning as warning:
            print("read at last:", warning)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"read at last: {file} is ignored by kernel_pytorch.rmsnorm: it is not JSON")
    assert not done.stderr


def test_without_a_home_there_is_no_file(monkeypatch):
    """A container may run as a user without a name: calls must not fail for it."""
    monkeypatch.delenv(adoption.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(adoption.os.path, "expanduser", lambda path: path)  # what it does where it finds none
    assert adoption.read(adoption.place()) == ()
    monkeypatch.undo()
    monkeypatch.setenv(adoption.VARIABLE, "~nosuchuser/defaults.json")
    assert ladder().adopted == ()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(file):
    os.mkfifo(file)
    with pytest.raises(ValueError, match="it is not a regular file"):
        adoption.read(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "\x1b[31mred"), ("date", "2" * 201), ("speedup", 10**400), ("speedup", float("nan")), ("speedup", 0)],
)
def test_what_could_not_be_printed(name, value, file):
    write(file, {name: value})
    with pytest.raises(ValueError, match=f"row 0: {name} must be"):
        adoption.read(file)
