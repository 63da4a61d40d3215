"""What the Triton kernels of all functions share."""
