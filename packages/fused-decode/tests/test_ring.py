"""The product in Gluon: what it is for, that it fits, and on compute capability 9.0 what it computes."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

triton = pytest.importorskip("triton")
launch = pytest.importorskip("kernel_pytorch.fused_decode.launch")
ring = pytest.importorskip("kernel_pytorch.fused_decode.kernels.ring")
configurations = launch.configurations

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CPU = torch.device("cpu")


def takes(x, weight, norm="rms", architecture=90):
    with mock.patch.object(configurations, "architecture", return_value=architecture):
        return launch.takes_ring(x, weight, norm)


def test_what_it_is_for():
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(40, 64, dtype=torch.bfloat16)
    assert takes(x, weight)
    assert takes(x, weight, None)
    assert not takes(x, weight, "layer")
    assert not takes(x, weight, architecture=100)
    assert not takes(x, weight, architecture=None)
    assert not takes(x.half(), weight.half())
    assert not takes(x[:, :60].contiguous(), weight[:, :60].contiguous())
    assert not takes(x, torch.zeros(40 * 64 + 1, dtype=torch.bfloat16)[1:].view(40, 64))
    assert not takes(torch.zeros(3, 32776, dtype=torch.bfloat16), torch.zeros(8, 32776, dtype=torch.bfloat16))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "k", [8, 64, 576, 1024, 1152, 2048, 2304, 2560, 3072, 4096, 5120, 6912, 8192, 14336, 28672, 32768]
)
@pytest.mark.parametrize("n", [1, 64, 1000, 2048, 3072, 5120, 9728, 14336, 128256])
def test_it_fits_and_takes_all_of_k(n, k, gated):
    with mock.patch.object(configurations, "multiprocessors_of", return_value=132):
        few, many = (configurations.ring(rows, n, k, gated, CPU) for rows in (8, 16))
    assert few[:2] == many[:2]
    assert (few.splits, few.programs) == (many.splits, many.programs)  # bits do not depend on the number of rows
    places = -(-n // few.columns) * few.splits
    for rows, c in ((8, few), (16, many)):
        steps = -(-k // (c.splits * c.block))
        block = 2 * c.columns * c.block * (2 if gated else 1)
        assert c.stages >= min(steps, 2)
        assert c.stages * block + 2 * rows * steps * c.block <= 226 * 1024
        assert c.programs % c.splits == 0
        assert c.programs <= min(places, 132 + c.splits)


@pytest.mark.parametrize(("n", "k", "gated", "splits"), [
    (5120, 5120, False, 4),  # 80 tiles: two shares leave multiprocessors without work in the second round
    (2560, 2048, False, 2),  # four shares of 40 tiles are two rounds
    (2048, 2048, False, 2),  # four shares of 32 tiles are too short
    (2048, 8192, False, 4),  # 32 tiles, and much of K for each share
    (12288, 4096, True, 2),  # 192 tiles
    (14336, 4096, True, 1),  # 224 tiles: two shares fill the rounds no better
    (3072, 1024, True, 1),  # too little of K to share
])  # fmt: skip
def test_shares_that_are_fastest_in_steps(n, k, gated, splits):
    with mock.patch.object(configurations, "multiprocessors_of", return_value=132):
        assert configurations.ring(8, n, k, gated, CPU).splits == splits


CASES = {
    "norm, two shares": (5, 3072, 2048, {"norm": "rms"}),
    "norm with an offset, end of K": (16, 200, 2304, {"norm": "rms", "norm_offset": 1.0}),
    "bias, K below a block": (3, 40, 72, {"norm": "rms", "bias": True}),
    "one program, many tiles": (9, 64 * 300, 512, {"bias": True, "softcap": 2.0}),
    "residual, four shares": (8, 2048, 8192, {"residual": True}),
    "residual, eight shares": (16, 70, 8200, {"residual": True, "bias": True}),
    "gated": (8, 8192, 2048, {"norm": "rms", "gated": "silu"}),
    "gated in shares, bias": (13, 100, 4096, {"norm": "rms", "gated": "gelu", "bias": True}),
    "gated, end of N": (4, 201, 640, {"gated": "gelu_tanh"}),
}


def inputs(rows, n, k, norm=None, gated=None, residual=False, bias=False, **options):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    parts = 2 if gated else 1
    tensors = {
        "norm_weight": normal(k) if norm else None,
        "bias": normal(parts * n) if bias else None,
        "residual": normal(rows, n) if residual else None,
    }
    return normal(rows, k), normal(parts * n, k) * k**-0.5, {"norm": norm, "gated": gated, **options, **tensors}


def expected(x, weight, norm, gated, norm_weight, bias, residual, norm_offset=0.0, softcap=None):
    """In float64."""
    x, weight = x.double(), weight.double()
    if norm:
        x = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * (norm_weight.double() + norm_offset)
    y = x @ weight.T + (0 if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, 1)
        act = F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh" if "tanh" in gated else "none")
        y = act * up
    y = y if residual is None else y + residual.double()
    return softcap * torch.tanh(y / softcap) if softcap else y


def is_right(case):
    rows, n, k, options = CASES[case]
    x, weight, options = inputs(rows, n, k, **options)
    workspace = launch.Workspace("cuda")
    found = [launch.project(x, weight, workspace=workspace, pdl=pdl, **options) for pdl in (False, True, True)]
    y = expected(x, weight, **options)
    near = ((found[0].double() - y).abs() <= 2e-2 * (1 + y.abs())).all()
    return bool(near) and found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0: Gluon has no interpreter")
class TestOnHopper:
    @pytest.mark.parametrize("case", CASES)
    def test_it_is_right(self, case):
        assert is_right(case)

    @pytest.mark.parametrize("case", CASES)
    def test_the_bits_of_a_row_do_not_depend_on_the_others(self, case):
        _, n, k, options = CASES[case]
        x, weight, options = inputs(16, n, k, **options)
        whole = launch.project(x, weight, **options)
        residual = options.pop("residual")
        for rows in range(3, 16):
            of_rows = None if residual is None else residual[:rows].contiguous()
            assert launch.project(x[:rows].contiguous(), weight, residual=of_rows, **options).equal(whole[:rows])

    @pytest.mark.parametrize(
        ("case", "text", "fault"),
        [
            ("norm, two shares", "place % SPLITS * STEPS", "0 * STEPS"),
            ("norm, two shares", "first % SPLITS", "0"),
            ("norm, two shares", "all_squares / K", "squares / K"),
            ("norm, two shares", "squares += f * f", "squares += f"),
            ("residual, four shares", "for i in gl.static_range(SPLITS)", "for i in gl.static_range(SPLITS - 1)"),
            ("gated", "part * N + n", "n"),
            ("one program, many tiles", "tile * COLUMNS + c", "first * COLUMNS + c"),
            ("one program, many tiles", "item % STEPS) * BLOCK", "0 * item) * BLOCK"),
        ],
    )
    def test_faults_are_found(self, case, text, fault, tmp_path, monkeypatch):
        with open(ring.__file__) as file:
            source = file.read()
        assert text in source
        path = tmp_path / "faulty.py"
        path.write_text(source.replace(text, fault).replace("from .linear", f"from {ring.__package__}.linear"))
        spec = importlib.util.spec_from_file_location("faulty", path)
        faulty = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "faulty", faulty)
        spec.loader.exec_module(faulty)
        monkeypatch.setattr(ring, "ring_kernel", faulty.ring_kernel)
        assert not is_right(case)
