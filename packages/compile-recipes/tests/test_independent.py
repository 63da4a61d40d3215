"""Every change, checked again in a fresh process on other inputs, and on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), [("changes", "changes hold: "), ("ranks", "ranks agree")])
def test_changes_hold_in_a_fresh_process(what, said):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "independent.py"), what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert said in done.stdout
