"""What the operators launch: Triton's kernels, imported when they are, and the chunks of level "native"."""
