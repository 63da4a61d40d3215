"""Triton kernels that all groups share; imported when a kernel is launched, as Triton is."""
