"""What the processes of the tests do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import spawned
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kernel_pytorch.flash_attn_triton import flash_attention
from kernel_pytorch.harness.interpreter import interpret_without_gpu
from kernel_pytorch.linear_cross_entropy import linear_cross_entropy
from kernel_pytorch.models.distributed import (
    clip_gradients,
    data_parallel,
    fully_sharded,
    parameter_kinds,
    ring_attention,
    sequence,
    shards,
    tensor_parallel,
    vocabulary_parallel_linear_cross_entropy,
    zigzag_positions,
)
from kernel_pytorch.models.distributed import loss as losses_module
from kernel_pytorch.models.distributed import ring as ring_module
from kernel_pytorch.qkv_fusion import fuse, unfuse


def whole(case: str, steps: int) -> list[float]:
    """The losses of one process."""
    return spawned.train(_made(case)[0], steps)


def losses(names: tuple[str, ...], cases: tuple[str, ...], steps: int, mutant: str | None = None) -> dict[Any, Any]:
    """Each strategy of each model: its losses on this rank, its report, and what is patched in the end."""
    if mutant is not None:
        setattr(*MUTANTS[mutant])
    found = {}
    for name in names:
        for case in cases:
            model, before = _made(case)
            report, rank, ranks = spawned.strategy(name, model)
            after = spawned.patched(model) if case.endswith("patched after") else before
            found[name, case] = spawned.train(report.model, steps, rank, ranks), str(report), after
    return found


def compiled(name: str, case: str) -> list[float]:
    """The losses of a model that is compiled after the strategy; in one graph under tensor parallelism alone."""
    report, rank, ranks = spawned.strategy(name, _made(case)[0])
    # This backend traces forward and backward as the default does; it leaves out the minutes of compiling kernels.
    traced = torch.compile(report.model, backend="aot_eager", fullgraph=name.startswith("tp"))
    return spawned.train(traced, 3, rank, ranks)


def _made(case: str) -> tuple[torch.nn.Module, list[str]]:
    kind, _, patches = case.partition(", ")
    given: dict[str, Any] = {}
    if kind.endswith("untied"):
        given = {"tie_embeddings": False, "attention_bias": True, "num_kv_heads": 4}
    if patches == "triton":
        interpret_without_gpu()
        return spawned.ours(level="triton").float(), []
    model = (spawned.llama if kind == "llama" else spawned.ours)(**given)
    return model, spawned.patched(model) if patches == "patched before" else []


def _alone(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return x


def _cut_as_one(layer: torch.nn.Linear, parts: dict[str, int], mesh: Any) -> torch.nn.Module:
    return PACKED(layer, {"all": sum(parts.values())}, mesh)


PACKED = shards.Packed
MUTANTS = {
    "outputs are not added up": (shards, "leaving", _alone),
    "gradients are not added up": (shards, "entering", _alone),
    "packed layers are cut as one": (shards, "Packed", _cut_as_one),
    "gradients of norms are not added up": (sequence, "entering", _alone),
    "gradients of a bias are not added up": (shards, "entering", _alone),
    "parts of a sequence are not added up": (sequence, "_part_of_sum", sequence._part),
}


@contextlib.contextmanager
def _mutated(module: Any, name: str | None, replacement: Any) -> Iterator[None]:
    before = getattr(module, name) if name else None
    if name:
        setattr(module, name, replacement)
    yield
    if name:
        setattr(module, name, before)


LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "few tokens at a time": {},
    "all ignored": {"ignore_index": 5},
}


def loss(case: str, mutant: str | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradients of a divided head, and of `linear_cross_entropy` in one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = LOSSES[case]
    hidden, head, target = _head()
    if case == "all ignored":
        target.fill_(5)
    whole = [each.clone().requires_grad_() for each in (hidden, head)]
    expected = linear_cross_entropy(*whole, target, level="native", **options)
    (3 * expected).backward()
    hidden.requires_grad_()
    mesh = init_device_mesh("cpu", (ranks,))
    weight = distribute_tensor(head, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    with (
        _mutated(losses_module, "LOGITS" if case == "few tokens at a time" else None, 13 * 8 * 2),
        _mutated(losses_module.dist, "all_reduce" if mutant else None, LOSS_MUTANTS.get(mutant)),
    ):
        found = vocabulary_parallel_linear_cross_entropy(hidden, weight, target, **options)
        (3 * found).backward()
    expected_rows = whole[1].grad.chunk(ranks)[rank]
    return [found.detach(), hidden.grad, weight.grad.to_local()], [expected.detach(), whole[0].grad, expected_rows]


def _head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(37, 8, dtype=torch.float64)
    target = torch.randint(37, (3, 5))
    target[0, :2] = -100
    return hidden, head, target


def _only(*kept: str) -> Any:
    """`all_reduce` of some kinds alone: of the maximum, of the sums of tokens, of the gradient."""
    reduce = dist.all_reduce

    def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        kind = "maximum" if op == dist.ReduceOp.MAX else "gradient" if x.shape[-1] == 8 else "sums"
        if kind in kept:
            reduce(x, op, group)

    return all_reduce


LOSS_MUTANTS: dict[str | None, Any] = {
    "no maximum": _only("sums", "gradient"),
    "no sums": _only("maximum", "gradient"),
    "no gradient": _only("maximum", "sums"),
}


ZIGZAG = {"layout": "zigzag"}
RINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "scale": {"scale": 0.7},
    "zigzag": ZIGZAG,
    "zigzag, all": {"causal": False, **ZIGZAG},
    "zigzag, scale": {"scale": 0.7, **ZIGZAG},
}


def ring(case: str, mutant: str | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of this rank's part of a sequence, and of `flash_attention` of all of it."""
    rank, ranks, options = dist.get_rank(), dist.get_world_size(), {"causal": True, **RINGS[case]}
    torch.manual_seed(0)
    shapes = [(2, heads, 4 * ranks, 8) for heads in (4, 2, 2)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    incoming = torch.randn(shapes[0], dtype=torch.float64)
    own = torch.arange(4 * ranks).chunk(ranks)[rank]
    layout = {"layout": options.pop("layout")} if "layout" in options else {}
    if layout:
        own = zigzag_positions(4 * ranks)
    expected = flash_attention(*whole, level="native", **options)
    expected.backward(incoming)
    parts = [each.detach()[:, :, own].requires_grad_() for each in whole]
    with _mutated(ring_module, *RING_MUTANTS[mutant]):
        found = ring_attention(*parts, level="reference", **options, **layout)
        found.backward(incoming[:, :, own])
    mine = [expected.detach(), *(each.grad for each in whole)]
    return [found.detach(), *(each.grad for each in parts)], [each[:, :, own] for each in mine]


def _mean(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> Any:
    return (output + more) / 2, torch.logaddexp(lse, more_lse)


def _maximum(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> Any:
    return ring_module_combine(output, lse, more, more_lse)[0], torch.maximum(lse, more_lse)


ring_module_combine = ring_module.combine
RING_MUTANTS: dict[str | None, tuple[Any, Any]] = {
    None: (None, None),
    "parts weigh the same": ("combine", _mean),
    "lse is that of one part": ("combine", _maximum),
    "keys behind are seen": ("_contiguous", lambda *given: (slice(None), slice(None))),
    "nothing goes round": ("_pass_on", lambda x, group: lambda: x),
}
ZIGZAG_MUTANTS: dict[str | None, tuple[Any, Any]] = {
    "both chunks are seen": ("_zigzag", lambda *given: (slice(None), slice(None))),
    "the split is contiguous": ("_zigzag", ring_module._contiguous),
}
RING_MUTANTS |= ZIGZAG_MUTANTS


def every(kind: str) -> dict[Any, Any]:
    """All cases of the loss or of the ring, then the first case with each mutant."""
    work, cases, mutants = (loss, LOSSES, LOSS_MUTANTS) if kind == "loss" else (ring, RINGS, RING_MUTANTS)
    found = {(case, None): work(case) for case in cases}
    first = next(iter(cases))
    seen_in = dict.fromkeys(ZIGZAG_MUTANTS, "zigzag")
    broken = [(seen_in.get(mutant, first), mutant) for mutant in mutants if mutant is not None]
    return found | {(case, mutant): work(case, mutant) for case, mutant in broken}


def refused() -> list[str]:
    """What the divided loss and the ring say of arguments that do not fit."""
    hidden, head, target = _head()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = (distribute_tensor(head, mesh, [Shard(i)], src_data_rank=None) for i in (1, 0))
    calls = [
        lambda: vocabulary_parallel_linear_cross_entropy(hidden, head, target),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden, columns, target),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden[..., :4], rows, target),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden.float(), rows, target),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden, rows, target[0]),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden, rows, target, reduction="none"),
        lambda: vocabulary_parallel_linear_cross_entropy(hidden, rows, target + 37),
        lambda: ring_attention(head[None, None], head[None, None, :4], head[None, None, :4]),
        lambda: ring_attention(head, head, head),
        lambda: ring_attention(*3 * [head[None, None]], scale="much"),
        lambda: ring_attention(*[head[None, None]] * 3, layout="striped"),
        lambda: ring_attention(*[head[None, None]] * 3, layout="zigzag"),
        lambda: zigzag_positions(6),
        lambda: second_derivative(lambda x: vocabulary_parallel_linear_cross_entropy(x, rows, target), hidden),
        lambda: second_derivative(lambda x: ring_attention(*3 * [x[None]]).sum(), hidden),
    ]
    messages = [said(call) for call in calls]
    dist.barrier()  # nothing was left under way by what was refused
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, len(messages))
    assert gathered == [len(messages)] * len(gathered)
    return messages


def second_derivative(function: Any, x: torch.Tensor) -> None:
    """Ask for a gradient that can be differentiated again, where the incoming one needs none."""
    x = x.clone().requires_grad_()
    torch.autograd.grad(function(x), x, create_graph=True)


def said(call: Any) -> str:
    """The message of the error that a call raises, "" if it raises none."""
    try:
        call()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def undivided() -> list[str]:
    """What the helpers say of models and meshes that they refuse."""
    mesh, both = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    adapted, normed, twice = spawned.llama(), spawned.llama(), spawned.ours()
    adapted.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    normed.model.layers[0].self_attn.q_norm = torch.nn.RMSNorm(4)
    sharded = fully_sharded(spawned.ours(), mesh).model
    tensor_parallel(twice, mesh)
    parted, short, (texts, _) = spawned.ours(), spawned.llama(), spawned.batch(0)
    for each in (parted, short):
        tensor_parallel(each, mesh, sequence_parallel=True)
    alone, other, within = spawned.ours().blocks[0], spawned.ours(), torch.nn.Sequential(spawned.ours())
    other.blocks[1].norm2 = torch.nn.LayerNorm(16)
    replicated, names = data_parallel(spawned.ours(), mesh).model, [*dict(other.named_parameters())]
    fused = data_parallel(fuse(spawned.llama()), mesh).model
    calls = [
        lambda: tensor_parallel(spawned.ours(num_kv_heads=1), mesh),
        lambda: tensor_parallel(spawned.ours(hidden_dim=25), mesh),
        lambda: tensor_parallel(adapted, mesh),
        lambda: tensor_parallel(normed, mesh),
        lambda: tensor_parallel(fuse(spawned.llama()), mesh),
        lambda: tensor_parallel(sharded, mesh),
        lambda: tensor_parallel(twice, mesh),
        lambda: tensor_parallel(torch.nn.Linear(2, 2), mesh),
        lambda: tensor_parallel(spawned.ours(), both),
        lambda: data_parallel(twice, mesh),
        lambda: parted(texts[:, :5]),
        lambda: short(texts[:, :5]),
        lambda: parted.generate(texts, 2),
        lambda: tensor_parallel(alone, mesh, sequence_parallel=True),
        lambda: tensor_parallel(other, mesh, sequence_parallel=True),
        lambda: tensor_parallel(within, mesh, sequence_parallel=True),
        lambda: tensor_parallel(torch.compile(spawned.ours()), mesh),
        lambda: tensor_parallel(spawned.ours(), dist.group.WORLD),
        lambda: data_parallel(replicated, mesh),
        lambda: fully_sharded(replicated, mesh),
        lambda: fully_sharded(twice, mesh),
        lambda: clip_gradients(iter([]), 1.0),
        lambda: unfuse(fused),
        lambda: unfuse(fully_sharded(fuse(spawned.llama()), mesh).model),
    ]
    messages = [said(call) for call in calls]
    assert [*dict(other.named_parameters())] == names, "what was refused is as it was"
    assert not any(type(each).__name__.endswith("OfPart") for each in other.modules())
    return messages


def generated() -> tuple[bool, bool]:
    """Whether a divided model has the logits of a whole one, and continues texts as it does."""
    alone, divided = spawned.ours().eval(), spawned.ours().eval()
    tensor_parallel(divided, init_device_mesh("cpu", (2,)))
    texts, _ = spawned.batch(0)
    logits = torch.allclose(divided(texts), alone(texts), rtol=0, atol=1e-12)
    return logits, torch.equal(divided.generate(texts, 4, temperature=0), alone.generate(texts, 4, temperature=0))


def clipped(name: str) -> tuple[list[float], list[float]]:
    """The norm before clipping and that of the gradients after it, of a divided model and of a whole one."""
    alone, divided = spawned.ours(attention_bias=True), spawned.ours(attention_bias=True)
    report, rank, ranks = spawned.strategy(name, divided)
    texts, targets = spawned.batch(0)
    spawned.loss_of(alone, texts, targets).backward()
    part = slice(rank * len(texts) // ranks, (rank + 1) * len(texts) // ranks)
    spawned.loss_of(report.model, texts[part], targets[part]).backward()
    found = [float(clip_gradients(report.model, most)) for most in (0.1, 1.0)]
    grouped = torch.optim.AdamW([{"params": kind} for kind in parameter_kinds(report.model)], fused=True)
    grouped.step()
    return found, [float(torch.nn.utils.clip_grad_norm_(alone.parameters(), most)) for most in (0.1, 1.0)]


def checkpoint(folder: str, action: str) -> bool:
    """Train and save a divided model and its optimizer, or load them and see whether the next losses are the same."""
    model = spawned.ours(num_heads=8, num_kv_heads=4)
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if action == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if action == "save":
        spawned.train(model, 3, optimizer=optimizer)
    else:
        spawned.train(model, 1, optimizer=optimizer)  # makes its state
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if action == "save":
        torch.distributed.checkpoint.save(parts, checkpoint_id=folder)
        torch.save(spawned.train(model, 3, optimizer=optimizer), f"{folder}/losses")
        return True
    torch.distributed.checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    found, expected = spawned.train(model, 3, optimizer=optimizer), torch.load(f"{folder}/losses")
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12
