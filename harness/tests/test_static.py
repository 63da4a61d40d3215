"""Each gate of `kernel-pytorch static` is red on a kernel that is wrong on purpose, and green on one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_pytorch.harness.static.record import load

triton = pytest.importorskip("triton", reason="needs Triton: it brings the compiler")

KERNELS = Path(__file__).with_name("planted_kernels.py")
COMMAND = [sys.executable, "-c", "from kernel_pytorch.harness.cli import main; main()", "static"]
ARCHS = ["--arch", "sm_80", "--arch", "sm_90"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process in which the planted techniques are installed, with an empty cache."""
    folder = tmp_path_factory.mktemp("planted")
    information = folder / "planted-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    names = "\n".join(f"{name} = planted_kernels:{name}" for name in ("right", "wrong"))
    (information / "entry_points.txt").write_text(f"[kernel_pytorch.techniques]\n{names}\n")
    (folder / KERNELS.name).symlink_to(KERNELS)
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **caches, "PYTHONPATH": path, "COLUMNS": "400"}


def run(environment, *arguments):
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wrong(environment, tmp_path_factory):
    """Exit code and printed text for the kernels that are wrong, and the record."""
    results = tmp_path_factory.mktemp("json")
    done = run(environment, "wrong", *ARCHS, "--json", str(results))
    assert (results / "static").exists(), done.stdout + done.stderr
    return done, load(results / "static" / "wrong.kernels.json")


RED = {
    ("_scale_kernel", "sm_80", "registers"): "8",
    ("_scale_kernel", "sm_90", "registers"): "8",
    ("_spilling_kernel", "sm_80", "spilled bytes"): "0",
    ("_spilling_kernel", "sm_90", "spilled bytes"): "0",
    ("_rounding_kernel", "sm_80", "tf32 instructions"): "0",
    ("_rounding_kernel", "sm_90", "tf32 instructions"): "0",
    # Compiled with float64 scalars on the first architecture only.
    ("_promoting_kernel", "sm_80", "float64 instructions"): "1",
    ("_narrow_kernel", "sm_80", "width of loads"): "80% of the bytes by 128 bit or more",
    ("_narrow_kernel", "sm_90", "width of loads"): "80% of the bytes by 128 bit or more",
    ("_narrow_kernel", "sm_80", "width of stores"): "80% of the bytes by 128 bit or more",
    ("_narrow_kernel", "sm_90", "width of stores"): "80% of the bytes by 128 bit or more",
    ("_product_kernel", "sm_90", "tensor-core instructions"): "wgmma alone",
    ("_hoarding_kernel", "sm_80", "shared memory in bytes"): str(163 * 1024),
    ("_hoarding_kernel", "sm_90", "shared memory in bytes"): str(227 * 1024),
    ("_broken_kernel", "sm_80", "compiles"): "no error",
    ("_broken_kernel", "sm_90", "compiles"): "no error",
    ("_absent_kernel", "", "launches"): "some",
    ("", "sm_80", "launches can be recorded"): "no error",
    ("", "sm_90", "launches can be recorded"): "no error",
}


@pytest.mark.slow
def test_exactly_what_is_wrong_is_found(wrong):
    done, record = wrong
    found = {(b.kernel, b.arch, b.rule): b.allowed for b in record.broken}
    assert found == RED
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("expected", sorted(RED), ids=" ".join)
def test_a_broken_contract_is_printed_with_all_it_takes_to_find_it(wrong, expected):
    done, record = wrong
    kernel, arch, rule = expected
    one = next(b for b in record.broken if (b.kernel, b.arch, b.rule) == expected)
    lines = [line for line in done.stdout.splitlines() if line.startswith("broken:")]
    assert any(
        all(part in line for part in ("wrong", kernel, arch, rule, one.allowed, one.found, one.configuration))
        for line in lines
    ), lines


@pytest.mark.slow
def test_an_implementation_that_raises_stops_nobody_else(wrong):
    (problem, *_) = [b.found for b in wrong[1].broken if b.rule == "launches can be recorded"]
    assert "RuntimeError: on purpose: 4 cases" in problem


@pytest.mark.slow
def test_right_kernels_pass_and_are_known_the_next_time(environment, tmp_path):
    file = tmp_path / "static" / "right.kernels.json"
    first = run(environment, "right", *ARCHS, "--json", str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "(0 known from before)" in first.stdout
    compiled = load(file).compiled
    summary = {(c.constants["BLOCK"], c.arch, bool(c.float64_scalars)): c for c in compiled}
    # Forward and backward of both grids, once more with float64 scalars, and the kernel of the one odd case.
    assert set(summary) == {
        *((block, arch, False) for block in (1024, 512, 1) for arch in ("sm_80", "sm_90")),
        *((block, "sm_80", True) for block in (1024, 512)),
    }
    assert all(c.loads.accesses == {128: c.constants["BLOCK"] // 512} for c in compiled if c.bench)
    assert {c.f64 for c in compiled if c.float64_scalars} == {1}
    again = run(environment, "right", *ARCHS, "--details")
    assert again.returncode == 0
    assert f"({len(compiled)} known from before)" in again.stdout
    assert "fp32, 4 warps, BLOCK=512" in again.stdout
    changed = run({**environment, "TRITON_DISABLE_LINE_INFO": "1"}, "right", "--arch", "sm_80")
    assert "(0 known from before)" in changed.stdout


@pytest.mark.slow
def test_what_is_recorded_is_not_compiled_again_and_still_judged(environment, tmp_path):
    file = tmp_path / "static" / "right.kernels.json"
    recorded = ("right", "--recorded", str(tmp_path))
    assert run(environment, "right", *ARCHS, "--json", str(tmp_path)).returncode == 0
    assert load(file).key == ""  # two architectures are missing
    assert "as recorded" not in run(environment, *recorded, "--arch", "sm_80").stdout
    assert run(environment, "right", "--json", str(tmp_path)).returncode == 0
    done = run(environment, *recorded)
    assert done.returncode == 0
    assert "nothing changed since" in done.stdout
    assert "as recorded" not in run({**environment, "TRITON_DISABLE_LINE_INFO": "1"}, *recorded, *ARCHS[:2]).stdout
    record = load(file)
    narrow = [c.model_copy(update={"loads": c.loads.model_copy(update={"accesses": {32: 4}})}) for c in record.compiled]
    record.model_copy(update={"compiled": tuple(narrow)}).save(file)
    done = run(environment, *recorded)
    assert done.returncode == 1
    assert "width of loads" in done.stdout
    cases = {name: dict.fromkeys(cases, "other") for name, cases in record.kernels["sm_80"].items()}
    record.model_copy(update={"key": "", "kernels": record.kernels | {"sm_80": cases}}).save(file)
    done = run(environment, *recorded)
    assert done.returncode == 1
    assert f"changed since it was recorded: {', '.join(cases)}: `kernel-pytorch static right --json" in done.stdout
    assert run(environment, *recorded, "--arch", "sm_90").returncode == 0


@pytest.mark.slow
def test_all_compiles_every_specialisation(environment, tmp_path):
    counts = []
    for option in ([], ["--all"]):
        file = tmp_path / "static" / "right.kernels.json"
        assert run(environment, "right", "--arch", "sm_80", "--json", str(tmp_path), *option).returncode == 0
        counts.append(len(load(file).compiled))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("arguments", [["toy", "--arch", "sm_70"], ["nothing"]], ids=["architecture", "technique"])
def test_a_name_that_does_not_exist_is_exit_code_2(site, command_line, arguments):
    site.install_toy()
    done = command_line("static", *arguments)
    assert done.code == 2
    assert "there are: sm_80, sm_90, sm_100, sm_120" in done.err or "installed are:" in done.err


def test_a_record_does_not_stand_for_all(site, command_line, tmp_path):
    site.install_toy()
    done = command_line("static", "toy", "--all", "--recorded", str(tmp_path))
    assert done.code == 2
    assert "give one of them" in done.err


def test_where_there_is_no_kernel_there_is_no_record(site, command_line, tmp_path):
    site.install_toy()
    done = command_line("static", "toy", "--json", str(tmp_path / "results"))
    assert done.code == 0, done.err
    assert "every contract kept: 0 compilations" in done.out
    assert list((tmp_path / "results").iterdir()) == []
