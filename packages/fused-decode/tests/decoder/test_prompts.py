"""Prompts by the layers of a step: against the model's own forward, padded, and as graphs of rounded sizes."""

import pytest
import torch
from tiny_models import FAMILIES, make, prompt

from kernel_pytorch.fused_decode import Decoder
from kernel_pytorch.fused_decode.decoder import prompt as prompts

OWN_FORWARD = ("gemma2", "mistral", "qwen2_mixed", "gemma3", "phi3")
"""Attention has a soft cap, or a window shorter than the 11 columns of the prompt."""


class Graph:
    """Stands in for a CUDA graph on a CPU: it computes again, into the same memory."""

    def __init__(self, call):
        self.call, self.found, self.replays = call, call(), 0

    def replay(self):
        self.replays += 1
        self.found.copy_(self.call())

    def reset(self):
        self.found = None


def captured(decoder):
    """Let a decoder on a CPU capture its prompts; the list of its graphs."""
    graphs = []

    def capture(call):
        graphs.append(Graph(call))
        return graphs[-1], graphs[-1].found

    decoder._runner.prompts.capture = capture
    return graphs


def outcome(decoder, ids, pads):
    """Logits, and what the caches hold of the prompt's tokens."""
    with torch.no_grad():
        logits = decoder._prompt(ids, pads).clone()
    kept = []
    for caches in decoder._step.caches.layers:
        for cache in caches[:2]:
            kept += [cache[row, :, : ids.shape[1] - pad].clone() for row, pad in enumerate(pads)]
            cache.fill_(7.0)  # so that nothing is left for the next call
    return logits, kept


@pytest.mark.parametrize("pads", [[0, 0], [4, 0], [0, 10]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_gives_what_the_models_own_forward_gives(family, pads, monkeypatch):
    model, (ids, _) = make(family), prompt([11 - pad for pad in pads])
    decoder = Decoder(model, 3, 64)
    called = []
    model.register_forward_hook(lambda *given: called.append(given))
    logits, kept = outcome(decoder, ids, pads)
    assert bool(called) == (family in OWN_FORWARD)
    monkeypatch.setattr(prompts.Prompts, "run", lambda *given: None)
    expected, of_forward = outcome(decoder, ids, pads)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    if family not in OWN_FORWARD:  # a ring has other slots
        torch.testing.assert_close(kept, of_forward, atol=2e-5, rtol=2e-5)
    assert decoder._step.caches.lengths.tolist() == [10 - pads[0], 10 - pads[1], -1]


def test_a_soft_cap_alone_needs_the_models_own_forward():
    decoder = Decoder(make("gemma2", sliding_window=64), 1, 64)
    assert decoder._runner.prompts.run(prompt([11])[0], torch.tensor([10])) is None


def test_the_second_prompt_of_a_rounded_size_is_captured(monkeypatch):
    monkeypatch.setattr(prompts, "ROUND", 8)
    decoder = Decoder(make("qwen3"), 3, 64)
    expected = [outcome(decoder, *given) for given in (given_of(11), given_of(14), given_of(9), given_of(11))]
    graphs = captured(decoder)
    for width, (logits, kept) in zip((11, 14, 9, 11), expected, strict=True):
        found = outcome(decoder, *given_of(width))
        torch.testing.assert_close(found[0], logits, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[1], kept, atol=2e-5, rtol=2e-5)
    assert [graph.replays for graph in graphs] == [3], "prompts of 9 to 16 columns share a graph, but for the first"
    outcome(decoder, *given_of(17))
    assert len(graphs) == 1
    decoder.revert()
    assert graphs[0].found is None


def given_of(width):
    return prompt([width, width - 3], seed=width)[0], [0, 3]


@pytest.mark.parametrize(("family", "length"), [("qwen2_mixed", 64), ("mistral", 64), ("llama", 14)])
def test_a_graph_is_no_wider_than_caches_and_windows(family, length, monkeypatch):
    """Rounded up, tokens behind a row's last would take slots of a ring that steps still read, or there is no slot."""
    monkeypatch.setattr(prompts, "ROUND", 16)
    model = make(family)
    decoder, (ids, mask) = Decoder(model, 1, length), prompt([5])
    expected = decoder.generate(ids, mask, 9)
    graphs = captured(decoder)
    for _ in range(3):
        assert decoder.generate(ids, mask, 9).equal(expected)
    assert not graphs


def test_long_prompts_are_not_captured(monkeypatch):
    monkeypatch.setattr(prompts, "SHORT", 127)
    decoder = Decoder(make("llama"), 2, 80)
    graphs = captured(decoder)
    for rows, count in ((2, 0), (1, 1)):
        for _ in range(2):
            outcome(decoder, *prompt([20] * rows)[:1], [0] * rows)
        assert len(graphs) == count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma2"])
def test_generation_is_the_same_once_prompts_are_graphs(family):
    model = make(family).cuda()
    decoder, (ids, mask) = Decoder(model, 2, 96), prompt([13, 8])
    first = decoder.generate(ids.cuda(), mask.cuda(), 40)
    for other in (ids[:, 2:], ids):
        decoder.generate(other.cuda(), mask[:, -other.shape[1] :].cuda(), 40)
    assert bool(decoder._runner.prompts._graphs) == (family != "gemma2")
    torch.testing.assert_close(decoder.generate(ids.cuda(), mask.cuda(), 40), first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_prompt_that_is_a_graph_keeps_its_workspace():
    """`torch.compile` clears the workspaces of cuBLAS when it records a CUDA graph, also those of other graphs."""
    widths = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = make("llama", torch.bfloat16, **widths, head_dim=64).cuda()  # narrow products need no workspace
    decoder, (ids, _) = Decoder(model, 1, 256), prompt([128])

    def logits():
        decoder.start(ids.cuda())
        return decoder.logits.clone()

    expected = [logits() for _ in range(3)][-1]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    assert logits().equal(expected)
    assert all(bool((each == 7.0).all()) for each in taken)
