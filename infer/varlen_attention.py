"""Attention by torch's own kernel for paged memory, on NVIDIA GPUs.

T new tokens of B sequences side by side; H query heads, Hkv key heads, Dh head size; N blocks of S tokens.
"""

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class VarlenLayout(NamedTuple):
    """Where the queries and keys of each sequence lie."""

    first_rows: Tensor  # [B + 1] int32, in the packed batch
    num_keys: Tensor  # [B] int32
    block_tables: Tensor  # [B, n] int32, short ones are padded
    max_queries: int
    max_keys: int


def varlen_layout(spans: Items[tuple[list[int], int, int]], block_size: int, device: torch.device) -> VarlenLayout:
    """Of spans `(block_table, start, stop)`; all numbers go to the device in one piece."""
    lengths = [stop - start for _, start, stop in spans]
    stops = [stop for _, _, stop in spans]
    num_blocks = -(-max(stops) // block_size)
    tables = [table[:num_blocks] + [0] * (num_blocks - len(table)) for table, _, _ in spans]
    numbers = [0, *accumulate(lengths), *stops, *(block for table in tables for block in table)]
    rows, keys, blocks = torch.tensor(numbers, dtype=torch.int32, device=device).split(
        [len(spans) + 1, len(spans), len(spans) * num_blocks]
    )
    return VarlenLayout(rows, keys, blocks.view(len(spans), num_blocks), max(lengths), max(stops))


def varlen_attention(
    query: Tensor,  # [T, H, Dh]
    keys: Tensor,  # [N, S, Hkv, Dh], the whole pool
    values: Tensor,  # [N, S, Hkv, Dh]
    layout: VarlenLayout,
    *,
    scaling: float,
    window: int | None,  # the token itself included
) -> Tensor:  # [T, H, Dh]
    """Causal attention of each sequence's newest tokens over all of its own."""
    from torch.nn.attention.varlen import varlen_attn  # newer than the oldest torch that we run on

    output = varlen_attn(
        query.contiguous(),
        keys,
        values,
        layout.first_rows,
        None,
        layout.max_queries,
        layout.max_keys,
        scale=scaling,
        # How many keys before the token itself, -1 for all, and behind it.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=layout.num_keys,
        block_table=layout.block_tables,
    )
    assert isinstance(output, Tensor)  # a pair only where more is asked for
    return output
