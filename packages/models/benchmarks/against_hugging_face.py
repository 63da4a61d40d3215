"""Time a training step of `LanguageModel` beside the Llama of transformers that its weights come from.

    python packages/models/benchmarks/against_hugging_face.py [--out FILE]     in the environment of `nox -s models`

Widths are those of Llama 3.2 1B with 8 layers on a GPU, small ones on a CPU. A step is forward, backward and AdamW, on
4 x 2,048 tokens in bfloat16; on a CPU smaller, in float32. All variants take turns; ratios compare steps of a round.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.clock.wall import step_seconds
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.models.variants import CAUSAL, register_causal
from kernel_pytorch.harness.models.works import find_work, prepare
from kernel_pytorch.harness.models.zoo import SUFFIX, find_model
from kernel_pytorch.models import LanguageModel

ROUNDS = 15
BASES = ("transformers", "transformers, torch.compile", "transformers, torch.compile, causal flag kept")


def step_of(model: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Forward, backward, and AdamW in one kernel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def steps(device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """A training step of each variant, from the same weights and on the same tokens."""
    spec = find_model("llama" if device.type == "cuda" else f"llama{SUFFIX}")
    torch.manual_seed(0)
    llama = prepare(find_work("training"), spec.build(), device)
    tokens = spec.inputs(spec.training, device)["input_ids"]
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name in BASES:
        model = copy.deepcopy(llama)
        if "causal" in name:
            register_causal()
            model.config._attn_implementation = CAUSAL
        called = torch.compile(model) if "compile" in name else model
        found[name] = step_of(model, lambda called=called: called(input_ids=tokens, labels=tokens).loss)
    for name in ("LanguageModel", "LanguageModel, torch.compile"):
        ours = LanguageModel.from_llama(llama).train()
        called = torch.compile(ours) if "compile" in name else ours
        found[name] = step_of(ours, lambda called=called: called(tokens, targets=targets))
    return found


def main() -> None:
    """Print a row for each variant; write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the table to this file, as JSON")
    out: Path | None = parser.parse_args().out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = steps(device)
    losses = {name: [float(step()) for _ in range(3)] for name, step in trained.items()}  # these compile
    took = {name: found[0] for name, found in step_seconds(trained, device, ROUNDS).items()}
    here = describe_environment(device)
    print(f"{here.device_name}, torch {here.torch}\n{'training step':46}{'ms':>8}  x of transformers, of it compiled")
    rows = {}
    for name, seconds in took.items():
        speedups = {base: compare_paired(took[base], seconds).speedup for base in BASES if base != name}
        shown = {base: f"{s.median:.2f} ({s.low:.2f} to {s.high:.2f})" for base, s in speedups.items()}
        print(f"{name:46}{statistics.median(seconds) * 1e3:8.1f}  {', '.join(shown.values())}")
        rows[name] = {"seconds": statistics.median(seconds), "speedup": shown, "losses": losses[name]}
    if out is not None:
        about = {"device": here.device_name, "torch": here.torch, "date": datetime.date.today().isoformat()}
        out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
