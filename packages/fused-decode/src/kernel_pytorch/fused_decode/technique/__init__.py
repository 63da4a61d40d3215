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
    contracts={**products.CONTRACTS, **attention.CONTRACTS},
)
