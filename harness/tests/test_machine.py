"""The record of a machine is complete, survives JSON, and names its folder safely."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kernel_pytorch.harness import environment as environment_module
from kernel_pytorch.harness import machine as machine_module
from kernel_pytorch.harness.clock import Timing
from kernel_pytorch.harness.environment import Environment, describe_environment
from kernel_pytorch.harness.machine import Machine, measure_ceilings, measure_machine


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine so small that measuring it takes no time."""
    monkeypatch.setattr(machine_module, "last_level_cache_bytes", lambda device: 2**20)
    monkeypatch.setitem(machine_module.MATMUL_SIZES, "cpu", ((32, 32, 32), (64, 64, 64)))


def test_the_cpu_is_described() -> None:
    found = describe_environment("cpu")
    assert found.torch == torch.__version__
    assert found.device_type == "cpu"
    assert found.device_name == found.cpu_model
    assert found.compute_capability is None
    assert found.memory_bytes > 2**28
    assert found.torch_threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("device_type", "name", "threads", "slug"),
    [
        ("cuda", "NVIDIA H200", 16, "nvidia-h200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", 16, "nvidia-a100-sxm4-80gb"),
        ("cpu", "AMD EPYC", 2, "amd-epyc-2-threads"),
        ("cpu", "AMD Ryzen 9 5950X 16-Core Processor", 1, "amd-ryzen-9-5950x-16-core-1-thread"),
        ("cpu", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 8, "intel-xeon-platinum-8481c-8-threads"),
        ("cpu", "../etc/passwd", 2, "etc-passwd-2-threads"),
    ],
)
def test_the_slug_is_short_and_safe(device_type: str, name: str, threads: int, slug: str) -> None:
    found = describe_environment("cpu")
    update = {"device_type": device_type, "device_name": name, "torch_threads": threads}
    assert found.model_copy(update=update).slug == slug


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment_module._checkout() == (None, None)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *command], check=True)
    commit, dirty = environment_module._checkout()
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "new").write_text("")
    assert environment_module._checkout() == (commit, True)


def test_a_missing_or_failing_program_is_tolerated() -> None:
    assert environment_module._output_of("no-such-program-anywhere") is None
    assert environment_module._output_of("git", "no-such-command") is None


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), (None, False)])
def test_the_interpreter_flag_is_read(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert describe_environment("cpu").triton_interpret is expected


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device is meta"):
        describe_environment("meta")


def test_the_ceilings_are_measured_and_survive_json(tiny: None) -> None:
    steps: list[str] = []
    machine = measure_machine("cpu", quick=True, on_step=steps.append)
    ceilings = machine.ceilings
    assert [(point.bytes, point.memory) for point in ceilings.bandwidth] == [
        (2**16, "cache"),
        (2**19, "cache"),
        (2**21, "DRAM"),
        (2**23, "DRAM"),
    ]
    assert all(0.0 < point.bytes_per_second <= point.peak_bytes_per_second for point in ceilings.bandwidth)
    assert set(ceilings.matmul_flops_per_second) == {"float32", "bfloat16"}
    # A kernel may compute in float32 where that is faster.
    assert ceilings.matmul_flops_per_second["bfloat16"] >= ceilings.matmul_flops_per_second["float32"]
    assert ceilings.launch_overhead_seconds > 0.0
    assert steps[0] == "launch overhead"
    assert steps[-1] == "matmul bfloat16"
    assert Machine.model_validate_json(machine.model_dump_json()) == machine
    assert machine.slug == machine.environment.slug


def test_the_best_of_several_medians_is_kept_and_bytes_are_counted(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"copy": iter([2e-3, 1e-3, 4e-3, 4e-3, 4e-3]), "scale in place": iter([2e-3] * 5), "read": iter([2e-3] * 5)}

    def measure(subjects: list, device: torch.device, rounds: int) -> dict[str, Timing]:
        for subject in subjects:
            subject.run(0)
        if subjects[0].name == "matmul":
            return {"matmul": Timing("matmul", (1e-3,) * 5, 1, "fake", 0)}
        # One spike per repeat: a median does not see it.
        return {s.name: Timing(s.name, (9.0, *[next(turns[s.name])] * 4), 1, "fake", 0) for s in subjects}

    monkeypatch.setattr(machine_module, "measure", measure)
    monkeypatch.setitem(machine_module.WORKING_SETS, "cpu", (1,))
    ceilings = measure_ceilings("cpu")
    assert ceilings.bandwidth[0].bytes_per_second == pytest.approx(2**20 / 1e-3)
    assert ceilings.bandwidth[0].peak_bytes_per_second == pytest.approx(2**20 / 1e-3)
    assert ceilings.matmul_flops_per_second["float32"] == pytest.approx(2 * 64**3 / 1e-3)


def test_records_are_frozen_and_closed() -> None:
    found = describe_environment("cpu")
    with pytest.raises(ValidationError):
        found.python = "4"
    with pytest.raises(ValidationError):
        Environment.model_validate(found.model_dump() | {"colour": "green"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_described_and_measured() -> None:
    machine = measure_machine("cuda", quick=True)
    assert machine.environment.compute_capability is not None
    assert machine.environment.last_level_cache_bytes
    assert set(machine.ceilings.matmul_flops_per_second) == {"float32", "bfloat16", "float16"}
    assert {point.memory for point in machine.ceilings.bandwidth} == {"cache", "DRAM"}
