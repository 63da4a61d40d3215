"""Fusion opportunities as findings: which package computes them, and what an eager forward would no longer move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .costs import Gpu
from .finders import Found
from .records import ALL, BY_HAND, SAFE, Finding


@dataclass(frozen=True)
class Technique:
    """Who computes a pattern.

    Attributes:
        package: that has it.
        call: what to write.
        applies: whether `optimize` can make the change.
        recipe: of the catalogue.
    """

    package: str
    call: str
    applies: str = BY_HAND
    recipe: str = ""


TECHNIQUES = {
    "rms_norm": Technique("rmsnorm", "y = rms_norm(x, weight, eps=eps)", SAFE, "norm_by_hand"),
    "layer_norm": Technique("fused-ln-act", "y = layer_norm(x, weight, bias, eps=eps)", BY_HAND, "norm_by_hand"),
    "residual_norm": Technique("rmsnorm", "y, residual = add_rms_norm(x, residual, weight)", SAFE, ""),
    "shared_linear": Technique("qkv-fusion", "fuse(model)  # one product for the layers of one input", ALL, "qkv"),
    "attention": Technique(
        "flash-attn-triton", "y = F.scaled_dot_product_attention(q, k, v, is_causal=..., scale=...)", SAFE,
        "attention_by_hand",
    ),
    "attention_math": Technique(
        "flash-attn-triton", "y = flash_attention(q, k, v)  # PyTorch took its math path here", BY_HAND, ""
    ),
    "gated_mlp": Technique("fused-ln-act", "h = swiglu(gate, up)", SAFE, "gated"),
    "bias_act": Technique("fused-ln-act", "y = linear_act(x, weight, bias, activation)", BY_HAND, "activation_by_hand"),
    "rotary": Technique("qkv-fusion", "q, k = rotary_qk(q, k, cos, sin)", BY_HAND, "rotary_table"),
    "loss": Technique(
        "linear-cross-entropy", "loss = linear_cross_entropy(hidden, head.weight, labels)", SAFE, "loss_over_logits"
    ),
}  # fmt: skip


def fusion_findings(found: Sequence[Found], installed: Sequence[str], gpu: Gpu) -> list[Finding]:
    """One finding for each kind and line, with all modules that have it.

    Args:
        found: by the finders.
        installed: names of the packages that are installed.
        gpu: whose bandwidth turns bytes into a least gain of time.
    """
    groups: dict[tuple[str, str], list[Found]] = {}
    for f in found:
        groups.setdefault((f.kind, f.line), []).append(f)
    return [_finding(group, installed, gpu) for group in groups.values()]


def _finding(group: Sequence[Found], installed: Sequence[str], gpu: Gpu) -> Finding:
    first = group[0]
    technique = TECHNIQUES[first.kind]
    here = technique.package in installed
    moved = sum(f.moved for f in group)
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    package = f"kernel_pytorch.{technique.package.replace('-', '_')}"
    where = f"# {package}" if here else f"# pip install kernel-pytorch-{technique.package}"
    return Finding(
        kind=first.kind,
        what=f"{TITLES[first.kind]}{times}: {first.what}",
        line=first.line,
        paths=tuple(dict.fromkeys(f.path for f in group)),
        recipe=technique.recipe,
        change=f"{technique.call}  {where}" if "#" not in technique.call else f"{technique.call}, {package}",
        gain_bytes=moved,
        gain_seconds=moved / gpu.bytes_per_second,
        applies=technique.applies if here or first.kind == "attention" else BY_HAND,
        evidence={"count": len(group), "package": technique.package, "installed": here, "moved": moved},
    )


TITLES: Mapping[str, str] = {
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "residual_norm": "residual sum before a norm",
    "shared_linear": "linear layers of one input",
    "attention": "attention by hand",
    "attention_math": "attention on PyTorch's math path",
    "gated_mlp": "gated unit",
    "bias_act": "bias and activation",
    "rotary": "rotary embedding",
    "loss": "loss over all logits",
}
