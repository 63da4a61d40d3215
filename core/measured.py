"""Whether the defaults of a package rest on measurements of a device, for reports."""

from __future__ import annotations

import re

import torch

from . import adoption
from .device import compute_capability
from .levels import Default, find_ladder

DURATION = "some minutes"


def why_not_measured(device: torch.device) -> str | None:
    """Say that no row of the package's table of defaults, nor an adopted one, is of this device; None if one is."""
    ladder = find_ladder()
    if device.type == "meta" or any(_is_of(row, device) for row in (*ladder.defaults, *ladder.adopted)):
        return None
    name = device_name(device)
    if device.type == "cuda":
        name += ", compute capability {}.{}".format(*compute_capability(device))
    reasons = [ladder.unavailable(level, device, torch.float32) for level in ("triton", "cuda")]
    lacking = "" if None in reasons else f" No kernel runs there yet: {'; '.join(map(str, reasons))}."
    return (
        f"Not measured on this device ({name}), where the defaults may be PyTorch's own operators.{lacking} "
        f"`kernel-pytorch adopt {adoption.TECHNIQUE}` measures the kernels and keeps the faster ones. "
        f"It takes {DURATION}."
    )


def device_name(device: torch.device) -> str:
    """Name of a GPU or processor; of other devices their type."""
    return adoption.device_name(device) if device.type in ("cpu", "cuda") else device.type


def _is_of(row: Default, device: torch.device) -> bool:
    """Whether a row rests on measurements of such a device: a GPU of its compute capability, a CPU of its name."""
    if device.type != row.device:
        return False
    if row.device_name is not None:
        return bool(device_name(device) == row.device_name)
    if device.type == "cpu":
        return (row.record or "").startswith(f"{_slug(device_name(device))}-")
    return row.capabilities is None or compute_capability(device) in row.capabilities


def _slug(name: str) -> str:
    """A device's name as the folders of `results/` begin with it."""
    name = re.sub(r"\((r|tm|c)\)|\bcpu\b|\bprocessor\b|@.*", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
