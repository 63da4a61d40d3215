"""Launchers that decide once for a geometry.

    @Planned
    def scale(x, factor):                      # runs once for a geometry: checks, block sizes, grid
        launch = bind(_kernel, (grid,), x.numel(), BLOCK=1024, num_warps=4)

        def run(x, factor):                    # runs in every call
            y = torch.empty_like(x)
            launch(x, y)
            return y

        return run

What a plan returns outlives the call, so it must keep shapes, and never a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from .call import MOST, all_known, clear_all, geometry_of
from .device import on_device


class Plan(NamedTuple):
    """What computes the calls of one geometry.

    Attributes:
        run: returns all results.
        alone: takes the same arguments and returns what users see, without the results that only a gradient needs: it
            runs where none is wanted, and saves allocating them. None if there are no such results.
    """

    run: Callable[..., Any]
    alone: Callable[..., Any] | None = None


class Planned:
    """A launcher that plans once for a geometry.

    Args:
        plan: checks its arguments and returns what runs, a `Plan` or a function, with them and with all others of the
            same geometry: shapes, strides, dtypes, devices, scalars, and whether memory begins at a multiple of 16
            bytes. Tensors whose memory was freed are a separate geometry, which it must refuse.
        state: what else the plan depends on, such as switches of PyTorch; every call computes it from its arguments.
    """

    def __init__(
        self, plan: Callable[..., Callable[..., Any] | Plan], state: Callable[..., Hashable] | None = None
    ) -> None:
        functools.update_wrapper(self, plan)
        self.plan, self.state = plan, state
        self._plans: dict[Hashable, Plan] = {}
        all_known.add(self)

    def plan_for(self, *arguments: Any) -> Plan:
        """What runs with arguments of this geometry."""
        geometry = geometry_of(arguments, plain=False)
        key = None if geometry is None else (geometry, None if self.state is None else self.state(*arguments))
        found = None if key is None else self._plans.get(key)
        if found is None:
            with on_device(next(a for a in arguments if isinstance(a, Tensor))):
                made = self.plan(*arguments)
            found = made if isinstance(made, Plan) else Plan(made)
            if key is not None:
                if len(self._plans) >= MOST:
                    self.clear()
                self._plans[key] = found
        return found

    def __call__(self, *arguments: Any) -> Any:
        """Launch."""
        return self.plan_for(*arguments).run(*arguments)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


def forget_plans() -> None:
    """Plan everything anew: for tests that change what plans rest on."""
    clear_all()
