"""`kernel-pytorch static` and CUDA C++: each gate is red on a kernel that is wrong on purpose, green on a right one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernel_pytorch.harness.commands import static as command
from kernel_pytorch.harness.static.nvcc import MISSING, _places, find_nvcc
from kernel_pytorch.harness.static.record import load

PLANTED = Path(__file__).with_name("planted_cuda")
COMMAND = [sys.executable, "-c", "from kernel_pytorch.harness.cli import main; main()", "static"]
ARCHS = ["--arch", "sm_80", "--arch", "sm_90"]
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason=MISSING)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process in which copies of the planted techniques are installed, with an empty cache."""
    folder = tmp_path_factory.mktemp("planted")
    information = folder / "planted-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    names = "\n".join(f"{name} = planted_cuda.techniques:{name}" for name in ("good", "wrong", "absent", "lost"))
    (information / "entry_points.txt").write_text(f"[kernel_pytorch.techniques]\n{names}\n")
    shutil.copytree(PLANTED, folder / PLANTED.name)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path, "COLUMNS": "400"}


@pytest.fixture
def without_nvcc(environment, tmp_path):
    """The same where there is no compiler."""
    if any(
        Path(folder).glob("cu*/bin/nvcc") for folder in getattr(find_spec("nvidia"), "submodule_search_locations", [])
    ):
        pytest.skip("nvcc is installed beside torch, where it is always found")
    return {**environment, "PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}


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
    **{("spilling_kernel", arch, "spilled bytes"): "0" for arch in ("sm_80", "sm_90")},
    **{("promoting_kernel", arch, "float64 instructions"): "0" for arch in ("sm_80", "sm_90")},
    **{("rounding_kernel", arch, "tf32 instructions"): "0" for arch in ("sm_80", "sm_90")},
    **{("unbounded_kernel", arch, "registers"): "4" for arch in ("sm_80", "sm_90")},
    **{
        ("narrow_kernel", arch, f"width of {what}"): "80% of the bytes by 128 bit or more"
        for arch in ("sm_80", "sm_90")
        for what in ("loads", "stores")
    },
    ("product_kernel", "sm_80", "tensor-core instructions"): "mma alone",
    ("product_kernel", "sm_90", "tensor-core instructions"): "wgmma alone",
    # ptxas refuses it for sm_80 alone.
    ("hoarding_kernel", "sm_80", "compiles"): "no error",
    ("hoarding_kernel", "sm_90", "shared memory in bytes"): str(48 * 1024),
    **{
        (f"planted_cuda/{name}.cu", arch, "compiles"): "no error"
        for name in ("broken", "empty")
        for arch in ("sm_80", "sm_90")
    },
}


@needs_nvcc
def test_exactly_what_is_wrong_is_found(wrong):
    done, record = wrong
    found = {(b.kernel, b.arch, b.rule): b.allowed for b in record.broken}
    assert found == RED
    assert done.returncode == 1
    assert 'broken.cu(2): error: expected a ";"' in done.stdout
    assert "uses too much shared data (0x13880 bytes, 0xc000 max)" in done.stdout
    assert "no __global__ function is instantiated in it" in done.stdout


@needs_nvcc
def test_a_kernel_that_is_refused_stops_no_other_of_its_file(wrong):
    unbounded = [c for c in wrong[1].compiled if c.kernel == "unbounded_kernel"]
    assert [c.arch for c in unbounded] == ["sm_80", "sm_90"]
    assert all(c.registers > 0 and not c.error for c in unbounded)
    assert {c.occupancy for c in unbounded} == {c.warps for c in unbounded} == {None}, "it has no launch bounds"
    assert "fp32, unknown warps; planted_cuda/hoarding.cu" in wrong[0].stdout


@pytest.mark.slow
@needs_nvcc
def test_right_kernels_pass_and_are_known_until_a_header_changes(environment, tmp_path):
    file = tmp_path / "static" / "good.kernels.json"
    first = run(environment, "good", *ARCHS, "--json", str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "10 compilations (0 known from before)" in first.stdout
    assert "for the 10 instantiations in CUDA C++, in" in first.stdout
    compiled = {(c.kernel, c.constants.get("template"), c.arch): c for c in load(file).compiled}
    wide = compiled["scale_kernel", "__nv_bfloat16, 8", "sm_90"]
    assert (wide.warps, wide.arguments["0"], wide.loads.accesses) == (8, "*bf16", {128: 1})
    assert compiled["scale_kernel", "double, 2", "sm_80"].f64 > 0
    assert compiled["scale_kernel", "__nv_bfloat16, 1", "sm_80"].loads.accesses == {16: 1}
    product = compiled["product_kernel", None, "sm_80"]
    assert (product.async_copies, product.dynamic_shared, product.shared_bytes) == (1, True, 0)
    again = run(environment, "good", *ARCHS)
    assert "(10 known from before)" in again.stdout
    assert "0 KiB + dynamic" in again.stdout
    assert "up to 100%" in again.stdout
    header = Path(environment["PYTHONPATH"].split(os.pathsep)[0], PLANTED.name, "include", "width.cuh")
    header.write_text(header.read_text().replace("THREADS = 256", "THREADS = 128"))
    changed = run(environment, "good", "--arch", "sm_80", "--details")
    assert "(0 known from before)" in changed.stdout
    assert "fp32, 4 warps, template=float, 4" in changed.stdout


@pytest.mark.slow
def test_without_a_compiler_one_line_says_how_to_get_one(without_nvcc, tmp_path):
    done = run(without_nvcc, "good", "--arch", "sm_80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"not compiled here: good: {MISSING}" in done.stdout
    assert "every contract kept of what was compiled: 0 compilations" in done.stdout
    done = run(without_nvcc, "good", "--json", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("not compiled here:") == 1, "four architectures, one line"
    assert load(tmp_path / "static" / "good.kernels.json").not_compiled == (MISSING,)


@pytest.mark.slow
def test_an_architecture_that_the_compiler_does_not_know_is_named(environment, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.4, V12.4.131"\n'
        "else echo compute_80; echo compute_90; fi\n"
    )
    nvcc.chmod(0o755)
    done = run({**environment, "CUDA_HOME": str(tmp_path)}, "good", "--arch", "sm_120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not compiled here: good: nvcc 12.4.131 knows no sm_120" in done.stdout
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    done = run({**environment, "CUDA_HOME": str(tmp_path)}, "good", "--arch", "sm_120")
    assert done.returncode == 1
    assert f"{nvcc} cannot be run" in done.stderr


@pytest.mark.slow
def test_sources_that_are_not_here_are_said(environment):
    absent = run(environment, "absent", "--arch", "sm_80")
    assert absent.returncode == 0, absent.stdout + absent.stderr
    assert "absent: its CUDA sources are not here (it is installed from a wheel)" in absent.stdout
    lost = run(environment, "lost", "--arch", "sm_80")
    assert lost.returncode == 1
    assert "cuda_units='planted_cuda.techniques:there_is_no_such_function' cannot be loaded" in lost.stderr


def test_cuda_alone_does_not_ask_for_triton(site, command_line, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    site.install_toy()
    assert command_line("static", "toy").code == 0
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; import kernel_pytorch.harness.static.worker; assert 'triton' not in sys.modules",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_cuda_home_goes_before_path_and_path_before_pip(monkeypatch, tmp_path):
    for folder in ("home/bin", "path", "site/nvidia/cu12/bin", "site/nvidia/cu13/bin"):
        nvcc = tmp_path / folder / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "site" / "nvidia")]})
    monkeypatch.setattr("kernel_pytorch.harness.static.nvcc.find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    order = [str(place.relative_to(tmp_path).parent) for place in _places()]
    assert order == ["home/bin", "path", "site/nvidia/cu13/bin", "site/nvidia/cu12/bin"]
