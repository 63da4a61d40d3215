"""The digest of an implementation changes with what it consists of, and with nothing else."""

from __future__ import annotations

import itertools
import json
import sys
import types

import pytest
import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.implementation import Implementation, Level, PublicLevel
from kernel_pytorch.harness.sources import kernel_files, kernels_digest, path_digest, path_files

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
CPU = torch.device("cpu")


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
    files = path_files(implementation(package))
    names = sorted(str(file.relative_to(package).with_suffix("")) for file in files)
    assert names == CLOSURE.split()


def test_a_folder_per_operation_reaches_what_operations_share(package):
    files = path_files(implementation(package, "operation.kernels"))
    assert {file.name for file in files} == {"broken.py", "helper.py", "kernels.py", "shared.py"}


@pytest.mark.parametrize("file", sorted(FILES))
def test_the_digest_changes_with_the_closure_and_with_nothing_else(package, file):
    before = path_digest(implementation(package), "cpu")
    assert len(before) == 64
    with (package / file).open("a") as source:
        source.write("\nchanged = True\n")
    after = path_digest(implementation(package), "cpu")
    assert (after != before) == (file.removesuffix(".py") in CLOSURE.split())


def test_comments_and_empty_lines_are_no_change(package):
    before = path_digest(implementation(package), "cpu")
    for file in FILES:
        path = package / file
        path.write_text("# said\n\n" + path.read_text().replace("\n", "   \n\n    # in other words\n"))
    assert path_digest(implementation(package), "cpu") == before


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
    before = path_digest(implementation(package), "cpu")
    (package / "kernels.py").write_text(DOCUMENTED.format(**said | {part: "two"}))
    assert (path_digest(implementation(package), "cpu") != before) == (part in ("value", "beside_code"))


def test_what_has_no_source_here_has_an_empty_digest(monkeypatch):
    for target in ("a_library_that_nobody_has:function", "a_library.that_nobody.has:function", "_thread:start_new"):
        assert path_digest(Implementation("peer:nobody", Level.PEER, target), "cpu") == ""
    monkeypatch.setitem(sys.modules, "made_at_run_time", types.ModuleType("made_at_run_time"))
    assert path_digest(Implementation("native", Level.NATIVE, "made_at_run_time:function"), "cpu") == ""


PUBLIC = {
    "__init__.py": "from .functional import gate",
    "functional.py": "from .levels import LADDER\nfrom .checks import check\n\ndef gate(x, *, level=None): pass",
    "checks.py": "def check(): pass",
    "levels/__init__.py": "from ..ladder import Ladder\nLADDER = 'defaults'",
    "ladder.py": "class Ladder: pass",
    "levels/reference.py": "def gate(x): pass",
    "levels/native.py": "from .reference import gate",
    "levels/triton.py": "from ..operators import gate",
    "operators.py": "def gate(x):\n    from .kernels import forward",
    "kernels/forward.py": "from ..sizes import BLOCK",
    "sizes.py": "BLOCK = 8",
}
KERNELS = {"kernels/forward.py", "sizes.py"}
AROUND = {"levels/triton.py", "operators.py"}
PATH = {"functional.py", "checks.py", "ladder.py"}
# By file, the levels whose digests change with it: those of the kernels, those of the whole path.
CHANGES = {
    "__init__.py": ("", ""),
    "levels/__init__.py": ("", ""),  # the table of defaults: each level is called by name
    **dict.fromkeys(sorted(PATH), ("", "reference native triton")),
    **dict.fromkeys(sorted(AROUND), ("", "triton")),
    **dict.fromkeys(sorted(KERNELS), ("triton", "triton")),
    "levels/reference.py": ("reference native", "reference native"),
    "levels/native.py": ("native", "native"),
}


@pytest.fixture
def public(tmp_path, monkeypatch):
    """A package with a public function and three levels."""
    name = f"public{next(NUMBERS)}"
    for file, text in PUBLIC.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("file", CHANGES)
def test_a_file_is_a_part_of_the_levels_that_run_it(public, file):
    assert set(CHANGES) == set(PUBLIC)
    levels = [PublicLevel(name, Level(name), f"{public.name}:gate") for name in ("reference", "native", "triton")]
    before = {i.name: (kernels_digest(i, "cpu"), path_digest(i, "cpu")) for i in levels}
    assert all(len(digest) == 64 for digests in before.values() for digest in digests)
    with (public / file).open("a") as source:
        source.write("\nchanged = True\n")
    after = {i.name: (kernels_digest(i, "cpu"), path_digest(i, "cpu")) for i in levels}
    for which, expected in enumerate(CHANGES[file]):
        assert [name for name in before if before[name][which] != after[name][which]] == expected.split()


def test_files_of_the_kernels_are_a_part_of_the_path(public):
    triton = PublicLevel("triton", Level.TRITON, f"{public.name}:gate")
    kernels, path = ([str(f.relative_to(public)) for f in found(triton)] for found in (kernel_files, path_files))
    assert set(kernels) == KERNELS
    assert set(path) == KERNELS | AROUND | PATH


def test_every_level_of_an_installed_technique_has_a_digest(toy):
    for technique in (toy.technique, *discover().techniques.values()):
        package = technique.levels.rpartition(".")[0]
        for operation in technique.operations:
            for i in operation.implementations:
                if i.target.startswith(package) and technique.ladder().unavailable(i.name, CPU, torch.float32) is None:
                    assert path_digest(i, "cpu"), f"{technique.name} {operation.name} {i.name}"
                    assert kernels_digest(i, "cpu"), f"{technique.name} {operation.name} {i.name}"


def test_kernels_of_an_installed_technique_are_no_part_of_its_other_levels():
    for technique in discover().techniques.values():
        for operation in technique.operations:
            levels = {i.name: i for i in operation.implementations if isinstance(i, PublicLevel)}
            if "triton" in levels:
                found = [f for f in kernel_files(levels["triton"]) if f.parent.name == "kernels"]
                kernels = {f for f in found if "import triton" in f.read_text()}
                assert kernels, f"{technique.name} {operation.name}"
                assert not kernels & set(path_files(levels["reference"])), f"{technique.name} {operation.name}"


def test_a_compiled_level_is_of_the_package_that_has_compiled_it():
    operation = discover().get("rmsnorm").operation("rms_norm")
    if (reason := discover().get("rmsnorm").ladder().unavailable("cuda", CPU, torch.float32)) is not None:
        pytest.skip(reason)
    cuda = operation.implementation("cuda")
    assert {f.parent.name for f in kernel_files(cuda)} <= {"cuda_ops", "_core"}
    assert any(f.name == "functional.py" for f in path_files(cuda))
    assert len({kernels_digest(cuda, "cpu"), kernels_digest(cuda, "cuda"), path_digest(cuda, "cpu"), ""}) == 4


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
        return [path_digest(implementation, device_type) for implementation in implementations]

    first, second = {"cpu": "a", "cuda": "b"}, {"cpu": "c", "cuda": "d"}
    before = digests("cpu", first=first, second=second)
    after = digests("cpu", first=first | {"cpu": "changed"}, second=second)
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert digests("cpu", first=first | {"cuda": "changed"}, second=second) == before
    assert digests("cuda", first=first, second=second)[0] != before[0]
