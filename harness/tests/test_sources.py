"""The digest of Python files changes with what they say to Python, and with nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernel_pytorch.harness.sources import package_digest, package_place, tree_digest
from kernel_pytorch.harness.technique import Technique

DOCUMENTED = '''
"""{module}"""
def function(x):
    """{function}

    More."""
    return "{value}", x
class Class: "{beside_code}"
'''


def test_comments_and_layout_are_no_change_and_code_is(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def function(x):\n    return x\n")
    before = tree_digest([file])
    file.write_text("# said\n\ndef function( x ):   # in other words\n\n    return (x)\n")
    assert tree_digest([file]) == before
    file.write_text("def function(x):\n    return -x\n")
    assert tree_digest([file]) != before


@pytest.mark.parametrize("part", ["module", "function", "value", "beside_code"])
def test_docstrings_are_no_change_and_other_strings_are(tmp_path, part):
    said = dict.fromkeys(("module", "function", "value", "beside_code"), "one")
    file = tmp_path / "module.py"
    file.write_text(DOCUMENTED.format(**said))
    before = tree_digest([file])
    file.write_text(DOCUMENTED.format(**said | {part: "two"}))
    assert (tree_digest([file]) != before) == (part == "value")


def test_where_a_file_lies_is_no_change_and_its_name_is(tmp_path):
    texts = {"a/module.py": "x = 1", "b/module.py": "x = 1", "b/other.py": "x = 1"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    first, second, third = (tree_digest([tmp_path / name]) for name in texts)
    assert first == second != third


FILES = ("__init__.py", "levels/__init__.py", "kernels/forward.py", "_core/sizes.py")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a namespace, whose core is a link, and a sibling in the same namespace."""
    core = tmp_path / "linked"
    core.mkdir()
    folder = tmp_path / "planted_space" / "planted"
    (folder / "levels").mkdir(parents=True)
    (folder / "kernels").mkdir()
    (folder / "_core").symlink_to(core, target_is_directory=True)
    for name in FILES:
        (folder / name).write_text("")
    sibling = tmp_path / "planted_space" / "sibling"
    sibling.mkdir()
    (sibling / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for module in [m for m in sys.modules if m.startswith("planted_space")]:
        del sys.modules[module]


def test_the_digest_of_a_package_changes_with_each_file_of_it_and_with_no_other(package):
    technique = Technique("planted", "", "", [], "planted_space.planted.levels")
    assert package_place(technique) == package
    seen = {package_digest(technique)}
    for name in FILES:
        (package / name).write_text("changed = True\n")
        assert package_digest(technique) not in seen, name
        seen.add(package_digest(technique))
    (package.parent / "sibling" / "__init__.py").write_text("changed = True\n")
    assert package_digest(technique) in seen
    with pytest.raises(ModuleNotFoundError, match="nobody_has is not installed"):
        package_digest(Technique("absent", "", "", [], "nobody_has"))


def test_a_technique_in_one_module_is_that_file(toy):
    assert package_place(toy.technique) == Path(toy.__file__)
    assert package_digest(toy.technique) == tree_digest([Path(toy.__file__)])
