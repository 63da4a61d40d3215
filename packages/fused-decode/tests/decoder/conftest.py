"""Makes the models of these tests importable: pytest imports each test file by itself."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    import torch

    torch.manual_seed(0)
