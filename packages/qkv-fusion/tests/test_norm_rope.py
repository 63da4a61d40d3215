"""`qk_norm_rope` and `qkv_norm_rope` beyond what verification asks: models' code, layouts, operators, bad input."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.qkv_fusion import qk_layer_norm_rope, qk_norm_rope, qkv_norm_rope, qkv_projection
from kernel_pytorch.qkv_fusion._core import cuda_level
from kernel_pytorch.qkv_fusion.levels import LADDER

operators = torch.ops.kernel_pytorch
LEVELS = ["reference", "native", "triton", *(["cuda"] if cuda_level.cuda_ops is not None else [])]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def arguments(*before, device, heads=(3, 2), columns=24, rotated=16, dtype=torch.float32, table=torch.float32):
    """Give q, k, the weights, which want gradients, then cos and sin."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*before, heads[0], columns), (*before, heads[1], columns), (columns,), (columns,)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    angles = torch.rand(before[-1], rotated // 2, generator=generator) * 6.28
    return [*tensors, angles.cos().to(device, table), angles.sin().to(device, table)]


@pytest.mark.parametrize("level", LEVELS)
def test_is_what_qwen3_computes(level, device):
    """`q_norm(q.view(B, S, H, D)).transpose(1, 2)` and `apply_rotary_pos_emb`, as in modeling_qwen3.py."""
    q, k, q_weight, k_weight, cos, sin = arguments(2, 7, rotated=24, device=device)
    twice_cos, twice_sin = (torch.cat((t, t), -1)[None, None] for t in (cos, sin))

    def theirs(x, weight):
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).transpose(1, 2)
        turned = torch.cat((-normed[..., 12:], normed[..., :12]), -1)
        return (normed * twice_cos + turned * twice_sin).transpose(1, 2)

    q_out, k_out = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, level=level)
    torch.testing.assert_close(q_out, theirs(q, q_weight))
    torch.testing.assert_close(k_out, theirs(k, k_weight))


def test_views_of_a_packed_projection_are_read_and_nothing_is_written(device):
    packed = torch.randn(2, 7, (3 + 2 + 2) * 24, device=device)
    _, _, *rest = arguments(2, 7, device=device)
    before = packed.clone()
    q = packed[..., : 3 * 24].unflatten(-1, (3, 24)).requires_grad_()
    k = packed[..., 3 * 24 : 5 * 24].unflatten(-1, (2, 24)).requires_grad_()
    incoming = [torch.randn(2, x.shape[2], 7, 24, device=device).transpose(1, 2) for x in (q, k)]
    kept = [t.clone() for t in incoming]
    found = [
        torch.autograd.grad(qk_norm_rope(q, k, *rest, level=level), [q, k, *rest[:2]], incoming)
        for level in ("triton", "reference")
    ]
    torch.testing.assert_close(*found)
    assert torch.equal(packed, before)
    assert all(torch.equal(a, b) for a, b in zip(incoming, kept, strict=True))


def test_launches(device):
    q, k, *rest = arguments(2, 5, device=device)
    with count_launches() as forward:
        outputs = qk_norm_rope(q, k, *rest, level="triton")
    with count_launches() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert (forward, backward) == (["_norm_rope_kernel"], ["_backward_kernel", "_add_shares_kernel"])
    frozen = [t.detach() for t in rest]
    outputs = qk_norm_rope(q, k, *frozen, level="triton")
    with count_launches() as backward:
        outputs[1].sum().backward()
    assert backward == ["_backward_kernel"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("name", ["qk_norm_rope", "qk_layer_norm_rope"])
def test_opcheck(name, device):
    operator, backward = getattr(operators, name), getattr(operators, f"{name}_backward")
    q, k, *rest = arguments(2, 5, device=device)
    torch.library.opcheck(operator.default, (q, k, *rest, 1e-6, False, 0.0))
    rstds = [torch.rand(x.shape[:-1], device=device) for x in (q, k)]
    for dq_out, dk_out, needs in ((q, k, [True] * 4), (q, None, [True, False, False, False])):
        given = (dq_out, dk_out, q, k, *rest, *rstds, 1e-6, True, 0.5, *needs)
        torch.library.opcheck(backward.default, given)


@pytest.mark.parametrize(
    ("function", "dynamic"), [(qk_norm_rope, False), (qk_norm_rope, True), (qk_layer_norm_rope, True)]
)
def test_compiled_is_bitwise_eager(function, dynamic, device):
    *tensors, cos, sin = arguments(6, device=device)
    check_compiled_equals_eager(lambda *t: function(*t, cos, sin, level="triton"), tensors, dynamic=dynamic)


@pytest.mark.parametrize(
    ("function", "level"),
    [
        pytest.param(f, level, marks=[pytest.mark.slow] if (f, level) == (qk_layer_norm_rope, "triton") else [])
        for f in (qk_norm_rope, qk_layer_norm_rope)
        for level in LEVELS
        if level in LADDER.levels(f.__name__)
    ],
)
def test_derivatives(function, level, device):
    *tensors, cos, sin = arguments(2, heads=(2, 1), columns=3, rotated=2, table=torch.float64, device=device)
    options = {"interleaved": True, "offset": 0.5, "level": level}
    check_second_derivatives(lambda *t: function(*t, cos, sin, **options), tensors)
    check_gradient_combinations(lambda *t: function(*t, cos, sin, **options), tensors)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used, device):
    *tensors, cos, sin = arguments(5, device=device)
    ours, theirs = (
        torch.autograd.grad(
            qk_norm_rope(*tensors, cos, sin, level=level)[used].pow(2).sum(), tensors, allow_unused=True
        )
        for level in ("triton", "reference")
    )
    assert [g is None for g in ours] == [g is None for g in theirs]
    torch.testing.assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])


def test_bits_do_not_depend_on_other_tokens(device):
    q, k, q_weight, k_weight, cos, sin = arguments(70, device=device)
    check_deterministic(lambda *t: qk_norm_rope(*t, cos, sin, level="triton"), [q, k, q_weight, k_weight])
    weights = q_weight.detach(), k_weight.detach()
    check_rows_independent(
        lambda q, k: qk_norm_rope(q, k, *weights, cos[: len(q)], sin[: len(q)], level="triton"), [q, k]
    )


def test_flops_are_counted(device):
    given = arguments(5, device=device)
    elements = given[0].numel() + given[1].numel()
    with FlopCounterMode(display=False) as counter:
        sum(o.sum() for o in qk_norm_rope(*given, level="triton")).backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.qk_norm_rope] == 7 * elements
    assert counts[operators.qk_norm_rope_backward] == 14 * elements


@pytest.mark.parametrize("level", LEVELS)
def test_fused_is_projection_then_norm_and_rotation(level, device):
    _, _, q_weight, k_weight, cos, sin = arguments(2, 7, device=device)
    x, weight = torch.randn(2, 7, 32, device=device), torch.randn(7 * 24, 32, device=device)
    bias = torch.randn(7 * 24, device=device)
    heads = {"num_heads": 3, "num_kv_heads": 2}
    q, k, v = qkv_projection(x, weight, bias, **heads, head_dim=24)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()  # views of one product
    found = qkv_norm_rope(x, weight, bias, q_weight, k_weight, cos, sin, **heads, offset=1.0, level=level)
    truth = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, offset=1.0, level="reference")
    torch.testing.assert_close(found, (*truth, v))


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_positions_outside_of_the_tables_are_named_on_a_cpu(level, device):
    """In each call: matching calls have other values."""
    if torch.device(device).type != "cpu":
        pytest.skip("values are read on a CPU alone")
    q, k, q_weight, k_weight, cos, sin = (t.detach() for t in arguments(5, device="cpu"))
    x, weight = torch.zeros(5, 8), torch.zeros(7 * 24, 8)
    heads, ids = {"num_heads": 3, "num_kv_heads": 2}, torch.tensor([4, 0, 1, 2, 0])
    calls = [
        lambda ids: qk_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids=ids, level=level),
        lambda ids: qkv_norm_rope(
            x, weight, None, q_weight, k_weight, cos, sin, **heads, position_ids=ids, level=level
        ),
    ]
    if level in (None, "reference", "native"):
        calls.append(lambda ids: qk_layer_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids=ids, level=level))
    for call in calls:
        for wrong in (5, -1):
            call(ids)
            with pytest.raises(ValueError, match=rf"^position_ids: given {wrong}; the tables have rows 0 to 4$"):
                call(ids.where(ids != 1, wrong))


def test_bad_input(device):
    given = [t.detach() for t in arguments(5, device=device)]
    with pytest.raises(ValueError, match=r"q_weight: shape is \(5,\); it must be \(D,\) = \(24,\)"):
        qk_norm_rope(*given[:2], given[2][:5], *given[3:])
    with pytest.raises(ValueError, match="level: 'cuda' of qk_layer_norm_rope does not exist yet"):
        qk_layer_norm_rope(*given, level="cuda")
    x, weight = torch.zeros(5, 8, device=device), torch.zeros(100, 8, device=device)
    with pytest.raises(ValueError, match=r"weight: shape is \(100, 8\); it must be \(128, 8\)"):
        qkv_projection(x, weight, num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="num_kv_heads: given 0; it must be at least 1"):
        qkv_projection(x, weight, num_heads=4, num_kv_heads=0, head_dim=16)


def test_a_gradient_needs_what_it_is_computed_of(device):
    q, k, *rest = (t.detach() for t in arguments(5, device=device))
    rstds = [torch.rand(x.shape[:-1], device=device) for x in (q, k)]
    with pytest.raises(ValueError, match="dk_out: given None; gradients of k need it"):
        operators.qk_norm_rope_backward(q, None, q, k, *rest, *rstds, 1e-6, False, 0.0, True, True, False, False)
