"""What must hold of a model and of a prompt; each error says what was given and what to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_decode._core.patching import is_autocast_enabled
from kernel_pytorch.fused_decode._core.stock import HOOKS, has_foreign_forward, why_not_replaceable

from .families import Refused
from .step import ENDS

OVERRIDDEN = ("forward", "generate", "_sample", "prepare_inputs_for_generation")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RECORDS = "transformers.utils.output_capturing"
"""Hooks of this module stay on layers after a call with output_hidden_states, and do nothing in other calls."""


def check_model(model: Any) -> None:
    """Raise Refused unless the decoder can read the weights of this model, and its modules do nothing beside."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: given {type(model).__name__}; it must be a causal model of transformers")
    reason = why_not(model)
    if reason is not None:
        raise Refused(f"{type(model).__name__}: {reason}")


def why_not(model: Any) -> str | None:
    """Why a decoder cannot stand in for the model's own steps, whatever it computes; None if nothing speaks against."""
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        return "it is compiled or scripted; give the model itself"
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        return "it is no model of transformers that generates"
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        return "its weights are quantised, and the decoder reads float16, bfloat16 and float32"
    modules = [*model.modules()]
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    for what, found in (("devices", {p.device for p in parameters}), ("dtypes", {p.dtype for p in parameters})):
        if len(found) != 1:
            return f"its parameters have {len(found)} {what}, {', '.join(sorted(map(str, found)))}; it must be one"
    first = parameters[0]
    if first.device.type not in ("cpu", "cuda"):
        return f"its device is {first.device}; allowed are cpu and cuda"
    if first.dtype not in DTYPES:
        return f"its dtype is {first.dtype}; allowed are {', '.join(map(str, DTYPES))}"
    special = next((p for p in parameters if type(p) is not torch.nn.Parameter or type(p.data) is not Tensor), None)
    if special is not None:
        return f"a parameter is a {type(special.data).__name__}; it must be a plain tensor, and not sharded"
    if any(p.is_inference() for p in parameters):
        return "it was made under torch.inference_mode, and its weights cannot be joined; make it outside"
    own = next((name for name in OVERRIDDEN for kind in _own_classes(model) if name in vars(kind)), None)
    if own is not None:
        return f"its class has its own {own}, which may do what the decoder does not"
    if model.training:
        return "it is in training mode; call model.eval() first"
    if is_autocast_enabled(first.device.type):
        return "autocast is on, which a step does not follow"
    return why_not_replaceable(module for module in modules if has_foreign_forward(module) or not _only_records(module))


def _only_records(module: torch.nn.Module) -> bool:
    """Whether a module has hooks, and each of them is one that transformers records outputs with."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return bool(hooks) and all(getattr(hook, "__module__", None) == RECORDS for hook in hooks)


def _own_classes(model: Any) -> list[type]:
    """The classes of a model that are not of transformers, up to the first that is."""
    kinds = type(model).__mro__
    return [*itertools.takewhile(lambda kind: not kind.__module__.startswith("transformers."), kinds)]


def check_prompt(input_ids: Any, attention_mask: Any, rows: int, vocabulary: int, inferred: bool = False) -> list[int]:
    """Raise TypeError or ValueError unless a step can go on from this prompt.

    Args:
        input_ids: the prompt.
        attention_mask: of it, or None.
        rows: how many there may be.
        vocabulary: how many tokens the model has.
        inferred: whether the mask was made of the prompt, as transformers does.

    Returns:
        For each row, how many columns at its left are padding.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        given = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: given {given}; it must be a tensor of torch.int64 or torch.int32")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: shape is {tuple(input_ids.shape)}; it must be (rows, columns), and not empty")
    if input_ids.shape[0] > rows:
        raise ValueError(f"input_ids: {input_ids.shape[0]} rows; at most {rows} are allowed, the batch_size")
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= vocabulary:
        raise ValueError(f"input_ids: tokens from {low} to {high}; the model has those from 0 to {vocabulary - 1}")
    if attention_mask is None:
        return [0] * len(input_ids)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        given = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask: given {given}; it must have the shape of input_ids, {tuple(input_ids.shape)}"
        )
    return [_pad(row, mask, inferred) for row, mask in enumerate((attention_mask != 0).tolist())]


def _pad(row: int, mask: Sequence[bool], inferred: bool) -> int:
    if not any(mask):
        raise ValueError(f"attention_mask: row {row} is all padding; it must have one token at least")
    pad = mask.index(True)
    if not all(mask[pad:]):
        raise ValueError(
            f"attention_mask: row {row} has zeros behind its first token; padding must be at the left alone "
            "(padding_side='left' of the tokenizer)"
            + ("; it was inferred from pad_token_id: give torch.ones_like(input_ids) for none" if inferred else "")
        )
    return pad


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise TypeError or ValueError unless these are what transformers takes."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: given {type(value).__name__}; it must be a Python number")
    if not 1e-30 <= temperature <= 1e30:  # float32 divides by it
        raise ValueError(
            f"temperature: given {temperature}; it must be from 1e-30 to 1e30, and do_sample=False is greedy"
        )
    if not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p: given {top_p}; it must be from 0 to 1")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k: given {top_k!r}; it must be an integer, at least 1, or 0 for all tokens")


def check_pad(pad: Any) -> None:
    """Raise TypeError unless this is a token."""
    if isinstance(pad, bool) or not isinstance(pad, int):
        raise TypeError(f"pad_token_id: given {pad!r}; it must be an integer")


def check_seed(seed: Any) -> None:
    """Raise TypeError or ValueError unless this is a seed, or None."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: given {type(seed).__name__}; it must be an integer, or None")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: given {seed}; it must fit in 64 bits")


def check_ends(ends: Sequence[int]) -> None:
    """Raise ValueError unless a step can compare with all of these."""
    if len(ends) > ENDS:
        raise ValueError(f"eos_token_id: given {len(ends)}; at most {ENDS} are allowed")


def end_tokens(given: Any) -> list[int]:
    """End tokens as a list, from an integer, a sequence, a tensor or None; TypeError or ValueError for others."""
    if given is None:
        return []
    found = given.reshape(-1).tolist() if isinstance(given, Tensor) else [given] if isinstance(given, int) else given
    if not isinstance(found, Sequence) or any(isinstance(t, bool) or not isinstance(t, int) for t in found):
        raise TypeError(f"eos_token_id: given {given!r}; it must be an integer, or a list of them")
    if any(not -(2**63) <= token < 2**63 for token in found):
        raise ValueError(f"eos_token_id: given {given!r}; each must fit in 64 bits")
    return [*found]
