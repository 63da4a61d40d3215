"""Sharding: two processes compute what one does in float64, and send nothing that they need not."""

import contextlib
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.support import Processes, Shared, Subject
from kernel_pytorch.harness.technique import Case
from kernel_pytorch.harness.verification import expect_for
from kernel_pytorch.rmsnorm import RMSNorm, add_rms_norm, head_rms_norm, operators, rms_norm
from kernel_pytorch.rmsnorm._core.sharding import shard
from kernel_pytorch.rmsnorm.levels import LADDER

DEVICE = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
FUNCTIONS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "head_rms_norm": head_rms_norm}
RUNS = (operators.rms_norm, operators.add_rms_norm, operators.rms_norm_backward)
UNEVEN, EVEN = (5, 7, 16), (4, 6, 16)
WHY_NO_TRITON = LADDER.unavailable("triton", DEVICE, torch.float32)
triton_runs = pytest.mark.skipif(WHY_NO_TRITON is not None, reason=str(WHY_NO_TRITON))
not_fused = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="on a GPU TorchScript fuses from the third call on, and its fusions refuse DTensors"
)
EAGER = [
    "reference",
    "native",
    pytest.param("torchscript", marks=not_fused),
    pytest.param("triton", marks=triton_runs),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes share a CPU or have a GPU each"),
]


@pytest.fixture(scope="module")
def processes():
    """Started once for all tests of this file."""
    with Processes(timeout=300.0, device_type=DEVICE.type) as two:
        yield two


# What runs in both processes.


def placement(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    word, _, dimension = text.partition(" ")
    return Shard(int(dimension)) if word == "shard" else {"replicate": Replicate(), "partial": Partial()}[word]


def placed(tensor):
    (found,) = tensor.placements
    return f"shard {found.dim}" if found.is_shard() else "partial" if found.is_partial() else "replicate"


def sharded(mesh, name, level, shape, data, weight="replicate", count=True, **sizes):
    """Hold a function on DTensors against one process in float64: where results were placed, messages sent for them."""
    from torch.distributed.tensor.debug import CommDebugMode

    from kernel_pytorch.harness.support.sharded import gather, run_sharded

    technique = discover().get("rmsnorm")
    operation = technique.operation(name)
    device = torch.device(mesh.device_type, mesh.get_local_rank() if mesh.device_type == "cuda" else None)
    subject = Subject(Shared(technique, device), operation, operation.implementation(level))
    case = Case("sharded", sizes.pop("dtype", torch.float32), {"shape": shape, **sizes})
    arguments = list(operation.arguments(case, torch.Generator(device).manual_seed(0)))
    against = expect_for(operation, arguments, device)

    def function(*arguments):
        *tensors, eps, offset, casting = arguments
        return FUNCTIONS[name](*tensors, eps=eps, offset=offset, casting=casting, level=level)

    placements = {n: placement(data) for n in subject.names if subject.has_rows(n)} | {"weight": placement(weight)}
    with CommDebugMode() if count else contextlib.nullcontext() as messages:
        outputs, gradients = run_sharded(mesh, function, against, placements)
    subject.hold(gather(outputs, gradients), against)
    results = [placed(t) for t in (*outputs, *gradients.values()) if t is not None]
    return SimpleNamespace(results=results, messages=messages.get_total_counts() if count else None)


# The functions.


@pytest.mark.parametrize("data", ["shard 0", "shard 1", "replicate"])
@pytest.mark.parametrize("level", EAGER)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_sharded_over_any_dimension_but_the_last(processes, name, level, data):
    """Five and seven rows over two processes: their shares are not of one size."""
    per_head = name == "head_rms_norm" and data == "shard 1"
    for found in processes.call(sharded, name, level, UNEVEN, data):
        *results, of_weight = found.results
        assert set(results) == {data}
        assert of_weight == ("replicate" if data == "replicate" else "shard 0" if per_head else "partial")
        assert found.messages == 0


@pytest.mark.slow
def test_compiled_functions_are_sharded_too(processes):
    """Nothing that differs between ranks: they share the cache of torch.compile, which does not tell them apart.

    With shares of two sizes it raises, with a slice to take of a whole weight it is wrong: seen in torch 2.13 and 2.15.
    """
    for found in processes.call(sharded, "head_rms_norm", "compile", EVEN, "shard 1", "shard 0", False):
        assert found.results == ["shard 1", "shard 1", "shard 0"]


@triton_runs
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("shape", "data"), [(UNEVEN, "shard 2"), (UNEVEN, "partial"), ((1, 7, 16), "shard 0")])
def test_what_no_rule_accepts_is_redistributed(processes, name, shape, data):
    """Parts of rows, pending sums, and fewer rows than processes."""
    for found in processes.call(sharded, name, "triton", shape, data):
        assert found.results[0] != data
        assert found.messages > 0


@triton_runs
def test_heads_are_sharded_with_their_weights(processes):
    for found in processes.call(sharded, "head_rms_norm", "triton", UNEVEN, "shard 1", "shard 0"):
        assert found.results == ["shard 1", "shard 1", "shard 0"]
        assert found.messages == 0


OTHER_SIZES = {
    "no weight": {"affine": False},
    "gemma": {"casting": "gemma", "offset": 1.0},
    "float16, weight float32": {"dtype": torch.float16, "weight_dtype": torch.float32},
}


def sharded_with(mesh, sizes):
    return sharded(mesh, "add_rms_norm", "triton", UNEVEN, "shard 1", **OTHER_SIZES[sizes])


@triton_runs
@pytest.mark.parametrize("sizes", OTHER_SIZES)
def test_every_kind_of_weight(processes, sizes):
    assert [found.messages for found in processes.call(sharded_with, sizes)] == [0, 0]


# What DTensor remembers of a decision.


def register(placements):
    """What is done once `torch.distributed.tensor` is imported."""
    for run in RUNS:
        shard(placements, run.operator, run.sharding)


def remembered(mesh, rows, columns):
    """Calls that differ in scalars alone, which decide about dtypes and shapes of the whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    device = mesh.device_type
    x = distribute_tensor(torch.randn(rows, columns, dtype=torch.float16, device=device), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(columns, device=device), mesh, [Replicate()])
    operators = torch.ops.kernel_pytorch
    results = [operators.rms_norm(x, weight, 1e-6, 0.0, casting)[0] for casting in ("llama", "gemma")]
    results += [operators.add_rms_norm(x, x, weight, 1e-6, 0.0, casting)[0] for casting in ("llama", "gemma")]
    dtypes = [y._spec.tensor_meta.dtype for y in results]  # what DTensor goes by: y.dtype is that of this share
    rstd = distribute_tensor(torch.rand(rows, device=device), mesh, [Shard(0)])
    shapes = []
    for needed in ((True, False), (False, True), (True, True)):
        gradients = operators.rms_norm_backward(x, None, x, weight, rstd, 1e-6, 0.0, *needed)
        shapes.append(tuple((tuple(g.shape), placed(g)) for g in gradients))
    return dtypes, shapes


def remembered_without_scalars(mesh, rows, columns):
    """The same as `register_sharding` alone would have it: planted, and taken back."""
    import torch.distributed.tensor as tensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for run in RUNS:
        known[run.operator] = RuntimeSchemaInfo(needs_pytree=True)
    try:
        return remembered(mesh, rows, columns)
    finally:
        register(tensor)


def expected(rows, columns):
    dx, dweight, nothing = ((rows, columns), "shard 0"), ((columns,), "partial"), ((0,), "replicate")
    return [torch.float32, torch.float16] * 2, [(dx, nothing), (nothing, dweight), (dx, dweight)]


@triton_runs
def test_a_decision_is_remembered_with_all_that_it_depends_on(processes):
    assert processes.call(remembered, 6, 24) == [expected(6, 24)] * 2


@triton_runs
def test_a_decision_remembered_without_the_scalars_would_be_found(processes):
    for found in processes.call(remembered_without_scalars, 10, 40):
        for ours, right in zip(found, expected(10, 40), strict=True):
            assert ours != right


# A wrong rule.


def sharded_by_a_wrong_rule(mesh, shape):
    """The gradient of the weight is said to be whole where it is only a part: planted, and taken back."""
    import torch.distributed.tensor as tensor

    wrong = SimpleNamespace(
        DTensor=tensor.DTensor, Shard=tensor.Shard, Replicate=tensor.Replicate, Partial=tensor.Replicate
    )
    register(wrong)
    try:
        sharded(mesh, "rms_norm", "triton", shape, "shard 0")
    except AssertionError as error:
        return str(error)
    finally:
        register(tensor)
    return ""


@triton_runs
def test_a_wrong_rule_would_be_found(processes):
    for error in processes.call(sharded_by_a_wrong_rule, (10, 48)):  # no other test makes DTensor remember this shape
        assert error.startswith("gradient of weight is off by")


# The module.


class Block(torch.nn.Module):
    """What a norm stands in: a product on each side."""

    def __init__(self, norm, features):
        super().__init__()
        self.norm = norm
        self.up = torch.nn.Linear(features, 2 * features)
        self.down = torch.nn.Linear(2 * features, features)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def blocks(level, features, device):
    """The block with our norm, and the same with PyTorch's in float64, as one process runs it."""
    torch.manual_seed(0)
    exact = Block(torch.nn.RMSNorm(features, eps=1e-6), features)
    torch.nn.init.normal_(exact.norm.weight)
    ours = Block(RMSNorm(features, eps=1e-6, level=level), features)
    ours.load_state_dict(exact.state_dict())
    return ours.to(device), exact.double().to(device)


def compare(ours, exact, scale=1):
    """Gradients of all parameters, summed over the processes."""
    for (name, a), b in zip(ours.named_parameters(), exact.parameters(), strict=True):
        whole = a.grad.full_tensor() * scale
        torch.testing.assert_close(whole.double(), b.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def sequence_parallel(mesh, level):
    """The sequence is sharded through the norm, the features in between."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    ours, exact = blocks(level, 16, mesh.device_type)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(ours, mesh, plan)
    x, dy = (torch.randn(3, 8, 16, device=mesh.device_type) for _ in range(2))
    own, own_dy = (t.chunk(2, 1)[mesh.get_local_rank()] for t in (x, dy))
    y, expected = ours(own), exact(x.double())
    torch.testing.assert_close(y.double(), expected.chunk(2, 1)[mesh.get_local_rank()], rtol=1e-5, atol=1e-5)
    y.backward(own_dy)
    expected.backward(dy.double())
    compare(ours, exact)


def fully_sharded(mesh, level):
    """Parameters of 17 features over two processes, each with a batch of its own; FSDP averages, one process adds."""
    from torch.distributed.fsdp import fully_shard

    ours, exact = blocks(level, 17, mesh.device_type)
    fully_shard(ours.norm, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    x, dy = (torch.randn(5, 17, device=mesh.device_type) for _ in range(2))
    own, own_dy = (t.chunk(2)[mesh.get_local_rank()] for t in (x, dy))
    ours(own).backward(own_dy)
    exact(x.double()).backward(dy.double())
    compare(ours, exact, scale=2)


MODULE_LEVELS = [
    None,
    "reference",
    pytest.param("compile", marks=pytest.mark.slow),
    pytest.param("triton", marks=triton_runs),
]


@pytest.mark.parametrize("level", MODULE_LEVELS)
@pytest.mark.parametrize("parallel", [sequence_parallel, fully_sharded], ids=["sequence parallel", "FSDP2"])
def test_the_module_in_a_network(processes, parallel, level):
    processes.call(parallel, level)


# Registration.


def run_python(program):
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


@pytest.mark.parametrize("first", ["kernel_pytorch.rmsnorm", "torch.distributed.tensor"])
def test_rules_are_registered_whatever_is_imported_first(first):
    run_python(f"""
        import importlib.util, sys
        import {first}
        import kernel_pytorch.rmsnorm
        assert ("torch.distributed.tensor" in sys.modules) == ({first!r} == "torch.distributed.tensor")
        importlib.util.find_spec("torch.distributed.tensor")  # whoever only asks has not imported it
        from torch.distributed.tensor import DTensor
        import torch
        known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        for name in ("rms_norm", "add_rms_norm", "rms_norm_backward"):
            assert getattr(torch.ops.kernel_pytorch, name).default in known, name
    """)


def test_a_torch_without_a_place_for_rules_is_told_of():
    with pytest.warns(UserWarning, match=r"rms_norm.* will not accept DTensors.*no attribute '_op_dispatcher'"):
        register(SimpleNamespace(DTensor=object()))
