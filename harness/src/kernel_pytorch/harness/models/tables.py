"""Tables of models for a terminal of 80 columns, and for the site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from kernel_pytorch.harness.models.record import Cost, Ratio, Row
from kernel_pytorch.harness.models.variants import LIGER, VARIANTS
from kernel_pytorch.harness.models.works import find_work
from kernel_pytorch.harness.models.zoo import find_model

TITLES = {variant.name: variant.title for variant in (*VARIANTS, LIGER)}


def tables(rows: Sequence[Row]) -> Iterable[Table]:
    """A table of the variants for each model and work, in the order of the rows; what did not run is named below."""
    for model, work in dict.fromkeys((row.model, row.work) for row in rows):
        found = [row for row in rows if (row.model, row.work) == (model, work)]
        title = f"{find_model(model).title}: {find_work(work).title}"
        reasons = dict.fromkeys(f"{TITLES[row.variant]}: {row.reason}" for row in found if row.reason)
        table = Table(title=title, title_justify="left", caption="\n".join(reasons), caption_justify="left", width=80)
        table.add_column("variant", no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("ms", "x of stock", "host ms", "kernels", "GiB"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in found:
            if row.cost is not None and row.ratio is not None:
                table.add_row(TITLES[row.variant], *_cells(row.cost, row.ratio))
        yield table


def _cells(cost: Cost, ratio: Ratio) -> tuple[str, ...]:
    memory = "" if cost.peak_bytes is None else f"{cost.peak_bytes / 2**30:.1f}"
    times = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{cost.wall * 1e3:.3g}", times, f"{cost.host * 1e3:.3g}", str(cost.launches or ""), memory
