"""Which source files an implementation consists of, and their digest: how a stale figure is recognised."""

from __future__ import annotations

import ast
import hashlib
from importlib.util import find_spec, resolve_name
from pathlib import Path

from .technique import Implementation


def implementation_files(implementation: Implementation) -> list[Path]:
    """The implementation's module and all modules of its own package that it imports, at whatever depth.

    Imports are read from the syntax tree, so those inside functions count too and nothing is executed.
    """
    module = implementation.target.partition(":")[0]
    package = module.rpartition(".")[0]
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = None if name in found else _source(name)
        if path is None:
            continue
        found[name] = path
        pending += [n for n in _imports(path, package) if n.startswith(f"{package}.")]
    return [found[name] for name in sorted(found)]


def digest(files: list[Path]) -> str:
    """SHA-256 over names and contents, in order."""
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def implementation_digest(implementation: Implementation) -> str:
    """The digest that results carry; empty for what has no Python source here (a peer that is not installed)."""
    try:
        return digest(implementation_files(implementation))
    except ModuleNotFoundError:
        return ""


def _source(module: str) -> Path | None:
    spec = find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _imports(path: Path, package: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            base = base.rstrip(".")
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names
