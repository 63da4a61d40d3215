"""What the processes of the tests do."""

from __future__ import annotations

from typing import Any

import spawned
import torch

from kernel_pytorch.models.distributed import shards


def whole(case: str, steps: int) -> list[float]:
    """The losses of one process."""
    return spawned.train(_made(case)[0], steps)


def losses(names: tuple[str, ...], cases: tuple[str, ...], steps: int, mutant: str | None = None) -> dict[Any, Any]:
    """Each strategy of each model: its losses on this rank, its report, and what is patched in the end."""
    if mutant is not None:
        setattr(shards, *MUTANTS[mutant])
    found = {}
    for name in names:
        for case in cases:
            model, before = _made(case)
            report, rank, ranks = spawned.strategy(name, model)
            after = spawned.patched(model) if case.endswith("patched after") else before
            found[name, case] = spawned.train(report.model, steps, rank, ranks), str(report), after
    return found


def _made(case: str) -> tuple[torch.nn.Module, list[str]]:
    kind, _, patches = case.partition(", ")
    given: dict[str, Any] = {}
    if kind.endswith("untied"):
        given = {"tie_embeddings": False, "attention_bias": True, "num_kv_heads": 4}
    model = (spawned.llama if kind == "llama" else spawned.ours)(**given)
    return model, spawned.patched(model) if patches == "patched before" else []


def _alone(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return x


SPLIT = shards.split
MUTANTS = {
    "outputs are not added up": ("leaving", _alone),
    "gradients are not added up": ("entering", _alone),
    "packed layers are cut elsewhere": ("split", lambda whole, parts: SPLIT(whole.roll(1, 0), parts)),
}
