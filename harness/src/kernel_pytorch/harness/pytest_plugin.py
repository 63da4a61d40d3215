"""pytest and pytest-benchmark driven from the declaration.

Tests name a technique and get one test per operation, level and trial; benchmarks one per operation, level, case and
direction. Device time reaches pytest-benchmark through its public `timer=`: a clock that moves by the samples that the
harness measured, so its JSON, its comparison and its histogram hold them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernel_pytorch.harness.checks import Skipped, check_trial
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import interpret_without_gpu
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.machine import measure_machine
from kernel_pytorch.harness.pretrained import RealInputUnavailable, real_model
from kernel_pytorch.harness.results import Measurement
from kernel_pytorch.harness.support import (
    CAPABILITIES,
    Capability,
    Processes,
    Shared,
    Subject,
    absence,
    check_declaration,
    examine,
)
from kernel_pytorch.harness.technique import Implementation, Level, Operation
from kernel_pytorch.harness.timing import run_job
from kernel_pytorch.harness.trials import Trial, is_economical, trials
from kernel_pytorch.harness.workload import Job, JobKey, jobs

SUPPORT_TIMEOUT = 300.0
"""Seconds that a check of the support table may take in its own process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Refuse the option that was removed."""
    parser.getgroup("kernel-pytorch").addoption("--kernel-pytorch-replay", help=argparse.SUPPRESS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test on a GPU that asks a level for float64 which has no kernels for it there, and says so."""
    try:
        return (yield)
    except RuntimeError as error:
        device = getattr(item, "funcargs", {}).get("device")
        if getattr(device, "type", device) == "cuda" and "cannot run here: dtype is torch.float64" in str(error):
            pytest.skip(str(error))
        raise


def pytest_configure(config: pytest.Config) -> None:
    """Turn Triton's interpreter on where there is no GPU, before any test module imports a kernel.

    What a user adopted on this machine is no concern of tests, unless they say so.
    """
    if config.getoption("--kernel-pytorch-replay", None) is not None:
        raise pytest.UsageError(
            "--kernel-pytorch-replay was removed: `pytest packages/NAME/benchmarks` measures, `kernel-pytorch report` "
            "and `kernel-pytorch compare` read the files in results/"
        )
    interpret_without_gpu()
    os.environ.setdefault("KERNEL_PYTORCH_DEFAULTS", "off")
    config.addinivalue_line("markers", "support: a cell of a support table; `nox -s tests -- -m support` asks them all")
    config.addinivalue_line("markers", "compiled: level compile in verification; run by `nox -s tests -- -m compiled`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what verifies level compile: TorchInductor takes most of the time of all tests."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        implementation = parameters.params.get("implementation") if parameters is not None else None
        if isinstance(implementation, Implementation) and implementation.level is Level.COMPILE:
            item.add_marker("compiled")


def best_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    """The device that tests run on: the first GPU, else the CPU."""
    return best_device()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Forget compiled functions after each test: past eight shapes torch.compile gives up."""
    yield
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()


def verification_trials(technique: str) -> list[Any]:
    """Parameters `(operation, implementation, trial)` for a test of every level, with readable ids.

    What compiles anew for every shape keeps to the core cases, as in `kernel-pytorch verify`.
    """
    where = best_device()
    return [
        pytest.param(operation, implementation, trial, id=f"{operation.name}-{implementation.name}-{trial.label}")
        for operation in discover().get(technique).operations
        for implementation in operation.implementations
        for trial in trials(operation, where)
        if is_economical(implementation, trial)
    ]


@pytest.fixture(scope="session")
def pretrained() -> tuple[Any, Any]:
    """Tokenizer and network of the real all-MiniLM-L6-v2; tests that ask for it are skipped where it is not."""
    try:
        return real_model()
    except RealInputUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def verify_level(device: torch.device) -> Callable[[str, Operation, Implementation, Trial], None]:
    """`(technique, operation, implementation, trial)`: fails if the level is wrong, skips with the reason if absent."""

    def check(technique: str, operation: Operation, implementation: Implementation, trial: Trial) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
            try:
                check_trial(discover().get(technique), operation, implementation, trial, device)
            except Skipped as reason:
                pytest.skip(str(reason))

    return check


def support_cases(technique: str) -> list[Any]:
    """Parameters `(operation, implementation, row)` for a test of every cell of the support table, with readable ids.

    Raises KeyError if an implementation declares a row unsupported that does not exist.
    """
    operations = discover().get(technique).operations
    for operation in operations:
        check_declaration(operation)
    return [
        pytest.param(
            operation,
            implementation,
            row,
            id=f"{operation.name}-{implementation.name}-{row.name}",
            marks=pytest.mark.support,
        )
        for operation in operations
        for implementation in operation.implementations
        for row in CAPABILITIES
    ]


@pytest.fixture(scope="session")
def _support(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Shared]]:
    """What the tests of one technique share; processes are started by the first test that needs them."""
    where, folder = best_device(), tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the other workers of this run know it too
    device_type = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    group = Processes(timeout=SUPPORT_TIMEOUT, device_type=device_type)
    with group as processes, Worker(SUPPORT_TIMEOUT) as worker:
        known: dict[str, Shared] = {}

        def shared(technique: str) -> Shared:
            if technique not in known:
                known[technique] = Shared(discover().get(technique), where, processes, worker, folder)
            return known[technique]

        yield shared


@pytest.fixture
def check_support(_support: Callable[[str], Shared]) -> Callable[[str, Operation, Implementation, Capability], None]:
    """`(technique, operation, implementation, row)`: fails unless it works, or is declared not to and does not.

    Skips with the reason where the implementation cannot run, and where only another machine can tell.
    """

    def check(technique: str, operation: Operation, implementation: Implementation, row: Capability) -> None:
        subject = Subject(_support(technique), operation, implementation)
        reason = absence(subject)
        if reason is not None:
            pytest.skip(reason)
        outcome = examine(subject, row)
        if outcome.answer == "not tested here":
            pytest.skip(outcome.reason)
        if outcome.answer == "wrong":
            pytest.fail("\n".join(filter(None, [outcome.reason, outcome.error])), pytrace=False)

    return check


class SampleTimer:
    """A timer for pytest-benchmark that advances only by the samples it is given.

    pytest-benchmark calls its timer at the start and at the end of each round; the difference is the sample.
    """

    __name__ = "device time measured by kernel_pytorch.harness.clock"

    def __init__(self) -> None:
        self._ticks: Iterator[float] = iter(())

    def load(self, samples: tuple[float, ...]) -> None:
        """Make the next rounds last as long as these samples, in seconds."""
        self._ticks = iter([tick for sample in samples for tick in (0.0, sample)])

    def __call__(self) -> float:
        """The next tick; 0.0 after the last sample."""
        return next(self._ticks, 0.0)


TIMER = SampleTimer()


def benchmark_jobs(technique: str) -> list[Any]:
    """Parameters `(job, implementation)` for a benchmark of every level, with readable ids."""
    return [
        pytest.param(
            job,
            implementation,
            id=f"{job.label}-{implementation.name}",
            marks=[
                pytest.mark.benchmark(timer=TIMER, group=job.label),
                # A level that was refused has nothing to hand over, and fails for that already.
                pytest.mark.filterwarnings("ignore:Benchmark fixture was not used at all"),
            ],
        )
        for job in jobs(discover().get(technique), best_device())
        for implementation in job.operation.implementations
    ]


def measured_once(device: torch.device) -> Callable[[Job], list[Measurement]]:
    """A function that measures a job when it is first asked for it, and the machine before the first job."""
    machine = functools.cache(lambda: measure_machine(device, quick=True))
    found: dict[JobKey, list[Measurement]] = {}

    def measure(job: Job) -> list[Measurement]:
        if job.key not in found:
            found[job.key] = run_job(job, machine(), device)
        return found[job.key]

    return measure


@pytest.fixture(scope="session")
def _measure() -> Callable[[Job], list[Measurement]]:
    return measured_once(best_device())


@pytest.fixture
def report_samples(
    _measure: Callable[[Job], list[Measurement]], benchmark: Any
) -> Callable[[Job, Implementation], None]:
    """`(job, implementation)`: hand the level's samples to pytest-benchmark; skip with the reason if there are none."""

    def report(job: Job, implementation: Implementation) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
            measurement = next(m for m in _measure(job) if m.implementation == implementation.name)
        if measurement.status == "unavailable":
            pytest.skip(measurement.reason)
        assert measurement.status == "measured", f"{measurement.status}: {measurement.reason}"
        benchmark.extra_info.update(
            measurement.model_dump(include={"method", "bytes", "bytes_per_second", "share_of_copy", "relative_error"})
        )
        TIMER.load(measurement.samples)
        benchmark.pedantic(lambda: None, rounds=len(measurement.samples), iterations=1, warmup_rounds=0)

    return report
