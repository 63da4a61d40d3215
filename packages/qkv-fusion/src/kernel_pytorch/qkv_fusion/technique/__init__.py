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
)
