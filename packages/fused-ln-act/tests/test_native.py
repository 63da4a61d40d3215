"""PyTorch's own operators in a row: what lies between two of them must not overflow where the result does not."""

import pytest
import torch

from kernel_pytorch.fused_ln_act.norm.levels import native
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS, activate


@pytest.mark.parametrize("incoming", [0.0, 0.1, 2.0, 100.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_native_gradient_is_finite_in_float16_where_that_of_the_definition_is(name, incoming):
    """Up to where float16 ends: x times the incoming gradient is beyond it, the gradient itself is not."""
    x = torch.tensor([-6e4, -3e4, -300.0, -10.0, 0.0, 10.0, 300.0, 3e4, 6e4], dtype=torch.float16).requires_grad_()
    ours, definition = native.activate(x, name), activate(x.float(), name).half()
    (found,), (expected,) = (torch.autograd.grad(y, x, torch.full_like(y, incoming)) for y in (ours, definition))
    finite = expected.isfinite()
    assert finite.sum() >= 7
    # The slope of a sigmoid that was rounded to one is lost, here times 100.
    torch.testing.assert_close(found[finite], expected[finite], rtol=2e-3, atol=1e-2)
