"""RMSNorm, alone, with the residual add in front of it, and per attention head."""

from .functional import add_rms_norm, head_rms_norm, rms_norm
from .module import RMSNorm
from .replacements import patch, unpatch

__all__ = ["RMSNorm", "add_rms_norm", "head_rms_norm", "patch", "rms_norm", "unpatch"]
