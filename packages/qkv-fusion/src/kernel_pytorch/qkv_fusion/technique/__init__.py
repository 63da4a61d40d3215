"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from kernel_pytorch.harness.technique import Technique

from . import norm_rope, projection, rotary
from .common import PACKAGE

technique = Technique(
    name="qkv-fusion",
    title="Queries, keys and values as one projection; QK-norm and rotary position embedding",
    paper="https://arxiv.org/abs/2104.09864",
    operations=[*rotary.OPERATIONS, *norm_rope.OPERATIONS, *projection.OPERATIONS],
    levels=f"{PACKAGE}.levels:LADDER",
    replacements=f"{PACKAGE}.replacements",
    contracts={**rotary.CONTRACTS, **norm_rope.CONTRACTS},
    slow_defaults=dict.fromkeys(
        (
            "qk_norm_rope: Qwen3 0.6B, decode 1x1x16x128 k_heads=8 start=4095 bfloat16",
            "qk_norm_rope: Qwen3 8B, decode 64 64x1x32x128 k_heads=8 batched=True bfloat16",
        ),
        "level cuda is as fast forward, and nobody trains on one token",
    ),
)
