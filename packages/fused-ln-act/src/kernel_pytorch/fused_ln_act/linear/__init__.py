"""Linear layers with what follows them inside the kernel of the product: bias, activation, the gate of a gated MLP."""
