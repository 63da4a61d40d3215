"""Checkpoints: a run that is killed at any moment goes on as if nothing had happened."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_pytorch.models import Checkpoints, ShuffledBatches

RUN = Path(__file__).parent / "training_run.py"
STEPS = 17


def run(folder, *stages):
    """Run `training_run.py`; what it prints."""
    folder.mkdir()
    found = subprocess.run(
        [sys.executable, RUN, folder, str(STEPS), *stages], check=True, capture_output=True, text=True
    )
    return [line.split() for line in found.stdout.splitlines()]


def losses(folder):
    return [line.split(maxsplit=1) for line in (folder / "losses.txt").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_trajectory_of_one_that_is_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole)
    stages = ("step:1", "write:1", "write:2", "fsync:1", "replace:3", "unlink:1", "step:3")
    *killed, last = run(broken, *stages)
    assert killed == [
        ["step:1", "-9"],
        ["write:1", "-9"],
        ["write:2", "-9", "2"],
        ["fsync:1", "-9", "2"],
        ["replace:3", "-9", "4", "6"],
        ["unlink:1", "-9", "4", "6", "8"],
        ["step:3", "-9", "8", "10"],
    ]
    assert last == [":0", "0", "14", "16"]
    wanted = dict(losses(whole))
    assert len(wanted) == STEPS
    assert len(losses(broken)) > STEPS  # steps since the last checkpoint were made again
    assert all(wanted[step] == found for step, found in losses(broken))
    assert dict(losses(broken)).keys() == wanted.keys()
    final = [torch.load(folder / "final.pt", weights_only=True) for folder in (whole, broken)]
    torch.testing.assert_close(*final, rtol=0, atol=0)
    assert len(list((broken / "checkpoints").iterdir())) == 2  # no temporary file


def test_parts_must_be_those_of_the_checkpoint(tmp_path):
    model, batches = torch.nn.Linear(2, 2), ShuffledBatches(5, 2)
    assert Checkpoints(tmp_path, {"model": model}).resume() == 0
    file = Checkpoints(tmp_path, {"model": model}).save(3)
    assert file == tmp_path / "step-0000000003.pt"
    assert Checkpoints(tmp_path, {"model": model}).resume() == 3
    with pytest.raises(ValueError, match=r"parts: given model, batches; step-0000000003.pt has model"):
        Checkpoints(tmp_path, {"model": model, "batches": batches}).resume()
    with pytest.raises(ValueError, match=r"generators: given noise; step-0000000003.pt has none"):
        Checkpoints(tmp_path, {"model": model}, {"noise": torch.Generator()}).resume()
    with pytest.raises(ValueError, match="keep: given 0; it must be at least 1"):
        Checkpoints(tmp_path, {}, keep=0)


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    class Odd:
        def state_dict(self):
            return {"path": Path("x")}

    checkpoints = Checkpoints(tmp_path, {"odd": Odd()})
    with pytest.raises(pickle.UnpicklingError, match="Path"):
        checkpoints.save(1)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_few_are_kept(tmp_path):
    (tmp_path / "step-0000000004.tmp").touch()  # of a process that was killed
    checkpoints = Checkpoints(tmp_path, {"model": torch.nn.Linear(1, 1)}, keep=3)
    for step in (5, 90, 100, 1_000_000):
        checkpoints.save(step)
    assert [int(file.stem[5:]) for file in checkpoints.files()] == [90, 100, 1_000_000]
    assert len(list(tmp_path.iterdir())) == 3


def test_batches_show_every_example_once_an_epoch():
    batches = ShuffledBatches(10, 3, seed=4)
    epochs = [torch.cat([next(batches) for _ in range(3)]).tolist() for _ in range(3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = ShuffledBatches(10, 3, seed=4)
    assert next(again).tolist() == epochs[0][:3]
    assert next(ShuffledBatches(10, 3, seed=5)).tolist() != epochs[0][:3]
    assert next(ShuffledBatches(10, 10)).sort().values.tolist() == list(range(10))


def test_batches_go_on_where_they_were():
    batches = ShuffledBatches(10, 3, seed=4)
    for _ in range(5):
        next(batches)
    state = batches.state_dict()
    wanted = [next(batches).tolist() for _ in range(6)]
    other = ShuffledBatches(10, 3)
    other.load_state_dict(state)
    assert [next(other).tolist() for _ in range(6)] == wanted
    with pytest.raises(ValueError, match="length: the checkpoint's is 10; it must be that of these data, 11"):
        ShuffledBatches(11, 3).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size: given 4; it must be from 1 to length, 3"):
        ShuffledBatches(3, 4)


@pytest.mark.parametrize(("step", "error"), [("a", TypeError), (2.5, TypeError), (True, TypeError), (-1, ValueError)])
def test_a_step_that_is_none_is_refused_and_deletes_nothing(step, error, tmp_path):
    checkpoints = Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 2)}, keep=1)
    kept = checkpoints.save(3)
    with pytest.raises(error, match=r"step: given"):
        checkpoints.save(step)
    assert checkpoints.files() == [kept]


def test_a_damaged_checkpoint_is_named_with_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 2)})
    _, newest = checkpoints.save(1), checkpoints.save(2)
    newest.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"step-0000000002\.pt: cannot be read .* resume from step-0000000001\.pt"):
        checkpoints.resume()
    newest.unlink()
    assert checkpoints.resume() == 1


def test_parts_without_a_state_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"parts: 'model' is int; it needs state_dict"):
        Checkpoints(tmp_path, {"model": 3})
    with pytest.raises(TypeError, match=r"length: given '3'; it must be an integer"):
        ShuffledBatches("3", batch_size=1)
