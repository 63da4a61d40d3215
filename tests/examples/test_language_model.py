"""The language model at quick size: it learns, it resumes where it was stopped, and both sides have the same losses."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.examples


@pytest.fixture
def tiny(example):
    """The example and sizes of seconds."""
    module = example("language_model")
    sizes = dataclasses.replace(module.sizes(True), dim=32, layers=1, heads=2, length=16, batch=2, steps=7)
    return module, sizes


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tiny, tmp_path, monkeypatch, capsys):
    module, sizes = tiny
    _, expected = module.train(sizes, tmp_path / "whole", every=2)
    assert len(expected) == 7
    step, calls = module.step, []

    def stopped(*given):
        calls.append(given)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return step(*given)

    monkeypatch.setattr(module, "step", stopped)
    with pytest.raises(SystemExit, match="130"):
        module.train(sizes, tmp_path / "stopped", every=2)
    assert "stopped after step 5; the same command resumes from step-0000000004.pt" in capsys.readouterr().out
    model, found = module.train(sizes, tmp_path / "stopped", every=2)
    assert found == expected[4:]
    whole, nothing = module.train(sizes, tmp_path / "whole", every=2)  # it is at its end
    assert nothing == []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_of_a_run_of_another_length_is_refused(tiny, tmp_path):
    module, sizes = tiny
    module.train(dataclasses.replace(sizes, steps=2), tmp_path)
    with pytest.raises(SystemExit, match=r"has a run of 2 steps, not of 7: give another folder with --out"):
        module.train(sizes, tmp_path)


KILLED = """
import dataclasses, os, runpy, signal
from pathlib import Path

example = runpy.run_path({script!r})
sizes = dataclasses.replace(example["sizes"](True), dim=32, layers=1, heads=2, length=16, batch=2, steps=7)
train, step, calls = example["train"], example["step"], []

def struck(*given):
    calls.append(step(*given))
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]

train.__globals__["step"] = struck
train(sizes, Path({folder!r}), every=2)
"""


def test_a_process_that_was_killed_loses_the_steps_since_its_checkpoint_alone(tiny, tmp_path):
    module, sizes = tiny
    threads = torch.get_num_threads()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}  # sums of other parts have other bits
    code = KILLED.format(script=module.__file__, folder=str(tmp_path / "killed"))
    killed = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    _, expected = module.train(sizes, tmp_path / "whole", every=2)
    _, found = module.train(sizes, tmp_path / "killed", every=2)
    assert found == expected[4:]


def test_accumulated_gradients_are_those_of_one_batch(tiny):
    module, sizes = tiny
    tokens = module.data(sizes)[0][:4].long()
    models = [module.model_and_optimizer(sizes) for _ in range(2)]
    losses = [module.step(*models[0], [tokens]), module.step(*models[1], [tokens[:2], tokens[2:]])]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(models[0][0].state_dict(), models[1][0].state_dict(), rtol=1e-4, atol=1e-5)


def test_the_losses_of_fifty_steps_are_those_of_plain_pytorch(example):
    module = example("language_model")
    sizes = module.sizes(True)
    pieces, trainers = module.data(sizes)[0], module.variants(sizes)
    order = module.ShuffledBatches(len(pieces), sizes.batch, seed=1)
    for _ in range(50):
        batches = [pieces[next(order)].to(sizes.device).long() for _ in range(sizes.accumulate)]
        plain, ours = (float(trainers[name](batches)) for name in ("plain PyTorch", "ours"))
        assert abs(plain - ours) < 1e-3
    assert plain < 3.0


def test_it_learns_and_every_way_has_the_same_losses(example, tmp_path, capsys):
    example("language_model").main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"unseen text: ([\d.]+) nats a byte before, ([\d.]+) after", printed).groups())
    assert after < 3.2 < 5.0 < before
    assert "def " in printed
    off = [float(line.split()[-1]) for line in printed.split("loss off by")[1].splitlines()[1:5]]
    assert len(off) == 4
    assert max(off) < 1e-3
    assert re.search(r"of plain PyTorch, [\d.]+x \(.* of it compiled$", printed.strip())
