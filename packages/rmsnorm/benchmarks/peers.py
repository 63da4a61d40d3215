"""Other libraries' RMSNorm, for `kernel-pytorch bench --peers`: the same arguments, the same truth, the same rounds.

Each is called as its library documents it, without writing into its inputs or incoming gradients.
"""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Level

TECHNIQUE = "rmsnorm"


def liger_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """Liger-Kernel's fused RMSNorm (Triton)."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False, None)


def liger_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Liger-Kernel's RMSNorm of a sum (Triton)."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    if weight is None:
        raise NotImplementedError("Liger-Kernel's fused add has no variant without a weight")
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting, False)


def quack_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """quack's RMSNorm (CuTe DSL)."""
    from quack import rmsnorm

    return rmsnorm(x, weight, eps=eps, weight_offset=offset)


def quack_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """quack's RMSNorm of a sum (CuTe DSL)."""
    from quack import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def flash_attn_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """flash-attn's RMSNorm (Triton)."""
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    _without_offset("flash-attn", offset)
    return rms_norm_fn(x, weight, None, eps=eps)


def flash_attn_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """flash-attn's RMSNorm of a sum (Triton)."""
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    _without_offset("flash-attn", offset)
    return rms_norm_fn(x, weight, None, residual=residual, eps=eps, prenorm=True)


def _without_offset(library: str, offset: float) -> None:
    if offset:
        raise NotImplementedError(f"{library} adds no offset to the weight")


def _quack(function: str) -> Peer:
    return Peer("peer:quack", Level.PEER, f"{__name__}:quack_{function}", requires="quack", install="quack-kernels",
                capability=(9, 0))  # fmt: skip


def _peers(function: str) -> list[Peer]:
    return [
        Peer("peer:liger", Level.PEER, f"{__name__}:liger_{function}", requires="liger_kernel", install="liger-kernel"),
        _quack(function),
        Peer("peer:flash-attn", Level.PEER, f"{__name__}:flash_attn_{function}", requires="flash_attn",
             install="flash-attn", capability=(8, 0)),
    ]  # fmt: skip


# A weight of two dimensions is one for each head to quack; the others have one for all heads.
PEERS = {
    "rms_norm": _peers("rms_norm"),
    "add_rms_norm": _peers("add_rms_norm"),
    "head_rms_norm": [_quack("rms_norm")],
}
