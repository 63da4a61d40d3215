"""Reads a user's model, says what to change for the compiler and the GPU, changes it and proves it."""

from .assistant import CompilerOptimizationAssistant
from .guard import assert_ready
from .records import Finding, Part, Report
from .techniques import Patches, patch, unpatch

__all__ = ["CompilerOptimizationAssistant", "Finding", "Part", "Patches", "Report", "assert_ready", "patch", "unpatch"]
