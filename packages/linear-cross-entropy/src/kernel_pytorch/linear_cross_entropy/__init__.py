"""Cross entropy: of a linear layer without ever holding its logits, and of logits that are there."""

from .functional import cross_entropy, linear_cross_entropy
from .module import CrossEntropyLoss, LinearCrossEntropy
from .replacements import patch, unpatch

__all__ = ["CrossEntropyLoss", "LinearCrossEntropy", "cross_entropy", "linear_cross_entropy", "patch", "unpatch"]
