"""Planted faults: every row of the support table passes what is right and has been seen to fail what it is for."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness import availability
from kernel_pytorch.harness.isolation import CallOutcome
from kernel_pytorch.harness.support import CAPABILITIES, Processes, Shared, Subject, capability, check_declaration
from kernel_pytorch.harness.support.examination import OUTDATED, UNDECLARED, examine

CPU = torch.device("cpu")


def gate(x, weight, factor):
    """In the place of the toy's own, whose sigmoid has other bits at the end of a vector than within."""
    return x * x * weight * factor


def gradients(dy, x, weight, factor):
    g = dy * factor * x
    return 2 * g * weight, (g * x).sum(0), None


# Faults, by the row that has to find each.


def breaking(x, weight, factor):
    torch._dynamo.graph_break()
    return gate(x, weight, factor)


def two_faced(x, weight, factor):
    return gate(x, weight, factor * 1.01 if torch.compiler.is_compiling() else factor)


def made_for_four_rows(x, weight, factor):
    return gate(x, weight, factor) if x.shape[0] == 4 else gate(x.double(), weight, factor).to(x.dtype)


def looking_at_the_data(x, weight, factor):
    return gate(x, weight, factor) if x.sum() > 0 else gate(x, weight, factor).clone()


def always_float16(x, weight, factor):
    return gate(x, weight, factor).half()


def unseen(x, weight, factor):
    """The launcher of a kernel, called beside the dispatcher."""
    return _Unseen.apply(x, weight, factor)


class _Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        with torch.utils._python_dispatch._disable_current_modes():
            return gate(x, weight, factor)

    @staticmethod
    def backward(ctx, dy):
        with torch.utils._python_dispatch._disable_current_modes():
            return gradients(dy, *ctx.saved_tensors, ctx.factor)


class _WrongAgain(torch.autograd.Function):
    """Its gradient is right, and treated as a constant when it is differentiated."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return gate(x, weight, factor)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (t.detach() for t in ctx.saved_tensors)
        return gradients(dy, x, weight, ctx.factor)


def wrong_again(x, weight, factor):
    return _WrongAgain.apply(x, weight, factor)


CALLS = []


def drifting(x, weight, factor):
    CALLS.append(None)
    return gate(x, weight, factor) + 1e-6 * (len(CALLS) % 2)


class _DriftingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        CALLS.append(None)
        return dy * (1 + 1e-6 * (len(CALLS) % 2))


def drifting_gradient(x, weight, factor):
    return _DriftingGradient.apply(gate(x, weight, factor))


def knowing_its_neighbours(x, weight, factor):
    return gate(x, weight, factor) + 1e-6 * x.mean()


class _GradientOfTheBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy + 1e-6 * dy.mean()


def gradient_of_the_batch(x, weight, factor):
    return _GradientOfTheBatch.apply(gate(x, weight, factor))


MUTANTS = [
    ("fullgraph", breaking, "Unsupported"),
    ("fullgraph", two_faced, "AssertionError: output is off by"),
    ("dynamic shapes", made_for_four_rows, "RecompileError"),
    ("dynamic shapes", two_faced, "AssertionError: output is off by"),
    ("opcheck", gate, "AssertionError: reaches no operator in torch.ops.kernel_pytorch"),
    ("export", looking_at_the_data, "data-dependent|guard"),
    ("export", made_for_four_rows, "rows_of_gate"),
    ("export", two_faced, "AssertionError: output is off by"),
    ("AOTInductor", looking_at_the_data, "data-dependent|guard"),
    ("AOTInductor", two_faced, "AssertionError: output is off by"),
    ("autocast", always_float16, "AssertionError: output is .* torch.float16, the reference's is .* torch.float32"),
    ("selective checkpointing", unseen, "AssertionError: the policy sees no operator"),
    ("FLOP counter", gate, "AssertionError: 0 operations are counted in the forward"),
    ("double backward", wrong_again, "GradcheckError: .*Jacobian mismatch"),
    ("determinism", drifting, "AssertionError: result 0: Tensor-likes are not equal"),
    ("determinism", drifting_gradient, "AssertionError: result 1: Tensor-likes are not equal"),
    ("batch invariance", knowing_its_neighbours, "AssertionError: result 0, 1 of 4 leading rows"),
    ("batch invariance", gradient_of_the_batch, "AssertionError: result 1, 1 of 4 leading rows"),
]
RIGHT = [name for name in dict.fromkeys(name for name, *_ in MUTANTS) if name not in ("opcheck", "FLOP counter")]


class InsteadOfALibrary:
    """What AOTInductor makes, without the seconds that it takes: the exported program itself."""

    def __init__(self, program):
        self.run = program.module()

    def __call__(self, *inputs):
        return self.run(*inputs)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """What is compared matters here, not what compiles: that is the test of every technique."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_with(f, **options | {"backend": "aot_eager"}))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, package_path: program)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", InsteadOfALibrary)


@pytest.fixture
def subject(toy, monkeypatch):
    """The toy with another function at the native level, on which it is asked about."""

    def make(function, device=CPU, **unsupported):
        monkeypatch.setattr(toy, "reference", gate)
        monkeypatch.setattr(toy, "native", function)
        native = dataclasses.replace(toy.gate.implementation("native"), unsupported=unsupported)
        operation = dataclasses.replace(toy.gate, levels=[toy.gate.reference, native])
        technique = dataclasses.replace(toy.technique, operations=[operation])
        return Subject(Shared(technique, device), operation, native)

    return make


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_a_yes(subject, name):
    outcome = examine(subject(gate), capability(name))
    assert (outcome.answer, outcome.reason, outcome.error) == ("yes", "", "")
    assert (outcome.operation, outcome.implementation, outcome.capability) == ("gate", "native", name)


def label(value):
    return getattr(value, "__name__", str(value)[:20].replace(" ", "-"))


@pytest.mark.parametrize(("name", "mutant", "error"), MUTANTS, ids=label)
def test_an_undeclared_no_is_wrong_and_a_declared_one_is_not(subject, name, mutant, error):
    CALLS.clear()
    outcome = examine(subject(mutant), capability(name))
    assert (outcome.answer, outcome.reason) == ("wrong", UNDECLARED)
    assert re.search(error, outcome.error), outcome.error
    CALLS.clear()
    declared = examine(subject(mutant, **{name: "planted"}), capability(name))
    assert (declared.answer, declared.reason) == ("no", "planted")
    assert declared.error == outcome.error.splitlines()[0]


@pytest.mark.parametrize("name", RIGHT)
def test_a_declared_no_that_works_is_wrong_unless_it_may_have_been_luck(subject, name):
    outcome = examine(subject(gate, **{name: "planted"}), capability(name))
    promises = name in ("determinism", "batch invariance")
    assert (outcome.answer, outcome.reason) == (("no", "planted") if promises else ("wrong", OUTDATED))


def test_one_that_cannot_be_packaged_does_not_take_the_others_along(subject, toy):
    broken = subject(looking_at_the_data)
    reference = Subject(broken.shared, broken.operation, toy.gate.reference)
    assert examine(reference, capability("AOTInductor")).answer == "yes"
    assert examine(broken, capability("AOTInductor")).answer == "wrong"


class DyingWorker:
    """A worker whose process never survives."""

    def call(self, function, *arguments):
        self.asked = [*getattr(self, "asked", []), function.__name__]
        return CallOutcome(failure="its process was killed by SIGSEGV")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_library_that_ends_its_process(subject, device):
    """On a GPU a sum is loaded first: if that cannot be, nothing of ours has been tested."""
    worker, asked = DyingWorker(), subject(gate, torch.device(device))
    asked = dataclasses.replace(asked, shared=dataclasses.replace(asked.shared, worker=worker))
    outcome = examine(asked, capability("AOTInductor"))
    if device == "cuda":
        assert (outcome.answer, worker.asked) == ("not tested here", ["_load_a_sum"])
        assert outcome.reason.endswith("not even of a sum: its process was killed by SIGSEGV")
    else:
        assert (outcome.answer, worker.asked) == ("wrong", ["_hold_packaged_apart"] * 2)  # together, then alone
        assert outcome.error.startswith("AssertionError: its process was killed by SIGSEGV")


def test_a_no_may_be_of_one_device_alone(subject):
    declared = {"export on cuda": "not there", "autocast on cpu": "not here"}
    asked = subject(gate, **declared)
    check_declaration(asked.operation)
    assert examine(asked, capability("export")).answer == "yes"
    assert examine(asked, capability("autocast")).reason == OUTDATED
    asked = subject(made_for_four_rows, **declared | {"export on cpu": "planted"})
    assert examine(asked, capability("export")).reason == "planted"


def test_what_takes_long_is_done_once_for_all_who_share_a_folder(toy, tmp_path):
    done = []

    def work():
        done.append(None)
        return {"gate/native": "off"}

    for folder, times in ((tmp_path, 1), (None, 3)):
        found = [Shared(toy.technique, CPU, folder=folder).once_for_all("a thing", work) for _ in range(2)]
        assert found == [{"gate/native": "off"}] * 2
        assert len(done) == times
    assert (tmp_path / "toy-a-thing.json").is_file()


def test_flops_of_a_product_are_counted(subject):
    def product(x, weight, factor):
        return gate(x @ torch.eye(16), weight, factor)

    assert examine(subject(product), capability("FLOP counter")).answer == "yes"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_only_another_machine_can_tell(subject, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(availability, "_cpp_compiler", lambda: None)
    asked = subject(gate, torch.device(device))
    found = {c.name: c.elsewhere(asked.device) for c in CAPABILITIES}
    not_here = {name for name, reason in found.items() if reason}
    compiled = {"dynamic shapes", "AOTInductor"}
    assert not_here == compiled | {{"cpu": "CUDA graphs", "cuda": "FSDP2/DTensor"}[device]}
    for name in not_here:
        outcome = examine(asked, capability(name))
        assert (outcome.answer, outcome.reason) == ("not tested here", found[name])


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.kernel_pytorch.planted_gate(x, weight, factor)

    @staticmethod
    def backward(ctx, dy):
        return gradients(dy, *ctx.saved_tensors, ctx.factor)


@pytest.fixture
def operator():
    """A registered gate, whose fake is given."""
    library = torch.library.Library("kernel_pytorch", "FRAGMENT")
    library.define("planted_gate(Tensor x, Tensor weight, float factor) -> Tensor")
    library.impl("planted_gate", gate, "CPU")
    library.impl("planted_gate", _Operator.apply, "Autograd")

    def register(fake):
        torch.library.register_fake("kernel_pytorch::planted_gate", fake, lib=library)
        return lambda x, weight, factor: torch.ops.kernel_pytorch.planted_gate(x, weight, factor)

    yield register
    library._destroy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_an_operator_with_a_right_fake(subject, operator):
    function = operator(lambda x, weight, factor: x.new_empty(x.shape))
    assert examine(subject(function), capability("opcheck")).answer == "yes"
    assert examine(subject(function), capability("selective checkpointing")).answer == "yes"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_an_operator_whose_fake_has_other_strides(subject, operator):
    function = operator(lambda x, weight, factor: x.new_empty(x.shape[::-1]).t())
    outcome = examine(subject(function), capability("opcheck"))
    assert outcome.answer == "wrong"
    assert re.search("[Ss]trides.*(16, 1)", outcome.error), outcome.error  # opcheck's words, or ours where it is silent


# Two processes, which find the toy in its file.


def sharded_gate(mesh, file, fault):
    """Hold the toy, or what is planted in it, sharded; what is wrong with it."""
    from torch.distributed.tensor import DTensor

    from kernel_pytorch.harness.support.sharded import hold_sharded

    def own_mean(x, weight, factor):
        """Right in one process; in two each knows its own rows only."""
        if not isinstance(x, DTensor):
            return gate(x, weight, factor)
        local = x.to_local()
        return gate(DTensor.from_local(local + local.mean(), mesh, x.placements), weight, factor)

    def own_weight(x, weight, factor):
        """A parameter whose gradient is taken twice where FSDP has gathered it."""
        return gate(x, weight + 0 if isinstance(x, DTensor) else 2 * weight - weight.detach(), factor)

    spec = importlib.util.spec_from_file_location("toy", file)
    toy = sys.modules["toy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    toy.reference = gate
    toy.native = {"none": gate, "rows": own_mean, "parameters": own_weight}[fault]
    shared = Shared(toy.technique, torch.device("cpu"))
    try:
        hold_sharded(mesh, Subject(shared, toy.gate, toy.gate.implementation("native")))
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_sharding():
    file = str(Path(__file__).with_name("toy.py"))
    with Processes() as processes:
        assert processes.call(sharded_gate, file, "none") == ["", ""]
        for fault, words in (("rows", "output is off by"), ("parameters", "gradient of weight is off by")):
            assert all(error.startswith(words) for error in processes.call(sharded_gate, file, fault))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs")
def test_cuda_graphs(subject, device):
    def looking(x, weight, factor):
        return gate(x, weight, factor) if x.sum().item() != 0 else x

    def frozen(x, weight, factor):
        return gate(x, weight, factor) * FROZEN.pop() if FROZEN else gate(x, weight, factor)

    FROZEN = [1.01, 1.0, 1.0, 1.0, 1.0]  # taken from the end: the fifth call is the one that is captured
    assert examine(subject(gate, device), capability("CUDA graphs")).answer == "yes"
    assert examine(subject(frozen, device), capability("CUDA graphs")).error.startswith("AssertionError: output is off")
    assert examine(subject(looking, device), capability("CUDA graphs")).answer == "wrong"
    torch.randn(2, device=device)  # a capture that has failed leaves nothing behind
