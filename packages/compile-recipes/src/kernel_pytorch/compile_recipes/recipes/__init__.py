"""The catalogue: changes as code before and after, one file each, with an effect that is counted by a test.

The assistant names them: `Finding.recipe` is the name of a file here.
"""

from __future__ import annotations

import importlib
import pkgutil

from .recipe import Recipe, count

__all__ = ["Recipe", "catalogue", "count"]


def catalogue() -> dict[str, Recipe]:
    """Every recipe, by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "recipe")
    return {name: Recipe(importlib.import_module(f"{__name__}.{name}")) for name in names}
