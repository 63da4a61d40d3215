"""Models that other libraries copy, offload, quantise or adapt, patched and fused before or after that."""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from replaced import PATCHES
from surroundings import trained
from test_architectures import check
from variants import STOCK, VARIANTS, RefusedError
from zoo import ARCHITECTURES

from kernel_pytorch.qkv_fusion._core.stock import owner_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

NAMES = ("Llama", "Gemma2", "Phi3", "Bert", "Bart", "T5")
WIDE = {
    name: dataclasses.replace(each, options={**each.options, "hidden_size": 64, "d_model": 64})
    for name, each in ARCHITECTURES.items() if name in NAMES
}  # fmt: skip
"""As wide as a block of weights in 4 bits."""
every_model = pytest.mark.parametrize("name", NAMES)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
order = pytest.mark.parametrize("before", [True, False], ids=["prepared before", "prepared after"])


def made(name, variant, change, before):
    """A model that is prepared before or after a library changed it; skips where it is refused by name."""
    model = WIDE[name].build()
    try:
        model = variant.prepare(model) if before else model
        model = change(model)
        return model if before else variant.prepare(model)
    except RefusedError as error:
        pytest.skip(f"refused by name: {error}")


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


def compare_logits(name, variant, change, before, atol=1e-5):
    """Those of stock that was changed likewise; of what is fused before, the library may leave out layers."""
    inputs = WIDE[name].inputs()
    with VARIANTS[variant].levels():
        found = logits(made(name, VARIANTS[variant], change, before), inputs)
    exact, wanted = (logits(made(name, STOCK, each, True), inputs) for each in (lambda model: model, change))
    if VARIANTS[variant].fused:
        assert (found - exact).norm() <= 2.0 * (wanted - exact).norm() + 1e-5 * exact.norm()
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=atol * float(wanted.abs().max()))


@every_model
@every_variant
def test_cloudpickle(name, variant):
    cloudpickle = pytest.importorskip("cloudpickle")
    kind, inputs = VARIANTS[variant], WIDE[name].inputs()
    model = made(name, kind, lambda model: model, True)
    with kind.levels():
        found = trained(cloudpickle.loads(cloudpickle.dumps(model)), inputs)
    check(found, trained(WIDE[name].build(), inputs), 1e-5)


def offloaded(model):
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model):
    import accelerate

    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("change", [offloaded, dispatched])
@every_model
@every_variant
@order
def test_accelerate(name, variant, change, before):
    """Weights that were joined before they are offloaded have no name to be found by: an error says so."""
    pytest.importorskip("accelerate")
    if change is offloaded and before and VARIANTS[variant].fused and name not in ("Phi3", "T5"):
        with pytest.raises(RuntimeError, match=r"offloaded.*unfuse\(model\)"), VARIANTS[variant].levels():
            logits(made(name, VARIANTS[variant], change, before), WIDE[name].inputs())
        return
    compare_logits(name, variant, change, before)


@pytest.mark.parametrize("change", [offloaded, dispatched])
@every_model
def test_unpatch_of_an_offloaded_model(name, change):
    """Not one patch is left under the hooks of accelerate."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = change(made(name, VARIANTS["patched"], lambda model: model, True))
    for technique in PATCHES:
        technique.unpatch(model)
    hooks.remove_hook_from_module(model, recurse=True)
    assert not {owner_of(module) for module in model.modules()} - {None}


def quantised_by_torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


@every_model
@every_variant
@order
def test_torchao(name, variant, before):
    pytest.importorskip("torchao")
    compare_logits(name, variant, quantised_by_torchao, before)


def _replaced_layers(model, make):
    """Linear layers of the body become others."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if (
                type(layer) is torch.nn.Linear
                and layer is not head
                and layer.in_features % 64 == layer.out_features % 32 == 0
            ):
                setattr(module, name, make(layer))
    return model


def in_8_bits(model):
    import bitsandbytes as bnb

    def make(layer):
        new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False)
        new.load_state_dict(layer.state_dict())
        return new.to("cpu")

    return _replaced_layers(model, make)


def in_4_bits(model):
    import bitsandbytes as bnb

    def make(layer):
        new = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, torch.float32, quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, quant_type="nf4")
        new.bias = layer.bias
        return new.to("cpu")

    return _replaced_layers(model, make)


@pytest.mark.parametrize("change", [in_8_bits, in_4_bits])
@every_model
@every_variant
@order
def test_bitsandbytes(name, variant, change, before):
    """In 4 bits a CPU rounds the input to bfloat16: noise of 2^-22 in T5's embedding moves logits of 3.4 by 0.012."""
    pytest.importorskip("bitsandbytes")
    compare_logits(name, variant, change, before, 2.0**-8 if change is in_4_bits else 1e-5)


def with_lora(model):
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def with_qlora(model):
    import peft

    return with_lora(peft.prepare_model_for_kbit_training(in_4_bits(model), use_gradient_checkpointing=False))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", [with_lora, with_qlora])
@every_model
@pytest.mark.parametrize("variant", ["patched", "patched at default levels"])
@order
def test_peft(name, variant, change, before, compiled):
    """Trained with frozen weights."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    if compiled and name not in ("Llama", "Bert"):
        pytest.skip("two models are compiled")
    kind, inputs, found = VARIANTS[variant], WIDE[name].inputs(), []
    for each in (kind, STOCK):
        model = made(name, each, change, before).train()
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager") if compiled and each is kind else model
        with each.levels():
            found.append(adapters_trained(model, call, inputs))
    check(*found, 1e-4 if change is with_qlora else 1e-5)


def adapters_trained(model, call, inputs):
    loss = call(**inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("lora" in name for name in found)
    return loss.detach(), found


@every_model
@pytest.mark.parametrize("variant", ["patched", "patched at default levels"])
def test_merged_adapters(name, variant):
    pytest.importorskip("peft")
    compare_logits(name, variant, lambda model: with_lora(model).merge_and_unload(), True)


@every_variant
def test_diffusers(variant):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    compare_step(model, variant, torch.randn(2, 4, 8, 8), torch.tensor([3, 5]), torch.randn(2, 6, 32))


@every_variant
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_timm(name, variant):
    try:
        import timm
    except Exception as error:  # torchvision raises RuntimeError where it was made for another torch
        pytest.skip(f"timm: {error}")
    torch.manual_seed(0)
    size = {"swin": 56, "eva0": 56}.get(name[:4], 32)
    compare_step(timm.create_model(name, img_size=size, num_classes=3), variant, torch.randn(2, 3, size, size))


def compare_step(model, variant, *inputs):
    """One step of a model that gives a tensor, or an output with a `sample`."""
    kind, found = VARIANTS[variant], []
    for each in (kind, STOCK):
        ours = copy.deepcopy(model)
        try:
            each.prepare(ours)
        except RefusedError as error:
            pytest.skip(f"refused by name: {error}")
        with each.levels():
            output = ours(*inputs)
            output = getattr(output, "sample", output)
            output.square().mean().backward()
        grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None} if not kind.fused else {}
        found.append((output.square().mean().detach(), {"output": output.detach(), **grads}))
    check(*found, 1e-5)
