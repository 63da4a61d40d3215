"""Adopting levels as defaults, from a made-up package whose native level is slow to the file that its calls read."""

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.harness import adoption, timing
from kernel_pytorch.harness.adoption import Verdict, judged
from kernel_pytorch.harness.benchmark import bench
from kernel_pytorch.harness.clock import statistics
from kernel_pytorch.harness.commands import adopt
from kernel_pytorch.harness.discovery import GROUP, discover
from kernel_pytorch.harness.results import CaseRecord, Comparison, Interval, Measurement
from kernel_pytorch.harness.verification import verify

CORE = Path(__file__).parents[2] / "core"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)

pytestmark = pytest.mark.skipif(not CORE.is_dir(), reason="not a checkout")

FILES = {
    "__init__": "from kernel_pytorch.made_up.functional import doubled",
    "functional": """
from kernel_pytorch.made_up.levels import LADDER

def doubled(x, *, level=None):
    return LADDER.resolve("doubled", level, x)(x)
""",
    "levels/__init__": """
from types import SimpleNamespace
from kernel_pytorch.made_up._core.levels import Ladder

COMPILED = SimpleNamespace(unavailable=lambda device, dtype: None, describe=lambda device: "")
LADDER = Ladder({"doubled": __name__}, [], COMPILED, absent={"doubled": ("torchscript", "compile", "triton")})
""",
    "levels/reference": "def doubled(x):\n    return x * 2",
    "levels/native": "def doubled(x):\n    return [x * 2 for _ in range(8)][-1]",
    "levels/cuda": "def doubled(x):\n    return x + x",
    "technique": """
import torch
from kernel_pytorch.harness.technique import Cost, Exemption, Operation, Technique, grid, point

def inputs(case, generator):
    return (torch.randn(case.rows, 512, generator=generator).to(case.dtype),), {}

DTYPES = (torch.float32, torch.float16)
doubled = Operation(
    name="doubled",
    function="kernel_pytorch.made_up.functional:doubled",
    levels=["reference", "native", "cuda"],
    inputs=inputs,
    cost=lambda case, direction: Cost(2 * case.rows * 512 * case.dtype.itemsize, case.rows * 512),
    test_grid=grid(point("plain", core=True, rows=4), dtypes=DTYPES),
    bench_grid=grid(point("few rows", rows=16), point("many rows", rows=256), dtypes=DTYPES),
    exemptions=[Exemption(("gradients",), "for inference")],
)
technique = Technique("made-up", "a made-up function", "", [doubled], "kernel_pytorch.made_up.levels:LADDER")
""",
}


@pytest.fixture
def install(site, monkeypatch, tmp_path):
    """Install the package, with other sources in the place of some, beside a user's file that does not exist yet."""
    for name in [name for name in sys.modules if name.startswith("kernel_pytorch.made_up")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("KERNEL_PYTORCH_DEFAULTS", str(tmp_path / "user" / "defaults.json"))

    def put(**changed):
        sources = FILES | {f"levels/{level}": text for level, text in changed.items()}
        folder = site.folder / "kernel_pytorch" / "made_up"
        for name, source in sources.items():
            file = folder / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        (folder / "_core").symlink_to(CORE)
        site.install("kernel-pytorch-made-up", {GROUP: {"made-up": "kernel_pytorch.made_up.technique:technique"}})
        return discover().get("made-up")

    yield put
    for name in [name for name in sys.modules if name.startswith("kernel_pytorch.made_up")]:
        del sys.modules[name]


class Counted(TorchDispatchMode):
    """A clock by which each operator of PyTorch takes a microsecond: other work on this machine cannot disturb it."""

    def __init__(self, subject, device):
        super().__init__()
        self.subject, self.method, self.calls_per_sample, self.operators = subject, "counted", 1, 0

    def warm_up(self):
        return False

    def prepare(self, *, short):
        pass

    def sample(self, start):
        self.operators = 0
        with self:
            self.subject.run(start % self.subject.sets)
        return self.operators * 1e-6

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def clock(monkeypatch, machine):
    """Let that clock time what the command measures, in this process."""
    own_bench = adopt.bench
    monkeypatch.setattr(timing, "measure", partial(timing.measure, make_sampler=Counted))
    monkeypatch.setattr(timing, "sets_needed", lambda *given, **named: 2)
    monkeypatch.setattr(adopt, "bench", lambda *given, worker, **named: own_bench(*given, **named))
    monkeypatch.setattr(adopt, "measure_machine", lambda *given, **named: machine)


def verdicts(technique, machine):
    """What comes of measuring it in this process."""
    wanted, checked = adoption.candidates(technique, CPU), verify(technique, CPU, levels=["cuda"])
    return judged(
        technique, CPU, wanted, checked, bench(technique, adoption.plan_for(wanted), device=CPU, machine=machine)
    )


ASK = """
import torch
from kernel_pytorch.made_up import doubled
from kernel_pytorch.made_up.levels import LADDER
assert torch.equal(doubled(torch.ones(2, 3)), torch.full((2, 3), 2.0))
print(LADDER.chosen("doubled", None, torch.ones(2)), LADDER.chosen("doubled", None, torch.ones(2).bfloat16()))
"""


def ask(site, monkeypatch, **environment):
    """The default for float32 and for bfloat16 in a fresh process."""
    monkeypatch.setenv("PYTHONPATH", f"{site.folder}:{':'.join(sys.path)}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_from_measuring_to_calls_and_back(install, clock, site, command_line, monkeypatch, tmp_path):
    install()
    found = command_line("adopt", "made-up", "--device", "cpu")
    assert found.code == 0, found
    assert found.out.count("adopted: at least ") == 2
    document = json.loads((tmp_path / "user" / "defaults.json").read_text())
    assert document["schema_version"] == 1
    assert [(row["function"], row["dtype"], row["level"]) for row in document["rows"]] == [
        ("doubled", "float16", "cuda"),
        ("doubled", "float32", "cuda"),
    ]
    assert all(row["speedup"] == 8.0 and row["version"].startswith("kernel-pytorch-made-up 1.0, ")
               for row in document["rows"])  # fmt: skip
    assert list((tmp_path / "user").iterdir()) == [tmp_path / "user" / "defaults.json"]
    listed = command_line("list", "--device", "cpu").out
    assert "adopted: " in listed
    assert listed.count("│ used") == 2
    assert ask(site, monkeypatch) == ["cuda", "native"]
    assert command_line("adopt", "--reset").out.startswith("removed: ")
    assert not (tmp_path / "user" / "defaults.json").exists()
    assert "adopted: " not in command_line("list", "--device", "cpu").out
    assert ask(site, monkeypatch) == ["native", "native"]


def test_switched_off(install, site, command_line, monkeypatch):
    install()
    monkeypatch.setenv("KERNEL_PYTORCH_DEFAULTS", "off")
    assert ask(site, monkeypatch) == ["native", "native"]
    found = command_line("adopt")
    assert found.code == 2
    assert "KERNEL_PYTORCH_DEFAULTS is off: nothing is adopted" in found.err
    assert "KERNEL_PYTORCH_DEFAULTS is off: what was adopted is not used" in command_line("list").out


WRONG = "import torch\n\ndef doubled(x):\n    return x + x + 0.1 * (x.dtype == torch.float16)"
SLOW = "def doubled(x):\n    return [x + x for _ in range(16 if x.shape[0] > 100 and x.element_size() == 2 else 1)][-1]"


def test_a_level_that_is_wrong_in_one_dtype_is_adopted_in_none(install, machine):
    technique = install(cuda=WRONG)
    checked = verify(technique, CPU, levels=["cuda"])
    found = of(technique, machine, measured(technique, "cuda", [(1.2, 1.4)] * 4), checked)
    assert all(v.reason.startswith("wrong: made-up doubled level 'cuda', case plain") for v in found)


@pytest.mark.slow
def test_a_wrong_level_is_a_failure_of_the_command(install, command_line, machine, monkeypatch, tmp_path):
    technique = install(cuda=WRONG)
    monkeypatch.setattr(adopt, "measure_machine", lambda *given, **named: machine)
    monkeypatch.setattr(adopt, "bench", lambda *given, **named: nothing(technique, machine))
    found = command_line("adopt", "--device", "cpu")
    assert found.code == 1
    assert "wrong: made-up doubled level 'cuda'" in found.out
    assert not (tmp_path / "user" / "defaults.json").exists()


def test_a_level_that_is_slower_in_one_case_is_not_adopted_in_that_dtype(install, clock, machine):
    single, half = verdicts(install(cuda=SLOW), machine)
    assert (single.dtype, single.reason) == (torch.float32, "")
    assert single.speedup == pytest.approx(8.0)
    assert "forward, many rows" in half.reason
    assert half.reason.endswith("0.50 to 0.50 times as fast as native")


def test_as_fast_as_native_is_not_faster(install, clock, machine):
    found = verdicts(install(cuda=FILES["levels/native"]), machine)
    assert all(v.reason.endswith("1.00 to 1.00 times as fast as native") for v in found)


def measured(technique, level, ratios, **changes):
    """Measurements of a level on all cases, with these intervals of the speedup over native."""
    operation = technique.operations[0]
    cases = operation.bench_grid.cases("cpu")
    return [
        Measurement(
            operation=operation.name, case=CaseRecord.of(case), direction="forward", implementation=level, level=level,
            comparisons={"native": Comparison(
                speedup=Interval(low=low, median=(low + high) / 2, high=high), verdict=statistics.Verdict.UNSURE)},
            **{"status": "measured", **changes},
        )
        for case, (low, high) in zip(cases, ratios, strict=True)
    ]  # fmt: skip


def nothing(technique, machine):
    """Results without a measurement."""
    return bench(dataclasses.replace(technique, operations=[]), device=CPU, machine=machine)


def right(level, dtype):
    """A verification that found nothing wrong."""
    trial = SimpleNamespace(case=SimpleNamespace(dtype=dtype))
    return SimpleNamespace(operation="doubled", implementation=level, passed=True, unavailable=None, trial=trial)


def of(technique, machine, measurements, checked=None, levels=("cuda",)):
    """Verdicts on what was measured."""
    checked = checked or [right(level, dtype) for level in levels for dtype in DTYPES]
    results = nothing(technique, machine).model_copy(update={"measurements": tuple(measurements)})
    return judged(technique, CPU, {"doubled": dict.fromkeys(DTYPES, levels)}, checked, results)


def test_the_rule(install, machine):
    technique = install()
    fast, touching = [(1.2, 1.4)] * 4, [(1.2, 1.4), (1.2, 1.4), (1.0, 1.9), (1.2, 1.4)]
    assert [v.reason for v in of(technique, machine, measured(technique, "cuda", fast))] == ["", ""]
    reasons = [v.reason for v in of(technique, machine, measured(technique, "cuda", touching))]
    assert sorted(map(bool, reasons)) == [False, True]
    crashed = measured(technique, "cuda", fast)
    crashed[0] = crashed[0].model_copy(update={"status": "crashed", "reason": "out of memory", "comparisons": {}})
    assert "crashed: out of memory" in of(technique, machine, crashed)[0].reason
    assert "not measured" in of(technique, machine, crashed[1:])[0].reason
    alone = [m.model_copy(update={"comparisons": {}}) for m in measured(technique, "cuda", fast)]
    assert "native could not be timed beside it" in of(technique, machine, alone)[0].reason
    only = [right("cuda", torch.float32)]
    assert of(technique, machine, measured(technique, "cuda", fast), only)[1].reason == (
        "no case of this dtype was verified"
    )


def test_of_two_that_win_the_faster_one_is_adopted(install, machine):
    technique = install()
    both = measured(technique, "cuda", [(1.2, 1.4)] * 4) + measured(technique, "triton", [(1.5, 1.6)] * 4)
    found = of(technique, machine, both, levels=("triton", "cuda"))
    assert [(v.level, v.reason) for v in found] == [("triton", ""), ("cuda", "'triton' is faster still")] * 2


def test_what_the_package_s_own_table_decides_is_no_candidate(install):
    technique = install()
    assert adoption.candidates(technique, CPU) == {"doubled": dict.fromkeys(DTYPES, ("cuda",))}
    assert adoption.candidates(technique, CPU, ["tripled"]) == {}
    ladder = technique.ladder()
    row = sys.modules["kernel_pytorch.made_up._core.levels"].Default
    ladder.defaults = (row("cuda", record="here", device="cpu", dtypes=[torch.float32]),)
    assert adoption.candidates(technique, CPU) == {"doubled": {torch.float16: ("cuda",)}}
    assert adoption.state(row_of(technique, torch.float32), [technique], CPU) == (
        "not used: the package's own table says 'cuda'"
    )


def row_of(technique, dtype, **changes):
    """A row of this machine."""
    environment = type("Environment", (), {"torch": torch.__version__, "triton": None})
    (row,) = adoption.rows(technique, [Verdict("doubled", dtype, "cuda", speedup=1.5)], environment, CPU)
    return dataclasses.replace(row, **changes)


@pytest.mark.slow
def test_rows_of_others_are_kept(install, command_line, machine, monkeypatch, tmp_path):
    technique = install()
    monkeypatch.setattr(adopt, "measure_machine", lambda *given, **named: machine)
    monkeypatch.setattr(adopt, "bench", lambda *given, **named: nothing(technique, machine))
    file = tmp_path / "user" / "defaults.json"
    row = row_of(technique, torch.float32)
    others = [row_of(technique, torch.float32, **c) for c in ({"device": "B"}, {"package": "b"}, {"function": "b"})]
    adoption.save(file, [row, *others], 1)
    assert command_line("adopt", "--device", "cpu").code == 0
    key = tuple(dataclasses.asdict(row))
    kept = {tuple(row[name] for name in key) for row in json.loads(file.read_text())["rows"]}
    assert kept == {dataclasses.astuple(other) for other in others}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "used"),
        ({"package": "nothing"}, "not used: its package is not installed"),
        ({"version": "0"}, "not used: measured with 0; installed is kernel-pytorch-made-up 1.0, "),
        ({"device": "B"}, "not used: this device is "),
        ({"kernels": "0"}, "used, though its package has changed since: adopt it again"),
        ({"level": "triton"}, "not used: made-up has no level 'triton' of doubled"),
    ],
)
def test_what_is_said_of_a_row(install, changes, said):
    technique = install()
    assert adoption.state(row_of(technique, torch.float32, **changes), [technique], CPU).startswith(said)


def test_a_file_that_cannot_be_read_is_named_before_anything_is_measured(install, command_line, tmp_path):
    install()
    file = tmp_path / "user" / "defaults.json"
    file.parent.mkdir()
    file.write_text("{")
    for arguments in (["adopt"], ["adopt", "made-up", "--reset"], ["adopt", "--reset"]):
        found = command_line(*arguments)
        assert found.code == 2
        assert f"{file} cannot be used: it is not JSON" in found.err
    with pytest.warns(RuntimeWarning, match="is ignored by kernel_pytorch.made_up: it is not JSON"):
        assert f"{file} is ignored: it is not JSON" in command_line("list").out
    assert file.read_text() == "{"  # perhaps somebody's own, named by mistake
    file.unlink()
    assert command_line("adopt", "--reset").out.startswith("nothing is adopted")


def test_a_file_of_any_name_behind_a_link(install, command_line, monkeypatch, tmp_path):
    technique = install()
    target, link = tmp_path / "kept", tmp_path / "link"
    adoption.save(target, [row_of(technique, torch.float32, package="another")], 1)
    link.symlink_to(target)
    monkeypatch.setenv("KERNEL_PYTORCH_DEFAULTS", str(link))
    assert "nothing of made-up is adopted" in command_line("adopt", "made-up", "--reset").out
    assert "leave --operation out" in command_line("adopt", "made-up", "--operation", "doubled", "--reset").err
    adoption.save(link, [row_of(technique, torch.float16)], 1)
    assert link.is_symlink()
    assert [row["dtype"] for row in json.loads(target.read_text())["rows"]] == ["float16"]


def test_without_anything_to_adopt(site, toy, command_line):
    site.install_toy()
    found = command_line("adopt", "toy")
    assert found.code == 2
    assert "toy has no defaults of its own" in found.err
