"""Memory: what happens where there is none, and what direct calls of operators may not read or write."""

import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY, cross_entropy
from kernel_pytorch.cuda_ops.operators import operators

# Each operator that has scratch memory of its own, with rows so long that the scratch is large beside its results: run
# with all the memory there is, and then with little, and more and more of it.
STARVED = """
    import resource, torch
    from pathlib import Path
    from kernel_pytorch.cuda_ops.operators import operators as o

    torch.set_num_threads(1)
    N = 2**18
    g = torch.Generator().manual_seed(0)
    r = lambda *size: torch.randn(size, generator=g).half()
    seed, ones = torch.tensor(7), torch.ones(N)
    q, cos = r(1, 1, 1, N), r(1, N // 2)
    CALLS = {
        "bias_dropout_add": lambda: o.bias_dropout_add(x, w, x, seed, 0.5),
        "bias_dropout_add_backward": lambda: o.bias_dropout_add_backward(
            x, None, seed, 0.5, "float16", True, False
        )[:1],
        "norm_act": lambda: o.norm_act(x, x, w, None, seed, 1e-6, 0.5, "layer", "silu"),
        "norm_act_backward": lambda: o.norm_act_backward(
            x, None, x, w, None, seed, torch.ones(2, 1), 1e-6, 0.5, "layer", "silu", "float16", "float16",
            True, True, False, False,
        )[:2],
        "rms_norm": lambda: o.rms_norm(x, w, 1e-6, 0.0, "gemma"),
        "rms_norm_backward": lambda: o.rms_norm_backward(x, None, x, w, torch.ones(1), 1e-6, 0.0, True, False)[:1],
        "softmax": lambda: [o.softmax(x, None, 1.0)],
        "bias_act": lambda: [o.bias_act(x, w, "gelu")],
        "rotary_embedding": lambda: [o.rotary_embedding(q, cos, cos, True)],
        "rotary_qk": lambda: o.rotary_qk(q, q, cos, cos, torch.zeros(1).long(), True, False),
        "qk_norm_rope": lambda: o.qk_norm_rope(q, q, w, w, cos, cos, 1e-6, False, 0.0),
        "qk_norm_rope_backward": lambda: o.qk_norm_rope_backward(
            q, q, q, q, w, w, cos, cos, torch.ones(1, 1, 1), torch.ones(1, 1, 1), 1e-6, False, 0.0,
            True, True, False, False,
        )[:2],
        "flash_attention": lambda: o.flash_attention(q[..., :4096], q[..., :4096], q[..., :4096], 0.01, False),
    }
    x, w = r(1, N), r(N)
    listed = lambda found: list(found) if isinstance(found, (tuple, list)) else [found]
    everything = resource.RLIM_INFINITY
    for name, call in CALLS.items():
        want, failed = [t.clone() for t in listed(call())], 0
        for room in range(0, 8 * 2**20, 2**18):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, everything))
            try:
                found = listed(call())
            except MemoryError:  # Python's heap had to grow for the call itself, before any tensor
                found = None
            except RuntimeError as error:
                found, failed = None, failed + 1
                assert "can't allocate memory: you tried to allocate" in str(error), (name, error)
                assert "API call failed" not in str(error), (name, error)
            resource.setrlimit(resource.RLIMIT_AS, (everything, everything))
            if found is not None:
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), (name, room)
                del found
        assert failed > 0, name
"""
unlimited = pytest.mark.skipif(LIBRARY.sanitized, reason="AddressSanitizer maps more memory than there is")


@pytest.mark.cpu_backend
@unlimited
def test_a_call_without_enough_memory_raises_and_never_computes_something_else(run_python):
    # A large allocation is the system's, and given back at once: so the limit decides about each.
    run_python(STARVED, MALLOC_MMAP_THRESHOLD_="65536")


@pytest.mark.cpu_backend
@unlimited
def test_a_depth_whose_scratch_no_machine_has_is_an_error(run_python):
    run_python("""
        import resource
        import pytest, torch
        from kernel_pytorch.cuda_ops import flash_attention
        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))  # some machines have as much
        q = torch.zeros(1, 1, 1, 2**27)
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate 103079223552 bytes"):
            flash_attention(q, q, q)
    """)


@pytest.mark.cpu_backend
@unlimited
def test_a_result_that_no_machine_has_raises_what_pytorch_raises():
    x = torch.zeros(1).expand(2**42, 8)
    for call in (lambda: operators.rms_norm(x, None, 1e-6, 0.0, "llama"), lambda: operators.softmax(x, None, 1.0)):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert "API call failed" not in str(caught.value)
        assert ".h" not in str(caught.value)
        if torch.__version__ >= "2.13":  # before, PyTorch keeps its message to itself
            assert "you tried to allocate 140737488355328 bytes" in str(caught.value) or "can't allocate" in str(
                caught.value
            )


def test_out_of_memory_on_a_gpu_has_pytorchs_type(monkeypatch):
    """The stable ABI hands on the text alone."""
    from kernel_pytorch.cuda_ops._core.registration import below_autograd

    def fails(*arguments):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        below_autograd(fails)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_out_of_memory_on_a_gpu():
    from kernel_pytorch.cuda_ops import rms_norm

    torch.cuda.empty_cache()
    x = torch.empty(torch.cuda.mem_get_info()[0] * 6 // 10 // 4096, 1024, device="cuda")  # there is no room for another
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        rms_norm(x)


H = torch.randn(4, 8)
RSTD = torch.ones(4)


@pytest.mark.parametrize("weight", [None, torch.ones(8)])
@pytest.mark.parametrize("need_dx", [False, True])
@pytest.mark.parametrize("need_dweight", [False, True])
def test_rms_norm_backward_computes_what_is_needed_and_nothing_else(weight, need_dx, need_dweight):
    dx, dweight = operators.rms_norm_backward(H, None, H, weight, RSTD, 1e-6, 0.0, need_dx, need_dweight)
    assert dx.shape == (H.shape if need_dx else (0,))
    assert dweight.shape == ((8,) if need_dweight and weight is not None else (0,))


@pytest.mark.parametrize("argument", ["dy", "dh", "h"])
def test_rms_norm_backward_takes_no_bool(argument):
    given = {"dy": H, "dh": H, "h": H, argument: H > 0}
    with pytest.raises(RuntimeError, match=f"{argument}: dtype is torch.bool; allowed are float dtypes"):
        operators.rms_norm_backward(given["dy"], given["dh"], given["h"], None, RSTD, 1e-6, 0.0, True, False)


def test_rms_norm_of_no_heads():
    x, weight = torch.randn(4, 0, 8), torch.randn(0, 8)
    y, rstd = operators.rms_norm(x, weight, 1e-6, 0.0, "llama")
    dx, dweight = operators.rms_norm_backward(y, None, x, weight, rstd, 1e-6, 0.0, True, True)
    assert (y.shape, dx.shape, dweight.shape) == (x.shape, x.shape, weight.shape)


TARGET = torch.tensor([0, 1, 2, 7])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operator_that_overwrites_counts_as_a_write(mode):
    logits = torch.randn(4, 8)
    with mode():
        _, lse = operators.cross_entropy(logits, TARGET, -100, 0.0, 0.0, 0.0)
        before = logits._version
        operators.cross_entropy_backward_(torch.ones(4), lse, logits, TARGET, -100, 0.0, 0.0, 0.0)
    assert logits._version == before + 1


def test_autograd_sees_logits_that_were_overwritten():
    logits = torch.randn(4, 8, requires_grad=True) * 1
    squares = logits.square().sum()
    _, lse = operators.cross_entropy(logits.detach(), TARGET, -100, 0.0, 0.0, 0.0)
    operators.cross_entropy_backward_(torch.ones(4), lse, logits.detach(), TARGET, -100, 0.0, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_backward_in_place_counts_once():
    logits = torch.randn(4, 8, requires_grad=True) * 1
    before = logits._version
    cross_entropy(logits, TARGET, inplace=True).backward()
    assert logits._version == before + 1


LONG = 2**31 - 2048
EMULATED = LIBRARY.instruction_sets == ("CUDA, emulated",)


@pytest.mark.skipif(not EMULATED, reason="what CUDA kernels take")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: operators.rms_norm(x, None, 1e-6, 0.0, "llama"), "rms_norm: x"),
        (
            lambda x: operators.rms_norm_backward(x, None, x, None, RSTD[:1], 1e-6, 0.0, True, False),
            "rms_norm_backward: h",
        ),
        (lambda x: operators.norm_act(x, None, None, None, None, 1e-6, 0.0, "rms", "gelu"), "norm_act: x"),
        (lambda x: operators.softmax(x, None, 1.0), "softmax: x"),
        (lambda x: operators.softmax_backward(x, x, None, 1.0, True, False), "softmax_backward: y"),
        (lambda x: operators.bias_act_backward(x, x, None, "gelu", True, False), "bias_act_backward: dy"),
        (
            lambda x: operators.bias_dropout_add_backward(x, None, None, 0.0, "float16", True, False),
            "bias_dropout_add_backward: dy",
        ),
    ],
)
def test_rows_that_are_longer_than_kernels_count_are_refused_by_name(call, message):
    with pytest.raises(RuntimeError, match=rf"{message}: shape is \(1, {LONG}\); on CUDA .* at most 2147479552"):
        call(torch.zeros((), dtype=torch.float16).expand(1, LONG))


@pytest.mark.slow
@pytest.mark.skipif(not EMULATED, reason="what CUDA kernels take")
def test_attention_of_more_batches_and_heads_than_a_grid_has_in_one_dimension():
    q, k, v = (torch.randn(2185, 30, 1, 4) for _ in range(3))  # 65,550
    o, lse = operators.flash_attention(q, k, v, 0.5, False)
    assert torch.equal(o, v)  # of one key
    torch.testing.assert_close(lse, (q * k).sum(-1) * 0.5)


@pytest.mark.skipif(not EMULATED, reason="what CUDA kernels take")
@pytest.mark.parametrize("shape", [(1, 65536, 1, 4), (1, 1, 1, 257)])
def test_attention_that_kernels_do_not_take_is_refused_by_name(shape):
    q = torch.zeros(()).expand(shape)
    with pytest.raises(
        RuntimeError, match=r"flash_attention: q: shape is .* on CUDA at most 65535 heads of a depth of at most 256"
    ):
        operators.flash_attention(q, q, q, 1.0, False)


@pytest.mark.skipif(not EMULATED, reason="what CUDA kernels take")
def test_a_weight_with_more_rows_than_a_grid_has_is_refused_by_name():
    x, rstd = torch.zeros(1, 65536, 4), torch.ones(1, 65536)
    with pytest.raises(
        RuntimeError, match=r"weight: shape is \(65536, 4\); on CUDA its gradient may have at most 65535"
    ):
        operators.rms_norm_backward(x, None, x, x[0], rstd, 1e-6, 0.0, False, True)
