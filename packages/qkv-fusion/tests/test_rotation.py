"""`patch` finds attention by the function that it calls, also in a forward that a decorator wraps."""

import functools

import pytest
import torch

from kernel_pytorch.qkv_fusion import patch, unpatch
from kernel_pytorch.qkv_fusion.levels import LADDER

calls = []


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q, k, cos, sin):
    calls.append("own")
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def renaming(function):
    """As transformers does it: hands on to the function that it holds."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        calls.append("wrapper")
        return function(*args, **kwargs)

    return wrapped


def by_name(function):
    """Hands on to a function that it finds elsewhere."""

    @functools.wraps(function)
    def wrapped(self, *args, **kwargs):
        return wrapped.__wrapped__(self, *args, **kwargs)

    return wrapped


class Attention(torch.nn.Module):
    def forward(self, hidden_states, position_embeddings):
        q = k = hidden_states.unflatten(-1, (2, 8)).transpose(1, 2)
        return sum(apply_rotary_pos_emb(q, k, *position_embeddings))


class Wrapped(Attention):
    forward = renaming(Attention.forward)


class TwiceWrapped(Attention):
    forward = renaming(renaming(Attention.forward))


class Unknown(Attention):
    forward = by_name(Attention.forward)


class Holder:
    """A decorator that is an object."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __get__(self, module, owner=None):
        return self if module is None else functools.partial(self, module)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


class Held(Attention):
    forward = Holder(Attention.forward)


def counting(function):
    """Keeps a number and something that is not there yet in its closure."""
    count = 0

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        calls.append(count)
        return later if count < 0 else function(*args, **kwargs)

    if function is None:
        later = None
    return wrapped


class Counting(Attention):
    forward = counting(Attention.forward)


@pytest.fixture(autouse=True)
def forget():
    calls.clear()


def inputs():
    torch.manual_seed(0)
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    return torch.randn(3, 5, 16), (angles.cos(), angles.sin())


@pytest.mark.parametrize("kind", [Attention, Wrapped, TwiceWrapped])
def test_the_rotation_is_found(kind, monkeypatch):
    monkeypatch.setattr(LADDER, "is_native", lambda function, x: False)
    model = kind()
    stock, wrappers = model(*inputs()), calls.count("wrapper")
    assert patch(model).replaced == {"": "rotary_embedding"}
    calls.clear()
    torch.testing.assert_close(model(*inputs()), stock)
    assert calls == ["wrapper"] * wrappers
    unpatch(model)
    model(*inputs())
    assert "own" in calls


def test_the_closure_of_a_wrapper_is_the_same(monkeypatch):
    monkeypatch.setattr(LADDER, "is_native", lambda function, x: False)
    model = Counting()
    stock, first = model(*inputs()), calls[0]
    assert patch(model).replaced
    torch.testing.assert_close(model(*inputs()), stock)
    assert calls[-1] == first + 1
    unpatch(model)
    calls.clear()
    model(*inputs())
    assert calls[0] == first + 2


@pytest.mark.parametrize("kind", [Unknown, Held])
def test_a_wrapper_that_is_not_known_is_left_alone(kind):
    model = kind()
    report = patch(model)
    assert not report.replaced
    assert "wrapped in a function" in report.left[""]
    model(*inputs())
    assert calls[-1] == "own"


@pytest.mark.parametrize("autocast", [True, False])
def test_tables_in_float32_turn_heads_in_16_bits_under_autocast_alone(monkeypatch, autocast):
    """There attention rounds them to 16 bits; elsewhere what it is given in float32 stays in float32."""
    monkeypatch.setattr(LADDER, "is_native", lambda function, x: False)
    model, (x, tables) = Attention(), inputs()
    x = x.bfloat16()
    stock = model(x, tables)
    assert stock.dtype is torch.float32
    assert patch(model).replaced
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model(x, tables)
    assert ("own" in calls) == (not autocast)
    torch.testing.assert_close(found, stock.to(found.dtype), rtol=2.0**-7, atol=2.0**-8)
    assert found.dtype is (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("kind", [Attention, Wrapped])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_inference_is_its_own(kind, training):
    """TorchInductor makes faster kernels of that."""
    model = kind()
    stock = model(*inputs())
    patch(model)
    calls.clear()
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(torch.compile(model, backend="eager")(*inputs()), stock)
    assert ("own" in calls) == (not training)


@pytest.mark.parametrize("kind", [Attention, Wrapped])
def test_compiled_where_the_rotation_of_the_class_runs(kind):
    """As under autocast, where heads are in 16 bits and the tables are not."""
    x, tables = inputs()
    x = x.bfloat16()
    model = kind()
    stock = model(x, tables)
    patch(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x, tables), stock)


FAMILIES = {
    "GPTNeoX": {},
    "Granite": {},
    "Mixtral": {"num_local_experts": 2, "num_key_value_heads": 2},
    "Olmo2": {},
    "Phi3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_compiled_under_autocast(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=64, **FAMILIES[family])
    model = getattr(transformers, f"{family}Model")(config).train()
    ids = torch.randint(64, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        stock = model(ids).last_hidden_state
        assert len(patch(model).replaced) == 1
        torch._dynamo.reset()
        ours = torch.compile(model, backend="eager", fullgraph=True)(ids).last_hidden_state
    torch.testing.assert_close(ours, stock)
