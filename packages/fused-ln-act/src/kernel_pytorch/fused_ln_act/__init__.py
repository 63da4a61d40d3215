"""Norm, residual, dropout and activation in one trainable kernel."""

from . import functional, modules
from .functional import *  # noqa: F403
from .modules import *  # noqa: F403
from .replacements import patch, unpatch

__all__ = [*functional.__all__, *modules.__all__, "patch", "unpatch"]
