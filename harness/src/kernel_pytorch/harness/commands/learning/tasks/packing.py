"""Task packing: leave the padding of a batch out, and put it back.

Texts of a batch have different lengths, and padding makes them one. Packing puts the tokens of all texts one after
the other, and offsets say where each text begins: the first is 0, the last is the number of tokens. Attention knows
the offsets as `cu_seqlens`. `kernel-pytorch learn --check packing.py`.
"""

import torch
from torch import Tensor


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens, `(tokens, width)`, and their offsets, `(batch + 1,)`.

    Args:
        x: `(batch, length, width)`.
        mask: `(batch, length)`, True for a token, False for padding behind it.
    """
    batch, length, _ = x.shape
    return x.flatten(0, 1), torch.arange(batch + 1) * length


def unpack(tokens: Tensor, offsets: Tensor, length: int) -> Tensor:
    """The way back, `(batch, length, width)`, with zeros for padding."""
    return tokens.unflatten(0, (-1, length))
