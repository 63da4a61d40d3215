"""The script of the bundle, on a bundle of two stubs: it unpacks elsewhere, runs the job, and tells what came out."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bundle" / "run.py"
STUB = """
import json, os, sys, time
record = {"arguments": sys.argv[1:], "file": __file__}
open(sys.argv[sys.argv.index("--json") + 1] + f"/{sys.argv[1]}.json", "w").write(json.dumps(record))
if "wait" in sys.argv:
    try:
        open(sys.argv[sys.argv.index("--json") + 1] + "/waiting", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        open(sys.argv[sys.argv.index("--json") + 1] + "/kept", "w").close()
        sys.exit(130)
sys.exit(int("fail" in sys.argv))
"""
JOBS = ("verify", "support")

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not a checkout: the bundle does not hold its own builder")


@pytest.fixture
def bundle(tmp_path):
    """A read-only bundle whose harness only notes how it was called, with one test that passes."""
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "tests").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "stub-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kernel_pytorch/harness/__init__.py", "")
        wheel.writestr("kernel_pytorch/harness/__main__.py", STUB)
    (folder / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:kernel_pytorch -p no:kernel_pytorch.harness\n")
    (folder / "run.py").write_text(SCRIPT.read_text())
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def run(bundle, out, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Plugins that are installed here are no part of the bundle.
    environment |= {"PIP_NO_INDEX": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(bundle / "run.py"), arguments[0], "--out", str(out), *arguments[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_bench_hands_over_where_to_write_and_what_follows(bundle, tmp_path):
    done = run(bundle, tmp_path / "out", "bench", "--quick")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["arguments"] == ["bench", "--json", str(tmp_path / "out"), "--quick"]
    assert not record["file"].startswith(str(bundle))


def test_peers_are_those_of_the_bundle(bundle, tmp_path):
    bundle.chmod(0o755)
    file = bundle / "peers" / "toy" / "benchmarks" / "peers.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert run(bundle, tmp_path / "out", "bench", "--peers").returncode == 0
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["arguments"] == ["bench", "--json", str(tmp_path / "out"), "--full", "--peers", str(file)]


def test_verify_asks_what_works_with_what_and_runs_the_tests_too(bundle, tmp_path):
    done = run(bundle, tmp_path / "out", "verify", "--level", "native")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'tests="1"' in (tmp_path / "out" / "tests.xml").read_text()
    asked = {job: json.loads((tmp_path / "out" / f"{job}.json").read_text())["arguments"] for job in JOBS}
    where = ["--json", str(tmp_path / "out"), "--jobs", asked["verify"][4]]
    assert asked == {"verify": ["verify", *where, "--level", "native"], "support": ["support", *where]}
    assert int(asked["verify"][4]) >= 1
    assert "1 passed" in done.stdout
    assert "1 passed" in (tmp_path / "out" / "tests.log").read_text()
    assert all(f"{job}: exit code 0" in done.stdout for job in (*JOBS, "tests"))


def test_one_technique_alone(bundle, tmp_path):
    bundle.chmod(0o755)
    (bundle / "tests").chmod(0o755)
    (bundle / "tests" / "toy").mkdir()
    (bundle / "tests" / "toy" / "test_two.py").write_text(
        "def test_two():\n    pass\n\n\ndef test_three():\n    pass\n"
    )
    done = run(bundle, tmp_path / "out", "verify", "--technique", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'tests="2"' in (tmp_path / "out" / "tests.xml").read_text()
    for job in JOBS:
        record = json.loads((tmp_path / "out" / f"{job}.json").read_text())
        assert record["arguments"][:4] == [job, "toy", "--json", str(tmp_path / "out")]


def test_wrong_arguments_are_one_line(bundle, tmp_path):
    (tmp_path / "file").write_text("")
    for out, arguments, words in [
        ("file", [], "is a file; give a folder"),
        ("out", ["--technique", "nope"], "given 'nope'; there are"),
    ]:
        done = run(bundle, tmp_path / out, "verify", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("told", [os.killpg, os.kill], ids=["all of them, as a terminal does", "the script alone"])
def test_an_interrupted_benchmark_may_keep_what_it_has(bundle, tmp_path, told):
    bundle.chmod(0o755)
    (bundle / "run.py").chmod(0o755)
    (bundle / "run.py").write_text(SCRIPT.read_text().replace("PATIENCE = 10.0", "PATIENCE = 1.0"))
    process = subprocess.Popen(
        [sys.executable, str(bundle / "run.py"), "bench", "--out", str(tmp_path / "out"), "wait"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "out" / "waiting").exists():
        time.sleep(0.05)
    told(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130
    assert (tmp_path / "out" / "kept").exists()


def test_what_is_wrong_is_the_exit_code(bundle, tmp_path):
    assert run(bundle, tmp_path / "out", "verify", "fail").returncode == 1
    assert (tmp_path / "out" / "tests.xml").exists(), "what is wrong in one job does not stop the others"
    (bundle / "tests" / "test_one.py").chmod(0o644)
    (bundle / "tests" / "test_one.py").write_text("def test_one():\n    assert False\n")
    assert run(bundle, tmp_path / "out", "verify").returncode == 1
