"""Doing something once a module has been imported, without importing it: what is optional stays unpaid for."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` now if the module of that name is imported already, else as soon as it has been."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the module, and acts once it has been executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            # Whoever only asked for the spec has not imported anything, so the finder stays until here.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
