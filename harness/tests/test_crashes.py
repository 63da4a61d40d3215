"""A case that kills its process costs that case alone, and what was measured before it is kept."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

CRASHES = """
import os, sys, time
from toy import *
from toy import native as healthy

def aborts(x, *rest):
    os.abort()

def exits(x, *rest):
    sys.exit(7)

def hangs(x, *rest):
    time.sleep(3600)

def raises(x, *rest):
    raise ValueError("planted")

def dies_while_timed(x, *rest):
    dies_while_timed.calls = getattr(dies_while_timed, "calls", 0) + 1
    if dies_while_timed.calls > 1:
        os._exit(9)
    return healthy(x, *rest)
"""
ENDS = {
    "aborts": ("crashed", "its process was killed by SIGABRT"),
    "exits": ("crashed", "its process exited with code 7"),
    "hangs": ("crashed", "did not end within 15 seconds and was stopped"),
    "raises": ("wrong", "raised ValueError: planted"),
}


def plant(site, *functions):
    """Install a technique like the toy, with more implementations, which end badly."""
    site.install_toy()
    source = (
        CRASHES
        + f"""
import dataclasses
operation = technique.operations[0]
planted = [Implementation(name, Level.NATIVE, f"crashing:{{name}}") for name in {functions}]
operation = dataclasses.replace(
    operation,
    levels=[*operation.implementations[:2], *planted],
    bench_grid=grid(point("small", rows=8, columns=64), dtypes=(torch.float32,)),
)
technique = dataclasses.replace(technique, name="crashing", operations=[operation])
"""
    )
    site.install("crashing", {"kernel_pytorch.techniques": {"crashing": "crashing:technique"}}, crashing=source)


@pytest.fixture
def machine_file(machine, tmp_path):
    """A record of a machine, so that none is measured."""
    file = tmp_path / "machine.json"
    file.write_text(machine.model_dump_json())
    return str(file)


@pytest.mark.slow
def test_bad_implementations_cost_themselves_alone(site, tmp_path, machine_file):
    plant(site, *ENDS)
    file = tmp_path / "crashing.json"
    options = f"--device cpu --direction forward --timeout 15 --machine {machine_file} --json".split()
    done = site.run("bench", "crashing", *options, str(file))
    assert done.code == 1, done.err
    found = json.loads(file.read_text())
    assert found["complete"]
    assert len(found["measurements"]) == 2 + len(ENDS)
    for m in found["measurements"]:
        status, reason = ENDS.get(m["implementation"], ("measured", ""))
        assert (m["status"], reason in m["reason"]) == (status, True), m
        assert reason in done.out


@pytest.mark.slow
def test_a_death_among_turns_is_the_whole_cases(site, tmp_path, machine_file):
    plant(site, "dies_while_timed")
    file = tmp_path / "crashing.json"
    options = ["--device", "cpu", "--direction", "forward", "--json", str(file), "--machine", machine_file]
    assert site.run("bench", "crashing", *options).code == 1
    found = json.loads(file.read_text())
    assert {m["status"] for m in found["measurements"]} == {"crashed"}
    assert "while timing: its process exited with code 9" in found["measurements"][0]["reason"]


@pytest.mark.slow
def test_interrupt_keeps_what_stands_and_resume_goes_on(site, tmp_path, machine_file):
    # Slow as long as a file is there, so that the interrupt comes before the end however busy this machine is.
    slow = tmp_path / "slow"
    slow.touch()
    place = "    shapes = ((case.rows"
    site.install_toy((place, f"    import os, time\n    time.sleep(0.03 * os.path.exists({str(slow)!r}))\n{place}"))
    file, partial = tmp_path / "crashing.json", tmp_path / "crashing.partial.json"
    arguments = ["bench", "toy", "--quick", "--level", "native", "--json", str(file), "--machine", machine_file]
    command = [sys.executable, "-m", "kernel_pytorch.harness", *arguments]
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not partial.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    slow.unlink()
    assert not file.exists()
    first = json.loads(partial.read_text())
    assert first["measurements"]
    assert not first["complete"]
    done = site.run(*arguments, "--resume")
    assert done.code == 0, done.err
    assert not partial.exists()
    resumed = json.loads(file.read_text())
    assert resumed["complete"]
    kept = resumed["measurements"][: len(first["measurements"])]
    assert kept == first["measurements"]
    assert len(resumed["measurements"]) > len(kept)


HOLD = """
import pathlib, time
from kernel_pytorch.harness.scratch import scratch_folder

def hold():
    with scratch_folder() as folder:
        pathlib.Path(folder, "large").write_text("temporary")
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_killed_leaves_no_temporary_files(site, tmp_path, end):
    site.install("holding", {"kernel_pytorch.commands": {"hold": "holding:hold"}}, holding=HOLD)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "kernel_pytorch.harness", "hold"]
    # TorchInductor's cache, which it keeps in the temporary folder otherwise, is to stay.
    own = {"PYTHONPATH": path, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    run = subprocess.Popen(command, env=os.environ | own)
    deadline = time.monotonic() + 120
    while not list(temporary.rglob("large")) and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(end)
    assert run.wait(60) != 0
    deadline = time.monotonic() + 60
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_resume_measures_again_what_has_changed(site, tmp_path, machine_file):
    site.install_toy()
    file, partial = tmp_path / "toy.json", tmp_path / "toy.partial.json"
    arguments = ["bench", "toy", "--quick", "--level", "native", "--json", str(file), "--machine", machine_file]
    assert site.run(*arguments).code == 0
    record = json.loads(file.read_text())
    assert record["identities"]
    for identity in record["identities"].values():
        identity["sources"] = dict.fromkeys(identity["sources"], "0" * 16)
    partial.write_text(json.dumps(record))
    done = site.run(*arguments, "--resume")
    assert done.code == 0, done.err
    again = json.loads(file.read_text())
    assert again["identities"] != record["identities"]
    before, after = ([m["samples"] for m in r["measurements"] if m["samples"]] for r in (record, again))
    assert len(before) == len(after)
    assert not [samples for samples in after if samples in before]
