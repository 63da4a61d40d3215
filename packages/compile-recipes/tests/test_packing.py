"""Encoders without padding: the shown positions are the same, fewer are computed, and it comes off again."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.compile_recipes import optimize
from kernel_pytorch.compile_recipes.apply.packing import attend, plan
from kernel_pytorch.compile_recipes.recorder import record

transformers = pytest.importorskip("transformers")
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def batch():
    ids, mask = torch.randint(1, 100, (4, 32)), torch.zeros(4, 32, dtype=torch.int64)
    for i, n in enumerate((32, 10, 3, 10)):
        mask[i, :n] = 1
    return {"input_ids": ids, "attention_mask": mask}


def bert(**options):
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**WIDTH, vocab_size=100, **options)).eval()


def flops(model, batch):
    return sum(n.cost.flops for n in record(model, (), batch).nodes)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_packed_encoder_computes_what_the_mask_shows(batch, implementation):
    model = bert(attn_implementation=implementation)
    with torch.no_grad():
        before, work = model(**batch), flops(model, batch)
        result = optimize(model, kwargs=batch, apply=["packing"], rounds=0)
        assert list(result.applied) == ["packing"], str(result)
        after = model(**batch)
        shown = batch["attention_mask"].bool()
        torch.testing.assert_close(after.last_hidden_state[shown], before.last_hidden_state[shown])
        assert after.last_hidden_state.shape == before.last_hidden_state.shape
        assert not after.last_hidden_state[~shown].any()
        torch.testing.assert_close(after.pooler_output, before.pooler_output)
        assert flops(model, batch) < 0.6 * work
        whole = {"input_ids": batch["input_ids"]}  # without a mask nothing is packed
        torch.testing.assert_close(model(**whole).last_hidden_state, result.revert()(**whole).last_hidden_state)
        assert torch.equal(model(**batch).last_hidden_state, before.last_hidden_state)
    assert model.config._attn_implementation == implementation


@pytest.mark.slow
def test_a_packed_encoder_compiles(batch):
    model = bert()
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        assert optimize(model, kwargs=batch, apply=["packing"], rounds=0).applied
        after = torch.compile(model, backend="aot_eager", dynamic=True)(**batch).last_hidden_state
    shown = batch["attention_mask"].bool()
    torch.testing.assert_close(after[shown], before[shown])


def test_training_stays_padded(batch):
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    before = model(**batch).last_hidden_state
    assert optimize(model, kwargs=batch, apply=["packing"], rounds=0).applied
    assert torch.equal(model(**batch).last_hidden_state, before)


def test_what_reads_a_padded_position_is_taken_back(batch):
    """A pooler reads the first position, which padding on the left hides."""
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    result = optimize(bert(), kwargs=batch, apply=["packing"], rounds=0)
    assert "taken back, it is wrong" in result.rejected["packing"]
    config = transformers.BertConfig(**WIDTH, vocab_size=100)
    without = transformers.BertModel(config, add_pooling_layer=False).eval()
    assert optimize(without, kwargs=batch, apply=["packing"], rounds=0).applied


def test_a_decoder_is_left_alone(batch):
    config = transformers.LlamaConfig(**WIDTH, vocab_size=100)
    result = optimize(transformers.LlamaModel(config).eval(), kwargs=batch, apply=["packing"], rounds=0)
    assert "packing" in result.rejected


def test_runs_of_one_length_are_dense_batches():
    keep = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    index, runs = plan(keep)
    assert index.tolist() == [4, 0, 1, 2, 9, 10, 11]
    assert runs.tolist() == [[1, 1], [2, 3]]
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    y = attend(q, k, v, runs, 0.5)
    for part in (slice(0, 1), slice(1, 4), slice(4, 7)):
        expected = F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.5)
        torch.testing.assert_close(y[:, part], expected.transpose(1, 2))
