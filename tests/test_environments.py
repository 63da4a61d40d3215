"""What nox installs where: the packages that are named and no others, compiled once and before pip hides it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent


@pytest.fixture
def environments(monkeypatch):
    """The module, without nox, which is not in the environment that it makes."""
    nox = SimpleNamespace(project=SimpleNamespace(load_toml=lambda file: tomllib.loads(Path(file).read_text())))
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("environments", ROOT / "tools" / "environments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "stop_before_cuda_without_gpu", lambda session: None)
    monkeypatch.setattr(module, "run_silently", lambda session, *command, **options: f"{session.virtualenv.location}\n")
    return module


class Session:
    """Records what it is told to do."""

    def __init__(self, folder):
        self.virtualenv = SimpleNamespace(location=str(folder))
        self.env, self.did = {}, []

    def run(self, *command, **options):
        self.did.append(("run", *command[1:]))

    def install(self, *arguments, **options):
        self.did.append(("install", *arguments))

    def log(self, message):
        self.did.append(("log", message))

    def done(self, what):
        return [each[1:] for each in self.did if each[0] == what]


def names(projects):
    return [project.name for project in projects]


@pytest.mark.parametrize(
    ("arguments", "alone"),
    [
        (["rmsnorm", "--quick"], True),
        (["--quick", "rmsnorm"], True),
        (["--device", "cpu", "--full", "rmsnorm"], True),
        (["--operation", "rmsnorm"], False),
        (["--quick"], False),
        ([], False),
    ],
)
def test_bench_installs_the_technique_that_is_named(environments, arguments, alone):
    found = names(environments.projects_named(arguments))
    assert found == (["harness", "rmsnorm"] if alone else names(environments.PROJECTS))


@pytest.mark.parametrize(
    ("arguments", "alone"),
    [
        (["packages/rmsnorm"], True),
        (["packages/rmsnorm/tests/test_functional.py::test_x", "-k", "triton"], True),
        (["-x", "packages/rmsnorm"], True),
        (["packages/rmsnorm", "tests"], False),
        (["-k", "rmsnorm"], False),
        (["--ignore", "packages/rmsnorm"], False),
        ([], False),
    ],
)
def test_tests_install_the_package_that_holds_them(environments, arguments, alone):
    found = names(environments.projects_of_paths(arguments))
    assert found == (["harness", "rmsnorm"] if alone else names(environments.PROJECTS))


def test_one_package_compiles_nothing_and_all_compile_before_they_are_installed(environments, tmp_path):
    first = Session(tmp_path)
    environments.prepare(first, "", ["test"], projects=environments.projects_named(["rmsnorm"]))
    assert first.done("run") == []
    in_place = first.done("install")[-1]
    assert [Path(a).name for a in in_place if a.startswith("/")] == ["harness", "rmsnorm"]

    every = Session(tmp_path)
    environments.prepare(every, "", ["test"])
    assert names(environments.COMPILED) == [Path(command[0]).parent.name for command in every.done("run")]
    assert all(command[0].endswith("build_library.py") for command in every.done("run"))
    assert [kind for kind, *_ in every.did if kind != "log"] == ["run", "install"], "compiled first, nothing twice"
    assert "rmsnorm" not in [Path(a).name for a in every.done("install")[0]]

    again = Session(tmp_path)
    environments.prepare(again, "", ["test"])
    assert again.done("run") == again.done("install") == []


def test_what_takes_long_is_announced(environments, tmp_path):
    session = Session(tmp_path)
    environments.prepare(session, "", ["test"])
    kinds = [kind for kind, *_ in session.did]
    assert kinds[kinds.index("install") - 1] == "log", session.did[:2]
    assert any("downloads can take minutes" in message for (message,) in session.done("log"))


def test_a_missing_interpreter_is_an_error():
    assert "nox.options.error_on_missing_interpreters = True" in (ROOT / "noxfile.py").read_text()
