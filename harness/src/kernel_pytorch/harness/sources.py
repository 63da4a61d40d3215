"""Digests of Python files: of what they say to Python, not to people."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from kernel_pytorch.harness.technique import Technique

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tree_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the syntax trees of files, wherever they lie: docstrings, comments and layout do not count."""
    code = sorted((file.name, _code(file.read_text(encoding="utf-8"))) for file in files)
    return hashlib.sha256(repr(code).encode()).hexdigest()


@functools.cache
def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def package_digest(technique: Technique) -> str:
    """The digest of all Python files of the package that a technique belongs to, its copy of the core among them."""
    found = package_place(technique)
    if found.is_file():
        return tree_digest([found])
    return tree_digest({*found.rglob("*.py"), *(found / "_core").glob("*.py")})  # rglob passes links by


def package_place(technique: Technique) -> Path:
    """The folder of the package that a technique belongs to, or its file, if it is one module.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    parts = technique.levels.partition(":")[0].split(".")
    for depth in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:depth]))
        if spec is None:
            break
        if spec.origin is not None:  # what lies above it is a namespace
            return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
    raise ModuleNotFoundError(f"{technique.levels} is not installed")
