"""`LayerNorm`, `LayerNormAct` and `AddLayerNorm`, with the parameters of `torch.nn.LayerNorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_tensor
from kernel_pytorch.fused_ln_act._core.stock import check_plain
from kernel_pytorch.fused_ln_act.activations import module_of, name_of
from kernel_pytorch.fused_ln_act.arguments import check_activation, check_dropout, names_of
from kernel_pytorch.fused_ln_act.levels import LADDER

from .functional import add_layer_norm, layer_norm, layer_norm_act

Norm = TypeVar("Norm", bound=torch.nn.LayerNorm)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `kernel_pytorch.fused_ln_act.layer_norm`.

    Same constructor, parameters, state_dict and result.

    Args:
        normalized_shape: sizes of the trailing dimensions that are normalised together.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, of shape `normalized_shape`, initialised to ones.
        bias: whether there is a bias beside the weight, initialised to zeros.
        device: of the parameters.
        dtype: of the parameters.
        level: as in `layer_norm`; an attribute that may be changed later.
    """

    level: str | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        LADDER.check(level)
        self.level = level

    @classmethod
    def from_torch(cls, module: torch.nn.Module, *, level: str | None = None) -> LayerNorm:
        """A drop-in that shares the parameters of `module`, a `torch.nn.LayerNorm`.

        Raises:
            TypeError: `module` is something else.
        """
        return _share(_only(module), cls(module.normalized_shape, module.eps, False, level=level))

    def to_torch(self) -> torch.nn.LayerNorm:
        """The stock module that shares these parameters: the way back."""
        return _share(self, torch.nn.LayerNorm(self.normalized_shape, self.eps, False))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the trailing dimensions of `x`, `(..., *normalized_shape)`; same shape and dtype come back.

        Raises:
            ValueError: the trailing dimensions of x are not `normalized_shape`.
            TypeError: as `layer_norm`.
        """
        rows = _as_rows("x", x, self)
        return layer_norm(rows, *_parameters(self), eps=self.eps, level=self.level).view(x.shape)

    def extra_repr(self) -> str:
        """As the stock module, and the level if one was given."""
        return super().extra_repr() + _shown(level=self.level)


class LayerNormAct(LayerNorm):
    """LayerNorm, an activation and dropout in one: `dropout(activation(layer_norm(x)))`.

    In the place of `torch.nn.Sequential(LayerNorm, GELU, Dropout)`; the parameters are those of the LayerNorm.

    `normalized_shape`, `eps`, `elementwise_affine`, `bias`, `device`, `dtype` and `level` are as in `LayerNorm`;
    `activation` is as in `layer_norm_act`.

    Args:
        p: probability that an element of the result is dropped while the module is training.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        activation: str,
        p: float = 0.0,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, level=level)
        check_activation(activation)
        check_dropout(p, None, self.weight, "p")
        self.activation = activation
        self.p = p

    @classmethod
    def from_torch(cls, module: torch.nn.Module, *, level: str | None = None) -> LayerNormAct:
        """A drop-in that shares the parameters of `Sequential(LayerNorm, activation[, Dropout])`.

        Raises:
            TypeError: `module` is something else, has hooks, or its activation is none of `layer_norm_act`'s.
            ValueError: its Dropout drops everything.
        """
        parts = list(module) if isinstance(module, torch.nn.Sequential) else [module]
        activation = name_of(parts[1]) if len(parts) > 1 else None
        drops = len(parts) == 3 and type(parts[2]) is torch.nn.Dropout
        if activation is None or not (len(parts) == 2 or drops):
            raise TypeError(
                f"module: given {names_of(parts)}; it must be torch.nn.Sequential of LayerNorm, one of GELU, SiLU, "
                "ReLU, Tanh, Sigmoid or Identity, and at most a Dropout"
            )
        check_plain([module, *parts])
        norm = _only(parts[0])
        p = parts[2].p if drops else 0.0
        ours = cls(norm.normalized_shape, activation, p, norm.eps, False, level=level)
        return _share(norm, ours).train(module.training)

    def to_torch(self) -> Any:
        """`torch.nn.Sequential(LayerNorm, activation, Dropout)` that shares these parameters.

        Raises:
            TypeError: PyTorch has no module of that activation.
        """
        norm = super().to_torch()
        return torch.nn.Sequential(norm, module_of(self.activation), torch.nn.Dropout(self.p)).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, activate and, while training, drop; shapes, dtypes and errors as of `LayerNorm.forward`."""
        rows = _as_rows("x", x, self)
        p = self.p if self.training else 0.0
        y = layer_norm_act(
            rows, *_parameters(self), activation=self.activation, eps=self.eps, dropout_p=p, level=self.level
        )
        return y.view(x.shape)

    def extra_repr(self) -> str:
        """As `LayerNorm`, with the activation and the dropout."""
        return f"{super().extra_repr()}, activation={self.activation!r}, p={self.p}"


class AddLayerNorm(LayerNorm):
    """Dropout, residual add and LayerNorm in one: `h = residual + dropout(x)`, `y = layer_norm(h)`.

    A transformer computes this between two blocks; the parameters are those of the LayerNorm.

    `normalized_shape`, `eps`, `elementwise_affine`, `bias`, `device`, `dtype` and `level` are as in `LayerNorm`.

    Args:
        p: probability that an element of x is dropped while the module is training.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        p: float = 0.0,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, level=level)
        check_dropout(p, None, self.weight, "p")
        self.p = p

    @classmethod
    def from_torch(cls, module: torch.nn.Module, *, p: float = 0.0, level: str | None = None) -> AddLayerNorm:
        """A module that shares the parameters of `module`, the LayerNorm that follows the residual add.

        `level` is as in `LayerNorm`.

        Args:
            module: a `torch.nn.LayerNorm`.
            p: that of the dropout in front of the add.

        Raises:
            TypeError: `module` is something else.
        """
        return _share(_only(module), cls(module.normalized_shape, p, module.eps, False, level=level))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Drop while training, add and normalise.

        Args:
            x: `(..., *normalized_shape)`.
            residual: the shape of x.

        Returns:
            `(y, new_residual)`, both the shape of x, in the promoted dtype of x and residual.

        Raises:
            ValueError: the trailing dimensions of x or residual are not `normalized_shape`.
            TypeError: as `add_layer_norm`.
        """
        p = self.p if self.training else 0.0
        rows = (_as_rows("x", x, self), _as_rows("residual", residual, self))
        y, h = add_layer_norm(*rows, *_parameters(self), eps=self.eps, dropout_p=p, level=self.level)
        return y.view(x.shape), h.view(x.shape)

    def extra_repr(self) -> str:
        """As `LayerNorm`, with the dropout."""
        return f"{super().extra_repr()}, p={self.p}"


def _as_rows(name: str, x: Tensor, module: torch.nn.LayerNorm) -> Tensor:
    """`x` with the normalised dimensions as one."""
    check_tensor(name, x)
    dimensions = len(module.normalized_shape)
    if tuple(x.shape[-dimensions:]) != tuple(module.normalized_shape):
        shape = tuple(module.normalized_shape)
        raise ValueError(f"{name}: shape is {tuple(x.shape)}; its last dimensions must be {shape}")
    return x.flatten(-dimensions)


def _parameters(module: torch.nn.LayerNorm) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as one row."""
    weight, bias = module.weight, module.bias
    return None if weight is None else weight.flatten(), None if bias is None else bias.flatten()


def _only(module: torch.nn.Module) -> torch.nn.LayerNorm:
    if not isinstance(module, torch.nn.LayerNorm) or type(module).forward is not torch.nn.LayerNorm.forward:
        given = f"{type(module).__module__}.{type(module).__qualname__}"
        raise TypeError(f"module: given {given}; it must be a torch.nn.LayerNorm, with the forward of that")
    check_plain([module])
    return module


def _share(source: torch.nn.LayerNorm, target: Norm) -> Norm:
    target.elementwise_affine = source.elementwise_affine
    target.weight = source.weight
    target.bias = source.bias
    return target.train(source.training)


def _shown(**given: Any) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
