"""Cross entropy of the library: instruction sets, dtypes, gradients, in place, bits, bad input.

Verification against float64 is that of linear-cross-entropy, whose level "cuda" it is.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, cross_entropy
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export

operators = torch.ops.kernel_pytorch_cuda
PLAIN = (-100, 0.0, 0.0, 0.0)
EVERYTHING = (-100, 0.1, 1e-4, 30.0)


def definition(logits, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    largest = z.detach().amax(-1, keepdim=True)
    z = z - largest  # even float64 would lose the logarithm beside a logit of 1e30
    log_sum = z.logsumexp(-1)
    counts = (target != ignore_index) & (target >= 0) & (target < z.shape[-1])
    picked = z.gather(-1, target.clamp(0, z.shape[-1] - 1).long().unsqueeze(-1)).squeeze(-1)
    loss = log_sum - (1 - label_smoothing) * picked
    loss = loss + z_loss * (largest.squeeze(-1) + log_sum) ** 2 if z_loss else loss
    loss = loss - label_smoothing * z.mean(-1) if label_smoothing else loss
    return loss.masked_fill(~counts, 0.0)


AGAINST_FLOAT64 = """
    import torch
    from kernel_pytorch.cuda_ops import cross_entropy
    torch.manual_seed(0)
    bounds = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 3e-6, torch.float64: 1e-14}
    for dtype, bound in bounds.items():
        for words in (1, 5, 16, 33, 4096, 4097, 9001):
            for smoothing, z_loss, softcap in ((0.0, 0.0, 0.0), (0.1, 1e-3, 5.0)):
                logits = (3 * torch.randn(7, words)).to(dtype).requires_grad_()
                target = torch.randint(words, (7,))
                target[2] = -100
                loss = cross_entropy(logits, target, -100, smoothing, z_loss, softcap, "none")
                (gradient,) = torch.autograd.grad(loss.sum(), logits)
                wide = logits.detach().double().requires_grad_()
                z = softcap * torch.tanh(wide / softcap) if softcap else wide
                lse = z.logsumexp(-1)
                picked = z.gather(-1, target.clamp(0)[:, None])[:, 0]
                truth = lse - (1 - smoothing) * picked - smoothing * z.mean(-1) + z_loss * lse**2
                truth = truth.masked_fill(target == -100, 0.0)
                (expected,) = torch.autograd.grad(truth.sum(), wide)
                wrong = (loss.double() - truth).abs().max().item(), (gradient.double() - expected).abs().max().item()
                assert wrong[0] < min(bound, 3e-6) * 10 and wrong[1] < bound, (dtype, words, softcap, wrong)
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_is_right(instruction_set, run_on):
    run_on(instruction_set, AGAINST_FLOAT64)


@pytest.mark.cpu_backend
def test_extreme_logits():
    """One block of -inf before any number, huge ones, none at all, NaN: as the definition has it."""
    rows = [
        torch.cat([torch.full((5000,), -float("inf")), torch.zeros(3)]),
        torch.cat([torch.full((5000,), 1e30), torch.zeros(3)]),
        torch.linspace(-1e4, 1e4, 5003),
        torch.cat([torch.zeros(5002), torch.tensor([float("nan")])]),
    ]
    logits, target = torch.stack(rows), torch.tensor([5001, 3, 5002, 1])
    found = cross_entropy(logits, target, reduction="none")
    truth = definition(logits.double(), target)
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_ignored_tokens_have_no_loss_and_no_gradient_whatever_their_logits():
    logits = torch.randn(4, 50)
    logits[1] = float("nan")
    logits.requires_grad_()
    target = torch.tensor([3, -100, 77, -1])
    loss = cross_entropy(logits, target, reduction="none")
    assert loss[1:].tolist() == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(gradient[1:], torch.zeros(3, 50))
    assert gradient[0].abs().sum() > 0


def of_rung(logits, target, scalars, number):
    """The losses, and the gradient of their sum, of a numbered kernel; 0 is the best one, and the CPU has one alone."""
    with rung(number):
        loss, normalizer = operators.cross_entropy(logits, target, *scalars)
    return loss, operators.cross_entropy_backward(torch.ones_like(loss), normalizer, logits, target, *scalars)


@pytest.mark.parametrize("words", [200, 4400])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("scalars", [PLAIN, (-100, 0.3, 0.0, 0.0)], ids=["plain", "smoothed"])
def test_a_common_offset_costs_no_digits(scalars, number, words, device):
    """The maximum and the logarithm of the sum are kept apart; their sum would have no digits left for this."""
    torch.manual_seed(0)
    logits, target = 4.0 * torch.randn(9, words, device=device), torch.randint(words, (9,), device=device)
    for offset in (0.0, 100.0, -1e3, 1e5):
        moved = logits + offset
        wide = (moved.double() - offset).requires_grad_()
        truth = definition(wide, target, *scalars)
        (expected,) = torch.autograd.grad(truth.sum(), wide)
        loss, gradient = of_rung(moved, target, scalars, number)
        torch.testing.assert_close(loss.double(), truth, rtol=0, atol=4e-6)
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("words", [200, 4400])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_are_those_of_pytorch(dtype, number, words, device):
    torch.manual_seed(0)
    logits, target = torch.randn(8, words, device=device), torch.randint(1, words - 1, (8,), device=device)
    logits[1, 2], logits[2, -1], logits[3] = float("nan"), float("nan"), float("nan")
    logits[4, -1], logits[5], logits[6, 0] = float("inf"), -float("inf"), -float("inf")
    logits = logits.to(dtype)
    wide = logits.float().requires_grad_()
    truth = F.cross_entropy(wide, target, reduction="none")
    (expected,) = torch.autograd.grad(truth.sum(), wide)
    loss, gradient = of_rung(logits, target, PLAIN, number)
    assert loss.isnan().tolist() == [False, True, True, True, True, True, False, False]
    torch.testing.assert_close(loss, truth, rtol=1e-5, atol=1e-5, equal_nan=True)
    atol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        gradient.float(), expected, rtol=2e-2 if atol > 1e-3 else 1e-5, atol=atol, equal_nan=True
    )


def test_a_weight_of_zero_leaves_nan():
    logits, target = torch.randn(2, 50), torch.tensor([3, 4])
    logits[1, 7] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, target, reduction="none")
    (gradient,) = torch.autograd.grad(loss, logits, torch.zeros_like(loss))
    assert gradient.isnan().all(1).tolist() == [False, True]
    assert not gradient[0].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction):
    logits, target = torch.randn(3, 4, 20, requires_grad=True), torch.randint(20, (3, 4), dtype=torch.int32)
    target[0, 1] = -100
    ours = cross_entropy(logits, target, reduction=reduction)
    theirs = F.cross_entropy(logits.flatten(0, 1), target.flatten().long(), reduction=reduction)
    torch.testing.assert_close(ours.flatten(), theirs.flatten())
    for a, b in zip(torch.autograd.grad(ours.sum(), logits), torch.autograd.grad(theirs.sum(), logits), strict=True):
        torch.testing.assert_close(a, b)
    assert cross_entropy(logits, torch.full_like(target, -100)).item() == 0.0


@pytest.mark.parametrize("scalars", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_second_derivatives(scalars):
    logits, target = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, 2])
    torch.autograd.gradgradcheck(lambda z: cross_entropy(z, target, *scalars), logits)


@pytest.mark.parametrize("scalars", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_in_place(scalars):
    source, target = torch.randn(6, 40, requires_grad=True), torch.randint(40, (6,))
    gradients = []
    for inplace in (False, True):
        logits = source * 1.0
        (found,) = torch.autograd.grad(cross_entropy(logits, target, *scalars, "mean", inplace), logits)
        gradients.append(found)
        assert (found.data_ptr() == logits.data_ptr()) is inplace
    assert torch.equal(*gradients)
    logits = source * 1.0
    loss = cross_entropy(logits, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_is_a_flag():
    with pytest.raises(TypeError, match="inplace: given int; it must be a bool"):
        cross_entropy(torch.randn(3, 8), torch.tensor([1, 2, 3]), inplace=1)


def test_in_place_leaves_alone_what_others_see():
    expanded = torch.randn(1, 40, requires_grad=True).expand(3, 40)
    (found,) = torch.autograd.grad(cross_entropy(expanded, torch.tensor([1, 2, 3]), inplace=True), expanded)
    assert found.data_ptr() != expanded.data_ptr()
    logits = torch.randn(3, 40, requires_grad=True)
    kept = logits.detach().clone()
    loss = cross_entropy(logits * 1.0, torch.tensor([1, 2, 3]), inplace=True)
    torch.autograd.grad(torch.autograd.grad(loss, logits, create_graph=True)[0].sum(), logits)
    assert torch.equal(logits, kept)


BITS = """
    import torch
    from kernel_pytorch.cuda_ops import cross_entropy
    torch.manual_seed(0)
    logits, target = torch.randn(300, 5000, requires_grad=True), torch.randint(5000, (300,))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        loss = cross_entropy(logits, target, reduction="none")
        found.append((loss, *torch.autograd.grad(loss, logits, torch.ones_like(loss))))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
"""


def test_the_number_of_threads_changes_no_bit(run_on):
    run_on(LIBRARY.instruction_sets[-1], BITS)


def test_shapes_and_layouts():
    for shape in [(0, 8), (2, 0, 8), (1, 1), (2, 3, 17)]:
        logits = torch.randn(shape)
        target = torch.randint(shape[-1], shape[:-1])
        torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), definition(logits, target))
    logits, target = torch.randn(9, 4, 30).transpose(0, 1), torch.randint(30, (8, 18))[::2, ::2].t()[:4]
    target = torch.randint(30, (9, 4)).t()
    torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), definition(logits, target))
    shared = torch.randint(30, (9,))
    torch.testing.assert_close(cross_entropy(logits, shared, reduction="none"), definition(logits, shared.expand(4, 9)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("scalars", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_opcheck(scalars, device):
    logits, target = torch.randn(4, 3, 8, device=device, requires_grad=True), torch.randint(8, (4, 3), device=device)
    torch.library.opcheck(operators.cross_entropy.default, (logits, target, *scalars))
    torch.library.opcheck(operators.cross_entropy.default, (logits.transpose(0, 1), target.t(), *scalars))
    dloss, normalizer = torch.randn(4, 3, device=device), torch.randn(4, 3, 2, device=device)
    torch.library.opcheck(operators.cross_entropy_backward.default, (dloss, normalizer, logits, target, *scalars))
    torch.library.opcheck(
        operators.cross_entropy_backward_.default, (dloss, normalizer, logits.detach(), target, *scalars)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    target = torch.randint(40, (6,), device=device)
    logits = torch.randn(6, 40, device=device, requires_grad=True)
    check_compiled_equals_eager(lambda z: cross_entropy(z, target, reduction="none"), [logits], dynamic=dynamic)


def test_export(device):
    logits, target = torch.randn(6, 3, 40, device=device), torch.randint(40, (6, 3), device=device)
    program = check_export(lambda z, t: cross_entropy(z, t), [logits, target])
    assert sum("kernel_pytorch_cuda" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter(device):
    logits = torch.randn(4, 8, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(logits, torch.zeros(4, dtype=torch.int64, device=device), reduction="sum").backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.cross_entropy] == 4 * 32
    assert counts[operators.cross_entropy_backward] == 5 * 32


def test_bad_input_is_named():
    logits, target = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    for message, arguments in {
        r"cross_entropy: target: shape is \(3,\); it must be that of logits, \(4, 8\)": (logits, target[:3], *PLAIN),
        "cross_entropy: target: allowed dtypes are int64 and int32": (logits, target.short(), *PLAIN),
        "logits: dtype is torch.int32; allowed are float16": (logits.int(), target, *PLAIN),
        r"logits: shape is \(4, 0\)": (logits[:, :0], target, *PLAIN),
        "label_smoothing: given 2; allowed is from 0 to 1": (logits, target, -100, 2.0, 0.0, 0.0),
        "softcap: given -1; it must be positive": (logits, target, -100, 0.0, 0.0, -1.0),
        "z_loss: given -1; it must not be negative": (logits, target, -100, 0.0, -1.0, 0.0),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            operators.cross_entropy(*arguments)
    with pytest.raises(RuntimeError, match=r"cross_entropy_backward: dloss: shape is \(3,\)"):
        operators.cross_entropy_backward(torch.ones(3), torch.ones(4, 2), logits, target, *PLAIN)
    with pytest.raises(RuntimeError, match="must be contiguous to be written over"):
        operators.cross_entropy_backward_(
            torch.ones(8), torch.ones(8, 2), torch.randn(4, 8).t(), torch.zeros(8).long(), *PLAIN
        )
    with pytest.raises(ValueError, match="reduction: given 'median'; allowed are 'mean', 'sum', 'none'"):
        cross_entropy(logits, target, reduction="median")
