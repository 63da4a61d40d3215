"""Commands of `kernel-pytorch` that this package adds."""
