"""Norm, residual, dropout and activation in one trainable kernel."""

from . import functional, modules
from .functional import *  # noqa: F403
from .modules import *  # noqa: F403

__all__ = [*functional.__all__, *modules.__all__]
