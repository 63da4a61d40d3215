"""Level "torchscript" of every operation: what PyTorch gets wrong there is put right, or refused by name."""

from types import FunctionType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.fused_ln_act._core.torchscript import scripted
from kernel_pytorch.fused_ln_act.norm.levels import reference
from kernel_pytorch.harness.checks import case_arguments
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.technique import Level

CPU = torch.device("cpu")
CASES = [
    pytest.param(operation, implementation, id=f"{technique.name}-{operation.name}")
    for technique in discover().select(None)
    for operation in technique.operations
    for implementation in operation.implementations
    if implementation.level is Level.TORCHSCRIPT and operation.differentiable
]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def prepared(operation, implementation):
    """The level as a function of its first argument, and that."""
    case = next(c for c in operation.test_grid if c.core and c.dtype == torch.float32)
    x, *rest = case_arguments(operation, case, CPU)
    function = implementation.load()

    def call(x):
        found = function(x, *rest)
        return found if isinstance(found, torch.Tensor) else found[0]

    return call, x


@pytest.mark.parametrize(("operation", "implementation"), CASES)
def test_without_gradients_no_result_wants_one(operation, implementation):
    call, x = prepared(operation, implementation)
    trained = x.clone().requires_grad_()
    for _ in range(3):  # what its executor compiles after the first calls it keeps
        call(trained).sum().backward()
    for _ in range(3):
        with torch.no_grad():
            assert not call(trained).requires_grad
        with torch.inference_mode():
            assert call(trained).is_inference()
    assert call(trained).requires_grad


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_frozen_input_does_not_disturb_inference(trained):
    """Where only parameters wanted gradients, the executor kept a graph that saves results for a backward."""
    fresh = FunctionType(reference.layer_norm.__code__, reference.layer_norm.__globals__, "layer_norm")
    fresh.__annotations__, fresh.__module__ = reference.layer_norm.__annotations__, reference.__name__
    call = scripted(fresh)
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    for _ in range(3):
        parameters = {"weight": weight.clone(), "bias": bias.clone()}
        parameters[trained].requires_grad_()
        call(x, parameters["weight"], parameters["bias"], 1e-5).sum().backward()
    for _ in range(3):
        with torch.inference_mode():
            y = call(x, weight, bias, 1e-5)
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,), weight, bias))


@pytest.mark.parametrize(("operation", "implementation"), CASES)
def test_transforms_are_refused_by_name(operation, implementation):
    call, x = prepared(operation, implementation)
    with pytest.raises(RuntimeError, match=f"level 'torchscript' of {operation.name} cannot run here: .* transforms"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize(("operation", "implementation"), CASES)
def test_a_checkpoint_works_or_is_refused_by_name(operation, implementation):
    call, x = prepared(operation, implementation)
    expected = torch.autograd.grad(call(trained := x.clone().requires_grad_()).sum(), trained)[0]
    for _ in range(3):
        y = checkpoint(call, trained, use_reentrant=False)
        if operation.name == "bias_dropout_add":  # it saves nothing, so nothing is computed again
            y.sum().backward()
            torch.testing.assert_close(trained.grad, expected)
        else:
            with pytest.raises(RuntimeError, match=rf"{operation.name} cannot run here: a checkpoint .*reentrant=True"):
                y.sum().backward()
        trained.grad = None
        checkpoint(call, trained, use_reentrant=True).sum().backward()
        torch.testing.assert_close(trained.grad, expected)
        trained.grad = None


def test_every_package_with_the_level_is_found():
    assert len(CASES) >= 17, [case.id for case in CASES]
