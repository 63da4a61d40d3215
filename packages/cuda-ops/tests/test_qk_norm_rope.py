"""`qk_norm_rope` beyond what verification asks: a model's own code, layouts, bits, autograd, bad input."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, head_rms_norm, levels, qk_norm_rope, rotary_embedding
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)

operators = torch.ops.kernel_pytorch_cuda
SCALARS = (1e-6, False, 0.0)


def definition(q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset):
    def one(x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        h, (c, s), rotated = x.to(wide), (t.detach().to(wide).unsqueeze(-2) for t in (cos, sin)), 2 * cos.shape[-1]
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (offset + weight.to(wide))
        if interleaved:
            first, second = n[..., 0:rotated:2], n[..., 1:rotated:2]
            y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
        else:
            first, second = n[..., :rotated].chunk(2, -1)
            y = torch.cat((first * c - second * s, second * c + first * s), -1)
        return torch.cat((y, n[..., rotated:]), -1).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


def arguments(*before, heads=(3, 2), columns=24, rotated=16, dtype=torch.float32, table=torch.float32):
    """Give q, k, the weights, which want gradients, then cos and sin."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*before, heads[0], columns), (*before, heads[1], columns), (columns,), (columns,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    angles = torch.rand(before[-1], rotated // 2, generator=generator) * 6.28
    return [*tensors, angles.cos().to(table), angles.sin().to(table)]


def gradients(function, given, incoming=None):
    outputs = function(*given)
    incoming = incoming or [torch.ones_like(o) for o in outputs]
    return torch.autograd.grad(outputs, given[:4], incoming)


def test_is_what_qwen3_computes():
    """`q_norm(q.view(B, S, H, D)).transpose(1, 2)` and `apply_rotary_pos_emb`, as in modeling_qwen3.py."""
    q, k, q_weight, k_weight, cos, sin = arguments(2, 7, rotated=24)
    twice_cos, twice_sin = (torch.cat((t, t), -1)[None, None] for t in (cos, sin))

    def theirs(x, weight):
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).transpose(1, 2)
        turned = torch.cat((-normed[..., 12:], normed[..., :12]), -1)
        return (normed * twice_cos + turned * twice_sin).transpose(1, 2)

    q_out, k_out = qk_norm_rope(q, k, q_weight, k_weight, cos, sin)
    torch.testing.assert_close(q_out, theirs(q, q_weight))
    torch.testing.assert_close(k_out, theirs(k, k_weight))


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_the_norm_then_the_rotation(interleaved):
    q, k, q_weight, k_weight, cos, sin = arguments(2, 7)
    q_out, k_out = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, 1e-5, interleaved, 1.0)
    for x, weight, found in ((q, q_weight, q_out), (k, k_weight, k_out)):
        normed = head_rms_norm(x, weight.expand(x.shape[-2:]), 1e-5, 1.0)
        torch.testing.assert_close(found, rotary_embedding(normed, cos, sin, interleaved))


AGAINST_FLOAT64 = """
    import torch
    from kernel_pytorch.cuda_ops import qk_norm_rope
    torch.manual_seed(0)
    bounds = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 4e-6, torch.float64: 1e-14}
    for dtype, bound in bounds.items():
        for columns, rotated in ((2, 2), (7, 6), (64, 64), (70, 70), (80, 32), (1030, 1030)):
            q, k = torch.randn(9, 3, columns).to(dtype), torch.randn(9, 2, columns).to(dtype)
            weights, angles = torch.rand(2, columns).to(dtype), torch.rand(9, rotated // 2, dtype=torch.float64)
            own = [t.requires_grad_() for t in (q, k, *weights.unbind(0))]
            wide = [t.detach().double().requires_grad_() for t in own]
            c, s, truth = angles.cos()[:, None], angles.sin()[:, None], []
            for h, weight in zip(wide[:2], wide[2:]):
                n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
                first, second = n[..., : rotated // 2], n[..., rotated // 2 : rotated]
                truth.append(torch.cat((first * c - second * s, second * c + first * s, n[..., rotated:]), -1))
            found = qk_norm_rope(*own, angles.cos(), angles.sin())
            incoming = [torch.randn_like(t) for t in found]
            ours = torch.autograd.grad(found, own, incoming)
            theirs = torch.autograd.grad(truth, wide, [t.double() for t in incoming])
            for a, b in zip((*found, *ours), (*truth, *theirs)):
                scale = b.abs().max().clamp(min=1)
                assert ((a.double() - b).abs().max() / scale).item() < bound, (dtype, columns)
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_is_right(instruction_set, run_on):
    run_on(instruction_set, AGAINST_FLOAT64)


def test_views_of_a_packed_projection_are_read_and_nothing_is_written():
    packed = torch.randn(2, 7, (3 + 2 + 2) * 24)
    _, _, *rest = arguments(2, 7)
    before = packed.clone()
    q = packed[..., : 3 * 24].unflatten(-1, (3, 24)).requires_grad_()
    k = packed[..., 3 * 24 : 5 * 24].unflatten(-1, (2, 24)).requires_grad_()
    incoming = [torch.randn(2, x.shape[2], 7, 24).transpose(1, 2) for x in (q, k)]  # as attention's gradients come
    kept = [t.clone() for t in incoming]
    ours = gradients(qk_norm_rope, [q, k, *rest], incoming)
    theirs = gradients(lambda *a: definition(*a, *SCALARS), [q, k, *rest], incoming)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(packed, before)
    assert all(torch.equal(a, b) for a, b in zip(incoming, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [(torch.float32, torch.float32), (torch.bfloat16, torch.float64)])
def test_every_pair_of_dtypes(dtype, weights):
    given = arguments(9, dtype=dtype)
    given[2:4] = [w.detach().to(d).requires_grad_() for w, d in zip(given[2:4], weights, strict=True)]
    ours, theirs = qk_norm_rope(*given), definition(*given, *SCALARS)
    torch.testing.assert_close(ours, theirs)
    found = gradients(qk_norm_rope, given)
    assert [g.dtype for g in found] == [dtype, dtype, *weights]
    expected = gradients(lambda *a: definition(*a, *SCALARS), given)
    for ours, theirs, x in zip(found, expected, (*given[:2], *given[:2]), strict=True):
        precise = torch.promote_types(x.dtype, torch.float32)  # what a float64 weight's gradient is computed in too
        torch.testing.assert_close(ours.to(precise), theirs.to(precise), rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    q, k, *rest = arguments(2, 5, dtype=dtype)
    torch.library.opcheck(operators.qk_norm_rope.default, (q, k, *rest, *SCALARS))
    rstds = [torch.rand(x.shape[:-1]) for x in (q, k)]
    if dtype == torch.float32:  # in 16 bits its own gradients meet in another order under AOTAutograd than in eager
        for dq_out, dk_out, needs in ((q, k, [True] * 4), (q, None, [True, False, False, False])):
            given = (dq_out, dk_out, q, k, *rest, *rstds, *SCALARS, *needs)
            torch.library.opcheck(operators.qk_norm_rope_backward.default, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic):
    *tensors, cos, sin = arguments(6)
    check_compiled_equals_eager(lambda *t: qk_norm_rope(*t, cos, sin), tensors, dynamic=dynamic)


def test_export():
    program = check_export(qk_norm_rope, [t.detach() for t in arguments(7)])
    assert sum("qk_norm_rope" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.slow
def test_first_call_of_a_process_is_compiled():
    program = """
        import torch
        from kernel_pytorch.cuda_ops import qk_norm_rope, rotary_embedding
        x, weight, angles = torch.randn(5, 2, 8), torch.randn(8), torch.rand(5, 4)
        cos, sin = angles.cos(), angles.sin()
        f = torch.compile(lambda x, k: qk_norm_rope(rotary_embedding(x, cos, sin), k, weight, weight, cos, sin),
                          fullgraph=True, dynamic=True)
        torch.testing.assert_close(f(x, x), qk_norm_rope(rotary_embedding(x, cos, sin), x, weight, weight, cos, sin))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_gradients_in_every_combination():
    *tensors, cos, sin = arguments(5)
    check_gradient_combinations(lambda *t: qk_norm_rope(*t, cos, sin), tensors)


@pytest.mark.parametrize("interleaved", [False, True])
def test_second_derivatives(interleaved):
    *tensors, cos, sin = arguments(2, heads=(2, 1), columns=6, rotated=4, table=torch.float64)
    check_second_derivatives(lambda *t: qk_norm_rope(*t, cos, sin, 1e-6, interleaved, 0.5), tensors)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used):
    *tensors, cos, sin = arguments(5)
    ours, theirs = (
        torch.autograd.grad(f(*tensors, cos, sin, *SCALARS)[used].pow(2).sum(), tensors, allow_unused=True)
        for f in (qk_norm_rope, definition)
    )
    assert [g is None for g in ours] == [g is None for g in theirs]
    torch.testing.assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])


@pytest.mark.parametrize("needed", range(4))
def test_formula_equals_kernels(needed):
    *tensors, cos, sin = arguments(5, dtype=torch.float64, table=torch.float64)
    outputs = qk_norm_rope(*tensors, cos, sin, 1e-6, True, 0.5)
    incoming = [torch.randn_like(o) for o in outputs]
    kernels = torch.autograd.grad(outputs, tensors[needed], incoming, retain_graph=True)
    formula = torch.autograd.grad(outputs, tensors[needed], incoming, create_graph=True)
    torch.testing.assert_close(kernels, formula)


def test_bits_do_not_depend_on_threads_or_other_tokens():
    given = arguments(700)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*qk_norm_rope(*given), *gradients(qk_norm_rope, given)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    q, k, q_weight, k_weight, cos, sin = given
    check_deterministic(lambda *t: qk_norm_rope(*t, cos, sin), given[:4])
    weights = q_weight.detach(), k_weight.detach()
    check_rows_independent(lambda q, k: qk_norm_rope(q, k, *weights, cos[: len(q)], sin[: len(q)]), [q, k])


def test_flops_are_counted():
    given = arguments(5)
    elements = given[0].numel() + given[1].numel()
    with FlopCounterMode(display=False) as counter:
        sum(o.sum() for o in qk_norm_rope(*given)).backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.qk_norm_rope] == 7 * elements
    assert counts[operators.qk_norm_rope_backward] == 14 * elements


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (
            1,
            lambda k: k[:3],
            r"k: shape is \(3, 2, 24\); it must be that of q, \(5, 3, 24\), but for the number of heads",
        ),
        (1, lambda k: k.half(), "k: dtype is torch.float16; it must be that of q, torch.float32"),
        (2, lambda w: w[:5], r"q_weight: shape is \(5,\); it must be \(D,\)"),
        (3, lambda w: w.bool(), "k_weight: dtype is torch.bool"),
        (4, lambda c: c[:2], r"cos: shape is \(2, 8\)"),
        (5, lambda s: s[:, :2], r"sin: shape is \(5, 2\); it must be that of cos"),
    ],
)
def test_bad_input(position, change, message):
    given = [t.detach() for t in arguments(5)]
    given[position] = change(given[position])
    with pytest.raises(RuntimeError, match=message):
        qk_norm_rope(*given)


def test_a_gradient_needs_what_it_is_computed_of():
    q, k, *rest = (t.detach() for t in arguments(5))
    rstds = [torch.rand(x.shape[:-1]) for x in (q, k)]
    with pytest.raises(RuntimeError, match="dk_out: is None; gradients of k need it"):
        operators.qk_norm_rope_backward(q, None, q, k, *rest, *rstds, *SCALARS, True, True, False, False)
    with pytest.raises(RuntimeError, match="k_rstd: shape is"):
        operators.qk_norm_rope_backward(q, k, q, k, *rest, rstds[0], rstds[0], *SCALARS, True, True, False, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_rung_on_cuda(number, interleaved, dtype):
    if reason := levels.unavailable("cuda", torch.device("cuda"), dtype):
        pytest.skip(reason)
    given = [t.detach().cuda() for t in arguments(2, 33, columns=96, rotated=64, dtype=dtype)]
    scalars = (1e-6, interleaved, 1.0)
    with rung(number):
        ours = operators.qk_norm_rope(*given, *scalars)[:2]
    torch.testing.assert_close(ours, definition(*given, *scalars))
