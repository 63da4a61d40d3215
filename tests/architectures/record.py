"""Write `record.json`, what the site shows, of the results of all tests; exit with 1 if one failed.

python tests/architectures/record.py architectures.xml      # as pytest wrote it with --junitxml
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import torch
import transformers
from replaced import count, left_in
from zoo import ARCHITECTURES

FILE = Path(__file__).with_suffix(".json")
GROUPS = {
    "eager": (
        "training",
        "second step",
        "evaluation",
        "generate",
        "threads",
        "bfloat16",
        "num_items_in_batch",
        "undone",
    ),
    "checkpointed": ("checkpointed", "checkpointed, reentrant", "autocast, checkpointed"),
    "compiled": ("compiled", "compiled, inductor", "compiled, autocast"),
    "autocast": ("autocast",),
    "two ranks": ("DDP", "FSDP2"),
}
"""Columns of the table; the other surroundings are ways in which models are carried and prepared."""
OTHERS = "carried"


def outcomes(file: Path) -> dict[str, dict[str, str]]:
    """By architecture and column "same", "fails", or "-" where transformers itself cannot do it."""
    found: dict[str, dict[str, str]] = {}
    for case in ET.parse(file).iter("testcase"):
        name, _, rest = case.get("name", "").partition("[")[2].partition("-")
        if "test_architectures" not in case.get("classname", "") or name not in ARCHITECTURES or not rest:
            continue
        surrounding = rest.rpartition("-")[0]
        column = next((each for each, members in GROUPS.items() if surrounding in members), OTHERS)
        skipped = case.find("skipped") is not None
        failed = case.find("failure") is not None or case.find("error") is not None
        before, now = found.setdefault(name, {}).get(column, "-"), "fails" if failed else "-" if skipped else "same"
        found[name][column] = min(before, now, key=("fails", "same", "-").index)
    return found


def main(file: Path) -> int:
    """Write the record; 1 if a test failed."""
    found = outcomes(file)
    rows = {
        name: {"replaced": count(each), "same": found.get(name, {}), "left": left_in(each)}
        for name, each in ARCHITECTURES.items()
    }
    of = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    FILE.write_text(f'{{\n "versions": {json.dumps(of)},\n "architectures": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    return int(
        any(case.find(kind) is not None for case in ET.parse(file).iter("testcase") for kind in ("failure", "error"))
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
