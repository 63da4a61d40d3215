"""Other libraries' cross entropy, for `kernel-pytorch bench --peers`: the same arguments, truth and rounds.

Each is called as its library documents it. Liger-Kernel and quack compute gradients in their forward and multiply what
they have saved in their backward, in place, so that a graph serves once; here that product is out of place, so that the
rounds can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Level

TECHNIQUE = "linear-cross-entropy"
ROUNDED = "rounds logits to 16 bits before their exponentials are taken"
QUACK_ROUNDED = "rounds logits, or their exponentials, to 16 bits"


class _GradientsInForward(torch.autograd.Function):
    """Loss and gradients in the forward, as the library has them; their product with what comes in, in the backward."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        own = [None if t is None else t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            found = loss(*own)
        wanted = [t for t in own if t is not None]
        gradients = iter(torch.autograd.grad(found, wanted))
        ctx.save_for_backward(*(None if t is None else next(gradients) for t in own))
        return found.detach()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g * incoming.to(g.dtype) for g in ctx.saved_tensors)


def _run(loss: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _GradientsInForward.apply(loss, *tensors)
    return loss(*tensors)


def liger_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    """Liger-Kernel's fused linear cross entropy (Triton and cuBLAS), its weight gradient added up in float32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _lacks("Liger-Kernel", hidden.dim() != 2 or hidden.shape[0] == 0, "leading dimensions, and no empty batch")
    _lacks("Liger-Kernel", reduction == "none" and torch.is_grad_enabled(), "backward of its own for each token here")

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scalars = ignore_index, z_loss, label_smoothing, reduction, softcap or None, False, torch.float32
        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, bias, None, *scalars)[0]

    return _run(loss, hidden, weight, bias)


def quack_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    """quack's chunked linear cross entropy (CuTe DSL).

    Where it would tune products it has its default configuration: it tunes in processes, which the harness's, a daemon,
    may not start.
    """
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    _lacks("quack", bias is not None, "bias")
    _lacks("quack", bool(label_smoothing or z_loss or softcap), "label smoothing, z-loss or soft cap")
    _lacks("quack", reduction == "none" or hidden.dim() != 2, "losses of single tokens")
    _lacks("quack", hidden.shape[0] % 8 != 0, "number of tokens but multiples of 8")
    backward = torch.is_grad_enabled() and weight.requires_grad
    _lacks("quack", backward and weight.shape[0] % 8 != 0, "gradients but of multiples of 8 words")

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(
            hidden, weight, target, ignore_index=ignore_index, reduction=reduction, tuned=False
        )

    return _run(loss, hidden, weight)


def cce_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    """Apple's cut-cross-entropy (Triton), with every gradient: by default it leaves out those of small probability."""
    from cut_cross_entropy import linear_cross_entropy

    _lacks("cut-cross-entropy", bias is not None, "bias")
    _lacks("cut-cross-entropy", bool(label_smoothing or z_loss), "label smoothing or z-loss")
    return linear_cross_entropy(
        hidden, weight, target, ignore_index, softcap or None, reduction=reduction, filter_eps=None
    )


def liger_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """Liger-Kernel's cross entropy (Triton), which waits for the GPU to count targets."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    _lacks("Liger-Kernel", logits.dim() != 2 or logits.shape[0] == 0, "leading dimensions, and no empty batch")
    recorded = torch.is_grad_enabled() and logits.requires_grad
    _lacks("Liger-Kernel", recorded, "gradient but in the place of the logits: its forward alone takes part")
    scalars = ignore_index, z_loss, label_smoothing, reduction, softcap or None
    return LigerCrossEntropyFunction.apply(logits.detach(), target, None, *scalars)[0]


def quack_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """quack's cross entropy (CuTe DSL)."""
    from quack import cross_entropy

    _lacks("quack", bool(label_smoothing or z_loss or softcap), "label smoothing, z-loss or soft cap")
    _lacks("quack", logits.dim() != 2, "leading dimensions")
    return cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _lacks(library: str, wanted: bool, what: str) -> None:
    if wanted:
        raise NotImplementedError(f"{library} has no {what}")


PEERS = {
    "linear_cross_entropy": [
        Peer("peer:liger", Level.PEER, f"{__name__}:liger_linear_cross_entropy", 4.0, ROUNDED,
             requires="liger_kernel", install="liger-kernel", capability=(8, 0)),
        Peer("peer:quack", Level.PEER, f"{__name__}:quack_linear_cross_entropy", 4.0, QUACK_ROUNDED,
             requires="quack", install="quack-kernels", capability=(9, 0)),
        Peer("peer:cut-cross-entropy", Level.PEER, f"{__name__}:cce_linear_cross_entropy", 4.0,
             "adds gradients of the hidden states up in 16 bits, by atomics", requires="cut_cross_entropy",
             install="cut-cross-entropy", capability=(8, 0)),
    ],
    "cross_entropy": [
        Peer("peer:liger", Level.PEER, f"{__name__}:liger_cross_entropy", 4.0, "rounds losses to the dtype of logits",
             requires="liger_kernel", install="liger-kernel", capability=(8, 0)),
        Peer("peer:quack", Level.PEER, f"{__name__}:quack_cross_entropy", requires="quack",
             install="quack-kernels", capability=(9, 0)),
    ],
}  # fmt: skip
