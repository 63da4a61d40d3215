"""Training on several devices: PyTorch's engine around our functions, a loss and an attention that are divided."""

from .loss import vocabulary_parallel_linear_cross_entropy
from .ring import ring_attention
from .strategies import Parallelized, data_parallel, fully_sharded, tensor_parallel

__all__ = ["Parallelized", "data_parallel", "fully_sharded", "tensor_parallel"]
__all__ += ["ring_attention", "vocabulary_parallel_linear_cross_entropy"]
