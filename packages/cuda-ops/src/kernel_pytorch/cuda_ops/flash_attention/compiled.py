"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.cuda_ops._core.compiled import compiled

from . import reference

flash_attention = compiled(reference.flash_attention)
