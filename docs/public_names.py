"""What griffe, which reads the sources for the API sections, has to be told about names."""

from __future__ import annotations

from typing import Any

from griffe import Alias, Extension, GriffeLoader, Module, Object


class PublicNames(Extension):
    """Lets a name mean what it means in Python: what a package imports, where a submodule has the same name.

    griffe holds one of the two, the submodule, so the function of `from .softmax import softmax` would be lost.
    """

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Put what is imported in the place of submodules, after everything was found that goes by their paths."""
        loader.resolve_aliases()
        for package in pkg.modules.values():
            for name, member in [*package.members.items()]:
                meant = imported(package, name, loader) if not member.is_alias and member.is_module else None
                if meant is not None:
                    package.members[name] = Alias(name, meant, parent=package)


def imported(package: Module, name: str, loader: GriffeLoader) -> Object | Alias | None:
    """What a package imports under a name, by itself or by `*`; None if that is its submodule."""
    path = package.imports.get(name)
    if path is not None:
        return None if path == f"{package.path}.{name}" else loader.modules_collection[path]
    by_star = (member.target for member in package.members.values() if member.is_alias and member.wildcard_imported)
    return next((found.parent.members[name] for found in by_star if name in found.parent.members), None)
