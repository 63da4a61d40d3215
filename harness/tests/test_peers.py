"""Other people's implementations: added from a file, absent ones named, wrong ones shown, nobody depends on them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness import peers, timing
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.interpreter import complete_interpreter
from kernel_pytorch.harness.peers import Peer, add_peers, with_peers
from kernel_pytorch.harness.report import cells, columns, rows
from kernel_pytorch.harness.technique import Direction, Level
from kernel_pytorch.harness.workload import jobs

FILES = sorted(Path(__file__).parents[2].glob("packages/*/benchmarks/peers.py"))
CPU = torch.device("cpu")

DECLARED = """
    import torch

    from kernel_pytorch.harness.peers import Peer
    from kernel_pytorch.harness.technique import Level

    TECHNIQUE = "toy"

    def right(x, weight, factor):
        return torch.sigmoid(x * weight) * factor

    def wrong(x, weight, factor):
        return right(x, weight, factor) * 1.01

    def picky(x, weight, factor):
        raise NotImplementedError("picky computes only what it likes")

    def peer(name, **more):
        return Peer(f"peer:{name}", Level.PEER, f"{__name__}:{name}", **({"requires": "torch", "install": name} | more))

    PEERS = {"gate": [peer("right"), peer("wrong"), peer("picky"), peer("absent", requires="no_such_library"),
                      peer("hopper", capability=(9, 0))]}
"""


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """A file of peers for the toy, as a package has it."""
    monkeypatch.setattr(peers, "_added", {})
    monkeypatch.setattr(peers, "is_interpreting", lambda: True)  # so that one may run on the CPU beside a GPU as well
    monkeypatch.setattr(peers, "complete_interpreter", lambda: None)
    monkeypatch.setattr("kernel_pytorch.harness.availability.is_interpreting", lambda: False)  # their time is real here
    file = tmp_path / "toy" / "benchmarks" / "peers.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(DECLARED))
    return file


def test_they_join_their_operation_after_the_levels(toy, declared):
    add_peers([declared])
    names = [i.name for i in with_peers(toy.technique).operation("gate").implementations]
    assert names[:4] == [i.name for i in toy.gate.implementations]
    assert names[4:] == ["peer:right", "peer:wrong", "peer:picky", "peer:absent", "peer:hopper"]


def test_present_ones_are_timed_with_ours_and_the_others_say_why_not(toy, declared, machine, monkeypatch):
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)
    add_peers([declared])
    job = jobs(with_peers(toy.technique), CPU, directions=(Direction.FORWARD,))[0]
    found = {m.implementation: m for m in timing.run_job(job, machine, CPU, rounds=FEWEST_ROUNDS)}
    assert found["peer:right"].status == "measured"
    assert "peer:right" in found["native"].comparisons
    assert found["peer:wrong"].status == "measured"
    assert found["peer:wrong"].error_over_budget > 1.0
    assert found["peer:wrong"].reason.startswith("output is off by")
    assert {n: (found[n].status, found[n].reason) for n in ("peer:picky", "peer:absent", "peer:hopper")} == {
        "peer:picky": ("unavailable", "picky computes only what it likes"),
        "peer:absent": ("unavailable", "not installed (pip install absent)"),
        "peer:hopper": ("unavailable", "needs a GPU of compute capability 9.0"),
    }
    assert cells(found["peer:absent"], "native")[1] == "not installed"


def test_a_table_has_a_column_for_the_best_of_them(toy, declared, machine, monkeypatch):
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)
    add_peers([declared])
    job = jobs(with_peers(toy.technique), CPU, directions=(Direction.FORWARD,))[0]
    found = timing.run_job(
        job, machine, CPU, {"reference", "native", "peer:right", "peer:absent"}, rounds=FEWEST_ROUNDS
    )

    class Measured:
        measurements = found

    header = columns(Measured())
    assert header[-2] == "vs best peer"
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows(found, header)}
    assert table["peer:right"]["vs best peer"] == "is it"
    assert "x" in table["native"]["vs best peer"]
    assert table["peer:absent"]["vs best peer"] == ""


@pytest.mark.slow
def test_a_wrong_peer_is_told_and_does_not_fail_the_command(site, declared, tmp_path):
    site.install_toy()
    file = tmp_path / "verified.json"
    done = site.run("verify", "toy", "--level", "peer:wrong", "--peers", str(declared), "--json", str(file))
    assert done.code == 0, done.err
    assert "wrong: toy gate level 'peer:wrong'" in done.out
    (level,) = json.loads(file.read_text())["levels"]
    assert level["right"] == 0
    assert level["ran"] > 0


@pytest.mark.parametrize(("source", "message"), [
    ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    ("TECHNIQUE = 'toy'", "AttributeError: .*PEERS"),
])  # fmt: skip
def test_a_file_that_declares_none(declared, source, message):
    declared.write_text(source)
    with pytest.raises(UserError, match=message):
        add_peers([declared])


def test_no_file(declared, command_line):
    declared.unlink()
    done = command_line("verify", "--peers", str(declared))
    assert done.code == 2
    assert "no Python file" in done.err


@pytest.mark.parametrize("path", ["/no_such_peers.py", "/tmp", "/"])
@pytest.mark.parametrize("command", ["bench", "verify"])
def test_a_path_directly_under_the_root_is_one_line(declared, command_line, command, path):
    done = command_line(command, "--peers", path)
    assert done.code == 2
    assert done.err == f"kernel-pytorch: {path}: no Python file\n"


def test_an_operation_that_does_not_exist(toy, declared):
    declared.write_text(declared.read_text().replace('"gate"', '"fence"'))
    add_peers([declared])
    with pytest.raises(ValueError, match="peers of toy name operation 'fence'; there are: gate"):
        with_peers(toy.technique)


def test_a_name_that_is_no_peers():
    with pytest.raises(ValueError, match="'peer:<library>'"):
        Peer("liger", Level.PEER, "a:b", requires="a", install="a")


def test_what_pip_is_asked_for(declared, capsys):
    peers.main([str(declared)])
    hopper = ["hopper"] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else []
    assert capsys.readouterr().out.split() == ["right", "wrong", "picky", "absent", *hopper]


@pytest.mark.skipif(not FILES, reason="not a checkout")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parents[1].name)
def test_what_packages_declare_belongs_to_them(file, monkeypatch):
    monkeypatch.setattr(peers, "_added", {})
    add_peers([file])
    (technique,) = peers._added
    assert technique == file.parents[1].name
    joined = [i for o in discover().get(technique).operations for i in o.implementations if i.level is Level.PEER]
    assert len(joined) == sum(map(len, peers._added[technique].values()))
    assert all(callable(i.load()) for i in joined)


def test_without_the_file_nothing_is_added():
    assert not any(i.level is Level.PEER for t in discover().techniques.values() for o in t.operations
                   for i in o.implementations)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel as it is")
def test_the_interpreter_takes_float_scalars_and_libdevice():
    triton = pytest.importorskip("triton", reason="runs a kernel in Triton's interpreter")
    tl = triton.language
    complete_interpreter()
    from triton.language.extra.libdevice import rsqrt

    def kernel(y, eps):
        tl.store(y, rsqrt(eps.to(tl.float32)))

    kernel.__globals__.update(rsqrt=rsqrt, tl=tl)
    y = torch.zeros(1)
    triton.jit(kernel)[(1,)](y, 0.25)
    assert y.item() == 2.0
