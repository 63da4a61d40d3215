"""Launchers of Triton's level that plan once for a geometry: what a plan must not keep, and when there is another."""

import gc
import sys
import weakref

import pytest
import torch

from kernel_pytorch import fused_ln_act

launcher = pytest.importorskip("kernel_pytorch.fused_ln_act._core.launch")


CALLS = {
    "swiglu": [(6, 40), (6, 40)],
    "geglu": [(6, 80)],
    "bias_act": [(6, 40), (40,)],
    "bias_dropout_add": [(6, 40), (40,), (6, 40)],
    "softmax": [(6, 40)],
    "layer_norm_act": [(6, 40), (40,), (40,)],
    "add_rms_norm_act": [(6, 40), (6, 40), (40,)],
    "linear_act": [(6, 16), (24, 16), (24,)],
    "gated_mlp": [(6, 16), (48, 16), (8, 24)],
}


def make(name, device):
    torch.manual_seed(0)
    return [(torch.randn(shape, device=device) / 4).requires_grad_() for shape in CALLS[name]]


def call(name, *tensors, **options):
    activation = (
        {"activation": "gelu"} if name in ("bias_act", "layer_norm_act", "add_rms_norm_act", "linear_act") else {}
    )
    return getattr(fused_ln_act, name)(*tensors, **activation, **options)


def results(name, tensors, level):
    """Outputs and gradients."""
    outputs = call(name, *tensors, level=level)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad([o.sin().sum() for o in outputs], tensors)]


@pytest.mark.parametrize("name", CALLS)
def test_plans_keep_no_tensors(name, device):
    tensors = make(name, device)
    watched = [weakref.ref(tensor.detach()) for tensor in tensors]
    held = results(name, tensors, "triton")
    watched += [weakref.ref(tensor) for tensor in (*tensors, *held)]
    del tensors, held
    gc.collect()
    assert not any(reference() is not None for reference in watched)


@pytest.mark.parametrize("name", CALLS)
def test_another_geometry_has_a_plan_of_its_own(name, device):
    """The rows are the same in number, and lie otherwise: transposed, shifted, expanded, fewer, none, wider."""
    first, *others = make(name, device)
    rows = first.detach()
    width = rows.shape[1]
    layouts = [
        rows, rows.t().contiguous().t(), torch.cat([rows[:, :1], rows], 1)[:, 1:], rows[:1].expand(6, width), rows[:3],
        rows.view(2, 3, width), rows[:0], rows.double(),
    ]  # fmt: skip
    for x in layouts:
        given = [x.detach().requires_grad_()]
        for other in others:  # what lies by rows goes with them, what does not with their dtype
            moved = other if other.shape != first.shape else torch.empty_like(x).copy_(other.new_ones(()).expand_as(x))
            given.append(moved.detach().to(x.dtype).requires_grad_())
        found, expected = (results(name, given, level) for level in ("triton", "reference"))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, x=x: f"{tuple(x.shape)}, {x.stride()}: {text}")


@pytest.mark.parametrize("name", CALLS)
def test_freed_memory_is_refused_although_there_is_a_plan(name, device):
    tensors = [tensor.detach() for tensor in make(name, device)]
    call(name, *tensors, level="triton")
    for position in range(len(tensors)):
        given = [tensor.clone() for tensor in tensors]
        given[position].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="holds nothing"):
            call(name, *given, level="triton")


@pytest.mark.parametrize("name", ["bias_dropout_add", "layer_norm_act", "add_layer_norm"])
def test_a_plan_keeps_no_seed(name, device):
    """Seeds that PyTorch draws differ between calls, a given one repeats, and the backward has that of its forward."""
    shapes = {
        "bias_dropout_add": [(9, 64), (64,), (9, 64)],
        "layer_norm_act": [(9, 64)],
        "add_layer_norm": [(9, 64)] * 2,
    }
    tensors = [torch.randn(shape, device=device) for shape in shapes[name]]
    x, probability = tensors[0].requires_grad_(), {"p" if name == "bias_dropout_add" else "dropout_p": 0.5}

    def kept(**options):
        """What is not zero in the gradient of x where dropout is applied to x, else in y."""
        found = call(name, *tensors, **probability, level="triton", **options)
        if name == "layer_norm_act":
            return found != 0
        (dx,) = torch.autograd.grad((found[0] if isinstance(found, tuple) else found).sin().sum(), x)
        h = found[1] if isinstance(found, tuple) else found
        assert torch.equal(dx != 0, h != tensors[-1])
        return dx != 0

    assert not torch.equal(kept(), kept())
    one, other = (torch.tensor(number, device=device) for number in (1, 2))
    masks = [kept(seed=seed) for seed in (one, other, one.clone())]
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("name", CALLS)
def test_few_functions_stand_between_a_call_and_its_launch(name, device, monkeypatch):
    """Level, operator, plan and what it returned, and one for each half of a gated MLP."""
    tensors, found = [tensor.detach() for tensor in make(name, device)], []

    def count(launch, *arguments):
        frame, between = sys._getframe(1), 0
        while frame.f_code.co_filename != __file__:
            frame, between = frame.f_back, between + 1
        found.append(between - 1)  # the public function

    call(name, *tensors, level="triton")
    monkeypatch.setattr(launcher.Launch, "__call__", count)
    call(name, *tensors, level="triton")
    assert 0 < max(found) <= 5 + (name == "gated_mlp")
