"""What the declarations of the operations share."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_pytorch.harness.exemptions import unsupported_rows
from kernel_pytorch.harness.technique import Implementation, Level

HERE = "kernel_pytorch.cuda_ops"
CUDA = ("cuda",)


def implementations(
    function: str, unsupported: Mapping[Level, Mapping[str, str | None]] | None = None, **budgets: tuple[float, str]
) -> list[Implementation]:
    """One per level.

    Args:
        function: its name, and that of its folder.
        unsupported: by level, what differs from the rows of all techniques, as in `Operation.unsupported`.
        **budgets: by level, as in `Operation.budgets`.
    """
    files = {Level.REFERENCE: "reference", Level.NATIVE: "native", Level.COMPILE: "compiled"}
    targets = {level: f"{HERE}.{function}.{file}:{function}" for level, file in files.items()}
    targets[Level.CUDA] = f"{HERE}.{function}.operator:{function}"
    return [
        Implementation(
            level.value,
            level,
            target,
            *budgets.get(level.value, (2.0, "")),
            unsupported=unsupported_rows(level, (unsupported or {}).get(level, {})),
        )
        for level, target in targets.items()
    ]
