"""What no operator may do silently: lose a tangent, take what is no tensor, answer out of memory that is not there."""

import math
import warnings

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch import cuda_ops

TARGET = torch.tensor([0, 1, 2, 3])
X = torch.linspace(-2.0, 2.0, 32).view(4, 8)
VECTOR = torch.linspace(0.5, 1.5, 8)
HEADS = torch.linspace(-1.0, 1.0, 64).view(1, 4, 2, 8)
TURNS = torch.linspace(0.0, 1.0, 16).view(4, 4)
CALLS = {
    "rms_norm": lambda x: cuda_ops.rms_norm(x, VECTOR),
    "add_rms_norm": lambda x: cuda_ops.add_rms_norm(x, X, VECTOR)[0],
    "layer_norm": lambda x: cuda_ops.layer_norm(x, VECTOR, VECTOR),
    "softmax": cuda_ops.softmax,
    "swiglu": cuda_ops.swiglu,
    "bias_act": lambda x: cuda_ops.bias_act(x, VECTOR, "silu"),
    "bias_dropout_add": lambda x: cuda_ops.bias_dropout_add(x, VECTOR, X, 0.0, None),
    "cross_entropy": lambda x: cuda_ops.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "rotary_embedding": lambda x: cuda_ops.rotary_embedding(HEADS * x.sum(), TURNS, TURNS),
    "rotary_qk": lambda x: cuda_ops.rotary_qk(HEADS * x.sum(), HEADS, TURNS, TURNS, TARGET)[0],
    "qk_norm_rope": lambda x: cuda_ops.qk_norm_rope(HEADS * x.sum(), HEADS, VECTOR, VECTOR, TURNS, TURNS)[0],
    "flash_attention": lambda x: cuda_ops.flash_attention(HEADS * x.sum(), HEADS, HEADS),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_is_refused_and_not_lost(name):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|forward"):
            CALLS[name](dual)
    assert CALLS[name](X).isfinite().all()


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_sum_of_frozen_tensors_wants_no_gradient(name):
    y, h = getattr(cuda_ops, name)(X, X, VECTOR.clone().requires_grad_())
    assert (y.requires_grad, h.requires_grad) == (True, False)
    y.sum().backward()
    assert getattr(cuda_ops, name)(X, X.clone().requires_grad_(), VECTOR)[1].requires_grad


def ragged(layout):
    with warnings.catch_warnings(action="ignore"):  # PyTorch's, that they are a prototype
        return torch.nested.nested_tensor([X, X[:2]], layout=layout)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda_ops.rms_norm(None), "rms_norm: x: given None; it must be a tensor"),
        (lambda: cuda_ops.add_rms_norm(X, None), "add_rms_norm: residual: given None; it must be a tensor"),
        (lambda: cuda_ops.layer_norm(X, (8,)), "layer_norm: weight: given tuple; it must be a tensor or None"),
        (
            lambda: cuda_ops.rotary_embedding(HEADS, None, None),
            "rotary_embedding: cos: given None; it must be a tensor",
        ),
        (
            lambda: cuda_ops.rotary_qk(HEADS, HEADS, TURNS, TURNS, [0, 1, 2, 3]),
            "rotary_qk: position_ids: given list; it must be a tensor or None",
        ),
        (
            lambda: cuda_ops.rotary_qk(HEADS, HEADS, TURNS, TURNS, None, 1),
            "rotary_qk: interleaved: given int; it must be True or False",
        ),
        (lambda: cuda_ops.flash_attention(None, HEADS, HEADS), "flash_attention: q: given None; it must be a tensor"),
        (lambda: cuda_ops.flash_attention([1.0], HEADS, HEADS), "flash_attention: q: given list; it must be a tensor"),
        (lambda: cuda_ops.flash_attention(HEADS, HEADS, None), "flash_attention: v: given None; it must be a tensor"),
        (lambda: cuda_ops.flash_attention(HEADS, HEADS, HEADS, True), "flash_attention: scale: given True; .* by name"),
        (lambda: cuda_ops.cross_entropy(X, None), "cross_entropy: target: given None; it must be a tensor"),
        (lambda: cuda_ops.rms_norm(X, VECTOR, "a"), "rms_norm: eps: given 'a'; it must be a Python number"),
        (lambda: cuda_ops.layer_norm_act(X, VECTOR, None, "gelu", 1e-5), "layer_norm_act: eps: given 'gelu'; it must"),
        (
            lambda: cuda_ops.softmax(X, X),
            r"softmax: scale: given a tensor of shape \(4, 8\); it must be a Python number",
        ),
        (lambda: cuda_ops.softmax(X, torch.tensor(2.0)), r"softmax: scale: given a tensor of shape \(\); it must"),
        (lambda: cuda_ops.geglu(X, limit="a"), "geglu: limit: given 'a'; it must be a Python number or None"),
        (lambda: cuda_ops.rms_norm(X, VECTOR, True), "rms_norm: eps: given True; it must be a Python number"),
        (lambda: cuda_ops.swiglu(X, limit=True), "swiglu: limit: given True; it must be a Python number or None"),
        (lambda: cuda_ops.cross_entropy(X, TARGET, True), "cross_entropy: ignore_index: given True; it must be an int"),
        (
            lambda: cuda_ops.rotary_embedding(HEADS, TURNS, TURNS, 1),
            "rotary_embedding: interleaved: given int; it must be True or False",
        ),
        (
            lambda: cuda_ops.flash_attention(HEADS, HEADS, HEADS, causal=1),
            "flash_attention: causal: given int; it must be True or False",
        ),
        (lambda: cuda_ops.bias_act(X, VECTOR, None), "bias_act: activation: given None; it must be a string"),
        (
            lambda: cuda_ops.rotary_embedding(HEADS, TURNS, TURNS, "a"),
            "rotary_embedding: interleaved: given 'a'; it must",
        ),
        (
            lambda: cuda_ops.cross_entropy(X, TARGET, "sum"),
            "cross_entropy: ignore_index: given 'sum'; it must be an int",
        ),
    ],
)
def test_what_is_of_another_kind_is_named(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda q: cuda_ops.rms_norm(q), "rms_norm: x"),
        (lambda q: cuda_ops.add_rms_norm(X, q), "add_rms_norm: residual"),
        (lambda q: cuda_ops.cross_entropy(q, TARGET), "cross_entropy: logits"),
        (lambda q: cuda_ops.cross_entropy(X, q[:, 0]), "cross_entropy: target"),
        (lambda q: cuda_ops.softmax(X, 1.0, q), "softmax: mask"),
    ],
)
def test_a_quantized_tensor_is_named(call, name):
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=rf"^{name}: dtype is torch.qint8; allowed is what dequantize\(\) gives$"):
        call(quantized)


def test_a_tensor_that_is_missing_in_a_direct_call_is_named():
    with pytest.raises(TypeError, match=r"^flash_attention: q: given None; it must be a tensor$"):
        torch.ops.kernel_pytorch_cuda.flash_attention(None, HEADS, HEADS, 1.0, False)


@pytest.mark.parametrize(
    ("call", "layout"),
    [
        (lambda: cuda_ops.softmax(X.to_sparse()), "softmax: x: layout is torch.sparse_coo"),
        (lambda: cuda_ops.softmax(X.to_sparse().requires_grad_()), "softmax: x: layout is torch.sparse_coo"),
        (lambda: cuda_ops.add_rms_norm(X, X.to_sparse()), "add_rms_norm: residual: layout is torch.sparse_coo"),
        (lambda: cuda_ops.cross_entropy(X.to_sparse(), TARGET), "cross_entropy: logits: layout is torch.sparse_coo"),
        (lambda: cuda_ops.softmax(ragged(torch.strided)), "softmax: x: layout is nested"),
        (lambda: cuda_ops.rms_norm(ragged(torch.jagged)), "rms_norm: x: layout is nested"),
        (lambda: cuda_ops.flash_attention(ragged(torch.strided), HEADS, HEADS), "flash_attention: q: layout is nested"),
    ],
)
def test_a_tensor_without_strides_is_named(call, layout):
    with pytest.raises(TypeError, match=f"^{layout}; allowed is torch.strided, which to_[a-z_]+\\(\\) gives$"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda_ops.rms_norm(X, VECTOR, -1.0), "rms_norm: eps: given -1.0; it must not be negative"),
        (lambda: cuda_ops.rms_norm(X, VECTOR, -1), "rms_norm: eps: given -1; it must not be negative"),
        (lambda: cuda_ops.layer_norm(X, eps=math.nan), "layer_norm: eps: given nan; it must be finite"),
        (lambda: cuda_ops.add_rms_norm(X, X, offset=math.inf), "add_rms_norm: offset: given inf; it must be finite"),
        (lambda: cuda_ops.softmax(X, math.nan), "softmax: scale: given nan; it must be finite"),
        (
            lambda: cuda_ops.flash_attention(HEADS, HEADS, HEADS, -math.inf),
            "flash_attention: scale: given -inf; it must",
        ),
        (lambda: cuda_ops.swiglu(X, alpha=math.nan), "swiglu: alpha: given nan; it must be finite"),
        (lambda: cuda_ops.cross_entropy(X, TARGET, softcap=math.inf), "cross_entropy: softcap: given inf; it must be"),
    ],
)
def test_a_number_that_gives_no_result_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_a_whole_number_will_do_and_so_will_no_limit():
    assert torch.equal(cuda_ops.softmax(X, 2), cuda_ops.softmax(X, 2.0))
    assert torch.equal(cuda_ops.swiglu(X, limit=math.inf), cuda_ops.swiglu(X))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda_ops.rms_norm(X.int()), "rms_norm: x: dtype is torch.int32; allowed are float16"),
        (
            lambda: cuda_ops.head_rms_norm(X.int(), VECTOR),
            "head_rms_norm: x: dtype is torch.int32; allowed are float16",
        ),
        (lambda: cuda_ops.softmax(X.to(torch.complex64)), "softmax: x: dtype is torch.complex64; allowed"),
        (lambda: cuda_ops.softmax(X, 1.0, X.int()), "softmax: mask: dtype is torch.int32; allowed are .*, torch.bool$"),
        (lambda: cuda_ops.cross_entropy(X, VECTOR[:4]), "cross_entropy: target: dtype is torch.float32; allowed are"),
        (
            lambda: cuda_ops.flash_attention(HEADS, HEADS.half(), HEADS),
            "flash_attention: k: dtype is torch.float16; it",
        ),
        (
            lambda: cuda_ops.bias_dropout_add(X, None, X, 0.5, torch.tensor(1.0)),
            r"bias_dropout_add: seed: given torch.float32 of shape \(\); it must be an int64",
        ),
        (
            lambda: cuda_ops.flash_attention(HEADS[..., :0], HEADS[..., :0], HEADS[..., :0]),
            "flash_attention: q: shape is .* not be empty",
        ),
        (lambda: cuda_ops.flash_attention(X[0, 0], HEADS, HEADS), r"flash_attention: q: shape is \(\); it must be"),
        (lambda: cuda_ops.layer_norm_act(X, activation="GELU"), "layer_norm_act: activation: given 'GELU'; allowed"),
        (lambda: cuda_ops.rms_norm_act(X), "rms_norm_act: activation: given ''; allowed are 'gelu'"),
        (lambda: cuda_ops.add_layer_norm(X, X[:2]), r"add_layer_norm: residual: shape is \(2, 8\)"),
        (lambda: cuda_ops.layer_norm(X.clone().requires_grad_(), X), r"layer_norm: weight: shape is \(4, 8\)"),
        (lambda: cuda_ops.swiglu(X[:, :7]), r"swiglu: gate: shape is \(4, 7\)"),
        (lambda: cuda_ops.reglu(X[:, :7]), r"reglu: gate: shape is \(4, 7\)"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_given(call, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call()


def test_an_error_that_is_not_about_the_arguments_arrives_as_it_is():
    class Interrupted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            raise MemoryError("x: none left")

    with pytest.raises(MemoryError, match=r"^x: none left$"), Interrupted():
        cuda_ops.softmax(X)


def test_what_may_be_left_out_is_what_was_left_out():
    assert torch.equal(
        cuda_ops.layer_norm_act(X, activation="gelu"), cuda_ops.layer_norm_act(X, None, None, 1e-5, "gelu")
    )
    assert torch.equal(cuda_ops.rms_norm_act(X, activation="silu"), cuda_ops.rms_norm_act(X, None, 1e-6, "silu"))
    for short, long in (
        (
            cuda_ops.add_layer_norm_act(X, X, activation="relu"),
            cuda_ops.add_layer_norm_act(X, X, None, None, 1e-5, "relu"),
        ),
        (cuda_ops.add_rms_norm_act(X, X, activation="relu"), cuda_ops.add_rms_norm_act(X, X, None, 1e-6, "relu")),
    ):
        assert all(map(torch.equal, short, long))
    assert torch.equal(cuda_ops.bias_dropout_add(X, VECTOR, X), cuda_ops.bias_dropout_add(X, VECTOR, X, 0.0, None))


def test_targets_that_are_no_word_count_as_ignored():
    outside = torch.tensor([0, -1, 8, 3])
    ignored = torch.tensor([0, -100, -100, 3])
    assert torch.equal(cuda_ops.cross_entropy(X, outside), cuda_ops.cross_entropy(X, ignored))


@pytest.mark.parametrize("shape", [(5,), (4, 1), (8,), (4, 4, 1)])
def test_a_target_that_does_not_expand_is_named(shape):
    with pytest.raises(
        ValueError, match=r"^cross_entropy: target: shape is .*; for logits of shape \(4, 8\) it must expand to \(4,\)"
    ):
        cuda_ops.cross_entropy(X, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("name", ["weight", "cos"])
def test_tensors_that_lie_apart_are_an_error_and_no_answer(name):
    """One on "meta" makes PyTorch ask the fake, whose result is memory that nobody wrote."""
    calls = {
        "weight": lambda: cuda_ops.rms_norm(X, VECTOR.to("meta")),
        "cos": lambda: cuda_ops.rotary_embedding(HEADS, TURNS.to("meta"), TURNS),
    }
    with pytest.raises(RuntimeError, match=r"^[a-z_]+: tensors are on cpu and meta; all of them must be on one device"):
        calls[name]()
    assert cuda_ops.rms_norm(X.to("meta"), VECTOR.to("meta")).shape == X.shape


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "call",
    [
        lambda: cuda_ops.rms_norm(freed(X)),
        lambda: cuda_ops.rms_norm(X, freed(VECTOR)),
        lambda: cuda_ops.add_rms_norm(X, freed(X), VECTOR),
        lambda: cuda_ops.layer_norm(X, VECTOR, freed(VECTOR)),
        lambda: cuda_ops.add_layer_norm(X, freed(X)),
        lambda: cuda_ops.softmax(X, 1.0, freed(X)),
        lambda: cuda_ops.bias_act(X, freed(VECTOR), "silu"),
        lambda: cuda_ops.swiglu(freed(X)),
        lambda: cuda_ops.rotary_embedding(freed(HEADS), TURNS, TURNS),
        lambda: cuda_ops.rotary_qk(HEADS, freed(HEADS), TURNS, TURNS),
        lambda: cuda_ops.rotary_qk(HEADS, None, TURNS, TURNS, freed(TARGET)),
        lambda: cuda_ops.flash_attention(HEADS, freed(HEADS), HEADS),
        lambda: cuda_ops.cross_entropy(freed(X), torch.tensor([0, 1, 2, 3])),
    ],
)
def test_memory_that_was_freed_is_an_error_and_not_an_argument_left_out(call):
    with pytest.raises(RuntimeError, match="its storage holds nothing; it was freed"):
        call()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_only_the_sum_is_used(dropout_p):
    """Parameters that want gradients get none: they have nothing to do with it."""
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (3, 8), (8,), (8,))]
    _, h = cuda_ops.add_layer_norm(*tensors, dropout_p=dropout_p, seed=torch.tensor(3) if dropout_p else None)
    found = torch.autograd.grad(h.sum(), tensors, allow_unused=True)
    assert [gradient is None for gradient in found] == [False, False, True, True]
    assert torch.equal(found[1], torch.ones(3, 8))
