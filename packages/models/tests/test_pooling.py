"""From tokens to one vector of each text, against the formulas by hand."""

import math

import pytest
import torch

from kernel_pytorch.models.sentence_encoder import MODES, pool_texts, read_modes


def by_hand(x, mode):
    """One text `(length, N)`."""
    weights = torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None]
    return {
        "cls": lambda: x[0],
        "lasttoken": lambda: x[-1],
        "max": lambda: x.amax(0),
        "mean": lambda: x.mean(0),
        "mean_sqrt_len_tokens": lambda: x.sum(0) / math.sqrt(len(x)),
        "weightedmean": lambda: (x * weights).sum(0) / weights.sum(),
    }[mode]()


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_and_its_gradient(mode):
    lengths = [3, 0, 1, 4, 0]
    starts = torch.tensor([0, 3, 3, 4, 8, 8], dtype=torch.int32)
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    found = pool_texts(x, starts, (mode,))
    expected = [by_hand(part, mode) if len(part) else torch.zeros(2).double() for part in x.split(lengths)]
    torch.testing.assert_close(found, torch.stack(expected))
    assert torch.autograd.gradcheck(lambda x: pool_texts(x, starts, (mode,)), x)
    assert pool_texts(x[:0], starts[:1].expand(3), (mode,)).eq(0).all()


def test_vectors_of_several_modes_follow_each_other():
    x, starts = torch.randn(5, 3).half(), torch.tensor([0, 2, 5])
    found = pool_texts(x, starts, ("cls", "mean"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat([pool_texts(x, starts, (m,)) for m in ("cls", "mean")], 1))
    assert pool_texts(torch.full((4000, 1), 100.0).half(), torch.tensor([0, 4000]), ("mean",)).item() == 100.0


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "max"}, ("max",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_mean_tokens": False, "word_embedding_dimension": 3}, ("mean",)),
    ],
)
def test_both_forms_of_pooling_configs(config, modes):
    assert read_modes(config) == modes
