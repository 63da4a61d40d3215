"""Calls of the public modules, for `tests/test_traceable.py`."""

import torch


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, TOKENS = normal(2, 5, 16), torch.tensor([[1, 4, 2, 0], [3, 3, 5, 1]])
NODES, EDGES = normal(4, 6), torch.tensor([[0, 1, 1, 3], [1, 0, 2, 2]])
DTYPES = [torch.float32]  # where levels of a CPU round differently, a whole model in bfloat16 does so in every layer
CALLS = {
    "Attention": (lambda m, x: m(x), (X,), (16, 2)),
    "FeedForward": (lambda m, x: m(x), (X,), (16, 24)),
    "TransformerBlock": (lambda m, x: m(x), (X,), (16, 2)),
    "LanguageModel": (
        lambda m, tokens: m(tokens, targets=tokens), (TOKENS,), (7, 16), {"num_layers": 2, "num_heads": 2}
    ),
    "VisionTransformer": (
        lambda m, x: m(x), (normal(2, 3, 8, 8),), (8, 4, 5), {"dim": 16, "num_layers": 1, "num_heads": 2}
    ),
    "ConvNet": (lambda m, x: m(x), (normal(2, 3, 8, 8),), (3, 5), {"widths": (8, 16), "depth": 1}),
    "GraphLayer": (lambda m, x, edges: m(x, edges), (NODES, EDGES), (6, 5)),
    "GraphNeuralNetwork": (lambda m, x, edges: m(x, edges), (NODES, EDGES), (6, 3), {"hidden_dim": 8}),
}  # fmt: skip
NOT_TRACED = {
    "TechniqueModule": "what the others are made from",
    "SentenceEncoder": "it is given a record of packed texts: test_sentence_encoder.py compiles it",
    "fold": "it changes a model",
    "sample": "it draws: test_generation.py compiles the step before it",
}
