"""The digest of an implementation changes with what it consists of, and with nothing else."""

from __future__ import annotations

import itertools
import json
import sys
import types

import pytest

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.sources import implementation_digest, implementation_files
from kernel_pytorch.harness.technique import Implementation, Level

FILES = {
    "__init__.py": "from .kernels import function",
    "kernels.py": "from .launcher import launch\nimport {0}.named\nfrom {0} import attribute\n\ndef function(): pass",
    "launcher.py": "def launch():\n    from . import lazy\n    import {0}_sibling.module",
    "lazy.py": "from .operation import helper",
    "named.py": "import torch",
    "attribute.py": "",
    "unrelated.py": "",
    "broken.py": "raise RuntimeError('imported')",
    "operation/__init__.py": "from . import helper",
    "operation/helper.py": "from ..shared import value\nfrom .. import broken",
    "operation/kernels.py": "from .helper import nothing",
    "shared.py": "value = 1",
}
CLOSURE = "attribute broken kernels launcher lazy named operation/__init__ operation/helper shared"
NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a namespace, and a sibling in the same one; a name of its own, for Python remembers packages."""
    name = f"planted{next(NUMBERS)}"
    for file, text in FILES.items():
        path = tmp_path / "planted_namespace" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(f"planted_namespace.{name}"))
    sibling = tmp_path / "planted_namespace" / f"{name}_sibling"
    sibling.mkdir()
    (sibling / "__init__.py").write_text("")
    (sibling / "module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "planted_namespace" / name
    for module in [m for m in sys.modules if m.startswith("planted_namespace")]:
        del sys.modules[module]


def implementation(package, module="kernels"):
    return Implementation("native", Level.NATIVE, f"planted_namespace.{package.name}.{module}:function")


def test_the_closure_holds_imports_in_functions_and_relative_ones_and_no_sibling(package):
    files = implementation_files(implementation(package))
    names = sorted(str(file.relative_to(package).with_suffix("")) for file in files)
    assert names == CLOSURE.split()


def test_a_folder_per_operation_reaches_what_operations_share(package):
    files = implementation_files(implementation(package, "operation.kernels"))
    assert {file.name for file in files} == {"broken.py", "helper.py", "kernels.py", "shared.py"}


@pytest.mark.parametrize("file", sorted(FILES))
def test_the_digest_changes_with_the_closure_and_with_nothing_else(package, file):
    before = implementation_digest(implementation(package), "cpu")
    assert len(before) == 64
    with (package / file).open("a") as source:
        source.write("\nchanged = True\n")
    after = implementation_digest(implementation(package), "cpu")
    assert (after != before) == (file.removesuffix(".py") in CLOSURE.split())


def test_comments_and_empty_lines_are_no_change(package):
    before = implementation_digest(implementation(package), "cpu")
    for file in FILES:
        path = package / file
        path.write_text("# said\n\n" + path.read_text().replace("\n", "   \n\n    # in other words\n"))
    assert implementation_digest(implementation(package), "cpu") == before


DOCUMENTED = '''
"""{module}"""
def function(x):
    """{function}

    More."""
    return "{value}", x
class Class: "{beside_code}"
'''


@pytest.mark.parametrize("part", ["module", "function", "value", "beside_code"])
def test_docstrings_are_no_change_and_other_strings_are(package, part):
    said = dict.fromkeys(("module", "function", "value", "beside_code"), "one")
    (package / "kernels.py").write_text(DOCUMENTED.format(**said))
    before = implementation_digest(implementation(package), "cpu")
    (package / "kernels.py").write_text(DOCUMENTED.format(**said | {part: "two"}))
    assert (implementation_digest(implementation(package), "cpu") != before) == (part in ("value", "beside_code"))


def test_what_has_no_source_here_has_an_empty_digest(monkeypatch):
    for target in ("a_library_that_nobody_has:function", "a_library.that_nobody.has:function", "_thread:start_new"):
        assert implementation_digest(Implementation("peer:nobody", Level.PEER, target), "cpu") == ""
    monkeypatch.setitem(sys.modules, "made_at_run_time", types.ModuleType("made_at_run_time"))
    assert implementation_digest(Implementation("native", Level.NATIVE, "made_at_run_time:function"), "cpu") == ""


def test_every_level_of_an_installed_technique_has_a_digest(toy):
    for technique in (toy.technique, *discover().techniques.values()):
        package = technique.levels.rpartition(".")[0]
        for operation in technique.operations:
            for i in operation.implementations:
                if i.target.startswith(package):
                    assert implementation_digest(i, "cpu"), f"{technique.name} {operation.name} {i.name}"


def test_what_a_library_was_compiled_of_counts(tmp_path, monkeypatch):
    """By the record beside the modules: of the module and the device that are meant, and of no others."""
    package = tmp_path / "compiled_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("first", "second"):
        (package / f"{name}.py").write_text("def function(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    implementations = [
        Implementation(name, Level.CUDA, f"compiled_package.{name}:function") for name in ("first", "second")
    ]

    def digests(device_type, **operators):
        (package / "_library.json").write_text(json.dumps({"operators": operators}))
        return [implementation_digest(implementation, device_type) for implementation in implementations]

    first, second = {"cpu": "a", "cuda": "b"}, {"cpu": "c", "cuda": "d"}
    before = digests("cpu", first=first, second=second)
    after = digests("cpu", first=first | {"cpu": "changed"}, second=second)
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert digests("cpu", first=first | {"cuda": "changed"}, second=second) == before
    assert digests("cuda", first=first, second=second)[0] != before[0]
