"""Each check passes what is right and has been seen to fail what it is for."""

from __future__ import annotations

import functools

import pytest
import torch

from kernel_pytorch.harness import checks
from kernel_pytorch.harness.trials import RANDOM, Trial

CPU = torch.device("cpu")


def gate(x, weight, factor=2.0):
    return torch.sigmoid(x * weight) * factor


def rounded_alike(x, weight):
    """Elements of which none knows where in a vector of the processor it lies, as those of a sigmoid do on some."""
    return torch.relu(x * weight) * 2.0


def arguments(rows=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 5, generator=generator), torch.randn(5, generator=generator)]


class ForgetfulWeight(torch.autograd.Function):
    """The product, whose weight gets its gradient only if x wants one too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) if ctx.needs_input_grad[0] else None


class OnceDifferentiable(torch.autograd.Function):
    """The square, whose backward autograd cannot see into."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


@pytest.fixture
def _eager_backend(monkeypatch):
    """torch.compile without TorchInductor: what the check compares matters here, not what compiles."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def test_gradients_of_every_combination():
    checks.check_gradient_combinations(gate, arguments())
    checks.check_gradient_combinations(gate, [*arguments(), 3.0])


def test_a_gradient_that_is_missing_in_one_combination():
    with pytest.raises(AssertionError, match=r"argument 1 with gradients wanted for \[1\]: gradient is missing"):
        checks.check_gradient_combinations(ForgetfulWeight.apply, arguments())


def test_a_gradient_that_differs_in_one_combination():
    def careless(x, weight):
        return gate(x, weight) if weight.requires_grad else gate(x, weight) * 1.5

    with pytest.raises(AssertionError, match=r"argument 0 with gradients wanted for \[0\]: Tensor-likes are not close"):
        checks.check_gradient_combinations(careless, arguments())


def test_a_gradient_that_was_not_requested():
    def generous(x, weight):
        return gate(x.requires_grad_(), weight.requires_grad_())

    with pytest.raises(AssertionError, match=r"argument 1 with gradients wanted for \[0\]: has a gradient that was"):
        checks.check_gradient_combinations(generous, arguments())


def test_an_output_without_any_gradient():
    with pytest.raises(AssertionError, match=r"no output has a gradient, wanted for arguments \[0\]"):
        checks.check_gradient_combinations(lambda x, weight: gate(x.detach(), weight), arguments())


def test_second_derivatives():
    checks.check_second_derivatives(gate, arguments(2))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        checks.check_second_derivatives(OnceDifferentiable.apply, arguments(2)[:1])
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        checks.check_second_derivatives(lambda x: x.detach() * x, arguments(2)[:1])


@pytest.mark.usefixtures("_eager_backend")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_and_eager(dynamic):
    checks.check_compiled_equals_eager(gate, arguments(), dynamic=dynamic)

    def two_faced(x, weight):
        return gate(x, weight, 2.5 if torch.compiler.is_compiling() else 2.0)

    with pytest.raises(AssertionError, match="result 0: Tensor-likes are not equal"):
        checks.check_compiled_equals_eager(two_faced, arguments(), dynamic=dynamic)

    def wrong_gradient(x, weight):
        return gate(x, weight.detach() + 0 * weight if torch.compiler.is_compiling() else weight)

    with pytest.raises(AssertionError, match="result 2: Tensor-likes are not equal"):
        checks.check_compiled_equals_eager(wrong_gradient, arguments(), dynamic=dynamic)


@pytest.mark.usefixtures("_eager_backend")
def test_a_function_that_breaks_the_graph():
    def breaking(x, weight):
        torch._dynamo.graph_break()
        return gate(x, weight)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        checks.check_compiled_equals_eager(breaking, arguments(), dynamic=False)


def test_export():
    program = checks.check_export(gate, [*arguments(), 3.0])
    assert isinstance(program, torch.export.ExportedProgram)


def test_export_of_a_function_that_looks_at_the_data():
    with pytest.raises(Exception, match=r"data-dependent|Could not guard"):
        checks.check_export(lambda x, weight: gate(x, weight) if x.sum() > 0 else x, arguments())


def test_export_of_a_function_made_for_one_size():
    def fixed(x, weight):
        return gate(x, weight) if x.shape[0] == 6 else x

    with pytest.raises(Exception, match="batch"):
        checks.check_export(fixed, arguments())


def test_export_whose_graph_holds_a_number_of_the_first_call():
    def frozen(x, weight):
        return gate(x, weight) * (3.0 if torch.compiler.is_compiling() else 2.0)

    with pytest.raises(AssertionError, match="not equal"):
        checks.check_export(frozen, arguments())


def test_determinism():
    checks.check_deterministic(gate, arguments())
    calls = []

    def drifting(x, weight):
        calls.append(x)
        return gate(x, weight) + 1e-6 * len(calls)

    with pytest.raises(AssertionError, match="result 0: Tensor-likes are not equal"):
        checks.check_deterministic(drifting, arguments())


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_rows_that_do_not_know_of_each_other(rows):
    checks.check_rows_independent(rounded_alike, arguments(rows))


def test_rows_that_depend_on_how_many_there_are():
    with pytest.raises(AssertionError, match="1 of 6 leading rows: Tensor-likes are not equal"):
        checks.check_rows_independent(lambda x, weight: rounded_alike(x, weight) - x.mean(), arguments())
    with pytest.raises(AssertionError, match="5 of 6 leading rows"):
        checks.check_rows_independent(lambda x, w: rounded_alike(x, w) + (x.shape[0] == 5), arguments())


def test_a_trial(toy, monkeypatch):
    operation, trial = toy.gate, Trial(toy.gate.test_grid.cases()[0], RANDOM)
    for level in ("reference", "native", "compile"):
        checks.check_trial(toy.technique, operation, operation.implementation(level), trial, CPU)
    with pytest.raises(checks.Skipped, match=r"^the toy has no kernel$"):
        checks.check_trial(toy.technique, operation, operation.implementation("cuda"), trial, CPU)
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) + 1)
    with pytest.raises(AssertionError, match=r"toy gate level 'native', case plain \[.*\] float32: output is off by"):
        checks.check_trial(toy.technique, operation, operation.implementation("native"), trial, CPU)


def test_case_arguments_are_those_of_the_random_trial(toy):
    case = toy.gate.test_grid.cases()[0]
    x, weight, factor = checks.case_arguments(toy.gate, case, CPU)
    assert (x.shape, weight.shape, factor) == ((4, 16), (16,), 1.5)
