"""pytest and pytest-benchmark, driven from a declaration, in a pytest of their own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness import pytest_plugin
from kernel_pytorch.harness.adversaries import ADVERSARIES
from kernel_pytorch.harness.pytest_plugin import SampleTimer, measured_once
from kernel_pytorch.harness.results import CaseRecord, Interval, Measurement, Results
from kernel_pytorch.harness.workload import jobs

CPU = torch.device("cpu")
CHILD = """
import pathlib
import pytest
from kernel_pytorch.harness import pytest_plugin
from kernel_pytorch.harness.pytest_plugin import benchmark_jobs, verification_trials
from kernel_pytorch.harness.results import load

def recorded(job, machine, device):
    every = load(pathlib.Path(__file__).with_name("toy.json")).measurements
    return [m for m in every if (m.direction, m.case.label) == (job.direction.value, job.key[2])]

pytest_plugin.run_job, pytest_plugin.measure_machine = recorded, lambda device, quick: None

@pytest.mark.parametrize(("operation", "implementation", "trial"), verification_trials("toy"))
def test_level(verify_level, operation, implementation, trial):
    verify_level("toy", operation, implementation, trial)

@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("toy"))
def test_time(report_samples, job, implementation):
    report_samples(job, implementation)
"""


def record(job, level, status="measured", samples=(), reason=""):
    seconds = Interval(median=statistics.median(samples), low=0, high=1) if samples else None
    return Measurement(
        operation="gate",
        case=CaseRecord.of(job.case),
        direction=job.direction.value,
        implementation=level,
        level=level,
        status=status,
        reason=reason,
        seconds=seconds,
        samples=samples,
        method="made up",
    )


@pytest.fixture
def recorded(toy, machine):
    """Results of every job: one level measured, two unavailable, one wrong."""
    generator = torch.Generator().manual_seed(0)
    measurements = []
    for job in jobs(toy.technique, CPU):
        samples = tuple((torch.rand(9, generator=generator, dtype=torch.float64) * 1e-5).tolist())
        measurements += [
            record(job, "reference", "unavailable", reason="no reference when it was measured"),
            record(job, "native", samples=samples),
            record(job, "cuda", "unavailable", reason="no kernel when it was measured"),
            record(job, "compile", "wrong", reason="output is off"),
        ]
    about = {"technique": "toy", "created": "", "quick": False, "machine": machine}
    return Results(**about, measurements=tuple(measurements))


@pytest.fixture
def child(site, tmp_path, monkeypatch):
    """Run a pytest that finds the toy technique; its native level is wrong in float16."""
    site.install_toy()
    source = (site.folder / "toy.py").read_text()
    planted = source.replace(".mul(factor)", ".mul(1.01 * factor if x.dtype is torch.float16 else factor)")
    assert planted != source
    (site.folder / "toy.py").write_text(planted)
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the child is no worker of this run
    # Not through pytest's own `pytester`: it forgets what was imported meanwhile, and torch cannot be imported twice.
    (tmp_path / "test_toy.py").write_text(CHILD)

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--import-mode=importlib"]
        return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    return run


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the records are of the CPU")
def test_levels_are_verified_and_pytest_benchmark_holds_the_samples(child, recorded, tmp_path):
    report = tmp_path / "benchmark.json"
    recorded.save(tmp_path / "toy.json")
    printed = child(f"--benchmark-json={report}", "-W", "error")
    cases, adversarial, timed = 4, 2 * (len(ADVERSARIES) - 1), 6  # a gate is not invariant to offsets
    trials = cases + adversarial
    natives = trials // 2 + timed  # right in float32, wrong in float16; recorded as measured
    assert pytest.RunResult.parse_summary_nouns(printed.splitlines()) == {
        "passed": trials + (trials - 2) + natives,  # reference; compile, on core cases alone; native
        "failed": natives,  # native in float16; compile, recorded as wrong
        "skipped": trials + 2 * timed,  # cuda; cuda and reference
    }
    for text in (
        "the toy has no kernel",
        "no kernel when it was measured",
        "no reference when it was measured",
        "AssertionError: toy gate level 'native', case plain [rows=4 columns=16] float16: output is off by",
        "AssertionError: wrong: output is off",
    ):
        assert text in printed
    found = {entry["name"]: entry for entry in json.loads(report.read_text())["benchmarks"]}
    assert len(found) == timed
    measured = [m for m in recorded.measurements if m.implementation == "native"]
    for m in measured:
        stats = found[f"test_time[gate {m.direction}, {m.case.label}-native]"]["stats"]
        assert stats["median"] == m.seconds.median
        assert (stats["min"], stats["max"], stats["rounds"]) == (min(m.samples), max(m.samples), len(m.samples))


def test_the_timer_moves_by_the_samples_and_then_stands_still():
    timer, samples = SampleTimer(), (1e-5, 0.1, 3.0)
    timer.load(samples)
    assert tuple(-timer() + timer() for _ in samples) == samples
    assert [timer(), timer()] == [0.0, 0.0]


def test_each_job_is_measured_once_and_the_machine_too(toy, machine, monkeypatch):
    measured, machines = [], []

    def run_job(job, on, device):
        measured.append((job.key, on))
        return [record(job, "native", samples=(1e-6,))]

    def measure_machine(device, quick):
        machines.append(device)
        return machine

    monkeypatch.setattr(pytest_plugin, "run_job", run_job)
    monkeypatch.setattr(pytest_plugin, "measure_machine", measure_machine)
    measure = measured_once(CPU)
    first, second = jobs(toy.technique, CPU)[:2]
    assert measure(first) is measure(first)
    assert [m.direction for m in measure(second)] == ["backward"]
    assert measured == [(first.key, machine), (second.key, machine)]
    assert machines == [CPU]


def test_the_option_that_was_removed_names_what_replaces_it():
    config = SimpleNamespace(getoption=lambda name, default: "results")
    with pytest.raises(pytest.UsageError, match=r"was removed: `pytest packages/NAME/benchmarks` measures"):
        pytest_plugin.pytest_configure(config)


def test_the_interpreter_is_on_where_there_is_no_gpu(monkeypatch):
    for has_gpu, wanted in ((False, "1"), (True, None)):
        monkeypatch.setenv("TRITON_INTERPRET", "")  # noted as absent, so that what is set below is undone
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda has_gpu=has_gpu: has_gpu))
        pytest_plugin.pytest_configure(SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda *_: None))
        assert os.environ.get("TRITON_INTERPRET") == wanted
