"""Each package carries a core of its own, perhaps of another version: two of them live in one process."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kernel_pytorch.rmsnorm import _core, rms_norm

CORE = Path(_core.__file__).parent


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """A package whose core has another set of levels and makes operators that count their calls."""
    package = tmp_path / "newer_package"
    shutil.copytree(CORE, package / "_core")
    (package / "__init__.py").write_text("")
    levels = package / "_core" / "levels.py"
    levels.write_text(levels.read_text().replace('"triton", "cuda")\nKERNELS', '"triton", "cuda", "hip")\nKERNELS'))
    operator = package / "_core" / "operator.py"
    operator.write_text(operator.read_text().replace("def declare(", "CALLS = []\n\n\ndef declare(", 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("newer_package._core.operator"), importlib.import_module("newer_package._core.levels")
    for name in [name for name in sys.modules if name.startswith("newer_package")]:
        del sys.modules[name]


def test_two_cores_live_in_one_process(newer):
    operator, levels = newer
    from kernel_pytorch.rmsnorm._core import levels as own_levels
    from kernel_pytorch.rmsnorm._core import operator as own

    assert "hip" in levels.LEVELS
    assert "hip" not in own_levels.LEVELS
    assert hasattr(operator, "CALLS")
    assert not hasattr(own, "CALLS")
    cubed = operator.declare(
        "test_cubed_by_another_core(Tensor x) -> Tensor",
        launch=lambda: lambda x: x**3,
        fake=torch.empty_like,
        gradient=lambda dy, x: (3.0 * dy * x**2,),
    )
    x = torch.arange(4.0, requires_grad=True)
    assert torch.equal(torch.autograd.grad(cubed(x).sum(), x)[0], 3.0 * x.detach() ** 2)
    y = rms_norm(x, level="reference")
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
