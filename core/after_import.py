"""Doing something once a module has been imported, without importing it: what is optional stays unpaid for."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
"""By name of a module that is not imported yet, what is to be done then: one finder for all of it, however much."""


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` now if the module of that name is imported already, else as soon as it has been."""
    if name in sys.modules and name not in _waiting:
        action(sys.modules[name])
        return
    if name not in _waiting:
        _waiting[name] = []
        sys.meta_path.insert(0, _AfterImport(name))
    _waiting[name].append(action)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the module, and acts once it has been executed."""

    def __init__(self, name: str) -> None:
        self._name = name
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
            # A caller that only asked for the spec has imported nothing, so the finder stays until here.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                for action in _waiting.pop(self._name):
                    action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
