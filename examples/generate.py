"""Generate with a Hugging Face model before and after its decoding steps are fused.

After reading it you can speed up `model.generate` with one line, see which calls it serves, and use the Decoder itself
with an end token, a streamer and a seed.

Needs: transformers (`pip install transformers`). No download: the model starts from random weights, the prompts are the
source text of Python's standard library, as bytes. Half a minute on two cores with `--quick`. On a GPU the model has
the widths of Llama 3.2 1B, in bfloat16, and transformers is also measured with its static cache, compiled. Run:
`python examples/generate.py --quick`. The last line says how much faster it generates.
"""

# %% One line
# Patch after the model is loaded and on its device. Only `generate` changes: its arguments and defaults stay those of
# transformers, which also computes what the decoder does not, such as beams.
# --8<-- [start:patch]
from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch import fused_decode


def patched(model: Any) -> Any:
    """The model, whose `generate` takes fused steps."""
    print(fused_decode.patch(model))
    return model


# --8<-- [end:patch]
# %% Model and prompts
# Prompts of a batch have different lengths and are padded at the left, as tokenizers do it for generation.
def stock(gpu: bool) -> Any:
    """A Llama at random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
    if gpu:  # Llama 3.2 1B
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256 if gpu else 256, num_hidden_layers=16 if gpu else 4, max_position_embeddings=4096,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=None, initializer_range=0.05, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return model.to("cuda", torch.bfloat16) if gpu else model


def prompts(rows: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Texts of the standard library, the last one shorter than the others by a third."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [[1 + byte % 255 for byte in file.read_bytes()[:length]] for file in files if file.stat().st_size > length]
    ids, mask = torch.tensor(texts[:rows]), torch.ones(rows, length, dtype=torch.int64)
    if rows > 1:
        mask[-1, : length // 3] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


# %% Speed
# Variants take turns, since the speed of a machine drifts, and the first call of each is not counted: it compiles, and
# captures a CUDA graph on a GPU.
Call = Callable[[], torch.Tensor]


def seconds(call: Call) -> float:
    """How long a call takes, until its tokens are there."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(calls: dict[str, Call], new: int, rounds: int) -> dict[str, list[float]]:
    """Print tokens a second of each variant, and return how many times as fast as the first it was in each round."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    first = next(iter(times.values()))
    found = {name: [a / b for a, b in zip(first, own, strict=True)] for name, own in times.items()}
    for name, own in times.items():
        print(f"  {name:28} {new / statistics.median(own):8.0f} tokens/s a sequence, "
              f"{statistics.median(found[name]):.2f}x ({min(found[name]):.2f} to {max(found[name]):.2f})")  # fmt: skip
    return found


# %% The Decoder itself
# What `patch` calls can be called as well: it is made once for a number of sequences and a length, and says so when a
# prompt does not fit. Rows end on their own; a streamer gets the tokens of each step as they come.
class Count:
    """A streamer that counts what it gets."""

    def __init__(self) -> None:
        self.steps = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        """Take the tokens of a step."""
        self.steps += 1

    def end(self) -> None:
        """Learn that there are no more."""


def direct(model: Any, inputs: dict[str, torch.Tensor], new: int) -> None:
    """Use the Decoder: greedy up to an end token, then two draws with one seed; give the weights back."""
    rows, length = inputs["input_ids"].shape
    decoder = fused_decode.Decoder(model, batch_size=rows, max_length=length + new)
    print(decoder)
    greedy = decoder.generate(**inputs, max_new_tokens=new)
    ends, count = sorted({*greedy[:, length + new // 2].tolist()}), Count()
    decoder.generate(**inputs, max_new_tokens=new, eos_token_id=ends, streamer=count)
    print(f"  with an end token in each row: {count.steps} of {new} steps")
    first, second = (
        decoder.generate(**inputs, max_new_tokens=new, do_sample=True, top_p=0.9, seed=1) for _ in range(2)
    )
    print(f"  two draws with one seed: {'equal' if first.equal(second) else 'DIFFERENT'}")
    decoder.revert()


# %% The comparison
def main(argv: list[str] | None = None) -> None:
    """Generate with one sequence and with four, before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="48 new tokens and 3 rounds, not 256 and 5")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers is missing: pip install transformers")
    gpu, (new, rounds) = torch.cuda.is_available(), (48, 3) if options.quick else (256, 5)
    before = stock(gpu)
    after = patched(copy.deepcopy(before))
    equal, gains = True, {}
    for rows in (1, 4):
        inputs = prompts(rows, 48, before.device)
        settings = {"max_new_tokens": new, "do_sample": False, **inputs}
        calls: dict[str, Call] = {"transformers": lambda s=settings: before.generate(**s)}
        if gpu:
            static = {**settings, "cache_implementation": "static"}
            calls["transformers, static, compiled"] = lambda s=static: before.generate(**s)
        calls["patched"] = lambda s=settings: after.generate(**s)
        print(f"{rows} sequence{'s' * (rows > 1)}, {new} new tokens each")
        gains[rows] = compare(calls, new, rounds)["patched"]
        equal &= calls["transformers"]().equal(calls["patched"]())
    after.generate(**settings, num_beams=2)
    print(fused_decode.report(after))
    fused_decode.unpatch(after)
    direct(after, inputs, new)
    tokens = "the same tokens" if equal else ("tokens that rounding changes" if gpu else "OTHER tokens")
    told = [f"{n} at {statistics.median(g):.2f}x ({min(g):.2f} to {max(g):.2f})" for n, g in gains.items()]
    print(f"Sequences generated at once, {' and '.join(told)} of transformers: {tokens}.")


if __name__ == "__main__":
    main()
