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
from kernel_pytorch.harness.jobs import jobs
from kernel_pytorch.harness.pytest_plugin import Recorder, Replay
from kernel_pytorch.harness.results import CaseRecord, IntervalRecord, Measurement, Results

CPU = torch.device("cpu")
CHILD = """
import pytest
from kernel_pytorch.harness.pytest_plugin import benchmark_jobs, verification_trials

@pytest.mark.parametrize(("operation", "implementation", "trial"), verification_trials("toy"))
def test_level(verify_level, operation, implementation, trial):
    verify_level("toy", operation, implementation, trial)

@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("toy"))
def test_time(report_samples, job, implementation):
    report_samples(job, implementation)
"""


def record(job, level, status="measured", samples=(), reason=""):
    seconds = IntervalRecord(median=statistics.median(samples), low=0, high=1) if samples else None
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
    """Results of every job: one level measured, one unavailable, one wrong, and none of the reference."""
    generator = torch.Generator().manual_seed(0)
    measurements = []
    for job in jobs(toy.technique, CPU):
        samples = tuple((torch.rand(9, generator=generator, dtype=torch.float64) * 1e-5).tolist())
        measurements += [
            record(job, "native", samples=samples),
            record(job, "cuda", "unavailable", reason="no kernel when it was measured"),
            record(job, "compile", "wrong", reason="output is off"),
        ]
    about = {"technique": "toy", "created": "", "quick": False, "machine": machine, "sources": {}}
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
def test_levels_are_verified_and_recorded_samples_replayed(child, recorded, tmp_path):
    results, report = tmp_path / "results", tmp_path / "benchmark.json"
    recorded.save(results / "toy.json")
    (results / "pytest-benchmark.json").write_text("not a results file")
    printed = child(f"--kernel-pytorch-replay={results}", f"--benchmark-json={report}", "-W", "error")
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
        "the results that are replayed hold no such measurement",
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


def test_a_folder_is_replayed_whatever_else_was_recorded_there(toy, recorded, tmp_path):
    recorded.save(tmp_path / "toy.json")
    (tmp_path / "models.json").write_text('{"runs": {}}')
    recorder = Recorder(tmp_path, CPU)
    native = toy.gate.implementation("native")
    found = [recorder.measurement(job, native) for job in jobs(toy.technique, CPU)]
    assert {m.status for m in found if m is not None} == {"measured"}
    (tmp_path / "toy.json").unlink()
    assert Recorder(tmp_path, CPU).measurement(jobs(toy.technique, CPU)[0], native) is None


def test_the_timer_moves_by_the_samples_and_then_stands_still():
    timer, samples = Replay(), (1e-5, 0.1, 3.0)
    timer.load(samples)
    assert tuple(-timer() + timer() for _ in samples) == samples
    assert [timer(), timer()] == [0.0, 0.0]


def test_without_a_record_each_job_is_measured_once(toy, machine, monkeypatch):
    measured = []

    def run_job(job, on, device):
        measured.append((job.key, on))
        return [record(job, "native", samples=(1e-6,))]

    monkeypatch.setattr(pytest_plugin, "run_job", run_job)
    monkeypatch.setattr(pytest_plugin, "measure_machine", lambda device, quick: machine)
    recorder = Recorder(None, CPU)
    first, second = jobs(toy.technique, CPU)[:2]
    native, compiled = toy.gate.implementation("native"), toy.gate.implementation("compile")
    assert recorder.measurement(first, native).implementation == "native"
    assert recorder.measurement(first, compiled) is None
    assert recorder.measurement(second, native).direction == "backward"
    assert measured == [(first.key, machine), (second.key, machine)]


def test_records_of_another_technique_are_not_taken(toy, recorded, tmp_path):
    recorded.model_copy(update={"technique": "another"}).save(tmp_path / "another.json")
    recorder = Recorder(tmp_path / "another.json", CPU)
    assert recorder.measurement(jobs(toy.technique, CPU)[0], toy.gate.implementation("native")) is None


def test_the_interpreter_is_on_where_there_is_no_gpu(monkeypatch):
    for has_gpu, wanted in ((False, "1"), (True, None)):
        monkeypatch.setenv("TRITON_INTERPRET", "")  # noted as absent, so that what is set below is undone
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda has_gpu=has_gpu: has_gpu))
        pytest_plugin.pytest_configure(SimpleNamespace(addinivalue_line=lambda *_: None))
        assert os.environ.get("TRITON_INTERPRET") == wanted
