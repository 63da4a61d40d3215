"""The vision transformer, and those of transformers and torchvision loaded into it."""

import copy

import pytest
import torch

from kernel_pytorch.models import VisionTransformer


def vision_transformer(**options):
    torch.manual_seed(0)
    model = VisionTransformer((8, 12), 4, 5, **{"dim": 24, "num_layers": 2, "num_heads": 3} | options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def images(count=3, *, size=(8, 12), dtype=torch.float32):
    return torch.randn(count, 3, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def gradients(loss, model):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_techniques_compute_the_plain_model(dtype):
    model, targets = vision_transformer().to(dtype), torch.tensor([0, 4, -100])
    expected = model.use(techniques=())(images(dtype=dtype), targets)
    wanted = gradients(expected, model)
    loss = model.use()(images(dtype=dtype), targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("techniques", [(), None])
def test_compiles_and_exports(techniques):
    model = vision_transformer(techniques=techniques)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images()), model(images()))
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    torch.testing.assert_close(program.module()(images(7)), model(images(7)))


def test_features_copies_and_autocast():
    model = VisionTransformer((8, 12), 4, 0, dim=24, num_heads=3)
    assert model(images()).shape == (3, 24)
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    torch.testing.assert_close(copied(images()), model(images()))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images()).float(), copied(images()).float(), rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="targets: given a tensor; it must be None"):
        model(images(), torch.tensor([0, 0, 0]))


def vit(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    config = transformers.ViTConfig(**sizes, image_size=(8, 12), patch_size=4, num_labels=5, **options)
    torch.manual_seed(0)
    stock = transformers.ViTForImageClassification(config).eval()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stock


def with_older_names(state):
    """As `save_pretrained` writes them, and as modules were called before version 5."""
    names = {
        "vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    }  # fmt: skip
    for new, old in names.items():
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    return state


@pytest.mark.parametrize("techniques", [(), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_gradients_are_those_of_transformers(techniques, dtype):
    stock = vit(hidden_act="gelu_pytorch_tanh").to(dtype)
    ours = VisionTransformer.from_transformers(stock, techniques=techniques)
    x = images(dtype=dtype)
    torch.testing.assert_close(ours(x), stock(x).logits, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-9)
    ours(x).square().sum().backward()
    stock(x).logits.square().sum().backward()
    for mine, theirs in (("patches", "vit.embeddings.patch_embeddings.projection"), ("head", "classifier")):
        wanted = stock.get_submodule(theirs).weight.grad
        torch.testing.assert_close(ours.get_submodule(mine).weight.grad, wanted, rtol=1e-4, atol=1e-3)


def test_both_families_of_names_of_transformers(tmp_path):
    stock = vit()
    older = with_older_names(stock.state_dict())
    load_file = pytest.importorskip("safetensors.torch").load_file
    stock.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() in (older.keys(), stock.state_dict().keys())
    for state in (stock.state_dict(), older, saved):
        ours = VisionTransformer.from_transformers(stock.config.to_dict(), state)
        torch.testing.assert_close(ours(images()), stock(images()).logits)


def test_a_model_without_classes():
    pytest.importorskip("transformers")
    from transformers import ViTModel

    stock = ViTModel(vit().config).eval()  # with a pooler
    ours = VisionTransformer.from_transformers(stock)
    torch.testing.assert_close(ours(images()), stock(images()).last_hidden_state[:, 0])


def torchvision_state(model, older=False):
    """The tensors of a model of ours under torchvision's names (`torchvision/models/vision_transformer.py`)."""
    state = model.state_dict()
    found = {
        "class_token": state["token"][None, None], "encoder.pos_embedding": state["positions"][None],
        "conv_proj.weight": state["patches.weight"], "conv_proj.bias": state["patches.bias"],
        "encoder.ln.weight": state["norm.weight"], "encoder.ln.bias": state["norm.bias"],
        "heads.head.weight": state["head.weight"], "heads.head.bias": state["head.bias"],
    }  # fmt: skip
    up, down = ("mlp.linear_1", "mlp.linear_2") if older else ("mlp.0", "mlp.3")
    names = {"norm1": "ln_1", "attention.out": "self_attention.out_proj", "norm2": "ln_2", "mlp.up": up}
    names |= {"mlp.down": down}
    for index in range(len(model.blocks)):
        home = f"encoder.layers.encoder_layer_{index}."
        for kind in ("weight", "bias"):
            found[f"{home}self_attention.in_proj_{kind}"] = state[f"blocks.{index}.attention.qkv.{kind}"]
            found |= {f"{home}{name}.{kind}": state[f"blocks.{index}.{ours}.{kind}"] for ours, name in names.items()}
    return found


@pytest.mark.parametrize("older", [False, True])
def test_names_of_torchvision(older):
    torch.manual_seed(0)
    model = VisionTransformer(12, 4, 5, dim=24, num_layers=2, num_heads=3, hidden_dim=40)
    state = torchvision_state(model, older)
    ours = VisionTransformer.from_torchvision(state, num_heads=3)
    torch.testing.assert_close(ours(images(size=(12, 12))), model(images(size=(12, 12))))
    del state["encoder.layers.encoder_layer_1.ln_1.bias"]
    with pytest.raises(ValueError, match=r"state_dict: missing are encoder.layers.encoder_layer_1.ln_1.bias"):
        VisionTransformer.from_torchvision(state, num_heads=3)


def test_attention_of_torchvision_is_the_stock_module():
    """What torchvision computes with its packed weights, as `torch.nn.MultiheadAttention` does."""
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    torch.nn.init.normal_(stock.in_proj_bias)
    attention = vision_transformer().blocks[0].attention
    attention.qkv.weight, attention.qkv.bias = stock.in_proj_weight, stock.in_proj_bias
    attention.out.load_state_dict(stock.out_proj.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(attention(x), stock(x, x, x, need_weights=False)[0])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"images: shape is \(3, 3, 8, 8\); it must be \(B, 3, 8, 12\)"):
        vision_transformer()(images(size=(8, 8)))
    with pytest.raises(ValueError, match="patch_size: given 5; it must divide image_size, 8"):
        VisionTransformer(8, 5)
    stock = vit()
    with pytest.raises(ValueError, match="config: qkv_bias is False; it must be True"):
        VisionTransformer.from_transformers(stock.config.to_dict() | {"qkv_bias": False}, stock.state_dict())
    state = {name: tensor for name, tensor in stock.state_dict().items() if name != "vit.layernorm.bias"}
    with pytest.raises(ValueError, match=r"state_dict: missing are vit.layernorm.bias; unknown are extra"):
        VisionTransformer.from_transformers(stock.config, state | {"extra": torch.zeros(1)})
