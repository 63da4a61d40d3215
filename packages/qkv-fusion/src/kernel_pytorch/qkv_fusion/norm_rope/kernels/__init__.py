"""Triton kernels, forward and backward."""
