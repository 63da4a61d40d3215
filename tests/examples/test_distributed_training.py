"""Training on several ranks: each strategy has the same losses, and so has a run that was killed and resumed.

The `slow` ones: .venv/bin/nox -s tests -- tests/examples/test_distributed_training.py -m slow
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

STEPS = 10
DRIVER = """
import dataclasses, os, runpy, signal

example = runpy.run_path({script!r})
tiny = dataclasses.replace(example["sizes"](True), dim=32, layers=2, length=16, steps={steps})
step, calls, within = example["step"], [], example["main"].__globals__

def struck(*given):
    calls.append(step(*given))
    if os.environ.get("STRUCK") and os.environ["RANK"] == "1" and len(calls) == 8:
        os.kill(os.getpid(), getattr(signal, os.environ["STRUCK"]))
    return calls[-1]

within["step"], within["sizes"] = struck, lambda quick: tiny
example["main"]()
"""


class Run:
    """Runs in one folder; `struck` is a signal that rank 1 sends itself in step 8."""

    def __init__(self, folder, script):
        self.folder = folder
        self.driver = folder / "driver.py"
        self.driver.write_text(DRIVER.format(script=script, steps=STEPS))

    def __call__(self, name, ranks, parallel, *more, struck=""):
        out = self.folder / name
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, str(self.driver), "--parallel", parallel, "--every", "3"]
        command += ["--timeout", "20", "--out", str(out), *more]
        environment = os.environ | {"STRUCK": struck, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            try:
                self.printed, self.errors = process.communicate(timeout=200)
            finally:
                process.terminate()  # torchrun then ends its ranks
        if not struck:
            assert process.returncode == 0, self.errors
        steps, losses = zip(*(line.split() for line in (out / "losses.txt").read_text().splitlines()), strict=True)
        assert steps == tuple(map(str, range(1, len(steps) + 1)))
        assert struck or len(steps) == STEPS
        return process.returncode, [float(loss) for loss in losses]

    def until(self, name, copy, step):
        """Copy the folder of a run without the checkpoints behind a step."""
        shutil.copytree(self.folder / name, self.folder / copy)
        for each in (self.folder / copy).glob("step-*"):
            if int(each.name.removeprefix("step-")) > step:
                shutil.rmtree(each)
        return copy


@pytest.fixture
def run(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("the ranks of this test share one machine's processors")
    script = Path(__file__).parents[2] / "examples" / "distributed_training.py"
    return Run(tmp_path, str(script))


def difference(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.mark.examples
def test_two_ranks_and_the_resumed_run_of_one_have_the_same_losses(run):
    _, expected = run("two", 2, "fsdp")
    assert f"step 0 of {STEPS}: begin" in run.printed
    assert re.search(r"fsdp, ranks: 2\. Nats a byte: [\d.]+ at first, [\d.]+ after 10 steps, \d+ tokens/s", run.printed)
    assert [each.name[-2:] for each in sorted((run.folder / "two").glob("step-*"))] == ["09", "10"]
    _, found = run(run.until("two", "one", 9), 1, "ddp")
    assert f"step 9 of {STEPS}: resume" in run.printed
    assert difference(found, expected) < 1e-6
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.examples
def test_what_does_not_fit_is_named(example, tmp_path, capsys, monkeypatch):
    module = example("distributed_training")
    with pytest.raises(SystemExit):
        module.main(["--quick", "--offload"])
    monkeypatch.setattr(module.dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(SystemExit):
        module.main(["--quick"])
    said = capsys.readouterr().err
    assert "--offload is of fsdp, not of ddp" in said
    assert "--out is missing: the ranks need one folder" in said


@pytest.mark.slow
def test_every_strategy_has_the_losses_of_one_rank(run):
    _, expected = run("one", 1, "ddp")
    for ranks, parallel in ((2, "ddp"), (2, "fsdp"), (2, "tp"), (4, "fsdp+tp")):
        assert difference(run(f"{parallel}{ranks}", ranks, parallel)[1], expected) < 2e-6, parallel
    smaller = "--checkpoint-activations", "--offload"
    assert difference(run("smaller", 2, "fsdp", *smaller)[1], expected) < 2e-6


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_resumed_on_one_and_four(run):
    for parallel, others in (("fsdp", ((1, "fsdp"), (4, "fsdp"), (2, "ddp"))), ("tp", ((1, "tp"), (4, "fsdp+tp")))):
        _, expected = run(parallel, 2, parallel)
        for ranks, other in others:
            _, found = run(run.until(parallel, f"{parallel}{ranks}{other}", 9), ranks, other)
            assert f"step 9 of {STEPS}: resume" in run.printed
            assert found[:9] == expected[:9]
            assert difference(found, expected) < 1e-6, other


@pytest.mark.slow
def test_a_checkpoint_of_another_kind_or_run_is_refused(run):
    run("one", 1, "ddp")
    with pytest.raises(AssertionError, match=r"step-0000000010 has no model\.\S+: resume with tp what tp saved"):
        run("one", 1, "tp")
    run.driver.write_text(run.driver.read_text().replace(f"steps={STEPS}", "steps=5"))
    with pytest.raises(AssertionError, match=r"has a run of 10 steps, not of 5: give another folder"):
        run("one", 1, "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tp"])
def test_a_killed_rank_ends_the_run_and_the_same_command_resumes_it(run, parallel):
    _, expected = run("whole", 2, parallel)
    begin = time.monotonic()
    code, before = run("killed", 2, parallel, struck="SIGKILL")
    assert time.monotonic() - begin < 60
    assert code != 0
    assert "Signal 9 (SIGKILL) received by PID" in run.errors
    assert before == expected[: len(before)]
    assert 6 <= len(before) <= 8
    _, found = run("killed", 2, parallel)
    assert re.search(rf"step [36] of {STEPS}: resume", run.printed)
    assert found == expected


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(run):
    """torchrun kills a stopped process half a minute after it asked the process to end."""
    code, _ = run("hangs", 2, "fsdp", "--timeout", "5", struck="SIGSTOP")
    assert code != 0
    assert "Timed out waiting 5000ms" in run.errors
