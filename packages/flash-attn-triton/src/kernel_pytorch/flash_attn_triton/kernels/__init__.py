"""Triton kernels and their launchers; imported when a kernel is launched, as Triton is."""
