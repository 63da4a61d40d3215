"""Reads a user's model, says what to change for the compiler and the GPU, changes it and proves it."""

from .apply import Optimized, optimize
from .assistant import CompilerOptimizationAssistant
from .guard import assert_ready
from .records import Finding, Part, Report
from .techniques import Patches, patch, unpatch
from .validation import Verdict

__all__ = ["CompilerOptimizationAssistant", "Finding", "Optimized", "Part", "Patches", "Report", "Verdict"]
__all__ += ["assert_ready", "optimize", "patch", "unpatch"]
