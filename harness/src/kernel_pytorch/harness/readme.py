"""The generated parts of a README, between `<!-- NAME:begin -->` and its `:end`; `page.headline` makes the results."""

from __future__ import annotations

from pathlib import Path

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.records import write_atomically


def read_block(readme: Path, name: str) -> str:
    """Return the text between the markers.

    Raises:
        UserError: there is no such file, or it lacks the markers.
    """
    return _parts(readme, name)[1]


def write_block(readme: Path, name: str, body: str) -> None:
    """Replace the text between the markers.

    Raises:
        UserError: as for `read_block`; nothing is written.
    """
    before, _, after = _parts(readme, name)
    write_atomically(readme, before + body + after)


def _parts(readme: Path, name: str) -> tuple[str, str, str]:
    """The text up to the block, the block, and the rest; markers belong to the outer two."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"no file {readme}" if not readme.is_file() else f"{readme}: {error.strerror}") from error
    before, found, rest = text.partition(f"{begin}\n")
    body, closed, after = rest.partition(end)
    if not found or not closed:
        raise UserError(f"{readme} has no {begin} and {end}, each on a line of its own")
    return before + found, body, closed + after
