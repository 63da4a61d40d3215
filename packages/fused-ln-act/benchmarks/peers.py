"""Other libraries' fused kernels, for `kernel-pytorch bench --peers`: the same arguments, truth and rounds.

Each is called as its library documents it, without writing into its inputs or incoming gradients: if a library's
backward does that by design, or overwrites what it saved so that it runs once, only its forward takes part. Variants
that a library lacks raise NotImplementedError, and the tables say so. No library offers a norm with an activation, and
no library's dropout mask is Philox by the element's index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Level

TECHNIQUE = "fused-ln-act"

LIGER_COLUMNS = 65536  # the longest row that its kernels take
LIGER_ROUNDS = "rounds the activation to the dtype of up before the product"
LIGER_BUDGETS = {
    "layer_norm": (4.0, "adds the rows of the parameters' gradients one by one in each program"),
    "swiglu": (4.0, LIGER_ROUNDS),
    "geglu": (4.0, LIGER_ROUNDS),
}
# By operation, the least compute capability where Triton's interpreter does not run it: it knows no tanh of libdevice.
LIGER_NEEDS = {"geglu": (8, 0), "gated_mlp": (9, 0)}
QUACK_ACTIVATIONS = {"silu": "silu", "relu": "relu", "relu_squared": "relu_sq", "gelu_tanh": "gelu_tanh_approx",
                     "tanh": "tanh"}  # fmt: skip
QUACK_GATED = {"silu": "swiglu", "relu": "reglu", "gelu_tanh": "geglu"}


# Norms.


def liger_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Liger-Kernel's LayerNorm (Triton)."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    _lacks("Liger-Kernel", weight is None or bias is None, "LayerNorm without a weight or a bias")
    _lacks("Liger-Kernel", x.shape[-1] > LIGER_COLUMNS, f"LayerNorm of rows longer than {LIGER_COLUMNS}")
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def flash_attn_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """flash-attn's LayerNorm (Triton)."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    _lacks("flash-attn", weight is None, "LayerNorm without a weight")
    return layer_norm_fn(x, weight, bias, eps=eps)


def flash_attn_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """flash-attn's LayerNorm of a sum (Triton)."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    _lacks("flash-attn", weight is None, "LayerNorm without a weight")
    _lacks("flash-attn", dropout_p > 0.0, "dropout mask that others can draw")
    return layer_norm_fn(x, weight, bias, residual=residual, eps=eps, prenorm=True)


# Gated units and activations.


def liger_swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> Tensor:
    """Liger-Kernel's SwiGLU (Triton), packed or of two tensors."""
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    _lacks("Liger-Kernel", (alpha, limit, offset) != (1.0, None, 0.0), "SwiGLU with alpha, limit or offset")
    if up is None:
        return LigerFusedGateUpSiLUMulFunction.apply(gate.flatten(0, -2)).view(*gate.shape[:-1], gate.shape[-1] // 2)
    _same_dtype("Liger-Kernel", gate, up)
    _once("Liger-Kernel", "writes into gate and up", gate, up)
    return LigerSiLUMulFunction.apply(gate, up)


def flash_attn_swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> Tensor:
    """flash-attn's SwiGLU (PyTorch's jiterator)."""
    from flash_attn.ops.activations import swiglu

    _lacks("flash-attn", (alpha, limit, offset) != (1.0, None, 0.0), "SwiGLU with alpha, limit or offset")
    if up is None:
        raise NotImplementedError("flash-attn takes gate and up apart")
    _same_dtype("flash-attn", gate, up)
    return swiglu(gate, up)


def liger_geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> Tensor:
    """Liger-Kernel's GEGLU by tanh (Triton)."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    _lacks("Liger-Kernel", approximate != "tanh" or limit is not None, "GEGLU but the one by tanh, without a limit")
    if up is None:
        raise NotImplementedError("Liger-Kernel takes gate and up of GEGLU apart")
    _same_dtype("Liger-Kernel", gate, up)
    _once("Liger-Kernel", "writes into gate and up", gate, up)
    return LigerGELUMulFunction.apply(gate, up)


def liger_bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Liger-Kernel's squared ReLU (Triton)."""
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    _lacks("Liger-Kernel", bias is not None or activation != "relu_squared", "activation alone but the squared ReLU")
    return LigerReLUSquaredFunction.apply(x)


# Softmax.


def liger_softmax(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Liger-Kernel's softmax (Triton)."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    _lacks("Liger-Kernel", scale != 1.0 or mask is not None, "softmax with a scale or a mask")
    _lacks("Liger-Kernel", x.shape[-1] > LIGER_COLUMNS, f"softmax of rows longer than {LIGER_COLUMNS}")
    return LigerSoftmaxFunction.apply(x)


def quack_softmax(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """quack's softmax (CuTe DSL)."""
    from quack import softmax

    _lacks("quack", scale != 1.0 or mask is not None, "softmax with a scale or a mask")
    return softmax(x.flatten(0, -2)).view(x.shape)


# Linear layers.


def quack_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> Tensor:
    """quack's product with an activation in its epilogue (CuTe DSL).

    It is in its default configuration: it tunes in processes, which the harness's, a daemon, may not start.
    """
    from quack.linear import linear_act_func

    _lacks("quack", activation not in QUACK_ACTIVATIONS, f"linear layer with {activation!r}")
    _once("quack", "begins at the pre-activation, in the layer behind", x, weight)
    return linear_act_func(x, weight, QUACK_ACTIVATIONS[activation], bias, store_preact=False, tuned=False)[1]


def quack_gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> Tensor:
    """quack's gated MLP (CuTe DSL), in its default configuration as its linear layer is."""
    from quack.mlp import mlp_func

    _lacks("quack", activation not in QUACK_GATED, f"gated MLP with {activation!r}")
    how = {"recompute": recompute, "concat_layout": True, "tuned": False}
    return mlp_func(x, w_gate_up, w_down, QUACK_GATED[activation], **how)


def liger_gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> Tensor:
    """Liger-Kernel's gated MLP (Triton, by the copy engine), tuned at its first call."""
    from liger_kernel.ops.mlp import LigerMLPFunction

    _lacks("Liger-Kernel", activation != "silu", f"gated MLP with {activation!r}")
    _once("Liger-Kernel", "overwrites what was saved for it", x, w_gate_up, w_down)
    gate, up = w_gate_up.chunk(2)
    return LigerMLPFunction.apply(x.view(1, -1, x.shape[-1]), gate, up, w_down).view(*x.shape[:-1], w_down.shape[0])


def _lacks(library: str, wanted: bool, what: str) -> None:
    if wanted:
        raise NotImplementedError(f"{library} has no {what}")


def _same_dtype(library: str, gate: Tensor, up: Tensor) -> None:
    if gate.dtype != up.dtype:
        raise NotImplementedError(f"{library} takes gate and up of one dtype")


def _once(library: str, what: str, *inputs: Tensor) -> None:
    """Refuse a backward that cannot be run by itself, again and again, on the inputs that everybody shares."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        raise NotImplementedError(f"{library}'s backward {what}: its forward alone takes part")


def _peers(function: str, *libraries: str) -> list[Peer]:
    liger = {"requires": "liger_kernel", "install": "liger-kernel", "capability": LIGER_NEEDS.get(function)}
    known = {
        "liger": Peer("peer:liger", Level.PEER, f"{__name__}:liger_{function}", *LIGER_BUDGETS.get(function, ()),
                      **liger),
        "quack": Peer("peer:quack", Level.PEER, f"{__name__}:quack_{function}", requires="quack",
                      install="quack-kernels", capability=(9, 0)),
        "flash-attn": Peer("peer:flash-attn", Level.PEER, f"{__name__}:flash_attn_{function}", requires="flash_attn",
                           install="flash-attn", capability=(8, 0)),
    }  # fmt: skip
    return [known[library] for library in libraries]


PEERS = {
    "layer_norm": _peers("layer_norm", "liger", "flash-attn"),
    "add_layer_norm": _peers("add_layer_norm", "flash-attn"),
    "swiglu": _peers("swiglu", "liger", "flash-attn"),
    "geglu": _peers("geglu", "liger"),
    "bias_act": _peers("bias_act", "liger"),
    "softmax": _peers("softmax", "liger", "quack"),
    "linear_act": _peers("linear_act", "quack"),
    "gated_mlp": _peers("gated_mlp", "liger", "quack"),
}
