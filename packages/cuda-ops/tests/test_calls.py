"""What no operator may do silently: lose a tangent, take what is no tensor, answer out of memory that is not there."""

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch import cuda_ops

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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda_ops.rms_norm(None), "x: given None; it must be a tensor"),
        (lambda: cuda_ops.add_rms_norm(X, None), "residual: given None; it must be a tensor"),
        (lambda: cuda_ops.layer_norm(X, (8,), VECTOR), "weight: given tuple; it must be a tensor or None"),
        (lambda: cuda_ops.rotary_embedding(HEADS, None, None), "cos: given None; it must be a tensor"),
        (lambda: cuda_ops.flash_attention(HEADS, HEADS, None), "v: given None; it must be a tensor"),
        (lambda: cuda_ops.flash_attention(HEADS, HEADS, HEADS, True), "scale: given True; .* `causal` goes by name"),
        (lambda: cuda_ops.cross_entropy(X, None), "target: given None; it must be a tensor"),
    ],
)
def test_what_is_no_tensor_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda_ops.rms_norm(X.int()), "x: dtype is torch.int32; allowed are float16"),
        (lambda: cuda_ops.softmax(X.to(torch.complex64)), "x: dtype is torch.complex64; allowed"),
        (
            lambda: cuda_ops.flash_attention(HEADS, HEADS.half(), HEADS),
            "k: dtype is torch.float16; it must be that of q",
        ),
        (
            lambda: cuda_ops.bias_dropout_add(X, None, X, 0.5, torch.tensor(1.0)),
            r"seed: given torch.float32 of shape \(\); it must be an int64",
        ),
        (
            lambda: cuda_ops.flash_attention(HEADS[..., :0], HEADS[..., :0], HEADS[..., :0]),
            "q: shape is .* not be empty",
        ),
    ],
)
def test_a_dtype_that_does_not_fit_is_named_with_what_was_given(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize("shape", [(5,), (4, 1), (8,), (4, 4, 1)])
def test_a_target_that_does_not_expand_is_named(shape):
    with pytest.raises(ValueError, match=r"target: shape is .*; for logits of shape \(4, 8\) it must expand to \(4,\)"):
        cuda_ops.cross_entropy(X, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("name", ["weight", "cos"])
def test_tensors_that_lie_apart_are_an_error_and_no_answer(name):
    """One on "meta" makes PyTorch ask the fake, whose result is memory that nobody wrote."""
    calls = {
        "weight": lambda: cuda_ops.rms_norm(X, VECTOR.to("meta")),
        "cos": lambda: cuda_ops.rotary_embedding(HEADS, TURNS.to("meta"), TURNS),
    }
    with pytest.raises(RuntimeError, match="tensors are on cpu and meta; all of them must be on one device"):
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
        lambda: cuda_ops.flash_attention(HEADS, freed(HEADS), HEADS),
        lambda: cuda_ops.cross_entropy(freed(X), torch.tensor([0, 1, 2, 3])),
    ],
)
def test_memory_that_was_freed_is_an_error_and_not_an_argument_left_out(call):
    with pytest.raises(RuntimeError, match="its storage holds nothing; it was freed"):
        call()
