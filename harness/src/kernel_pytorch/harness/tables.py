"""Tables that rich shows, and `print` too."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table


class _Printable:
    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


class PrintableTable(_Printable, Table):
    """A table."""


class PrintableGroup(_Printable, Group):
    """Lines and tables below each other."""


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    *notes: str,
    text: int = 0,
    width: int | None = None,
) -> PrintableTable:
    """A table with its title above and notes below, both at the left.

    Args:
        title: plain text.
        columns: their names, which may hold markup, as the cells may.
        rows: cells; missing ones at the end are empty.
        *notes: lines of plain text; empty ones are left out.
        text: how many columns, from the first on, hold text and not figures, which are aligned at the right.
        width: of the whole table; then no cell wraps, and the first column is cut. None for what the cells need.
    """
    caption = escape("\n".join(filter(None, notes))) or None
    found = PrintableTable(title=escape(title), caption=caption, width=width)
    found.title_justify = found.caption_justify = "left"
    for place, name in enumerate(columns):
        ratio = 1 if width is not None and place == 0 else None
        found.add_column(name, justify="left" if place < text else "right", no_wrap=width is not None, ratio=ratio)
    for row in rows:
        found.add_row(*row)
    return found
