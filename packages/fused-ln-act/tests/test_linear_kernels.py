"""The kernels of `linear_act`: launches, memory and configurations."""

import math

import pytest
import torch

from kernel_pytorch.fused_ln_act import linear_act
from kernel_pytorch.fused_ln_act._core.plans import forget_plans
from kernel_pytorch.fused_ln_act.linear.kernels import configurations
from kernel_pytorch.harness.checks import check_deterministic
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.harness.memory import profile_memory

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


def layer(rows=9, depth=16, columns=24, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (rows, depth), (columns, depth), (columns,)
    x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [x.requires_grad_(), (weight / math.sqrt(depth)).requires_grad_(), bias.requires_grad_()]


def triton_level(x, weight, bias, activation="silu", save=True):
    return linear_act(x, weight, bias, activation, save_preactivation=save, level="triton")


# Kernels.


def products(call):
    """The matrix products that PyTorch itself runs in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    names = {event.key for event in profiler.key_averages()}
    return names & {"aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "aten::_addmm_activation"}


@pytest.mark.parametrize("level", ["triton", "native"])
def test_the_forward_is_no_product_of_pytorch(level, device):
    x, weight, bias = layer(device=device)
    found = products(lambda: linear_act(x, weight, bias, "gelu", level=level))
    assert bool(found) == (level == "native")


@pytest.mark.parametrize(
    ("activation", "save", "rows", "backward"),
    [
        ("gelu", True, 9, ["_linear_saved_backward_kernel"]),  # few rows, which one program sums up
        ("gelu", True, 600, ["_linear_saved_backward_kernel", "_add_shares_kernel"]),
        ("gelu", False, 9, ["_linear_backward_kernel", "_add_shares_kernel"]),
        ("relu", False, 600, ["_linear_saved_backward_kernel", "_add_shares_kernel"]),
        ("identity", True, 600, ["_linear_saved_backward_kernel", "_add_shares_kernel"]),
    ],
)
def test_launches(activation, save, rows, backward, device):
    arguments = layer(rows, device=device)
    with count_launches() as launched:
        y = triton_level(*arguments, activation, save)
    assert launched == ["_linear_kernel"]
    with count_launches() as launched:
        torch.autograd.grad(y.sum(), arguments)
    assert launched == backward


def test_only_what_is_needed_is_launched(device):
    x, weight, bias = layer(device=device)
    y = triton_level(x, weight, bias.detach(), "identity")
    with count_launches() as launched:
        torch.autograd.grad(y.sum(), (x, weight))
    assert launched == []
    y = triton_level(x.detach(), weight.detach(), bias, "identity")
    assert torch.equal(torch.autograd.grad(y, bias, torch.ones_like(y))[0], torch.full_like(bias, 9.0))


@pytest.mark.parametrize("save", [True, False])
def test_bitwise_reproducible(save, device):
    check_deterministic(lambda *t: triton_level(*t, "gelu", save), layer(70, 40, 48, device))


@pytest.mark.parametrize(
    ("activation", "save", "elements"),
    [("gelu", True, 9 * 24), ("gelu", False, 0), ("relu", True, 0), ("tanh", True, 0), ("identity", True, 0)],
)
def test_saved_for_the_backward(activation, save, elements, device):
    arguments = layer(device=device)
    use = profile_memory(lambda *t: triton_level(*t, activation, save), *arguments)
    assert use.saved_for_backward == 4 * elements


def test_without_gradients_nothing_is_written_for_them(monkeypatch, device):
    triton_forward = pytest.importorskip("kernel_pytorch.fused_ln_act.linear.kernels.forward")
    asked, plan = [], triton_forward.plan_linear
    monkeypatch.setattr(triton_forward, "plan_linear", lambda *a: asked.append(a[-1]) or plan(*a))
    x, weight, bias = layer(device=device)
    for arguments, wanted in (((x, weight, bias), True), ((x, weight, bias), False), (detached(x, weight, bias), True)):
        forget_plans()  # each of these is planned anew, and the plan looked at
        with torch.set_grad_enabled(wanted):
            triton_level(*arguments)
    assert asked == [True, False, False]


def detached(*tensors):
    return [tensor.detach() for tensor in tensors]


# Configurations.

TABLES = {
    "LINEAR": (configurations.LINEAR, 1),
    "LINEAR_BACKWARD": (configurations.LINEAR_BACKWARD, 1),
    "GATED": (configurations.GATED, 2),
    "GATED_BACKWARD": (configurations.GATED_BACKWARD, 2),
}
SHARED_KIB = {80: 163, 90: 227, 100: 227, 120: 99}


def shared_bytes(chosen, tiles):
    """What the copies take, and the tile that is on its way out."""
    copies = chosen.stages * (chosen.rows + tiles * chosen.columns) * chosen.depth * 2
    return copies + chosen.rows * chosen.columns // chosen.parts * 2


@pytest.mark.parametrize("name", TABLES)
def test_every_configuration_fits_its_architecture(name):
    table, tiles = TABLES[name]
    for architecture, candidates in table.tensor_cores.items():
        for chosen in candidates:
            limit = SHARED_KIB[architecture] * 1024
            assert shared_bytes(chosen, tiles) * chosen.programs <= limit, (architecture, chosen)
    too_large = configurations.Configuration(128, 256, 64, 4, 8)
    assert shared_bytes(too_large, 1) > SHARED_KIB[90] * 1024


@pytest.mark.parametrize("name", TABLES)
def test_every_tile_is_the_fastest_for_some_product(name):
    for architecture, candidates in TABLES[name][0].tensor_cores.items():
        lengths = [2**power for power in range(13)]
        chosen = {
            configurations.configuration(TABLES[name][0], architecture, 132, rows, columns, depth, 2, False, True)
            for rows in lengths for columns in (1024, 4096, 14336) for depth in (1024, 14336)
        }  # fmt: skip
        assert chosen == set(candidates)


@pytest.mark.parametrize(
    ("architecture", "rows", "itemsize", "exact", "regular", "expected"),
    [
        (90, 8192, 2, False, True, configurations.LINEAR.tensor_cores[90][1]),
        (90, 512, 2, False, True, configurations.LINEAR.tensor_cores[90][2]),  # 96 tiles: one wave, half of the time
        (90, 64, 2, False, True, configurations.LINEAR.tensor_cores[90][5]),
        (90, 1, 2, False, True, configurations.LINEAR.tensor_cores[90][-1]),
        (86, 8192, 2, False, True, configurations.LINEAR.tensor_cores[120][0]),
        (103, 8192, 2, False, True, configurations.LINEAR.tensor_cores[100][0]),
        (90, 8192, 4, True, True, configurations.LINEAR.exact[4]),
        (80, 8192, 2, False, False, configurations.IRREGULAR),
        (None, 8192, 2, False, True, configurations.INTERPRETED),
    ],
)
def test_the_configuration_that_is_chosen(architecture, rows, itemsize, exact, regular, expected):
    shape = (132, rows, 3072, 768, itemsize)
    assert configurations.configuration(configurations.LINEAR, architecture, *shape, exact, regular) == expected


def test_long_rows_of_x_take_larger_tiles():
    """Whose epilogue is a small part of their time."""
    short, long = (
        configurations.configuration(configurations.LINEAR, 90, 132, 8192, 4096, depth, 2, False, True)
        for depth in (1024, 14336)
    )
    assert short.columns < long.columns


def test_a_wave_more_takes_a_wave_longer():
    chosen = configurations.Configuration(128, 128, 64, 3, 8, speed=0.5, overhead=100)
    one, two = (chosen.time(rows, 128, 1000, 132) for rows in (132 * 128, 132 * 128 + 1))
    assert one == 128 * 128 * (1000 / 0.5 + 100)
    assert two == 2 * one


def test_tf32_takes_as_many_bytes():
    half, whole = (
        configurations.configuration(configurations.LINEAR, 90, 132, 8192, 3072, 768, size, False, True)
        for size in (2, 4)
    )
    assert half.depth * 2 == whole.depth * 4
