"""Count what each package's `patch` replaces in each architecture, and the groups that `fuse` makes: `replaced.json`.

    python tests/architectures/replaced.py

The file in the repository was written before `patch` and `fuse` began to prove what a module computes in the
surroundings of the whole model. A test holds later versions against it: no count may fall without a reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.qkv_fusion import LinearGroup, fuse, replacements

PATCHES = [technique for technique in discover().techniques.values() if technique.replacements]
FILE = Path(__file__).with_suffix(".json")


def replaced_in(model: torch.nn.Module) -> dict[str, int]:
    """By package, how many modules of a model are patched; the model is changed."""
    return {technique.name: len(technique.patch(model, gpu_bound=True).replaced) for technique in PATCHES}


def fused_in(model: torch.nn.Module) -> int:
    """How many groups of layers become one product; the model is changed."""
    try:
        fuse(model)
    except (TypeError, ValueError):
        return 0
    return sum(isinstance(module, LinearGroup) for module in model.modules())


def count(architecture: Any) -> dict[str, int]:
    """By package, and under "fuse"; without what is 0."""
    counts = replaced_in(architecture.build()) | {"fuse": fused_in(architecture.build())}
    return {name: number for name, number in counts.items() if number}


def left_in(architecture: Any) -> dict[str, list[str]]:
    """By package, and under "fuse", the names of the modules that are left alone, once for all layers."""
    left = {}
    model = architecture.build()
    for technique in PATCHES:
        left[technique.name] = technique.patch(model, gpu_bound=True).left
    model = architecture.build()
    if fused_in(model):
        left["fuse"] = replacements.fusion_report(model).left
    return {package: sorted(set(map(_name_of, found))) for package, found in left.items() if found}


def _name_of(path: str) -> str:
    """The last name of a path that is no number of a layer."""
    return next((name for name in reversed(path.split(".")) if name and not name.isdigit()), "the model")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from zoo import ARCHITECTURES

    lines = (f" {json.dumps(name)}: {json.dumps(count(each))}" for name, each in ARCHITECTURES.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
