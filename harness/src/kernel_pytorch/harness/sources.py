"""Which source files an implementation consists of, and their digest: how a stale figure is recognised.

Imports are read from the syntax tree, so those inside functions count too, and no module is executed but the package.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
from collections.abc import Callable
from importlib.util import find_spec, resolve_name
from pathlib import Path

from kernel_pytorch.harness.implementation import Implementation, Level, PublicLevel, imported
from kernel_pytorch.harness.technique import Technique


def kernel_files(implementation: Implementation) -> list[Path]:
    """What runs on the device: the kernels that a level launches and what they import; of a level without any, itself.

    Kernels are the modules in folders of that name, with their launchers. What was compiled has no Python to it.

    Raises:
        ModuleNotFoundError: there is no such module here, or it has no Python source.
    """
    module = level_module(implementation)
    found = _closure(module)
    if implementation.level is Level.CUDA and _compiled(implementation, "cuda"):
        return []
    kernels: dict[str, Path] = {}
    for name in found:
        if "kernels" in name.split("."):
            kernels |= _closure(name)
    return _files(kernels or found)


def path_files(implementation: Implementation) -> list[Path]:
    """All that a call runs: the module of the public function with what that imports, and `kernel_files`.

    A package's ladder, the module `<package>.levels`, finds the levels by their names, so that one level's files are no
    part of another's. Its own text is left out: it says which level `level=None` means, and each is called by name.

    Raises:
        ModuleNotFoundError: as `kernel_files`.
    """
    found = _closure(level_module(implementation))
    if isinstance(implementation, PublicLevel):
        found = {**_closure(imported(implementation.target).__module__), **found}
    return _files(found)


def level_module(implementation: Implementation) -> str:
    """The module that holds an implementation.

    Raises:
        ModuleNotFoundError: it would be in a package that is not installed.
    """
    if not isinstance(implementation, PublicLevel):
        return implementation.target.partition(":")[0]
    target = implementation.level_target()
    module = target.partition(":")[0]
    if implementation.level is not Level.CUDA:
        return module
    # Compiled code is in a package of its own, whose function the level is, or which the level's own module calls.
    own, module = module, imported(target).__module__
    if _package(module) == _package(own) and not _compiled_beside(own):
        raise ModuleNotFoundError(f"level 'cuda' of {implementation.target} is not installed")
    return module


def _compiled_beside(module: str) -> list[str]:
    """The modules of other packages, which were compiled, whose functions a module of a level "cuda" calls."""
    levels = [name for name in _closure(module) if name.endswith(f".{Level.CUDA.value}")]
    values = [value for name in levels for value in vars(importlib.import_module(name)).values()]
    held = {getattr(value, "__module__", "") for value in values}
    others = sorted(name for name in held if name.startswith("kernel_pytorch.") and _package(name) != _package(module))
    return [name for name in others if (_package(name)[1] / "_library.json").is_file()]


def _closure(module: str) -> dict[str, Path]:
    """A module and all modules of its own package that it imports, at whatever depth, by name.

    The package's own `__init__` is left out: it names everything, and no implementation consists of everything.
    """
    package, folder = _package(module)
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = None if name in found else _source(name, package, folder)
        if path is None:
            continue
        found[name] = path
        pending += [n for n in _imports(path, name) if n.startswith(f"{package}.")]
    if not found:
        raise ModuleNotFoundError(f"{module} has no Python source here")
    found.pop(f"{package}.levels", None)
    return found


def _files(modules: dict[str, Path]) -> list[Path]:
    return [modules[name] for name in sorted(modules)]


def digest(files: list[Path], compiled: str = "") -> str:
    """SHA-256 over names and contents, in order; what only people read does not count: docstrings, comments, space.

    Args:
        files: Python sources.
        compiled: what `compiled_digest` says of the rest.
    """
    total = hashlib.sha256(compiled.encode())
    for path in files:
        code = "\n".join(_code(path.read_text(encoding="utf-8")))
        total.update(f"{path.name}\0{code}\0".encode())
    return total.hexdigest()


@functools.cache
def _code(source: str) -> tuple[str, ...]:
    """The lines of a module that are neither empty nor a comment nor part of a docstring."""
    lines = [line.rstrip() for line in source.splitlines()]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            end = docstring.end_lineno or docstring.lineno
            if lines[docstring.lineno - 1].lstrip().startswith(('"', "'", "r")):  # else it shares its line with code
                lines[docstring.lineno - 1 : end] = [""] * (end - docstring.lineno + 1)
    return tuple(line for line in lines if line and not line.lstrip().startswith("#"))


def kernels_digest(implementation: Implementation, device_type: str) -> str:
    """The digest of `kernel_files`, which device time depends on; arguments as of `path_digest`."""
    return _digest(implementation, device_type, kernel_files)


def path_digest(implementation: Implementation, device_type: str) -> str:
    """The digest of `path_files`, which results carry; empty for what has no Python source here.

    Args:
        implementation: of what; for a peer that is not installed it is empty.
        device_type: "cpu" or "cuda": of what was compiled, that which runs there counts.
    """
    return _digest(implementation, device_type, path_files)


def _digest(implementation: Implementation, device_type: str, files: Callable[[Implementation], list[Path]]) -> str:
    try:
        return digest(files(implementation), _compiled(implementation, device_type))
    except (ModuleNotFoundError, ValueError):  # ValueError: a module made at run time, without a file
        return ""


def _compiled(implementation: Implementation, device_type: str) -> str:
    """What `compiled_digest` says of the compiled functions that a level is, or calls."""
    return "".join(compiled_digest(name, device_type) for name in compiled_modules(implementation))


def compiled_modules(implementation: Implementation) -> list[str]:
    """The modules that a level "cuda" calls of a package with a compiled library; of another level its own."""
    module = level_module(implementation)
    return (_compiled_beside(module) if implementation.level is Level.CUDA else []) or [module]


def compiled_digest(module: str, device_type: str) -> str:
    """The digest of what a module consists of beyond Python on a type of device; empty where that is all.

    A package with a compiled library leaves `_library.json` beside its modules, which holds under "operators", by the
    name of a module that was compiled and the type of the device, the digest of the sources.
    """
    package, folder = _package(module)
    record = folder / "_library.json"
    if not record.is_file():
        return ""
    operators = json.loads(record.read_text(encoding="utf-8")).get("operators", {})
    return operators.get(module.removeprefix(f"{package}.").partition(".")[0], {}).get(device_type, "")


def technique_digests(
    technique: Technique, device_type: str, of: Callable[[Implementation, str], str] = path_digest
) -> dict[str, str]:
    """The digests of all implementations on a type of device, by `operation/implementation`.

    Args:
        technique: whose.
        device_type: as of `path_digest`.
        of: which digest.
    """
    return {
        f"{operation.name}/{implementation.name}": of(implementation, device_type)
        for operation in technique.operations
        for implementation in operation.implementations
    }


def _package(module: str) -> tuple[str, Path]:
    """The package that a module belongs to and its folder: the outermost one, what lies above it is a namespace."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = find_spec(name)
        if spec is None:
            break
        if spec.origin is not None:
            return name, Path(spec.origin).parent
    raise ModuleNotFoundError(f"{module} is not installed")


def _source(module: str, package: str, folder: Path) -> Path | None:
    """The file of a module of the package; None where the name is no module, but something that a module holds."""
    if module == package:
        spec = find_spec(module)
        return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
    place = folder.joinpath(*module.removeprefix(f"{package}.").split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _imports(path: Path, module: str) -> tuple[str, ...]:
    """Every dotted name that a file may import: modules, and whatever it takes from them."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imported_names(path.read_text(encoding="utf-8"), package)


@functools.cache  # by text, which is shared by most implementations of a package
def _imported_names(source: str, package: str) -> tuple[str, ...]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            base = base.rstrip(".")
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(names)
