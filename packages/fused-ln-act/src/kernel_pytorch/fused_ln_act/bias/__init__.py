"""What comes behind a linear layer: bias and activation, or bias, dropout and the residual add."""
