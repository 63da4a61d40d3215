"""Launchers that decide once for a geometry.

    @planned
    def scale(x, factor):                      # runs once for a geometry: checks, block sizes, grid
        launch = bind(_kernel, (grid,), x.numel(), BLOCK=1024, num_warps=4)

        def run(x, factor):                    # runs in every call
            y = torch.empty_like(x)
            launch(x, y)
            return y

        return run

What a plan returns outlives the call, so it must keep shapes, and never a tensor. `run.alone`, if there is one, takes
the same arguments and returns what users see, without the results that only a gradient needs: it runs where none is
wanted, and saves allocating them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from .call_cache import clear_all
from .device import on_device
from .direct_calls import was_freed

PLANS = 1024  # geometries of one launcher; beyond that all are forgotten
_all_plans: list[dict[Any, Any]] = []


def planned(
    plan: Callable[..., Callable[..., Any]], state: Callable[..., Hashable] | None = None
) -> Callable[..., Any]:
    """Make a launcher that plans once for a geometry.

    Args:
        plan: checks its arguments and returns what runs with them, and with all others of the same geometry: shapes,
            strides, dtypes, devices, scalars, and whether memory begins at a multiple of 16 bytes. Tensors whose memory
            was freed are a geometry of their own, which it must refuse.
        state: what else the plan rests on, such as switches of PyTorch, asked of the arguments in every call.
    """
    plans: dict[Any, Callable[..., Any]] = {}
    _all_plans.append(plans)

    def planned_for(*arguments: Any) -> Callable[..., Any]:
        """What runs with arguments of this geometry."""
        # NaN is never equal to itself, and -0.0 always to 0.0: such floats are known by their names.
        geometry = [
            (a.shape, a.stride(), a.dtype, a.device, None if was_freed(a) else a.data_ptr() & 15 != 0)
            if isinstance(a, Tensor)
            else (a if not isinstance(a, float) or a < 0.0 or a > 0.0 else repr(a))
            for a in arguments
        ]
        if state is not None:
            geometry.append(state(*arguments))
        key = tuple(geometry)
        run = plans.get(key)
        if run is None:
            if len(plans) >= PLANS:
                plans.clear()
            with on_device(next(a for a in arguments if isinstance(a, Tensor))):
                run = plans[key] = plan(*arguments)
        return run

    @functools.wraps(plan)
    def launcher(*arguments: Any) -> Any:
        return planned_for(*arguments)(*arguments)

    launcher.planned_for, launcher.state = planned_for, state  # type: ignore[attr-defined]
    return launcher


def forget_plans() -> None:
    """Plan everything anew: for tests that change what plans rest on."""
    for plans in _all_plans:
        plans.clear()
    clear_all()
