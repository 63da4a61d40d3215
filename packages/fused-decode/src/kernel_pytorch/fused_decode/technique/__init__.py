"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from kernel_pytorch.harness.technique import Technique

from . import attention, products
from .common import PACKAGE

technique = Technique(
    name="fused-decode",
    title="A step of generation: norm and linear layer, rotary embedding and attention to a cache",
    paper="https://pytorch.org/blog/flash-decoding/",
    operations=[*products.OPERATIONS, *attention.OPERATIONS],
    levels=f"{PACKAGE}.levels:LADDER",
    replacements=f"{PACKAGE}.replacements",
    decoder=f"{PACKAGE}:Decoder",
    slow_defaults={
        "linear_residual: Llama 3.2 1B, output, 8 rows 8x2048 outputs=2048 bfloat16": (
            "K is divided among programs, and the last one adds their sums; no default depends on the number of rows"
        )
    },
    contracts={**products.CONTRACTS, **attention.CONTRACTS},
)
