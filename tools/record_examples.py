"""Run the examples, record the last line that each prints, and write the README's table of them.

    python tools/record_examples.py [NAME ...]     those named, or all; in the environment of `nox -s examples`

Each example ends with one sentence that it computed. It stands in results/<device>/examples/figures.json with the date
and what measured it, and in the README, in the table of the examples. Examples that are not named keep theirs.
"""

from __future__ import annotations

import ast
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
FILE = "examples/figures.json"


def figures() -> Path:
    """The record that the README shows."""
    found = sorted(ROOT.glob(f"results/*/{FILE}"))
    if len(found) != 1:
        raise SystemExit(f"the README shows one record; there are {len(found)}: {', '.join(map(str, found))}")
    return found[0]


def table(record: dict[str, dict[str, str]]) -> str:
    """A row for each example: what it does, by its docstring, and what it measured."""
    rows = ["| example | what it does | measured at quick size |", "|---|---|---|"]
    for script in sorted(EXAMPLES.glob("*.py")):
        what = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        measured = record[script.stem]["line"] if script.stem in record else "not measured here"
        rows.append(f"| [{script.name}](examples/{script.name}) | {' '.join(what.split())} | {measured} |")
    devices = sorted({f"{found['device']}, torch {found['torch']}, {found['date']}" for found in record.values()})
    return "\n".join([*rows, "", f"Measured on {'; '.join(devices)}."]) + "\n"


def run(script: Path) -> str:
    """The last line that an example prints."""
    done = subprocess.run([sys.executable, str(script), "--quick"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{script.name} ended with exit code {done.returncode}")
    return done.stdout.strip().splitlines()[-1].strip()


def main() -> None:
    """Run, record and show."""
    import torch

    from kernel_pytorch.harness.environment import describe_environment
    from kernel_pytorch.harness.readme import write_block
    from kernel_pytorch.harness.records import write_atomically

    here = describe_environment("cuda" if torch.cuda.is_available() else "cpu")
    path = ROOT / "results" / here.slug / FILE
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = sys.argv[1:] or sorted(script.stem for script in EXAMPLES.glob("*.py"))
    for name in names:
        print(f"running {name}", file=sys.stderr)
        device = here.device_name + (f", {here.torch_threads} threads" if here.device_type == "cpu" else "")
        day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        record[name] = {"line": run(EXAMPLES / f"{name}.py"), "device": device, "torch": here.torch, "date": day}
        write_atomically(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
    write_block(ROOT / "README.md", "examples", table(json.loads(figures().read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
