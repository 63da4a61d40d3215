"""What the decoder does not compute: refused by name, with the reason, and the model is as before."""

import pytest
import torch
import transformers
from tiny_models import SIZES, make, prompt, stock

from kernel_pytorch.fused_decode import Decoder
from kernel_pytorch.fused_decode.decoder import plain


class Adapter(torch.nn.Linear):
    """A linear layer that may compute something else."""


class Twice(torch.nn.Module):
    """A forward that is another one."""

    def __init__(self, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            inner.gate_proj, inner.up_proj, inner.down_proj, inner.act_fn
        )  # fmt: skip

    def forward(self, x):
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _adapter(model):
    old = model.model.layers[1].self_attn.v_proj
    model.model.layers[1].self_attn.v_proj = Adapter(old.in_features, old.out_features, bias=False)


def _twice(model):
    model.model.layers[1].mlp = Twice(model.model.layers[1].mlp)


def _shared(model):
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight


def _one_bias(model):
    layer = model.model.layers[0].self_attn
    layer.k_proj.bias = torch.nn.Parameter(torch.zeros(layer.k_proj.out_features))


CHANGES = {
    "adapter": (_adapter, "layer 1: v_proj is a .*Adapter.*merge adapters"),
    "other forward": (_twice, "compute something else"),
    "shared": (_shared, "share a Parameter"),
    "one bias": (_one_bias, "some of q_proj, k_proj, v_proj have a bias"),
    "training": (lambda m: m.train(), "training mode; call model.eval"),
    "quantised": (lambda m: setattr(m, "is_quantized", True), "quantised"),
    "hook": (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None), "LlamaMLP has hooks"),
    "own forward": (lambda m: setattr(m.lm_head, "forward", lambda x: x), "Linear has a forward of its own"),
    "meta": (lambda m: m.to("meta"), "its device is meta"),
    "two devices": (lambda m: m.lm_head.to("meta"), "have 2 devices, cpu, meta"),
    "two dtypes": (lambda m: m.lm_head.to(torch.bfloat16), "have 2 dtypes"),
    "float64": (lambda m: m.double(), "its dtype is torch.float64"),
    "another parameter": (
        lambda m: setattr(m.model, "extra", torch.nn.Parameter(torch.ones(3))), "model.extra have no"),
    "activation": (
        lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.ReLU()), "activation of its unit is ReLU"),
    "parametrised": (
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.model.layers[0].mlp.up_proj), "have no|made of other"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models(change):
    act, reason = CHANGES[change]
    model = make("llama")
    act(model)
    before = [(p, p.data_ptr()) for p in model.parameters()] if change not in ("meta", "two devices") else []
    with pytest.raises(TypeError, match=f"(?s){reason}"):
        Decoder(model)
    assert all(p.data_ptr() == pointer for p, pointer in before)


def test_changes_after_the_decoder_was_made():
    for change in ("training", "hook", "quantised"):
        act, reason = CHANGES[change]
        model = make("llama")
        decoder = Decoder(model, 1, 32)
        act(model)
        with pytest.raises(TypeError, match=reason):
            decoder.generate(prompt([3])[0])


@pytest.mark.parametrize(("name", "config"), [
    ("GPT2", {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32}),
    ("Mixtral", {**SIZES, "num_local_experts": 2}),
    ("Cohere", {k: v for k, v in SIZES.items() if k != "head_dim"}),
    ("Granite", {**SIZES, "residual_multiplier": 0.5}),
    ("Glm", {**SIZES, "pad_token_id": None}),
    ("GPTNeoX", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "vocab_size": 32}),
])  # fmt: skip
def test_other_families(name, config):
    config = getattr(transformers, f"{name}Config")(**config)
    name = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with pytest.raises(TypeError):
        Decoder(model)


def test_other_modules():
    with pytest.raises(TypeError, match="given int"):
        Decoder(3)
    with pytest.raises(TypeError, match="no model of transformers"):
        Decoder(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("part", ["softcap", "window", "norm_offset", "q_norm", "scale", "bias", "residual"])
def test_a_step_that_forgets_a_part_is_refused(part, monkeypatch):
    """So the trial would notice a model in which that part is another one."""
    family = {"softcap": "gemma2", "window": "mistral", "norm_offset": "gemma", "q_norm": "qwen3", "bias": "qwen2"}
    model = make(family.get(part, "gemma"))
    for name in ("project", "attend", "embed", "add_norm"):
        function = getattr(plain, name)

        def forgets(*args, function=function, **options):
            options.pop(part, None)
            if part == "q_norm":
                options.pop("k_norm", None)
            if part == "scale" and function.__name__ == "attend":
                options["scale"] = 1.0
            return function(*args, **options)

        monkeypatch.setattr(plain, name, forgets)
    with pytest.raises(TypeError, match="compute something else"):
        Decoder(model)


@pytest.mark.skipif(not hasattr(transformers, "Ministral3Config"), reason="a newer transformers has it")
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_queries_that_are_scaled_by_their_position(beta):
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**SIZES, rope_parameters=rope)).eval()
    if beta:
        with pytest.raises(TypeError, match="compute something else"):
            Decoder(model)
    else:
        ids, mask = prompt([5])
        expected = stock(model, ids, mask)
        assert Decoder(model, 1, 64).generate(ids, mask, expected.shape[1] - 5).equal(expected)


def test_angles_that_change_with_the_length():
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(TypeError, match="'dynamic', whose angles depend on the length"):
        Decoder(make("llama", rope_parameters=dynamic))
    long = {
        "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
        "factor": 4.0, "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = make("phi3", rope_parameters=long, original_max_position_embeddings=16, sliding_window=None)
    with pytest.raises(TypeError, match="change behind position 16; max_length is 17 and must be at most 16"):
        Decoder(model, 1, 17)
    ids, _ = prompt([4])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert Decoder(model, 1, 16).generate(ids, max_new_tokens=12).equal(expected)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"batch_size": 0}, "batch_size: given 0; it must be an integer from 1 to 16"),
    ({"batch_size": 17}, "batch_size: given 17"),
    ({"batch_size": True}, "batch_size: given True"),
    ({"max_length": 2.0}, "max_length: given 2.0"),
    ({"level": "cuda"}, "level: given 'cuda'; allowed are 'native', 'triton'"),
])  # fmt: skip
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Decoder(make("llama"), **arguments)


def test_level_is_said():
    assert repr(Decoder(make("llama"), 2, 64)) == (
        "Decoder(LlamaForCausalLM, batch_size=2, max_length=64, level='native')"
    )
