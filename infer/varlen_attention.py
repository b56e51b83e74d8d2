"""Attention by torch's own kernel for paged memory, on NVIDIA GPUs.

T new tokens of B sequences side by side; H query heads, Hkv key heads, Dh head size; N blocks of S tokens.
"""

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class VarlenShape(NamedTuple):
    """Sizes of a packed batch that a kernel is called with; tensors of one shape differ in their numbers alone."""

    num_rows: int  # T
    num_seqs: int  # B
    num_blocks: int  # n, of the longest block table
    max_queries: int  # of one sequence, at most

    def padded(self) -> "VarlenShape":
        """The next of few shapes that has room for all."""
        if self.max_queries == 1:
            # The kernel takes a short way for one query a sequence, if there are as many of these as of those.
            num_rows = num_seqs = power_of_two(self.num_rows)
            return VarlenShape(num_rows, num_seqs, power_of_two(self.num_blocks), 1)
        num_rows = power_of_two(self.num_rows)
        return VarlenShape(num_rows, power_of_two(self.num_seqs), power_of_two(self.num_blocks), num_rows)


class VarlenLayout(NamedTuple):
    """Where the queries and keys of each sequence lie."""

    slots: Tensor  # [T] int64, where the new tokens go
    first_rows: Tensor  # [B + 1] int32, in the packed batch
    num_keys: Tensor  # [B] int32
    block_tables: Tensor  # [B, n] int32, short ones are padded
    max_queries: int
    max_keys: int


Spans = Items[tuple[list[int], int, int]]
"""The new tokens of each sequence: block table, start, stop."""


def varlen_shape(spans: Spans, block_size: int) -> VarlenShape:
    """The sizes that these have; at least one row, where there are none."""
    lengths = [stop - start for _, start, stop in spans]
    num_blocks = max((-(-stop // block_size) for _, _, stop in spans), default=1)
    return VarlenShape(max(sum(lengths), 1), max(len(spans), 1), num_blocks, max(lengths, default=1))


def varlen_numbers(spans: Spans, block_size: int, shape: VarlenShape, spare_slot: int) -> list[int]:
    """All integers of the layout, one behind the other; rows that no span has are written to the spare slot."""
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, start, stop in spans
        for position in range(start, stop)
    ]
    num_padded = shape.num_seqs - len(spans)
    first_rows = [0, *accumulate(stop - start for _, start, stop in spans)]
    numbers = slots + [spare_slot] * (shape.num_rows - len(slots))
    numbers += first_rows + first_rows[-1:] * num_padded
    numbers += [stop for _, _, stop in spans] + [0] * num_padded
    for table, _, _ in spans:
        numbers += table[: shape.num_blocks] + [0] * (shape.num_blocks - len(table))
    return numbers + [0] * (num_padded * shape.num_blocks)


def varlen_layout(
    numbers: Tensor,  # from `varlen_numbers`, on the device
    block_size: int,
    shape: VarlenShape,
) -> VarlenLayout:
    """The layout that the numbers say, as views of them and as copies in the kernel's type."""
    num_rows, num_seqs, num_blocks, max_queries = shape
    slots, for_kernel = numbers[:num_rows], numbers[num_rows:].to(torch.int32)
    first_rows, num_keys, tables = for_kernel.split([num_seqs + 1, num_seqs, num_seqs * num_blocks])
    block_tables = tables.view(num_seqs, num_blocks)
    return VarlenLayout(slots, first_rows, num_keys, block_tables, max_queries, num_blocks * block_size)


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


def power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()
