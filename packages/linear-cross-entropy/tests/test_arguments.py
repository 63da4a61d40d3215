"""What the public functions refuse: targets that are no words, and every other argument that does not fit."""

import pytest
import torch

from kernel_pytorch.linear_cross_entropy import (
    CrossEntropyLoss,
    LinearCrossEntropy,
    cross_entropy,
    linear_cross_entropy,
)
from kernel_pytorch.linear_cross_entropy.functional import CHECK_VARIABLE

LEVELS = ["reference", "native", "torchscript", "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def problem(device="cpu", dtype=torch.float32, tokens=11, depth=16, words=37):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, depth, device=device, dtype=dtype)
    weight = torch.randn(words, depth, device=device, dtype=dtype) / depth**0.5
    target = torch.randint(words, (tokens,), device=device)
    target[2] = -100
    return hidden, weight, target


# Targets.


@pytest.mark.parametrize("level", [None, *LEVELS, "compile"])
@pytest.mark.parametrize(("wrong", "position"), [(37, 4), (-1, 7), (2**40, 0)])
def test_a_target_that_is_no_word_is_told_of_on_the_cpu(level, wrong, position):
    hidden, weight, target = problem()
    target[position] = wrong
    target[9] = 99  # the first one is named
    message = rf"target: {wrong} at position \({position},\); allowed are 0 to 36, and ignore_index -100"
    with pytest.raises(IndexError, match=message):
        linear_cross_entropy(hidden, weight, target, level=level)
    with pytest.raises(IndexError, match=message):
        cross_entropy(hidden @ weight.T, target, level=level)


def test_a_compiled_function_checks_its_targets_too():
    hidden, weight, target = problem()
    compiled = torch.compile(lambda h, t: linear_cross_entropy(h, weight, t), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, target), linear_cross_entropy(hidden, weight, target))
    with pytest.raises(IndexError, match=r"target: 40 at position \(0,\)"):
        compiled(hidden, torch.full_like(target, 40))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked for by torch 2.11
@pytest.mark.parametrize("level", [*LEVELS, "compile"])
def test_without_the_check_such_tokens_are_ignored(level, device, monkeypatch):
    """What a GPU does unless it is asked: `is_checked` is where the two part."""
    from kernel_pytorch.linear_cross_entropy import functional

    monkeypatch.setattr(functional, "is_checked", lambda target: False)
    hidden, weight, target = (t.requires_grad_(t.is_floating_point()) for t in problem(device))
    wild = target.clone()
    wild[3], wild[5] = 37, -(2**62)
    target[3] = target[5] = -100
    for call in (
        lambda t: linear_cross_entropy(hidden, weight, t, label_smoothing=0.1, level=level),
        lambda t: cross_entropy(hidden @ weight.T, t, label_smoothing=0.1, level=level),
    ):
        torch.testing.assert_close(call(wild), call(target))
        for a, b in zip(*(torch.autograd.grad(call(t), (hidden, weight)) for t in (wild, target)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("value", "checked"), [("1", True), ("0", False), ("", False), (None, False)])
def test_elsewhere_targets_are_checked_only_where_that_is_asked_for(value, checked, monkeypatch):
    from kernel_pytorch.linear_cross_entropy.functional import is_checked

    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(CHECK_VARIABLE, value)
    assert is_checked(torch.empty(3, device="meta", dtype=torch.int64)) is checked
    assert is_checked(torch.empty(3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, whose targets are not looked at")
@pytest.mark.parametrize("level", [None, "reference", "native", "triton"])
def test_a_gpu_says_so_when_asked(level, device, monkeypatch):
    hidden, weight, target = problem(device)
    target[4] = 37
    assert linear_cross_entropy(hidden, weight, target, level=level).isfinite()
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    with pytest.raises(IndexError, match=r"target: 37 at position \(4,\)"):
        linear_cross_entropy(hidden, weight, target, level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_an_ignore_index_that_no_32_bit_target_holds(level, device):
    """Compared in 32 bits it would be word 0."""
    hidden, weight, target = problem(device)
    target = torch.zeros_like(target)
    options = {"ignore_index": -(2**40), "reduction": "none", "level": level}
    each = linear_cross_entropy(hidden, weight, target.int(), **options)
    torch.testing.assert_close(each, linear_cross_entropy(hidden, weight, target, **options))
    assert (each > 0).all()
    each = cross_entropy(hidden @ weight.T, target.int(), **options)
    assert (each > 0).all()
    with pytest.raises(IndexError, match=r"target: -5 at position \(0,\)"):
        linear_cross_entropy(hidden.cpu(), weight.cpu(), (target.cpu() - 5).int(), ignore_index=2**32 - 5)


# Bad input.

hidden, weight, target = problem()
logits = hidden @ weight.T
loss = linear_cross_entropy
BAD = {
    "no tensor": (lambda: loss([1.0], weight, target), TypeError, "hidden: given list"),
    "integer hidden": (lambda: loss(hidden.long(), weight, target), TypeError, "hidden: dtype is torch.int64; allowed"),
    "sparse": (lambda: loss(hidden.to_sparse(), weight, target), TypeError, "hidden: layout is torch.sparse_coo"),
    "scalar": (lambda: loss(hidden[0, 0], weight, target), ValueError, r"hidden: shape is \(\)"),
    "weight shape": (lambda: loss(hidden, weight.T, target), ValueError, r"weight: shape is \(16, 37\).* the last 16"),
    "weight dimensions": (lambda: loss(hidden, weight[0], target), ValueError, r"weight: shape is \(16,\)"),
    "no words": (lambda: loss(hidden, weight[:0], target), ValueError, r"weight: shape is \(0, 16\); it must have at"),
    "weight dtype": (lambda: loss(hidden, weight.half(), target), TypeError, "weight: dtype is torch.float16; it must"),
    "weight device": (lambda: loss(hidden, weight.to("meta"), target), ValueError, "weight: device is meta"),
    "bias shape": (
        lambda: loss(hidden, weight, target, bias=hidden[0]),
        ValueError,
        r"bias: shape is \(16,\).* \(37,\)",
    ),
    "bias dtype": (
        lambda: loss(hidden, weight, target, bias=weight[:, 0].double()),
        TypeError,
        "bias: dtype is torch.f",
    ),
    "target shape": (lambda: loss(hidden, weight, target[:3]), ValueError, r"target: shape is \(3,\).* \(11,\)"),
    "target dtype": (
        lambda: loss(hidden, weight, target.float()),
        TypeError,
        "target: dtype is torch.float32; allowed",
    ),
    "target list": (lambda: loss(hidden, weight, [1]), TypeError, "target: given list"),
    "target device": (lambda: loss(hidden, weight, target.to("meta")), ValueError, "target: device is meta"),
    "ignore_index": (lambda: loss(hidden, weight, target, ignore_index=1.0), TypeError, "ignore_index: given float"),
    "ignore_index size": (
        lambda: loss(hidden, weight, target, ignore_index=2**63),
        ValueError,
        "ignore_index: given 9223372036854775808; it must fit into 64 bits",
    ),
    "label_smoothing": (
        lambda: loss(hidden, weight, target, label_smoothing=1.5),
        ValueError,
        "label_smoothing: given 1.5; allowed is 0 to 1",
    ),
    "smoothing text": (
        lambda: loss(hidden, weight, target, label_smoothing="0"),
        TypeError,
        "label_smoothing: given str",
    ),
    "z_loss": (lambda: loss(hidden, weight, target, z_loss=-1.0), ValueError, "z_loss: given -1.0; it must not be neg"),
    "z_loss nan": (lambda: loss(hidden, weight, target, z_loss=float("nan")), ValueError, "z_loss: given nan; it must"),
    "softcap": (
        lambda: loss(hidden, weight, target, softcap=0.0),
        ValueError,
        "softcap: given 0.0; it must be above 0",
    ),
    "reduction": (lambda: loss(hidden, weight, target, reduction="avg"), ValueError, "reduction: given 'avg'; allowed"),
    "chunk": (lambda: loss(hidden, weight, target, chunk=0), ValueError, "chunk: given 0; it must be at least 1"),
    "chunk float": (lambda: loss(hidden, weight, target, chunk=2.0), TypeError, "chunk: given float"),
    "level": (
        lambda: loss(hidden, weight, target, level="cutlass"),
        ValueError,
        "level: given 'cutlass'; allowed are None",
    ),
    "logits": (lambda: cross_entropy(logits[0, 0], target), ValueError, r"logits: shape is \(\)"),
    "empty rows": (lambda: cross_entropy(logits[:, :0], target), ValueError, r"logits: shape is \(11, 0\)"),
    "words first": (
        lambda: cross_entropy(logits.T, target),
        ValueError,
        r"target: shape is \(11,\); for logits of shape",
    ),
    "module, level": (lambda: LinearCrossEntropy(8, 9, level="tritn"), ValueError, "level: given 'tritn'"),
    "module, chunk": (lambda: LinearCrossEntropy(8, 9, chunk=0), ValueError, "chunk: given 0; it must be at least 1"),
    "module, classes": (
        lambda: CrossEntropyLoss(weight=torch.ones(3)),
        ValueError,
        "weight: given Tensor; allowed is None",
    ),
    "module, average": (lambda: CrossEntropyLoss(size_average=True), ValueError, "size_average: given bool"),
    "module, reduction": (lambda: CrossEntropyLoss(reduction="avg"), ValueError, "reduction: given 'avg'"),
    "module, linear": (lambda: LinearCrossEntropy.from_torch(torch.nn.ReLU()), TypeError, "module: given ReLU"),
    "module, probabilities": (lambda: CrossEntropyLoss()(logits, logits), TypeError, "probabilities of words are not"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs bfloat16 kernels; the interpreter cannot")
def test_unavailable_level_says_why():
    with pytest.raises(RuntimeError, match=r"level 'triton' of linear_cross_entropy cannot run here: .*bfloat16"):
        linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target, level="triton")


def test_a_bool_is_no_number_and_a_number_no_bool():
    hidden, weight, target = problem()
    with pytest.raises(TypeError, match=r"^z_loss: given bool; it must be a Python number"):
        linear_cross_entropy(hidden, weight, target, z_loss=True)
    with pytest.raises(TypeError, match=r"^inplace: given 1; it must be True or False"):
        cross_entropy(hidden, target, inplace=1)


def test_a_layer_without_memory():
    hidden, weight, target = (torch.randn(3, 8), torch.randn(16, 8), torch.tensor([1, 2, 3]))
    assert linear_cross_entropy(hidden.to("meta"), weight.to("meta"), target.to("meta")).device.type == "meta"
    with pytest.raises(ValueError, match="weight"):
        linear_cross_entropy(hidden.to("meta"), weight, target.to("meta"))


@pytest.mark.parametrize(
    "call",
    [
        lambda target: torch.ops.kernel_pytorch.check_target(target, 8, -100),
        lambda target: linear_cross_entropy(torch.randn(64, 4), torch.randn(8, 4), target),
        lambda target: cross_entropy(torch.randn(64, 8), target),
    ],
    ids=["operator", "linear_cross_entropy", "cross_entropy"],
)
def test_a_target_whose_storage_was_freed_is_refused(call):
    """PyTorch's own comparison ends the process."""
    target = torch.zeros(64, dtype=torch.int64)
    target.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"target: shape is \(64,\), but its storage holds nothing; it was freed"):
        call(target)
