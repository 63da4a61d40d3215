"""A toy technique, a made-up machine, and a folder of installed packages that only the test knows."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from kernel_pytorch.harness import availability, cli
from kernel_pytorch.harness.commands.common import output
from kernel_pytorch.harness.discovery import GROUP
from kernel_pytorch.harness.machine import BandwidthPoint, Ceilings, Environment, Machine
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.support import CAPABILITIES, Absent, Outcome, SupportRecord

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # A run that a shell has put into the background ignores Ctrl-C, and so would the programs that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOY = Path(__file__).with_name("toy.py")
COMMAND = (sys.executable, "-c", "from kernel_pytorch.harness.cli import main; main()")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the toy technique, fresh: a test may replace its functions."""
    spec = spec_from_file_location("toy", TOY)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy", module)
    monkeypatch.setattr(availability, "_cpp_compiler", lambda: "not needed by the toy")
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_machine() -> Callable[[float], Machine]:
    """A machine whose memory moves that many bytes per second."""
    environment = Environment(
        python="3.11.7",
        torch="2.13.0",
        triton=None,
        cuda=None,
        driver=None,
        device_type="cpu",
        device_name="Made-up CPU",
        compute_capability=None,
        multiprocessors=None,
        last_level_cache_bytes=2**20,
        memory_bytes=2**30,
        cpu_model="Made-up CPU",
        logical_cpus=2,
        torch_threads=2,
        float32_matmul_precision="highest",
        operating_system="Linux",
        commit=None,
        dirty=None,
        triton_interpret=True,
    )

    def make(rate: float) -> Machine:
        bandwidth = BandwidthPoint(bytes=2**20, bytes_per_second=rate, peak_bytes_per_second=rate, memory="DRAM")
        ceilings = Ceilings(bandwidth=(bandwidth,), matmul_flops_per_second={}, launch_overhead_seconds=1e-6)
        return Machine(environment=environment, ceilings=ceilings)

    return make


@pytest.fixture
def machine(make_machine: Callable[[float], Machine]) -> Machine:
    """A machine so fast that no result is faster."""
    return make_machine(1e18)


class Printed(NamedTuple):
    """What a command did."""

    code: int | str | None
    out: str
    err: str


class Site:
    """A folder of installed packages that hides every other technique."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for distribution in distributions():
            if any(entry_point.group == GROUP for entry_point in distribution.entry_points):
                self.install(distribution.metadata["Name"], {})  # the first of a name on the path counts

    def install(self, distribution: str, entry_points: dict[str, dict[str, str]], **modules: str) -> None:
        """Write modules and what an installer would write about their distribution."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in e.items()) for group, e in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(source)
        # The caches of folders go by their time of change, which may be too coarse to see two changes.
        os.utime(self.folder, (time.time(), time.time() + len(list(self.folder.iterdir()))))
        importlib.invalidate_caches()

    def install_toy(self, planted: tuple[str, str] | None = None) -> None:
        """Install the toy technique, with one piece of its source replaced by another."""
        source = TOY.read_text()
        if planted is not None:
            assert planted[0] in source
            source = source.replace(*planted)
        self.install("toy-technique", {GROUP: {"toy": "toy:technique"}}, toy=source)

    def run(self, *arguments: str) -> Printed:
        """Run the real command line in a process of its own."""
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
        done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False)
        return Printed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Packages that the test installs, and no technique besides."""
    folder = tmp_path / "site"
    folder.mkdir()
    installed = Site(folder)
    monkeypatch.syspath_prepend(folder)
    return installed


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Run `kernel-pytorch` in this process."""
    monkeypatch.setattr(cli.app, "registered_commands", [*cli.app.registered_commands])
    monkeypatch.setattr(output, "_width", 200)  # whatever the terminal of the test run is

    def run(*arguments: str) -> Printed:
        monkeypatch.setattr(sys, "argv", ["kernel-pytorch", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Printed(stopped.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def record(toy: ModuleType, machine: Machine) -> Callable[..., SupportRecord]:
    """A record in which a level says no in some rows, with reasons, and yes in all others."""

    def make(device="Made-up CPU", noes=(), levels=("reference", "native", "compile"), **fields):
        noes = dict(noes)
        outcomes = []
        for level in levels:
            for c in CAPABILITIES:
                answer, reason = noes.get((level, c.name), ("yes", ""))
                about = {"operation": "gate", "implementation": level, "capability": c.name}
                outcomes.append(Outcome(**about, answer=answer, reason=reason))
        about = {"technique": "toy", "created": "2026-01-02T03:04:05+00:00"}
        environment = machine.environment.model_copy(update={"device_name": device})
        absent = (Absent(operation="gate", implementation="cuda", reason="the toy has no kernel"),)
        fields = {
            "outcomes": tuple(outcomes),
            "absent": absent,
            "identities": identify(toy.technique, environment),
            "environment": environment,
        } | fields
        return SupportRecord(**about, **fields)

    return make
