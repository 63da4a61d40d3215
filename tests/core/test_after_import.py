"""What is done once a module is imported: all of it, once, by one finder, whatever else is imported meanwhile."""

import importlib
import importlib.util
import sys

import pytest

from kernel_pytorch.rmsnorm._core.after_import import _AfterImport, after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, and is not yet."""
    (tmp_path / "imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "imported_later"
    sys.modules.pop("imported_later", None)


def finders(name):
    return [f for f in sys.meta_path if isinstance(f, _AfterImport) and f._name == name]


def test_all_actions_of_a_name_share_a_finder_and_run_once(module):
    seen = []
    for number in range(5):
        after_import(module, lambda found, number=number: seen.append((number, found.value)))
    assert len(finders(module)) == 1
    assert importlib.util.find_spec(module) is not None
    assert seen == []  # whoever only asks has not imported it
    importlib.import_module(module)
    assert seen == [(number, 3) for number in range(5)]
    assert not finders(module)
    after_import(module, lambda found: seen.append("now"))
    assert seen[-1] == "now"
    importlib.reload(sys.modules[module])
    assert len(seen) == 6
