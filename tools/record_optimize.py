"""Time training steps of models that `optimize` changed, and record them for the page of compile-recipes.

    python tools/record_optimize.py [--out FILE] [MODEL[:BATCH] ...]     in the environment of `nox -s models`

Each model is timed as it is, compiled, patched and compiled, optimized, and optimized and compiled, all in turns. The
lower bound is the sum of what the report says that its fusions save in an eager forward of the same inputs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant, optimize, patch
from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.clock.wall import step_seconds
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.models.works import find_work, prepare, step_of
from kernel_pytorch.harness.models.zoo import Shape, find_model

MODELS = ("llama:1", "bert:8", "vit:16")
ROUNDS = 15


def measure(name: str, batch: int, device: torch.device) -> dict[str, Any]:
    """Rows of a model, the lower bound, and how long `optimize` and the analysis took, in seconds."""
    spec, work = find_model(name), find_work("training")
    torch.manual_seed(0)
    stock = prepare(work, spec.build(), device)
    given = spec.inputs(Shape(batch, work.shape(spec).tokens), device)
    begun = time.perf_counter()
    report = CompilerOptimizationAssistant().analyze_component(stock, kwargs=given)
    analysis = time.perf_counter() - begun
    patched, begun = copy.deepcopy(stock), time.perf_counter()
    changed = optimize(copy.deepcopy(stock), kwargs=given).module
    took = time.perf_counter() - begun
    patch(patched)
    models = {
        "stock": stock, "stock compiled": copy.deepcopy(stock), "patch compiled": patched,
        "optimize compiled": copy.deepcopy(changed), "optimize": changed,
    }  # fmt: skip
    steps = {
        variant: step_of(work, spec, model, torch.compile(model) if "compiled" in variant else model, device)
        for variant, model in models.items()
    }
    bound = sum(found.gain_seconds for found in report["fusion_opportunities"])
    return {"rows": rows(steps, device), "bound": bound * work.shape(spec).batch / batch, "optimize": took,
            "analysis": analysis, "analysed": list(next(iter(given.values())).shape)}  # fmt: skip


def rows(steps: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Each variant's median, and its speedup over three of them with the interval."""
    for step in steps.values():
        step()
    took = {variant: seconds for variant, (seconds, _) in step_seconds(steps, device, ROUNDS).items()}
    found: dict[str, Any] = {}
    for variant, seconds in took.items():
        compared = {
            base: compare_paired(took[base], seconds).speedup
            for base in ("stock", "stock compiled", "patch compiled")
            if base != variant
        }
        speedup = {base: f"{s.median:.2f} ({s.low:.2f} to {s.high:.2f})" for base, s in compared.items()}
        found[variant] = {"seconds": statistics.median(seconds), "speedup": speedup}
    return found


def main() -> None:
    """Measure the models one after another; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL[:BATCH]", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("optimize.json"), help="default: %(default)s")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "device": describe_environment(device.type).device_name, "torch": torch.__version__,
        "transformers": transformers.__version__, "models": {},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }  # fmt: skip
    for model in options.models:
        name, _, batch = model.partition(":")
        found["models"][find_model(name).title] = measure(name, int(batch or 1), device)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{model} is in {options.out}", flush=True)


if __name__ == "__main__":
    main()
