"""The tests of whole architectures: all of them run in the session `architectures` alone, eight with `-m slow`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what only `-m architectures` runs; all of the others take minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow")
    if "architectures" in config.option.markexpr:
        return
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker("architectures") else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes."""
    from ranks import Ranks

    found = Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.stop()
