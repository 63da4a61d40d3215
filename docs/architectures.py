"""The table of architectures: what is replaced in each, and where that gives the losses and gradients of stock."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parent.parent / "tests" / "architectures" / "record.json"
PACKAGES = ("rmsnorm", "fused-ln-act", "qkv-fusion", "flash-attn-triton", "linear-cross-entropy", "fuse")
SURROUNDINGS = ("eager", "checkpointed", "compiled", "autocast", "two ranks", "carried")


def table() -> str:
    """The table in Markdown, with the versions that it is of."""
    record = json.loads(FILE.read_text(encoding="utf-8"))
    heads = ("architecture", *PACKAGES, *SURROUNDINGS, "left alone")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, found in record["architectures"].items():
        counts = [str(found["replaced"].get(package, "")) for package in PACKAGES]
        same = [found["same"].get(surrounding, "") for surrounding in SURROUNDINGS]
        left = "; ".join(f"{package}: {', '.join(modules)}" for package, modules in found["left"].items())
        rows.append(f"| {' | '.join([name, *counts, *same, left])} |")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*rows, "", f"{versions}, two layers, on a CPU."])
