"""Which keys a query sees: causal and window, in plain PyTorch that TorchScript compiles."""

import torch
from torch import Tensor


def always(comparison: bool) -> bool:
    """Whether a comparison of sizes is true; where torch.compile or torch.export leaves sizes open, whether of all."""
    if torch.compiler.is_compiling() or not isinstance(comparison, bool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(comparison)
    return comparison


def limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """How many keys before and behind its position a query sees; -1 for all."""
    left, right = -1, -1
    if window is not None:
        left, right = window
    return left, 0 if causal else right


def positions(queries: int, keys: int, device: torch.device) -> Tensor:
    """Position of each key minus that of each query, `(Sq, Sk)`; the last query is at the position of the last key."""
    of_queries = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    return torch.arange(keys, device=device) - of_queries


def visible(queries: int, keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """Which of the keys each query sees, `(Sq, Sk)`."""
    behind = positions(queries, keys, device)
    sees = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        sees = sees & (behind >= -left)
    if right >= 0:
        sees = sees & (behind <= right)
    return sees


def packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for packed sequences; and which sequence each query is of.

    Args:
        cu_seqlens_q: `(B + 1,)`, where the queries of each sequence begin, and their number.
        cu_seqlens_k: `(B + 1,)`, where the keys of each sequence begin, and their number.
        queries: of all sequences.
        keys: of all sequences.
        causal: whether a query sees no key behind its position.
        window: how many keys before and behind its position a query sees; -1 for all.

    Returns:
        `(queries, keys)`, integers; `(queries, keys)`, bool; `(queries,)`.
    """
    query = torch.arange(queries, device=cu_seqlens_q.device)
    key = torch.arange(keys, device=cu_seqlens_k.device)
    # No token is assigned to an empty sequence, which ends where it begins.
    # torch.searchsorted on a slice is wrong under TorchInductor of torch 2.11 on a GPU.
    of_query = (query.unsqueeze(1) >= cu_seqlens_q[1:]).sum(1)
    of_key = (key.unsqueeze(1) >= cu_seqlens_k[1:]).sum(1)
    exists = of_query < cu_seqlens_q.shape[0] - 1
    of_query = of_query.clamp(max=cu_seqlens_q.shape[0] - 2)
    # Positions count from the ends of the sequences: the last query is at the position of the last key.
    behind = (key - cu_seqlens_k[1:][of_query].unsqueeze(1)) - (query - cu_seqlens_q[1:][of_query]).unsqueeze(1)
    sees = (of_query.unsqueeze(1) == of_key) & exists.unsqueeze(1)
    left, right = limits(causal, window)
    if left >= 0:
        sees = sees & (behind >= -left)
    if right >= 0:
        sees = sees & (behind <= right)
    return behind, sees, of_query


def cached(
    lengths: Tensor, queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the last `queries` tokens of sequences in a cache with room for `keys`, and which keys are valid.

    lengths: `(B,)`, valid keys of each sequence. Returns key minus query positions and which keys queries see,
    both `(B, 1, Sq, S)`, and which keys are valid, `(B, 1, S, 1)`.
    """
    key = torch.arange(keys, device=lengths.device)
    of_sequence = lengths.clamp(0, keys).to(torch.int64).unsqueeze(1).unsqueeze(1).unsqueeze(1)
    query = torch.arange(queries, device=lengths.device).unsqueeze(1) + (of_sequence - queries)
    behind = key - query
    valid = key < of_sequence
    sees = valid.expand(behind.shape)
    left, right = limits(causal, window)
    if left >= 0:
        sees = sees & (behind >= -left)
    if right >= 0:
        sees = sees & (behind <= right)
    return behind, sees, valid.transpose(2, 3)


def gathered(pages: Tensor, block_table: Tensor) -> Tensor:
    """The caches of sequences, `(B, Hkv, S, D)`, copied out of pages `(num_blocks, Hkv, page_size, D)`."""
    found = pages[block_table.clamp(0, pages.shape[0] - 1).to(torch.int64)]
    return found.transpose(1, 2).flatten(2, 3)
