"""Whole models built from the fused functions of this project; `techniques=` says which of them a model uses."""

from .techniques import ALL, TechniqueModule, Techniques

__all__ = ["ALL", "TechniqueModule", "Techniques"]
