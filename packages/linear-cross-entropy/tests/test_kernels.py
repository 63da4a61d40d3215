"""What the Triton kernels promise besides being right: launches, reproducibility, layouts, configurations."""

import math

import pytest
import torch

from kernel_pytorch.harness.checks import check_deterministic, check_rows_independent
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy
from kernel_pytorch.linear_cross_entropy._core.plans import forget_plans
from kernel_pytorch.linear_cross_entropy._core.sizes import exceeds_int32
from kernel_pytorch.linear_cross_entropy.kernels import chunks, configurations

matmul = pytest.importorskip("kernel_pytorch.linear_cross_entropy.kernels.matmul")


def problem(device, tokens=21, depth=16, words=70, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, depth, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(words, depth, device=device, dtype=dtype) / math.sqrt(depth)).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), device=device)


def level(hidden, weight, target, **options):
    return linear_cross_entropy(hidden, weight, target, level="triton", **options)


def test_launches(device):
    hidden, weight, target = problem(device)
    with count_launches() as launched:
        loss = level(hidden, weight, target, chunk=32)
    assert launched == ["_forward_kernel", "_join_kernel"]
    with count_launches() as launched:
        loss.backward()
    assert launched == ["_gradient_kernel"] * 3  # of 32, 32 and 6 words
    logits = torch.randn(21, 70, device=device, requires_grad=True)
    with count_launches() as launched:
        cross_entropy(logits, target, level="triton").backward()
    assert launched == ["_logits_forward_kernel", "_join_kernel", "_logits_backward_kernel"]


@pytest.mark.parametrize("words", [1, 70, 300])
def test_bitwise_reproducible(words, device):
    hidden, weight, target = problem(device, words=words)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none"}
    check_deterministic(lambda h, w: level(h, w, target, **options), [hidden, weight])
    check_deterministic(
        lambda z: cross_entropy(z, target, level="triton", **options), [torch.randn(21, words, device=device)]
    )


def test_a_loss_does_not_depend_on_the_number_of_tokens(device):
    hidden, weight, target = problem(device)
    folded = hidden.detach().view(7, 3, 16)  # its gradient is a product of PyTorch's, which promises nothing
    check_rows_independent(
        lambda h, t: level(h, weight, t, reduction="none", label_smoothing=0.1), [folded, target.view(7, 3)]
    )
    logits = torch.randn(7, 3, 70, device=device, requires_grad=True)
    check_rows_independent(
        lambda z, t: cross_entropy(z, t, reduction="none", level="triton"), [logits, target.view(7, 3)]
    )


@pytest.fixture
def plan_anew():
    """Forget the plans, which rest on what a test changes, when it says so and when it ends."""
    yield forget_plans
    forget_plans()


@pytest.mark.parametrize("shape", [(40, 48, 80), (33, 16, 8), (19, 32, 70)])
def test_descriptors_and_pointers_give_the_same(shape, monkeypatch, plan_anew, device):
    hidden, weight, target = problem(device, *shape)
    results, asked = [], []
    for engine in (True, False):
        if device.type == "cpu":  # a GPU may have none
            monkeypatch.setattr(matmul, "copy_engine", lambda device, engine=engine: asked.append(engine) or engine)
        plan_anew()
        own = []
        for options in ({}, {"chunk": 512}):  # gradients with the loss, or in a backward
            loss = level(hidden, weight, target, label_smoothing=0.1, **options)
            own += [loss, *torch.autograd.grad(loss, (hidden, weight))]
        results.append(own)
    assert device.type != "cpu" or asked == [True] * 3 + [False] * 3
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: tensor cores")
@pytest.mark.parametrize("words", [5000, 5003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["native", "triton"])
@pytest.mark.parametrize(
    "given",
    [{"softcap": 5.0, "label_smoothing": 0.1, "chunk": 1024}, {"softcap": 5.0}, {"label_smoothing": 0.1}],
    ids=["logits again", "capped", "smoothed"],
)
def test_tensor_cores(given, name, dtype, words, monkeypatch, plan_anew, device):
    """16 bits at a size with many tiles and chunks, against float64."""
    monkeypatch.setattr(chunks, "MOST_LOGITS", 1)
    plan_anew()
    hidden, weight, target = problem(device, 4100, 640, words, dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    options = {"z_loss": 1e-3, **{key: value for key, value in given.items() if key != "chunk"}}
    loss = linear_cross_entropy(hidden, weight, target, level=name, **given, z_loss=1e-3)
    truth = linear_cross_entropy(*exact, target, level="reference", **options)
    assert abs(loss.item() - truth.item()) < 1e-5 * truth.item()
    found, right = (torch.autograd.grad(y, t) for y, t in ((loss, (hidden, weight)), (truth, exact)))
    for a, b in zip(found, right, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 8.6 GB of bfloat16")
def test_logits_past_2_to_the_31(device):
    logits = torch.zeros(2**14 + 3, 2**18, device=device, dtype=torch.bfloat16)
    logits[-1, -1] = 3.0
    target = torch.full(logits.shape[:1], 2**18 - 1, device=device)
    loss = cross_entropy(logits, target, reduction="none", level="triton")
    torch.testing.assert_close(loss[-2:], cross_entropy(logits[-2:], target[-2:], reduction="none", level="reference"))
    torch.testing.assert_close(loss[:1], loss[-2:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 2^31 logits, which are never there")
def test_a_product_past_2_to_the_31(device):
    tokens, words = 2**14 + 8, 2**17 + 8
    hidden = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, 64, device=device, dtype=torch.bfloat16) * 0.1
    target = torch.randint(words, (tokens,), device=device)
    loss = level(hidden, weight, target, reduction="none")
    (gradient,) = torch.autograd.grad(loss, hidden, torch.ones_like(loss))
    tail = hidden[-3:].detach().double().requires_grad_()
    expected = linear_cross_entropy(tail, weight.double(), target[-3:], reduction="none", level="reference")
    torch.testing.assert_close(loss[-3:].double(), expected, rtol=1e-5, atol=1e-5)
    (exact,) = torch.autograd.grad(expected, tail, torch.ones_like(expected))
    assert ((gradient[-3:].double() - exact).norm() / exact.norm()).item() < 6e-3


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 8), (2**31, 1), True),
        ((2**20, 4096), (4096, 1), True),
        ((2**18, 4096), (4096, 1), False),
        ((1, 8), (2**40, 1), False),
    ],
    ids=["large stride", "large tensor", "half of the limit", "stride of a single row"],
)
def test_wide_offsets_where_they_are_needed(shape, stride, expected):
    assert exceeds_int32(torch.empty_strided(shape, stride, device="meta")) is expected


def test_long_offsets_compute_the_same(monkeypatch, plan_anew, device):
    hidden, weight, target = problem(device)
    results = []
    for long in (False, True):
        monkeypatch.setattr(matmul, "exceeds_int32", lambda *tensors, long=long: long)
        monkeypatch.setattr(matmul, "copy_engine", lambda device: False)
        plan_anew()
        own = []
        for options in ({}, {"chunk": 512}):
            loss = level(hidden, weight, target, **options)
            own += [loss, *torch.autograd.grad(loss, (hidden, weight))]
        results.append(own)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_full_precision_unless_torch_allows_tf32():
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    assert matmul.precision_of(torch.float32) == ("ieee", True)
    try:
        switch.fp32_precision = "tf32"
        assert matmul.precision_of(torch.float32) == ("tf32", False)
        assert matmul.precision_of(torch.float64) == ("ieee", True)
        assert matmul.precision_of(torch.bfloat16) == ("ieee", False)
    finally:
        switch.fp32_precision = before


# Configurations.

SHARED_KIB = {80: 163, 90: 227, 100: 227, 120: 99}


def shared_bytes(chosen, stored):
    """What the copies take, and the tile that is on its way out, where one is stored."""
    copies = chosen.stages * (chosen.rows + chosen.columns) * chosen.depth * 2
    return copies + stored * chosen.rows * chosen.columns // chosen.parts * 2


@pytest.mark.parametrize(("table", "stored"), [("FORWARD", False), ("GRADIENT", True)])
def test_every_configuration_fits_its_architecture(table, stored):
    for architecture, chosen in getattr(configurations, table).tensor_cores.items():
        limit = SHARED_KIB[architecture] * 1024
        assert shared_bytes(chosen, stored) * chosen.programs <= limit, (architecture, chosen)
    too_large = configurations.Configuration(128, 256, 64, 5, 8)
    assert shared_bytes(too_large, True) > SHARED_KIB[90] * 1024


@pytest.mark.parametrize(
    ("architecture", "itemsize", "exact", "regular", "expected"),
    [
        (90, 2, False, True, configurations.FORWARD.tensor_cores[90]),
        (86, 2, False, True, configurations.FORWARD.tensor_cores[120]),
        (103, 2, False, True, configurations.FORWARD.tensor_cores[100]),
        (90, 4, True, True, configurations.FORWARD.exact[4]),
        (80, 2, False, False, configurations.IRREGULAR),
        (None, 2, False, True, configurations.INTERPRETED),
    ],
)
def test_the_configuration_that_is_chosen(architecture, itemsize, exact, regular, expected):
    chosen = configurations.configuration(configurations.FORWARD, architecture, itemsize, exact, regular)
    assert chosen == expected


def test_tf32_takes_as_many_bytes():
    half, whole = (configurations.configuration(configurations.FORWARD, 90, size, False, True) for size in (2, 4))
    assert half.depth * 2 == whole.depth * 4
