"""`LinearCrossEntropy`, the head of a language model with its loss, and `CrossEntropyLoss`, a drop-in for PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core.stock import check_plain
from .arguments import check_chunk, check_scalars
from .functional import Reduction, cross_entropy, linear_cross_entropy
from .levels import LADDER


class LinearCrossEntropy(torch.nn.Linear):
    """The last linear layer of a language model, which returns the loss instead of logits.

    Same parameters and state_dict as `torch.nn.Linear`. Without a target it returns logits as that does, capped where
    there is a cap: for inference.

    Args:
        in_features: H, of the hidden states.
        out_features: V, words of the vocabulary.
        bias: whether there is a bias; language models have none.
        device: of the parameters.
        dtype: of the parameters.
        ignore_index: as in `linear_cross_entropy`; so are the rest, attributes that may be changed later.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        chunk: int | None = None,
        level: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        check_scalars(ignore_index, label_smoothing, z_loss, softcap, reduction)
        check_chunk(chunk)
        LADDER.check(level)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.softcap, self.reduction, self.chunk, self.level = softcap, reduction, chunk, level

    @classmethod
    def from_torch(cls, module: torch.nn.Linear, **options: Any) -> LinearCrossEntropy:
        """This layer with the very parameters of a linear layer: nothing is held twice.

        Args:
            module: whose parameters are taken over.
            **options: keyword arguments of the constructor, from `ignore_index` on.

        Raises:
            TypeError: `module` is something else, or a subclass, which may compute something else; it has hooks, or a
                parameter that is computed; or an option is what the module decides.
        """
        if type(module) is not torch.nn.Linear:
            raise TypeError(f"module: given {type(module).__name__}; it must be a torch.nn.Linear, no subclass")
        check_plain([module])
        for name in ("bias", "device", "dtype"):
            if name in options:
                raise TypeError(f"{name}: given {options[name]}; it is that of the module, so leave it out")
        ours = cls(module.in_features, module.out_features, device="meta", **options)
        ours.weight, ours.bias = module.weight, module.bias
        return ours.train(module.training)

    def to_torch(self) -> torch.nn.Linear:
        """A linear layer with the very parameters of this one."""
        linear = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The loss of `hidden` `(..., H)` for `target` `(...)`, as `linear_cross_entropy`; without one the logits."""
        if target is None:
            logits = super().forward(hidden)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return linear_cross_entropy(
            hidden, self.weight, target, bias=self.bias, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap,
            reduction=self.reduction, chunk=self.chunk, level=self.level,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """As the stock module, with what differs from the defaults."""
        return super().extra_repr() + _options(self, "softcap", "chunk")


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` for targets that are words, computed by `cross_entropy`.

    Same arguments and shapes: logits `(V,)`, `(N, V)` or `(N, V, d1, ...)`. It differs in two things: the loss is
    float32 for float16 and bfloat16 too, and zero, not NaN, where all targets are ignored. Weights of classes and
    probabilities as targets are refused.

    Args:
        weight: None: weights of classes are not supported.
        size_average: None: deprecated in PyTorch, and not supported.
        ignore_index: as in `cross_entropy`; so are the rest.
        reduce: None: deprecated in PyTorch, and not supported.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: bool = False,
        level: str | None = None,
    ) -> None:
        for name, given in (("weight", weight), ("size_average", size_average), ("reduce", reduce)):
            if given is not None:
                raise ValueError(
                    f"{name}: given {type(given).__name__}; allowed is None, else torch.nn.CrossEntropyLoss"
                )
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        check_scalars(ignore_index, label_smoothing, z_loss, softcap, reduction)
        LADDER.check(level)
        self.z_loss, self.softcap, self.inplace, self.level = z_loss, softcap, inplace, level

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of logits with the words in the second dimension, or the only one; as `cross_entropy`."""
        logits = input.movedim(1, -1) if isinstance(input, Tensor) and input.dim() > 1 else input
        return cross_entropy(
            logits, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, z_loss=self.z_loss,
            softcap=self.softcap, reduction=self.reduction, inplace=self.inplace, level=self.level,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        return super().extra_repr() + _options(self, "softcap", "inplace").removeprefix(", ")


def _options(module: Any, *more: str) -> str:
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean", "level": None}
    defaults |= dict.fromkeys(more)
    given = {name: getattr(module, name) for name in defaults}
    return "".join(f", {name}={value!r}" for name, value in given.items() if value and value != defaults[name])
