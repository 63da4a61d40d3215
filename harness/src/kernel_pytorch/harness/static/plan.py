"""Which launches are compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernel_pytorch.harness.static.launches import Launch


def covering_set(launches: Iterable[Launch]) -> list[Launch]:
    """Choose launches so that a check of every commit stays short and no kernel escapes.

    1. Every distinct compilation that the bench cases lead to: these are the shapes that speed is claimed for.
    2. From the core cases of the test grid, every distinct combination of kernel, constants, argument types, warps and
       stages. What else Triton specialises on (a size that is 1, or divisible by 16) is not told apart.
    3. From the rest of the test grid the same, for kernels that neither bench nor core cases reach.
    """
    distinct = every_launch(launches)
    chosen = [launch for launch in distinct if launch.bench]
    seen = {_combination(launch) for launch in chosen}
    for stage in ("core", "rest"):
        reached = {launch.function for launch in chosen}
        for launch in distinct:
            wanted = launch.core if stage == "core" else launch.function not in reached
            if wanted and not launch.bench and _combination(launch) not in seen:
                seen.add(_combination(launch))
                chosen.append(launch)
    return chosen


def every_launch(launches: Iterable[Launch]) -> list[Launch]:
    """Every distinct compilation; where several cases lead to one, a bench case is named before a core case."""
    distinct: dict[tuple[Any, str], Launch] = {}
    for launch in sorted(launches, key=lambda each: (not each.bench, not each.core)):
        distinct.setdefault((launch.function, launch.key), launch)
    return list(distinct.values())


def _combination(launch: Launch) -> tuple[Any, ...]:
    options = launch.options
    constants, arguments = tuple(launch.constants.items()), tuple(launch.arguments.items())
    return launch.function, constants, arguments, options.num_warps, options.num_stages, options.num_ctas
