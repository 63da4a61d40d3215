"""Whole models built from the fused functions of this project; `techniques=` chooses which of them a model uses."""

from .block import Attention, FeedForward, TransformerBlock
from .cache import KeyValueCache
from .convnet import ConvNet, fold
from .graph import GraphLayer, GraphNeuralNetwork
from .language_model import LanguageModel
from .sampling import sample
from .segments import SortedEdges
from .sentence_encoder import SentenceEncoder
from .techniques import ALL, TechniqueModule, Techniques
from .training import Checkpoints, ShuffledBatches
from .vision_transformer import VisionTransformer

__all__ = ["ALL", "Attention", "Checkpoints", "ConvNet", "FeedForward", "GraphLayer", "GraphNeuralNetwork"]
__all__ += ["KeyValueCache", "LanguageModel", "SentenceEncoder", "ShuffledBatches", "SortedEdges", "TechniqueModule"]
__all__ += ["Techniques", "TransformerBlock", "VisionTransformer", "fold", "sample"]
