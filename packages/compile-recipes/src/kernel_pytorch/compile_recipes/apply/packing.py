"""Encoders without padding: the tokens of a batch in one row, so that no layer computes what a mask hides.

The encoder's own code runs. Only its attention is another, by the seam of transformers: sequences are in the order of
their length, and those of one length are a dense batch for PyTorch's attention, without a mask. What comes out has the
padded shape, with zeros where the mask hides.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_pytorch.compile_recipes._core.patching import Forward, forward_of_class

from .attention import configs_of, switch
from .changes import Context, Done, put

PACKED = "kernel_pytorch_packed"
LAYERS = ("layer", "layers")


def pack_encoders(model: torch.nn.Module, context: Context) -> Done | str:
    """Pack what goes through the encoders of a model of transformers that is given a padding mask."""
    encoders = {id(m) for m in model.modules() if _is_encoder(m)}
    if not encoders or not configs_of(model):
        return "it has no encoder of transformers"
    if any(getattr(c, "is_decoder", False) for c in configs_of(model).values()):
        return "it is a decoder"
    register()
    switched = switch(model, {"sdpa", "eager"}, PACKED)
    if isinstance(switched, str):
        return switched
    done = put(model, "packing", dict.fromkeys(encoders, _forward), "encoders packed")
    if isinstance(done, str):
        switched.undo()
        return done

    def undo() -> None:
        done.undo()
        switched.undo()

    return Done(done.what, undo, masked=True)


def _is_encoder(module: torch.nn.Module) -> bool:
    """A list of layers whose forward takes hidden states and a mask."""
    names = [*inspect.signature(forward_of_class(module)).parameters][1:3]
    layers = any(isinstance(getattr(module, name, None), torch.nn.ModuleList) for name in LAYERS)
    return layers and names == ["hidden_states", "attention_mask"]


def _forward(module: torch.nn.Module) -> Forward:
    own = forward_of_class(module)
    plan_outside = torch.compiler.disable(plan)  # here, because it imports TorchDynamo, which takes seconds

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        keep = _kept(attention_mask)
        if keep is None or self.training or hidden_states.dim() != 3:
            return own(self, hidden_states, attention_mask, *args, **kwargs)
        index, runs = plan_outside(keep)
        batch, length, width = hidden_states.shape
        packed = hidden_states.reshape(batch * length, width).index_select(0, index).unsqueeze(0)
        output = own(self, packed, runs, *args, **kwargs)
        first = output[0]
        padded = first.new_zeros(batch * length, width).index_copy(0, index, first.squeeze(0))
        return _with_first(output, padded.view(batch, length, width))

    return forward


def _with_first(output: Any, value: Tensor) -> Any:
    """An output of transformers with another hidden state; the rest of it is None where nothing more was asked for."""
    if isinstance(output, tuple):
        return (value, *output[1:])
    return type(output)(last_hidden_state=value)


def _kept(mask: Tensor | None) -> Tensor | None:
    """(batch, length): which positions a mask shows, if it shows the same to every query and hides some."""
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    if mask.stride(2) != 0 and mask.shape[2] > 1 and not bool((mask == mask[:, :, :1]).all()):
        return None
    row = mask[:, 0, 0]
    return row if row.dtype == torch.bool else row > -1.0


def plan(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of sequences lie that are in the order of their length.

    Args:
        keep: (batch, length) bool.

    Returns:
        (tokens,) positions in the flattened batch, and (runs, 2): how many sequences of which length follow.
    """
    lengths = keep.sum(-1)
    order = lengths.argsort(stable=True)
    columns = torch.arange(keep.shape[1], device=keep.device)
    positions = order[:, None] * keep.shape[1] + columns
    index = positions[keep[order]]
    found, counts = lengths.unique(return_counts=True)
    runs = torch.stack((counts, found), 1)
    return index, runs[found > 0]


def attend(query: Tensor, key: Tensor, value: Tensor, runs: Tensor, scale: float) -> Tensor:
    """Attention within each sequence of a packed row.

    Args:
        query: (1, heads, tokens, columns), as key and value.
        key: as query.
        value: as query.
        runs: (runs, 2), as `plan` gives them.
        scale: of the scores.

    Returns:
        (1, tokens, heads, columns).
    """
    parts, start = [], 0
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    for count, length in runs.tolist():
        stop = start + count * length
        dense = [t[start:stop].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(dense[0], dense[1], dense[2], scale=scale)
        parts.append(y.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(parts)[None]


def register() -> None:
    """Let transformers know packed attention; one operator, so that torch.compile sees one graph."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    operator = _operator()

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any,
        scaling: float | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if attention_mask is None or attention_mask.dim() != 2:
            return sdpa_attention_forward(module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs)
        scale = scaling or query.shape[-1] ** -0.5
        compiling = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        return (operator if compiling else attend)(query, key, value, attention_mask, scale), None

    AttentionInterface.register(PACKED, attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask)


def _operator() -> Any:
    """The registered operator, which is defined when it is needed first."""
    namespace = torch.ops.kernel_pytorch_recipes
    if not hasattr(namespace, "packed_attention"):
        defined = torch.library.custom_op(
            "kernel_pytorch_recipes::packed_attention",
            attend,
            mutates_args=(),
            schema="(Tensor query, Tensor key, Tensor value, Tensor runs, float scale) -> Tensor",
        )

        @defined.register_fake
        def _(query: Tensor, key: Tensor, value: Tensor, runs: Tensor, scale: float) -> Tensor:
            return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])

        KEPT.append(defined)
    return namespace.packed_attention.default


KEPT: list[Any] = []
"""The definition of the operator, which lives as long as it is referenced."""
