"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Technique

from . import bias, gated, linear, norm, softmax
from .common import PACKAGE

GROUPS = (norm, gated, bias, softmax, linear)

technique = Technique(
    name="fused-ln-act",
    title="Norm, residual, dropout and activation in one kernel",
    paper="https://arxiv.org/abs/1607.06450",
    operations=[operation for group in GROUPS for operation in group.OPERATIONS],
    levels=f"{PACKAGE}.levels:LADDER",
    replacements=f"{PACKAGE}.replacements",
    contracts={
        # It stores the sum over a tile: one row, too short for wide stores.
        "_add_shares_kernel": KernelContract(max_registers=128, min_load_bits=128),
        **{name: contract for group in GROUPS for name, contract in group.CONTRACTS.items()},
    },
)
