"""Joined weights: one storage, the same names and values, and the way back bit for bit."""

import pytest
import torch
from tiny_models import FAMILIES, make, prompt, stock

from kernel_pytorch.fused_decode import Decoder
from kernel_pytorch.fused_decode.decoder import decoder as module
from kernel_pytorch.fused_decode.decoder import weights


def state_of(model):
    return {name: (value.clone(), value.shape, value.stride()) for name, value in model.state_dict().items()}


def check_state(model, before):
    after = model.state_dict()
    assert [*after] == [*before]
    for name, (value, shape, stride) in before.items():
        assert after[name].equal(value)
        assert after[name].shape == shape
        assert after[name].stride() == stride


def storages(model):
    return [p.untyped_storage().data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("family", ["llama_biased_tied", "qwen2", "gemma2", "phi3"])
def test_parameters_become_views_and_come_back(family):
    model = make(family)
    before, parameters, apart = state_of(model), [*model.parameters()], len({*storages(model)})
    decoder = Decoder(model, 1, 32)
    check_state(model, before)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    layer = model.model.layers[0]
    if family != "phi3":
        attention = layer.self_attn
        joined = decoder._step.plan.layers[0].attention.qkv.weight
        rows = attention.q_proj.weight.numel() * attention.q_proj.weight.element_size()
        assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + rows
        assert joined.data_ptr() == attention.q_proj.weight.data_ptr()
        assert joined.equal(torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]))
    decoder.revert()
    check_state(model, before)
    assert len({*storages(model)}) == apart
    if family != "phi3":
        assert attention.k_proj.weight.data_ptr() != joined.data_ptr() + rows
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters())
    if "tied" in family:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(RuntimeError, match="was reverted; make a new one"):
        decoder.generate(prompt([3])[0])
    decoder.revert()


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_load(family, tmp_path):
    model = make(family)
    before = state_of(model)
    Decoder(model, 1, 32)
    model.save_pretrained(tmp_path)
    check_state(type(model).from_pretrained(tmp_path), before)
    fresh = make(family, seed=3)
    fresh.load_state_dict(model.state_dict())
    check_state(fresh, before)


def test_checkpoints_of_other_libraries_have_every_weight(tmp_path):
    """Those that look for shared storages drop Parameters, or refuse."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = make("qwen3"), make("qwen3", seed=3)
    before = state_of(model)
    decoder = Decoder(model, 1, 32)
    safetensors.save_model(model, tmp_path / "joined.safetensors")
    safetensors.load_model(other, tmp_path / "joined.safetensors")
    check_state(other, before)
    assert len({*storages(model)}) == len([*model.parameters()])
    del decoder
    check_state(model, before)  # each Parameter keeps its memory
    assert Decoder(model, 1, 32).generate(prompt([3])[0]).shape == (1, 23)


CHANGES = {
    "a head": lambda m: setattr(m, "lm_head", torch.nn.Linear(32, 96, bias=False)),
    "a wrapped layer": lambda m: setattr(
        m.model.layers[0].mlp, "down_proj", torch.nn.Sequential(m.model.layers[0].mlp.down_proj)
    ),
    "an activation": lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
    "a bias": lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.ones(96))),
    "a scale": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 3.0),
    "an eps": lambda m: setattr(m.model.norm, "variance_epsilon", 5.0),
    "angles": lambda m: m.model.rotary_emb.inv_freq.mul_(0.1),
    "fewer layers": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_refused(name):
    model, (ids, _) = make("llama"), prompt([4])
    decoder = Decoder(model, 1, 32)
    decoder.generate(ids)
    CHANGES[name](model)
    assert decoder.is_outdated()
    with pytest.raises(TypeError, match="is not as it was when the Decoder was made; make a new Decoder"):
        decoder.generate(ids)


def test_a_model_of_inference_tensors_is_refused():
    with torch.inference_mode():
        model = make("llama")
    with pytest.raises(TypeError, match=r"it was made under torch\.inference_mode"):
        Decoder(model, 1, 32)


def test_loaded_and_changed_weights_count():
    model, other = make("qwen2"), make("qwen2", seed=3)
    ids, _ = prompt([6])
    decoder = Decoder(model, 1, 64)
    assert decoder.generate(ids, max_new_tokens=30).equal(stock(model, ids))
    model.load_state_dict(other.state_dict())
    expected = stock(other, ids)
    assert decoder.generate(ids, max_new_tokens=30).equal(expected)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    changed = stock(model, ids)
    assert not changed.equal(expected)
    assert decoder.generate(ids, max_new_tokens=30).equal(changed)
    state = state_of(model)
    decoder.revert()
    check_state(model, state)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj", "model.norm", "lm_head"])
def test_replaced_parameters_are_refused(name):
    model = make("llama")
    decoder = Decoder(model, 1, 32)
    part = model.get_submodule(name)
    part.weight = torch.nn.Parameter(part.weight.detach().clone())
    with pytest.raises(TypeError, match=f"{name}.weight is not as it was .* make a new Decoder"):
        decoder.generate(prompt([3])[0])
    before = state_of(model)
    decoder.revert()
    check_state(model, before)
    model.load_state_dict(make("llama", seed=4).state_dict(), assign=True)
    Decoder(model, 1, 32).generate(prompt([3])[0])


@pytest.mark.parametrize("fails_at", range(5))
def test_out_of_memory_leaves_the_model_as_it_was(fails_at, monkeypatch):
    model = make("llama_biased_tied")
    before, apart = state_of(model), len({*storages(model)})
    calls = []

    class Torch:
        OutOfMemoryError = torch.OutOfMemoryError

        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *shape, **options):
            calls.append(shape)
            if len(calls) > fails_at:
                raise torch.OutOfMemoryError("no memory")
            return torch.empty(*shape, **options)

    monkeypatch.setattr(weights, "torch", Torch())
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        Decoder(model, 1, 32)
    monkeypatch.undo()
    check_state(model, before)
    assert len({*storages(model)}) == apart
    Decoder(model, 1, 32).generate(prompt([3])[0])


@pytest.mark.parametrize("part", ["Caches", "Step", "Runner"])
def test_failures_behind_the_weights_leave_the_model_as_it_was(part, monkeypatch):
    model = make("llama")
    before, apart = state_of(model), len({*storages(model)})

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(module, part, fails)
    with pytest.raises(torch.OutOfMemoryError):
        Decoder(model, 1, 32)
    check_state(model, before)
    assert len({*storages(model)}) == apart


def test_two_decoders_share_the_weights():
    model = make("qwen3")
    ids, mask = prompt([5, 9])
    first = Decoder(model, 1, 64)
    joined = storages(model)
    second = Decoder(model, 2, 64)
    assert storages(model) == joined
    expected = stock(model, ids, mask)
    assert second.generate(ids, mask, 30).equal(expected)
    assert first.generate(ids[1:], max_new_tokens=30).equal(expected[1:])
    first.revert()
    with pytest.raises(TypeError, match="make a new Decoder"):
        second.generate(ids, mask)


def test_training_goes_on_with_joined_weights():
    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        ids, _ = prompt([12])
        for _ in range(2):
            model.train()(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    model, other = make("llama"), make("llama")
    decoder = Decoder(model, 1, 64)
    trained(model), trained(other)
    check_state(model, state_of(other))
    ids, _ = prompt([6])
    assert decoder.generate(ids, max_new_tokens=30).equal(stock(other, ids))


@pytest.mark.parametrize("where", ["inference mode", "another default device", "another default dtype"])
def test_surroundings_of_the_call(where):
    model, other = make("qwen3"), make("qwen3")
    ids, mask = prompt([5, 9])
    expected = stock(other, ids, mask)
    contexts = {"inference mode": torch.inference_mode(), "another default device": torch.device("meta")}
    try:
        if where == "another default dtype":
            torch.set_default_dtype(torch.float64)
        with contexts.get(where, torch.enable_grad()):
            decoder = Decoder(model, 2, 64)
            assert decoder.generate(ids, mask, 30).equal(expected)
        assert decoder.generate(ids, mask, 30).equal(expected)
        decoder.generate(ids, mask, 30, do_sample=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for each in (model, other):
        each(input_ids=ids, labels=ids).loss.backward()
    assert all(a.grad.equal(b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with torch.inference_mode():
        decoder.revert()
    assert not any(p.is_inference() for p in model.parameters())


def test_autocast_is_refused():
    decoder = Decoder(make("llama"), 1, 32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="autocast is on"):
        decoder.generate(prompt([3])[0])
