"""The choice of techniques, and the functions that blocks call: fused where the technique is in use, else plain.

Every plain branch is what a competent user writes in PyTorch. No parameter depends on the choice, so a model can change
it at any time: `model.use(techniques=(), level=None)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_pytorch import flash_attn_triton, fused_ln_act, linear_cross_entropy, qkv_fusion, rmsnorm

ALL = ("flash-attn-triton", "fused-ln-act", "linear-cross-entropy", "qkv-fusion", "rmsnorm")
"""The techniques that models can use, by the names of their packages."""

LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")
SMALL_VOCABULARY = 4
"""Up to this many words per channel the logits are no larger than the hidden layer of a feed-forward."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Activations of feed-forwards, under the names of `kernel_pytorch.fused_ln_act`."""

GATES: dict[str, Any] = {"silu": fused_ln_act.swiglu, "gelu": fused_ln_act.geglu, "relu": fused_ln_act.reglu}
"""Gated units with a level "cuda"; `gated_mlp`, which includes the matrix products, has none."""

DIVIDED: tuple[Any, ...] = ()
"""The type of divided weights, DTensor once `distributed` is imported: that takes time, and some builds lack it."""

Names: TypeAlias = Iterable[str] | None
Norm: TypeAlias = nn.RMSNorm | nn.LayerNorm
Model = TypeVar("Model", bound="TechniqueModule")


@dataclass(frozen=True)
class Techniques:
    """The techniques that a module uses (names: a subset of `ALL`), and the level that their functions are called with.

    In all methods tokens come before heads: queries `(B, S, H, D)`, keys and values `(B, S, K, D)`, or without B for
    packed sequences. K divides H.
    """

    names: frozenset[str]
    level: str | None = None

    @classmethod
    def of(cls, techniques: Names, level: str | None) -> Techniques:
        """Check the arguments of a `TechniqueModule`, and make one object of them."""
        if isinstance(techniques, str):
            raise TypeError(f"techniques: given the string {techniques!r}; it must be a sequence of names, or None")
        names = frozenset(ALL if techniques is None else techniques)
        if unknown := sorted(map(str, names.difference(ALL))):
            raise ValueError(f"techniques: given {', '.join(unknown)}; allowed are {', '.join(ALL)}")
        if level is not None and level not in LEVELS:
            raise ValueError(f"level: given {level!r}; allowed are None, {', '.join(LEVELS)}")
        return cls(names, level)

    def level_for(self, x: Tensor) -> str | None:
        """Return the level for a function of x: "native" when compiling for a CPU, unless a level was given.

        TorchInductor fuses PyTorch's operators into one loop; a custom operator is a fusion barrier.
        """
        traced = self.level is None and x.device.type == "cpu" and torch.compiler.is_compiling()
        return "native" if traced else self.level

    def norm(self, norm: Norm, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(norm(x + update), x + update)`; of x alone where update is None."""
        one: Callable[..., Tensor] = fused_ln_act.layer_norm
        added: Callable[..., tuple[Tensor, Tensor]] = fused_ln_act.add_layer_norm
        name, level = "fused-ln-act", self.level
        weights = (norm.weight,) if isinstance(norm, nn.RMSNorm) else (norm.weight, norm.bias)
        if isinstance(norm, nn.RMSNorm):
            one, added, name, level = rmsnorm.rms_norm, rmsnorm.add_rms_norm, "rmsnorm", self.level_for(x)
        if name in self.names and update is not None:
            return added(update, x, *weights, eps=norm.eps, level=level)
        x = x if update is None else x + update
        return one(x, *weights, eps=norm.eps, level=level) if name in self.names else norm(x), x

    def layer_norm_act(self, norm: nn.LayerNorm, x: Tensor, activation: str) -> Tensor:
        """LayerNorm, then an activation of `ACTIVATIONS`."""
        if "fused-ln-act" not in self.names:
            return ACTIVATIONS[activation](norm(x))
        weights = norm.weight, norm.bias
        return fused_ln_act.layer_norm_act(x, *weights, activation=activation, eps=norm.eps, level=self.level)

    def linear_act(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """`activation(x @ weight.T + bias)`, with a name of `ACTIVATIONS`."""
        weight, bias = local(weight), None if bias is None else local(bias)
        if "fused-ln-act" in self.names and self.level == "cuda":  # the product is PyTorch's, what follows has a kernel
            return fused_ln_act.bias_act(F.linear(x, weight), bias, activation, level=self.level)
        if "fused-ln-act" in self.names:
            return fused_ln_act.linear_act(x, weight, bias, activation, level=self.level)
        return ACTIVATIONS[activation](F.linear(x, weight, bias))

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
        """`(activation(gate(x)) * up(x)) @ down.T`; gate_up `(2I, N)` holds the rows of the gate first."""
        gate_up, down = local(gate_up), local(down)
        if "fused-ln-act" in self.names:
            level = self.level_for(x)
            if activation in GATES and (level == "cuda" or (level is None and x.device.type == "cpu")):
                # The products are PyTorch's there; the gate between them has a kernel.
                return F.linear(GATES[activation](F.linear(x, gate_up), level=level), down)
            return fused_ln_act.gated_mlp(x, gate_up, down, activation, level=level)
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(ACTIVATIONS[activation](gate) * up, down)

    def qkv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as views of one product; weight holds their rows in this order."""
        if "qkv-fusion" in self.names:  # without a level: the product is PyTorch's at every level
            heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
            return qkv_fusion.qkv_projection(x, weight, bias, **heads)
        y = F.linear(x, weight, bias).unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
        q, k, v = y.split((num_heads, num_kv_heads, num_kv_heads), -2)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding of halves (Llama); cos and sin `(S, D/2)`, or with the leading dimensions of q."""
        if "qkv-fusion" in self.names:
            return qkv_fusion.rotary_embedding(q, k, cos, sin, level=self.level_for(q))
        cos, sin = cos.to(q.dtype).unsqueeze(-2), sin.to(q.dtype).unsqueeze(-2)
        halves = (t.chunk(2, -1) for t in (q, k))
        q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves)
        return q, k

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None) -> Tensor:
        """Attention, with as many keys as queries if causal; a query that sees no key gives zeros.

        mask is bool, broadcasts to `(B, H, Sq, Sk)`, and is False where a key is not seen.
        """
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if "flash-attn-triton" not in self.names:
            y = _plain_attention(q, k, v, mask, causal)
        elif mask is None:
            y = flash_attn_triton.flash_attention(q, k, v, causal=causal, level=self.level)
        else:
            y = flash_attn_triton.flash_attention_masked(q, k, v, mask, causal=causal, level=self.level)
        return y.transpose(1, 2)

    def attention_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool
    ) -> Tensor:
        """Attention of packed sequences `(T, heads, D)`; each token sees only its own sequence.

        cu_seqlens, `(B + 1,)` int32, is where each sequence begins, and T. No sequence is longer than max_seqlen.
        """
        # On a CPU the lengths can be read at once, and the masked product of all tokens with all would be quadratic.
        if q.device.type == "cpu" and self.level is None and not torch.compiler.is_compiling():
            lengths = cu_seqlens.diff().tolist()
            parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
            outputs = [self.attention(*(t[None] for t in part), causal=causal)[0] for part in parts]
            return torch.cat(outputs) if outputs else q
        if "flash-attn-triton" in self.names:
            lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
            return flash_attn_triton.flash_attention_varlen(q, k, v, *lengths, causal=causal, level=self.level)
        places = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(cu_seqlens, places, right=True, out_int32=True)
        mask = sequence[:, None] == sequence
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return _plain_attention(q, k, v, mask.tril() if causal else mask, False)[0].transpose(0, 1)

    def attention_cached(self, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Causal attention of the newest tokens to caches that already hold their keys. No gradients.

        keys and values are `(B, K, S, D)`, heads before tokens; what lies behind a length must be finite. lengths is
        `(B,)` int32: the last query of sequence b has the position `lengths[b] - 1`.
        """
        q = q.transpose(1, 2)
        if "flash-attn-triton" in self.names:
            y = flash_attn_triton.flash_decode(q, keys, values, lengths, level=self.level)
        else:
            last = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
            mask = torch.arange(keys.shape[2], device=q.device) <= last[:, None, :, None]
            y = _plain_attention(q, keys, values, mask, False)
        return y.transpose(1, 2)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`hidden @ weight.T`, whole on every rank where the words are divided."""
        if isinstance(weight, DIVIDED):
            from .distributed.loss import vocabulary_parallel_logits

            return vocabulary_parallel_logits(hidden, weight)
        return F.linear(hidden, weight)

    def linear_cross_entropy(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of the logits `hidden @ weight.T`; targets of -100 do not count, and if all are, it is 0.

        With a small vocabulary the logits need no more memory than a block; they are then computed, which is faster.
        """
        words, columns = weight.shape
        if isinstance(weight, DIVIDED):  # `distributed.tensor_parallel` divided the words
            from .distributed.loss import vocabulary_parallel_linear_cross_entropy

            return vocabulary_parallel_linear_cross_entropy(hidden, weight, target)
        if "linear-cross-entropy" in self.names and (words > SMALL_VOCABULARY * columns or self.level is not None):
            return linear_cross_entropy.linear_cross_entropy(hidden, weight, target, level=self.level)
        logits = F.linear(hidden, weight)
        # In float32 also under autocast, like the fused loss.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        target = target.flatten()
        return F.cross_entropy(logits, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight that `distributed.tensor_parallel` divided."""
    found: Tensor = weight.to_local() if isinstance(weight, DIVIDED) else weight
    return found


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """PyTorch's attention of `(B, heads, S, D)`."""
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    if causal:
        mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return torch.where(mask.any(-1, keepdim=True), y, 0.0)  # else NaN in some of PyTorch's kernels


class TechniqueModule(nn.Module):
    """The base of all modules that take `techniques` and `level`; parameters depend on neither.

    Args:
        techniques: names from `ALL`; None for all of them, `()` for plain PyTorch.
        level: "reference", "native", "torchscript", "compile", "triton" or "cuda", as in the functions of the
            techniques; None for the default of each.

    Raises:
        TypeError: techniques is a single string.
        ValueError: a technique or the level is unknown, or in a subclass another argument does not fit.
    """

    techniques: Techniques

    def __init__(self, techniques: Names = None, level: str | None = None) -> None:
        super().__init__()
        self.techniques = Techniques.of(techniques, level)

    def use(self: Model, techniques: Names = None, level: str | None = None) -> Model:
        """Change the techniques of this module and of all below it, in place, and return it.

        Arguments and errors are those of the constructor; an error changes nothing.
        """
        found = Techniques.of(techniques, level)
        for module in self.modules():
            if isinstance(module, TechniqueModule):
                module.techniques = found
        return self

    def extra_repr(self) -> str:
        """The techniques in use."""
        level = "" if self.techniques.level is None else f", level={self.techniques.level!r}"
        return f"techniques={tuple(sorted(self.techniques.names))}{level}"


def check_integers(**given: Any) -> None:
    """Raise TypeError, with the name, for a value that is no integer."""
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}: given {value!r}; it must be an integer")
