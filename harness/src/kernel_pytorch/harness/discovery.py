"""Find the installed techniques: entry points in the group `kernel_pytorch.techniques`.

A package that cannot be loaded is reported with its reason; the others are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.peers import with_peers
from kernel_pytorch.harness.technique import Technique

GROUP = "kernel_pytorch.techniques"
UnknownNameError = UserError


@dataclass(frozen=True)
class Discovery:
    """The techniques that were found.

    Attributes:
        techniques: by name, in alphabetical order.
        broken: name of each entry point that failed, with the reason.
    """

    techniques: dict[str, Technique]
    broken: dict[str, str]

    def get(self, name: str) -> Technique:
        """The technique of that name.

        Raises:
            UserError: there is none, or its package is broken.
        """
        if name in self.techniques:
            return self.techniques[name]
        if name in self.broken:
            raise UserError(f"technique {name!r} is installed but broken: {self.broken[name]}")
        raise UserError(f"no technique {name!r}; installed are: {', '.join(self.techniques) or 'none'}")

    def select(self, name: str | None) -> list[Technique]:
        """Return that technique alone, or all of them for None."""
        return list(self.techniques.values()) if name is None else [self.get(name)]


def discover() -> Discovery:
    """Load every declared technique."""
    techniques: dict[str, Technique] = {}
    broken: dict[str, str] = {}
    for entry_point in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            technique = entry_point.load()
            if not isinstance(technique, Technique):
                raise TypeError(f"{entry_point.value} is a {type(technique).__name__}, not a Technique")
            if technique.name != entry_point.name:
                raise ValueError(f"the technique calls itself {technique.name!r}, its entry point {entry_point.name!r}")
            technique.ladder()
        except Exception as error:  # a package may fail in any way
            broken[entry_point.name] = f"{type(error).__name__}: {error}"
        else:
            techniques[entry_point.name] = with_peers(technique)
    return Discovery(techniques, broken)
