"""Whole models built from the fused functions of this project; `techniques=` says which of them a model uses."""

from .convnet import ConvNet, fold
from .graph import GraphLayer, GraphNeuralNetwork
from .segments import SortedEdges
from .sentence_encoder import SentenceEncoder
from .techniques import ALL, TechniqueModule, Techniques

__all__ = [
    "ALL",
    "ConvNet",
    "GraphLayer",
    "GraphNeuralNetwork",
    "SentenceEncoder",
    "SortedEdges",
    "TechniqueModule",
    "Techniques",
    "fold",
]
