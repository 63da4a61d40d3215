"""Training on several devices: PyTorch's engine around our functions, a loss and an attention that are divided."""

from .gradients import clip_gradients, parameter_kinds
from .loss import vocabulary_parallel_linear_cross_entropy
from .ring import ring_attention, zigzag_positions
from .strategies import Parallelized, data_parallel, fully_sharded, tensor_parallel

__all__ = ["Parallelized", "clip_gradients", "data_parallel", "fully_sharded", "parameter_kinds", "tensor_parallel"]
__all__ += ["ring_attention", "vocabulary_parallel_linear_cross_entropy", "zigzag_positions"]
