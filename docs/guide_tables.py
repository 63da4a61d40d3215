"""Tables that are made from results/: a page asks for one by a comment with its name.

ceilings          what a copy and a product reach on each device that was measured
tuned             how the Triton kernel of RMSNorm is launched, and what it compiles to
triton-and-cuda   the same function at both levels: time, registers, lines
against-hugging-face, optimize      training steps of whole models, from results/<device>/examples
packing                             sentences per second of padded and packed batches, from the same
distributed                         training steps on two GPUs, from the same
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from technique_pages import packages  # beside this file

from kernel_pytorch.harness.report import seconds
from kernel_pytorch.harness.results import Measurement, Results, load
from kernel_pytorch.harness.static import record as static_record
from kernel_pytorch.harness.static.compiled import Compiled

ROOT = Path(__file__).parent.parent
DEVICE = ROOT / "results" / "nvidia-h200"
STEPS = ROOT / "results" / "nvidia-h100-80gb-hbm3" / "examples"
RMS_NORM = ROOT / "packages" / "rmsnorm" / "src" / "kernel_pytorch" / "rmsnorm" / "kernels" / "forward.py"
LEVELS = ("native", "compile", "triton", "cuda")
BASES = ("compile, padded to 128", "compile, sorted")


def fill(markdown: str) -> str:
    """A page with the tables that it asks for."""
    for name, table in TABLES.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", table())
    return markdown


def table_of(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def against_hugging_face() -> str:
    """A training step of `LanguageModel` beside the Llama that it was made from."""
    found = json.loads((STEPS / "against_hugging_face.json").read_text(encoding="utf-8"))
    bases = [name for name in found["rows"] if name.startswith("transformers")]
    rows = [
        [name, f"{row['seconds'] * 1e3:.1f} ms", *(row["speedup"].get(base, "") for base in bases)]
        for name, row in found["rows"].items()
    ]
    return _measured_on(found, table_of(["training step", "time", *(f"x of {base}" for base in bases)], rows))


def optimized() -> str:
    """What `optimize` does for training steps, beside the lower bound that the report predicts."""
    found = json.loads((STEPS / "optimize.json").read_text(encoding="utf-8"))
    rows = []
    for name, each in found["models"].items():
        times = {variant: row["seconds"] * 1e3 for variant, row in each["rows"].items()}
        speedup, saved = each["rows"]["optimize compiled"]["speedup"], times["stock"] - times["optimize"]
        rows.append([
            name, *(f"{times[of]:.1f} ms" for of in ("stock", "stock compiled", "optimize", "optimize compiled")),
            speedup["stock compiled"], speedup["patch compiled"], f"{saved:.1f} ms", f"{each['bound'] * 1e3:.1f} ms",
            f"{each['optimize']:.0f} s, {each['analysis']:.0f} s",
        ])  # fmt: skip
    head = ["training step", "stock", "compiled", "`optimize`", "`optimize`, compiled", "x of stock compiled",
            "x of `patch` compiled", "saved in eager", "lower bound, forward alone", "took, analysis took"]  # fmt: skip
    return _measured_on(found, table_of(head, rows))


def packing() -> str:
    """Sentences per second of MiniLM, padded, sorted, and after `optimize(..., apply="all")`."""
    record: dict[str, Any] = {}
    for file in sorted(ROOT.glob("results/*/examples/packing.json")):
        record |= json.loads(file.read_text(encoding="utf-8"))
    rows = [
        [name, threads.split()[0], f"{row['texts per second']:.0f}", *(row["speedup"].get(base, "") for base in BASES)]
        for threads, found in record.items()
        for name, row in found["rows"].items()
    ]
    head = ["batches of 32", "threads", "texts/s", *(f"x of {base}" for base in BASES)]
    return _measured_on(next(iter(record.values())), table_of(head, rows))


def distributed() -> str:
    """Training steps of Llama on two GPUs by strategy, stock and patched."""
    tables = []
    for file in sorted(ROOT.glob("results/*/examples/distributed.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = []
        for strategy, each in found["strategies"].items():
            both = each["stock"], each["patched"]
            cells = [f"{row['seconds'] * 1e3:.1f} ms" for row in both] + [each["speedup"]]
            cells += [f"{row['peak'] / 2**30:.1f} GiB" for row in both]
            rows.append([strategy, *cells, *(f"{row['overlapped']:.0%}" for row in both)])
        head = ["strategy", "stock", "patched", "x of stock", "peak memory, stock", "patched", "overlapped, stock",
                "patched"]  # fmt: skip
        tables.append(_measured_on(found | {"device": f"{found['ranks']} x {found['device']}"}, table_of(head, rows)))
    return "\n\n".join(tables) or "Not measured yet."


def _measured_on(found: dict[str, str], table: str) -> str:
    return f"{table}\n\nMeasured on {found['device']}, torch {found['torch']}, {found['date']}."


def ceilings() -> str:
    """One row per device: the record with the most sizes of copies, a GPU first."""
    best: dict[str, Results] = {}
    for file in sorted(file for file in ROOT.glob("results/*/*.json") if file.stem in packages()):
        found = load(file)
        known = best.get(file.parent.name)
        if known is None or len(known.machine.ceilings.bandwidth) < len(found.machine.ceilings.bandwidth):
            best[file.parent.name] = found
    rows = []
    for found in sorted(best.values(), key=lambda r: r.machine.environment.device_type == "cpu"):
        e, c = found.machine.environment, found.machine.ceilings
        copies = {where: [p.bytes_per_second for p in c.bandwidth if p.memory == where] for where in ("DRAM", "cache")}
        rates = [max(copies[where], default=0.0) / 1e12 for where in ("DRAM", "cache")]
        products = [c.matmul_flops_per_second.get(dtype, 0.0) / 1e12 for dtype in ("bfloat16", "float32")]
        figures = [f"{value:.3g}" if value else "not measured here" for value in (*rates, *products)]
        where = f"{e.device_name}, torch {e.torch}, {found.created[:10]}"
        rows.append([where, *figures, f"{c.launch_overhead_seconds * 1e6:.3g}"])
    head = [
        "device",
        "copy in memory, TB/s",
        "copy in cache, TB/s",
        "bf16 product, TFLOP/s",
        "float32 product, TFLOP/s",
    ]
    return table_of([*head, "eager call, µs"], rows)


def _compiled(name: str) -> list[Compiled]:
    if not static_record.record_file(ROOT / "results", name).is_file():
        return []
    return [c for c in static_record.load(static_record.record_file(ROOT / "results", name)).compiled if c.bench]


def tuned() -> str:
    """A row per block size of the forward kernel on sm_90, in bfloat16."""
    rows = {}
    for c in _compiled("rmsnorm"):
        plain = c.kernel == "_forward_kernel" and c.arch == "sm_90" and c.arguments["x_ptr"] == "*bf16"
        if plain and not c.constants["HAS_RESIDUAL"] and not c.constants["HAS_HEADS"]:
            block, rows_each = int(c.constants["BLOCK"]), int(c.constants["ROWS"])
            widest = max(map(int, c.loads.accesses), default=0)
            rows[block, rows_each] = [str(block), str(rows_each), str(c.warps), str(c.registers), str(widest)]
    return table_of(
        ["columns of a block", "rows of a block", "warps", "registers a thread", "bits of a load"],
        [rows[key] for key in sorted(rows)],
    )


def triton_and_cuda() -> str:
    """Forward times of RMSNorm in bfloat16, and what both levels are made of."""
    if not (DEVICE / "rmsnorm.json").is_file():
        return f"Not measured yet: there is no `results/{DEVICE.name}/rmsnorm.json`."
    results = load(DEVICE / "rmsnorm.json")
    found: dict[str, dict[str, Measurement]] = {}
    for m in results.measurements:
        if (m.operation, m.direction, m.case.dtype) == ("rms_norm", "forward", "bfloat16") and m.seconds:
            found.setdefault(m.case.label, {})[m.implementation] = m
    rows = [
        [label, *(seconds(levels[name].seconds.median) if name in levels else "not measured here" for name in LEVELS)]
        for label, levels in found.items()
    ]
    e = results.machine.environment
    times = table_of(["case", *(f"`{name}`" for name in LEVELS)], rows)
    return f"{e.device_name}, torch {e.torch}, triton {e.triton}, {results.created[:10]}.\n\n{times}\n\n{_sizes()}"


def _sizes() -> str:
    """Registers of the kernels for sm_90 in bfloat16, and lines of code without comments."""
    of_triton = [c for c in _compiled("rmsnorm") if c.kernel == "_forward_kernel" and c.arguments["x_ptr"] == "*bf16"]
    of_cuda = [c for c in _compiled("cuda-ops") if c.kernel == "rms_norm::forward_vectorized"]
    of_cuda = [c for c in of_cuda if c.constants["template"].startswith("__nv_bfloat16")]
    rows = []
    for name, compiled, file, comment in (
        ("Triton", of_triton, RMS_NORM, "#"),
        ("CUDA", of_cuda, ROOT / "csrc" / "rms_norm" / "kernels" / "3_vectorized.cuh", "//"),
    ):
        registers = sorted(c.registers for c in compiled if c.arch == "sm_90")
        code = [line.strip() for line in file.read_text("utf-8").splitlines()]
        lines = sum(bool(line) and not line.startswith(comment) for line in code)
        rows.append(
            [
                name,
                f"{registers[0]} to {registers[-1]}" if registers else "not compiled yet",
                f"{lines}, in `{file.relative_to(ROOT)}`",
            ]
        )
    return table_of(["forward kernel", "registers a thread, sm_90", "lines of code"], rows)


def served() -> str:
    """The sentence that the example computed, on each machine where it was run."""
    lines = []
    for file in sorted(ROOT.glob("results/*/examples/figures.json")):
        if found := json.loads(file.read_text("utf-8")).get("deployment"):
            lines.append(f"> {found['line']}\n>\n> {found['device']}, torch {found['torch']}, {found['date']}.")
    return "\n\n".join(lines) or "Not measured yet."


TABLES: dict[str, Callable[[], str]] = {
    "ceilings": ceilings,
    "tuned": tuned,
    "triton-and-cuda": triton_and_cuda,
    "served": served,
    "against-hugging-face": against_hugging_face,
    "optimize": optimized,
    "packing": packing,
    "distributed": distributed,
}
