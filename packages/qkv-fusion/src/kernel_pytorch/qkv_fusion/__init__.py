"""One projection for queries, keys and values, QK-norm and rotary embedding, trainable."""

from . import functional, modules
from .functional import *  # noqa: F403
from .modules import *  # noqa: F403
from .replacements import fuse, fusion_report, patch, unfuse, unpatch

__all__ = [*functional.__all__, *modules.__all__, "fuse", "fusion_report", "patch", "unfuse", "unpatch"]
