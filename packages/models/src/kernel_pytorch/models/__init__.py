"""Whole models built from the fused functions of this project; `techniques=` says which of them a model uses."""

from .graph import GraphLayer, GraphNeuralNetwork
from .segments import SortedEdges
from .techniques import ALL, TechniqueModule, Techniques

__all__ = ["ALL", "GraphLayer", "GraphNeuralNetwork", "SortedEdges", "TechniqueModule", "Techniques"]
