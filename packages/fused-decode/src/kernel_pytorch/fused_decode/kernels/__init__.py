"""Triton kernels of a decoding step. Every one reads its weights before it waits for the kernel ahead (PDL)."""
