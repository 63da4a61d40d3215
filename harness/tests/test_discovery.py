"""Packages are found through what their installer wrote; one that is broken stops nobody else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernel_pytorch.harness.discovery import GROUP, Discovery, UnknownNameError, discover

BROKEN = {
    "raising": ("raise RuntimeError('no [/luck] today')", "RuntimeError: no [/luck] today"),
    "stranger": ("technique = 3", "TypeError: stranger:technique is a int, not a Technique"),
    "alias": (
        "import dataclasses, toy\ntechnique = dataclasses.replace(toy.technique, name='other')",
        "ValueError: the technique calls itself 'other', its entry point 'alias'",
    ),
    "empty": ("", "AttributeError: module 'empty' has no attribute 'technique'"),
}


@pytest.fixture
def broken_site(site, monkeypatch):
    """The toy technique among packages that cannot be loaded."""
    site.install_toy()
    for name, (source, _) in BROKEN.items():
        site.install(f"technique-{name}", {GROUP: {name: f"{name}:technique"}}, **{name: source})
    yield site
    for name in (*BROKEN, "toy"):
        sys.modules.pop(name, None)


def test_what_is_broken_is_named_with_the_reason(broken_site):
    found = discover()
    assert list(found.techniques) == ["toy"]
    assert found.broken == {name: reason for name, (_, reason) in sorted(BROKEN.items())}


def test_a_broken_technique_is_not_an_unknown_one(broken_site):
    with pytest.raises(UnknownNameError, match=r"'raising' is installed but broken: RuntimeError: no \[/luck\] today"):
        discover().get("raising")


def test_an_unknown_name_is_answered_with_those_that_exist(broken_site):
    found = discover()
    with pytest.raises(UnknownNameError, match="no technique 'nope'; installed are: toy"):
        found.get("nope")
    assert found.select(None) == [found.get("toy")] == found.select("toy")


def test_where_nothing_is_installed_that_is_said(site):
    assert discover() == Discovery({}, {})
    with pytest.raises(UnknownNameError, match="no technique 'nope'; installed are: none"):
        discover().get("nope")


@pytest.mark.slow
def test_the_command_line_lists_the_broken_and_the_healthy(broken_site):
    printed = broken_site.run("list", "--device", "cpu")
    assert printed.code == 0, printed.err
    assert "toy: a gate [small]" in printed.out
    assert "gate" in printed.out
    for name, (_, reason) in BROKEN.items():
        assert f"{name}: broken. {reason}" in printed.out.splitlines()


@pytest.mark.slow
def test_verify_fails_while_a_package_is_broken(broken_site, command_line):
    printed = command_line("verify", "--device", "cpu", "--level", "native")
    assert printed.code == 1
    assert "broken packages: alias, empty, raising, stranger" in printed.out.splitlines()
    assert "technique raising is broken and left out: RuntimeError: no [/luck] today" in printed.err.splitlines()


@pytest.mark.slow
def test_verify_of_a_healthy_one_alone_passes(broken_site, command_line):
    assert command_line("verify", "toy", "--device", "cpu", "--level", "native").code == 0


@pytest.mark.slow
def test_an_unknown_name_is_one_line_and_exit_code_2(broken_site):
    printed = broken_site.run("verify", "nope")
    assert printed.code == 2
    assert printed.out == ""
    assert printed.err == "kernel-pytorch: no technique 'nope'; installed are: toy\n"


def test_the_process_of_a_test_is_the_one_that_a_user_starts(broken_site):
    """`kernel-pytorch` is installed as a script that calls the same function."""
    script = "from importlib.metadata import entry_points as e; print(e(name='kernel-pytorch')['kernel-pytorch'].value)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "kernel_pytorch.harness.cli:main"
