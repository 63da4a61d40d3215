"""Processes with gloo that run one function, and the models and steps that those functions share."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SECONDS = 180
SEQUENCE, BATCH, WORDS = 6, 4, 37


def spawn(work: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns on each of some ranks; raises with the traceback of one that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(_serve, (ranks, str(folder), work, arguments), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _serve(rank: int, ranks: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        torch.save(work(*arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def ours(**given: Any) -> torch.nn.Module:
    """A small `LanguageModel` in float64 with more queries than keys, and more words than ranks divide."""
    from kernel_pytorch.models import LanguageModel

    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24, "max_position": 16}
    return LanguageModel(WORDS, 16, **{"level": "native", **sizes, **given}).double()


def llama(**given: Any) -> torch.nn.Module:
    """A small Llama of transformers in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16, **given)
    return LlamaForCausalLM(config).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and the words that follow, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCH, SEQUENCE + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_of(model: torch.nn.Module, texts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next word, of a model of ours or of transformers."""
    if not hasattr(getattr(model, "module", model), "config"):
        return model(texts, targets=targets)
    none = targets.new_full((len(targets), 1), -100)
    labels = torch.cat((none, targets, none), 1)  # transformers shifts them itself; 8 tokens, which ranks divide
    output = model(input_ids=torch.cat((texts, targets[:, -1:], targets[:, -1:]), 1), labels=labels)
    if output.logits is None:  # `linear_cross_entropy` is in it
        return output.loss
    # transformers' own loss rounds the logits to float32.
    return torch.nn.functional.cross_entropy(output.logits[:, :-2].flatten(0, 1), targets.flatten())


def train(model: torch.nn.Module, steps: int, rank: int = 0, ranks: int = 1, optimizer: Any = None) -> list[float]:
    """The losses of some steps, of which this rank sees its part, one of `ranks`."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for step in range(steps):
        part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        loss = loss_of(model, *(each[part] for each in batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def patched(model: torch.nn.Module) -> list[str]:
    """Put in what our packages replace; the paths of what they replaced."""
    from kernel_pytorch import fused_ln_act, linear_cross_entropy, qkv_fusion, rmsnorm

    patches = [rmsnorm.patch(model), fused_ln_act.patch(model)]
    patches += [linear_cross_entropy.patch(model), qkv_fusion.patch(model)]
    return sorted(f"{path}: {by}" for found in patches for path, by in found.replaced.items())


def strategy(name: str, model: torch.nn.Module) -> tuple[Any, int, int]:
    """Apply a strategy by its name on all ranks: the report, and which part of a batch this rank has, of how many."""
    from kernel_pytorch.models.distributed import data_parallel, fully_sharded, tensor_parallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    divided = {"sequence_parallel": name.endswith("sequence")}
    if name.startswith("fsdp+tp"):
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"], **divided)
        return fully_sharded(model, mesh["dp"]), rank // 2, ranks // 2
    mesh = init_device_mesh("cpu", (ranks,))
    if name.startswith("tp"):
        return tensor_parallel(model, mesh, **divided), 0, 1
    return {"ddp": data_parallel, "fsdp": fully_sharded}[name](model, mesh), rank, ranks
