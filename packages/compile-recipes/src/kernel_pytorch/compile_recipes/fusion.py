"""Fusion opportunities as findings: which package computes them, and what an eager forward would no longer move."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.discovery import discover

from .costs import Gpu
from .finders import Found
from .recorder import place_of
from .records import ALL, BY_HAND, SAFE, Finding
from .techniques import replaceable


@dataclass(frozen=True)
class Technique:
    """Who computes a pattern: what to write, and the package of this project that has it; "" for PyTorch's own.

    `applies` says whether `optimize` makes the change; a trial finds out what a package replaces.
    """

    title: str
    call: str
    package: str = ""
    applies: str = BY_HAND
    recipe: str = ""


TECHNIQUES = {
    "rms_norm": Technique("RMSNorm", "y = rms_norm(x, weight, eps=eps)", "rmsnorm", recipe="norm_by_hand"),
    "layer_norm": Technique(
        "LayerNorm", "y = layer_norm(x, weight, bias, eps=eps)", "fused-ln-act", recipe="norm_by_hand"
    ),
    "residual_norm": Technique(
        "residual sum before a norm", "y, residual = add_rms_norm(x, residual, weight)", "rmsnorm"
    ),
    "residual_layer_norm": Technique(
        "residual sum before a norm", "y, residual = add_layer_norm(x, residual, weight, bias)", "fused-ln-act"
    ),
    "shared_linear": Technique("linear layers of one input", "fuse(model)", "qkv-fusion", ALL, "projections"),
    "attention": Technique(
        "attention by hand", "y = F.scaled_dot_product_attention(q, k, v, is_causal=..., scale=...)", "", SAFE,
        "attention_by_hand",
    ),
    "attention_math": Technique(
        "attention on PyTorch's math path", "y = flash_attention(q, k, v)", "flash-attn-triton"
    ),
    "gated_mlp": Technique("gated unit", "h = swiglu(gate, up)", "fused-ln-act"),
    "bias_act": Technique("bias and activation", "y = linear_act(x, weight, bias, activation)", "fused-ln-act"),
    "activation": Technique("activation by hand", 'y = F.gelu(x, approximate="tanh")', recipe="activation_by_hand"),
    "rotary": Technique("rotary embedding", "q, k = rotary_qk(q, k, cos, sin)", "qkv-fusion"),
    "loss": Technique(
        "loss over all logits", "loss = linear_cross_entropy(hidden, head.weight, labels)", "linear-cross-entropy",
        ALL, "loss_over_logits",
    ),
    "loop": Technique("a loop over parts of a tensor", "one call on the whole tensor", recipe="loop_over_rows"),
    "small_products": Technique("small products in a loop", "y = torch.bmm(x, weights)", recipe="small_products"),
    "computed_again": Technique("the same values again", "compute it once, and hand it on", recipe="computed_again"),
    "created": Technique(
        "a tensor from the host", 'self.register_buffer("name", tensor), or device=x.device', recipe="created_tensor"
    ),
    "repeated_heads": Technique(
        "repeated heads", "y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)", recipe="repeated_heads"
    ),
    "causal_mask": Technique(
        "causal mask", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", recipe="causal_mask"
    ),
    "conv_norm": Technique(
        "convolution and batch norm", "torch.nn.utils.fuse_conv_bn_eval(conv, norm)", recipe="conv_norm"
    ),
    "channels_last": Technique(
        "layout of a convolution", "model.to(memory_format=torch.channels_last)", "", ALL, "channels_last"
    ),
    "cast_weights": Technique("autocast over wide weights", "model.bfloat16()", recipe="cast_weights"),
    "float32_logits": Technique("float32 logits", "loss = F.cross_entropy(logits, labels)", recipe="float32_logits"),
}  # fmt: skip
"""By kind of pattern."""


def fusion_findings(module: torch.nn.Module, found: Sequence[Found], gpu: Gpu) -> list[Finding]:
    """One finding for each kind and line, with all modules that have it; a GPU's rates give the least gain of time."""
    replaced = replaceable(module)
    groups: dict[tuple[str, str], list[Found]] = defaultdict(list)
    for f in found:
        groups[f.kind, place_of(f.line, f.path)].append(f)
    return [_finding(group, replaced, gpu) for group in groups.values()]


def _call(technique: Technique, first: Found) -> str:
    """What to write: of attention the call that was proven, mask and scale included."""
    if first.kind != "attention" or not first.what.startswith("equal to "):
        return technique.call
    call, _, kept = first.what.removeprefix("equal to ").partition(" here; ")
    if kept and "attn_mask" not in call:  # what the proof saw of it may be less than it hides elsewhere
        call = re.sub(r"is_causal=\w+", "attn_mask=mask", call)
    return f"y = F.{call}"


def _finding(group: Sequence[Found], replaced: Mapping[str, Mapping[str, str]], gpu: Gpu) -> Finding:
    first = group[0]
    of_layer_norm = first.kind == "residual_norm" and "layer_norm" in first.what
    technique = TECHNIQUES["residual_layer_norm" if of_layer_norm else first.kind]
    here = not technique.package or technique.package in discover().techniques
    proven = first.kind != "attention" or (first.what.startswith("equal to") and "mask" not in first.what)
    applies = technique.applies if here and proven else BY_HAND
    if any(
        f"{f.path}.".startswith(path and f"{path}.") and ("add_" in by) == ("residual" in f.kind)
        for path, by in replaced.get(technique.package, {}).items() for f in group if applies == BY_HAND
    ):  # fmt: skip
        applies = SAFE
    moved, launches = sum(f.moved for f in group), sum(f.launches for f in group)
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    package = f"kernel_pytorch.{technique.package.replace('-', '_')}"
    where = f"  # {package}" if here else f"  # pip install ./packages/{technique.package}"
    return Finding(
        kind=first.kind,
        what=f"{technique.title}{times}: {first.what}",
        line=first.line,
        paths=tuple(dict.fromkeys(f.path for f in group)),
        recipe=technique.recipe,
        change=_call(technique, first) + (where if technique.package else ""),
        gain_bytes=moved,
        gain_seconds=max(moved / gpu.bytes_per_second, launches * gpu.launch_seconds),
        applies=applies,
        evidence={
            "count": len(group), "package": technique.package, "installed": here, "moved": moved, "launches": launches
        },
    )  # fmt: skip
