"""The language model: loss, gradients, packing, tying, and what PyTorch does with models."""

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.models import LanguageModel


def language_model(**options):
    torch.manual_seed(0)
    return LanguageModel(150, 32, **{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_position": 64} | options)


def tokens(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def gradients(loss, model):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_that_of_the_logits(dtype, tied):
    model = language_model(tie_embeddings=tied).to(dtype)
    ids, targets = tokens(3, 9), tokens(3, 9)
    targets[0, :4] = -100
    plain = model.use(techniques=())
    expected = F.cross_entropy(plain(ids).flatten(0, 1), targets.flatten())
    wanted = gradients(expected, model)
    for techniques in ((), None):
        loss = model.use(techniques)(ids, targets=targets)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(loss, model), wanted, rtol=1e-5, atol=1e-6)


def test_the_logits_of_the_loss_are_never_in_memory():
    model = language_model(num_layers=1)
    model.embedding = torch.nn.Embedding(5000, 32)
    ids, kept = tokens(4, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model(ids, targets=ids)
    assert max(kept) <= 5000 * 32 < ids.numel() * 5000
    kept.clear()
    model.use(techniques=())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model(ids, targets=ids)
    assert max(kept) == ids.numel() * 5000


def test_a_token_sees_no_later_one():
    model = language_model().eval()
    ids = tokens(2, 10)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :6], model(ids)[:, :6])
    assert (model(changed)[:, 6:] - model(ids)[:, 6:]).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize("techniques", [(), None])
def test_packed_texts_have_the_loss_of_texts_alone(techniques):
    model = language_model(techniques=techniques).double()
    lengths = [5, 1, 0, 12]
    ids, targets = tokens(18), tokens(18)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = model(ids, cu_seqlens=cu_seqlens)
    alone = [model(part[None])[0] for part in ids.split(lengths) if len(part)]
    torch.testing.assert_close(packed, torch.cat(alone))
    loss = model(ids, targets=targets, cu_seqlens=cu_seqlens, max_seqlen=12)
    torch.testing.assert_close(loss, F.cross_entropy(packed, targets))
    # A rotation depends on differences alone, but far positions cost digits.
    assert model._positions(ids, None, cu_seqlens).tolist() == [*range(5), 0, *range(12)]


def test_tied_weights_stay_one_parameter():
    model = language_model()
    assert "head.weight" not in model.state_dict()
    for other in (copy.deepcopy(model), model.to(torch.float64), copy.deepcopy(model).to_empty(device="cpu")):
        assert other.head_weight is other.embedding.weight
    loaded = language_model().double()
    loaded.load_state_dict(model.state_dict(), assign=True)
    assert loaded.head_weight is loaded.embedding.weight
    count = sum(1 for p in torch.optim.SGD(loaded.parameters()).param_groups[0]["params"] if p.shape == (150, 32))
    assert count == 1
    untied = language_model(tie_embeddings=False)
    assert untied.head_weight is untied.head.weight is not untied.embedding.weight


def test_state_dict_round_trip():
    model, other = language_model(), LanguageModel(150, 32, num_layers=2, num_heads=4, num_kv_heads=2, techniques=())
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True))
    ids = tokens(1, 7)
    torch.testing.assert_close(other(ids), model(ids))


def test_new_weights_are_narrow_where_they_enter_the_stream():
    model = LanguageModel(500, 128, num_layers=8, num_heads=4)
    stds = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert stds["embedding.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["blocks.3.attention.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize("techniques", [(), None])
def test_loss_and_gradients_compile_as_one_graph(techniques):
    model = language_model(techniques=techniques)
    ids, targets = tokens(2, 9), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients(compiled(ids, targets=targets), model),
        gradients(model(ids, targets=targets), model), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_exports_with_any_number_of_tokens():
    model = language_model().eval()
    sizes = {"input_ids": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=60)}}
    program = torch.export.export(model, (tokens(3, 9),), dynamic_shapes=sizes)
    ids = tokens(5, 30)
    torch.testing.assert_close(program.module()(ids), model(ids))


@pytest.mark.parametrize("techniques", [(), None])
def test_autocast_changes_the_dtype_of_products_alone(techniques):
    model = language_model(techniques=techniques)
    ids, targets = tokens(2, 9), tokens(2, 9)
    wanted = gradients(model(ids, targets=targets), model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, targets=targets)
        assert model(ids).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    for name, gradient in gradients(loss, model).items():
        assert gradient.dtype == torch.float32
        assert F.cosine_similarity(gradient.flatten(), wanted[name].flatten(), 0) > 0.99, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": tokens(5)}, r"input_ids: shape is \(5,\); it must be \(B, S\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"input_ids: shape is \(2, 5\); it must be \(T,\), with cu_seqlens"),
        ({"targets": tokens(2, 4)}, r"targets: shape is \(2, 4\); it must be \(2, 5\)"),
        ({"input_ids": tokens(1, 65)}, "input_ids: 65 tokens with those cached; max_position is 64"),
        ({"targets": tokens(2, 5), "logits_at": torch.zeros(2)}, "logits_at: given with targets"),
        ({"targets": tokens(2, 5), "cache": language_model().new_cache(2)}, "cache: given with targets"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        language_model()(**{"input_ids": tokens(2, 5)} | arguments)


@pytest.mark.parametrize("num_layers", [0, -2])
def test_a_number_of_layers_that_is_none_is_refused(num_layers):
    with pytest.raises(ValueError, match=r"num_layers: given"):
        LanguageModel(16, 8, num_layers=num_layers, num_heads=2)
    with pytest.raises(TypeError, match=r"num_layers: given '2'; it must be an integer"):
        LanguageModel(16, 8, num_layers="2", num_heads=2)
    with pytest.raises(TypeError, match=r"num_heads: given '2'; it must be an integer"):
        LanguageModel(16, 8, num_layers=1, num_heads="2")
