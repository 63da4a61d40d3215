"""`RotaryTable`: cosines and sines of positions, with the scalings that published models use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.arguments import check_choice, check_number
from kernel_pytorch.qkv_fusion.arguments import check_positive

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""By kind of scaling, the required keys; names are those of models' configurations."""
OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")}
ALWAYS = ("rope_type", "original_max_position_embeddings")
"""Keys that every kind accepts."""


def _checked(scaling: Mapping[str, Any] | None, theta: float, dimension: int) -> dict[str, Any]:
    """Return the scaling with its `rope_type`; raise for a missing, wrong or unknown key."""
    if not isinstance(scaling, Mapping | None):
        raise TypeError(f"scaling: given {type(scaling).__name__}; it must be a mapping or None")
    given = dict(scaling or {})
    kind = given.pop("type", "default")  # the name of rope_type in older configurations
    found = {"rope_type": kind, **given}
    kind = found["rope_type"]
    check_choice("scaling['rope_type']", kind, KINDS)
    if missing := [name for name in NEEDED[kind] if name not in found]:
        raise ValueError(f"scaling: {kind!r} needs {', '.join(missing)}; given are {', '.join(found)}")
    for name in NEEDED[kind]:
        _check_above_0(f"scaling[{name!r}]", found[name])
    if found.pop("rope_theta", theta) != theta:
        raise ValueError(f"scaling['rope_theta']: given {given['rope_theta']}; theta is {theta}")
    if "partial_rotary_factor" in found:
        raise ValueError("scaling['partial_rotary_factor']: leave it out; dimension counts the rotated columns alone")
    for name in ("beta_fast", "beta_slow"):
        if found.get(name) is not None:
            _check_above_0(f"scaling[{name!r}]", found[name])
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if found.get(name) is not None:
            check_number(f"scaling[{name!r}]", found[name])
    known = dict.fromkeys((*ALWAYS, *NEEDED[kind], *OPTIONAL.get(kind, ())))
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"scaling: {kind!r} has no {', '.join(unknown)}; allowed are {', '.join(known)}")
    if kind == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        raise ValueError(f"scaling['high_freq_factor']: given {high}; it must be above low_freq_factor, {low}")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"theta: given {theta}; it must be above 1 with scaling 'yarn'")
    if kind == "dynamic" and dimension == 2:
        raise ValueError("dimension: given 2; it must be above 2 with scaling 'dynamic'")
    return found


def _check_above_0(name: str, value: Any) -> None:
    check_number(name, value)
    if value <= 0:
        raise ValueError(f"{name}: given {value}; it must be above 0")


class RotaryTable(torch.nn.Module):
    """Cosines and sines for `rotary_embedding`, computed of positions in float32.

    Args:
        dimension: R, how many columns of a head are rotated; even.
        theta: base of the frequencies, `theta ** (-2i / R)`.
        scaling: None, or what models' configurations call rope_scaling: `rope_type`, one of "default", "linear"
            (positions divided by factor, Chen et al., 2023, https://arxiv.org/abs/2306.15595), "dynamic" (NTK: theta
            grows with the longest position beyond `original_max_position_embeddings`, for which transformers takes a
            configuration's `max_position_embeddings`; the longest is read on the host, which torch.compile cannot
            trace in one piece), "llama3" (Llama 3.1: long wavelengths are divided, with a ramp), "yarn"
            (Peng et al., 2023, https://arxiv.org/abs/2309.00071; optional: `beta_fast`, `beta_slow`,
            `attention_factor`, `mscale`, `mscale_all_dim`, `truncate`), and the numbers that it needs.
        sections: for positions of several dimensions (time, height, width of Qwen2-VL,
            https://arxiv.org/abs/2409.12191): how many pairs go by each, R/2 together. None for one dimension.

    Raises:
        ValueError: dimension is odd, theta or a number that the scaling needs is not above 0 and finite, a scaling or
            one of its keys is unknown, a number is missing, or sections do not add up.
        TypeError: theta or a number of the scaling is no number, scaling no mapping, or sections no integers.
    """

    frequencies: Tensor

    def __init__(
        self,
        dimension: int,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        sections: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_positive(dimension=dimension)
        if dimension % 2:
            raise ValueError(f"dimension: given {dimension}; it must be even")
        _check_above_0("theta", theta)
        if sections is not None and not (isinstance(sections, Sequence) and all(isinstance(n, int) for n in sections)):
            raise TypeError(f"sections: given {sections!r}; it must be a sequence of integers or None")
        self.dimension, self.theta = dimension, float(theta)
        self.sections = None if sections is None else list(sections)
        if self.sections is not None and (min(self.sections, default=0) < 0 or sum(self.sections) != dimension // 2):
            raise ValueError(
                f"sections: given {self.sections}; they must add up to {dimension // 2}, half of dimension"
            )
        self.scaling = _checked(scaling, self.theta, dimension)
        self.register_buffer("frequencies", self._scaled(self._frequencies(self.theta)), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each `(..., S, R/2)`, float32.

        Args:
            position_ids: `(..., S)`, integers; with sections `(dimensions, ..., S)`.

        Raises:
            TypeError: position_ids is no tensor.
            ValueError: with sections, the first dimension of position_ids is not theirs.
        """
        if not isinstance(position_ids, Tensor):
            raise TypeError(f"position_ids: given {type(position_ids).__name__}; it must be a torch.Tensor")
        frequencies = self.frequencies
        if self.scaling["rope_type"] == "dynamic" and position_ids.numel():
            frequencies = self._dynamic(int(position_ids.max()) + 1)
        angles = position_ids.unsqueeze(-1).to(torch.float32) * frequencies.to(position_ids.device)
        if self.sections is not None:
            if position_ids.dim() == 0 or position_ids.shape[0] != len(self.sections):
                wanted = f"({len(self.sections)}, ..., S), a row for each of sections"
                raise ValueError(f"position_ids: shape is {tuple(position_ids.shape)}; it must be {wanted}")
            parts = angles.split(self.sections, -1)
            angles = torch.cat([part[i] for i, part in enumerate(parts)], -1)
        factor = self._attention_factor()
        return angles.cos() * factor, angles.sin() * factor

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryTable:
        """Move with the model, and stay float32: in 16 bits far positions would fall together."""
        super()._apply(fn, recurse)
        self.frequencies = self._scaled(self._frequencies(self.theta)).to(self.frequencies.device)
        return self

    def extra_repr(self) -> str:
        """What it was made with."""
        sections = "" if self.sections is None else f", sections={self.sections}"
        return f"{self.dimension}, theta={self.theta}, scaling={self.scaling}{sections}"

    def _frequencies(self, theta: float) -> Tensor:
        return theta ** (-torch.arange(0, self.dimension, 2, dtype=torch.float64) / self.dimension)

    def _scaled(self, frequencies: Tensor) -> Tensor:
        kind = self.scaling["rope_type"]
        if kind == "linear":
            frequencies = frequencies / self.scaling["factor"]
        elif kind == "llama3":
            frequencies = self._llama3(frequencies)
        elif kind == "yarn":
            frequencies = self._yarn(frequencies)
        return frequencies.to(torch.float32)

    def _dynamic(self, length: int) -> Tensor:
        """Theta grows so that the longest wavelength reaches beyond the context that the model was trained with."""
        factor, context = self.scaling["factor"], self.scaling["original_max_position_embeddings"]
        if length <= context:
            return self.frequencies
        grown = (factor * length / context - (factor - 1)) ** (self.dimension / (self.dimension - 2))
        return self._frequencies(self.theta * grown).to(torch.float32)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Wavelengths that fit often into the context stay, those that do not are divided, with a ramp in between."""
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        turns = self.scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - ramp) * frequencies / self.scaling["factor"] + ramp * frequencies

    def _yarn(self, frequencies: Tensor) -> Tensor:
        """The same by the number of a pair, between those that turn beta_fast and beta_slow times in the context."""
        context = self.scaling["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return self.dimension * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair(self.scaling.get("beta_fast") or 32), pair(self.scaling.get("beta_slow") or 1)
        if self.scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dimension - 1)
        places = torch.arange(self.dimension // 2, dtype=torch.float64)
        ramp = ((places - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return frequencies / self.scaling["factor"] * ramp + frequencies * (1 - ramp)

    def _attention_factor(self) -> float:
        """YaRN's temperature, which is multiplied into both tables."""
        if self.scaling["rope_type"] != "yarn":
            return 1.0
        given, factor = self.scaling.get("attention_factor"), self.scaling["factor"]
        if given is not None:
            return float(given)

        def temperature(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        scale, scale_of_all = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        return temperature(scale) / temperature(scale_of_all) if scale and scale_of_all else temperature(1.0)
