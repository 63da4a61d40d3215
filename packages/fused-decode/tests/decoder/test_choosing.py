"""The kernels that end a step: the greedy choice, and the draw among the largest logits."""

import pytest
import torch

launch = pytest.importorskip("kernel_pytorch.fused_decode.launch")
from kernel_pytorch.fused_decode.decoder.sampling import Sampling  # noqa: E402
from kernel_pytorch.fused_decode.decoder.step import ENDS  # noqa: E402

OTHER = 77


def state(device, lengths, *ends):
    """Tokens, history, lengths and ends before a step; on a GPU, history is in the host's memory."""
    tokens = torch.full((len(lengths),), 9, dtype=torch.int64, device=device)
    history = torch.full((len(lengths), 9), OTHER, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
    known = torch.full((ENDS,), -2, dtype=torch.int64, device=device)
    known[3 : 3 + len(ends)] = torch.tensor(ends, dtype=torch.int64)
    return tokens, history, torch.tensor(lengths, dtype=torch.int32, device=device), known


def written(history, lengths):
    """What was written for each row at its length; None where nothing was. Nothing else may have changed."""
    if history.device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()
    found = [None if at < 0 else int(row[at]) for row, at in zip(history, lengths, strict=True)]
    assert int((history != OTHER).sum()) == sum(each is not None for each in found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [203, 64, 5], ids=["ragged tiles", "one tile", "less than a tile"])
def test_the_greedy_choice(device, size, dtype):
    """A tie, NaN, nothing, infinity and a token that ends its row; a row that is not in use gets none."""
    torch.manual_seed(0)
    x = torch.randn(6, size, device=device).to(dtype)
    x[0, 3], x[1, size - 1], x[1, 2], x[5, 4] = 60.0, 50.0, 50.0, 70.0
    x[2, 3], x[3], x[4, 1] = float("nan"), float("-inf"), float("inf")
    workspace = launch.Workspace(device)
    for _ in range(2):  # the counters are as before
        tokens, history, lengths, ends = state(device, before := [3, 4, 5, 6, -1, 7], 4)
        launch.greedy(x, tokens, history, lengths, ends, workspace=workspace)
        assert written(history, before) == [3, 2, -1, -1, None, 4]
        assert lengths.tolist() == [4, 5, -1, -1, -1, -1]
        assert tokens.tolist() == [3, 2, 0, 0, 0, 4]
    assert not workspace.counters.any()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(50, 1.0, 1.0), (50, 0.9, 0.7), (900, 0.5, 2.0), (1, 1.0, 1.0), (7, 1e-6, 1.0), (20, 0.3, 1.3)],
)
@pytest.mark.parametrize("size", [203, 5000], ids=["fewer than candidates", "more than candidates"])
def test_a_draw_is_that_of_pytorch_operators(device, size, top_k, top_p, temperature):
    torch.manual_seed(0)
    sampling = Sampling(3, torch.device(device))
    sampling.set(1234567890123, temperature, min(top_k, size), top_p)
    for index in range(4):
        x = torch.randn(3, size, device=device).mul(3).to(torch.float16 if index % 2 else torch.float32)
        x = x + torch.arange(size, device=device) * 1e-2  # no ties in 16 bits where p ends
        x[1, 3] = float("nan") if index == 3 else x[1, 3]
        before = int(sampling.step)
        expected = sampling.draw(x)
        sampling.step.fill_(before)
        tokens, history, lengths, ends = state(device, [3, 4, -1])
        launch.draw(x, sampling, tokens, history, lengths, ends)
        assert written(history, [3, 4, -1]) == [*expected[:2].tolist(), None]
        assert lengths.tolist() == [4, -1 if index == 3 else 5, -1]
        assert int(sampling.step) == before + 1


def test_a_draw_ends_its_row(device):
    sampling = Sampling(2, torch.device(device))
    sampling.set(1, 1.0, 1, 1.0)
    x = torch.zeros(2, 40, device=device)
    x[0, 5] = x[1, 6] = 9.0
    tokens, history, lengths, ends = state(device, [3, 4], 6)
    launch.draw(x, sampling, tokens, history, lengths, ends)
    assert (written(history, [3, 4]), lengths.tolist()) == ([5, 6], [4, -1])
