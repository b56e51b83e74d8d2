"""Paged memory for keys and values.

N blocks of S tokens; Hkv key heads of size Dh.
"""

import torch
from torch import Tensor

from ..heads import Pools


class KVCache:
    """One pool of keys and one of values for each layer, `[N * S, Hkv, Dh]`; a token's place in it is its slot.

    The pools are not filled: the operating system hands out their memory as blocks come into use.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.pools = Pools(self.keys, self.values)
        # Views `[1, Hkv, N * S, Dh]`, of which one more operation makes what attention reads.
        self._heads_first = [
            (keys.unsqueeze(0).transpose(1, 2), values.unsqueeze(0).transpose(1, 2))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def write(self, layer: int, slots: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Put keys and values `[T, Hkv, Dh]` at `slots` ([T] int64, or a slice)."""
        self.keys[layer][slots] = key
        self.values[layer][slots] = value

    def clear(self, layer: int, blocks: Tensor) -> None:  # blocks: [n] int64
        """Fill blocks with zeros: what a block is not yet filled with must be a number when it is read."""
        for pool in (self.keys[layer], self.values[layer]):
            pool.view(-1, self.block_size, *pool.shape[1:]).index_fill_(0, blocks, 0)

    def erase(self, block_table: list[int], start: int) -> None:
        """Fill all of a sequence's slots from position `start` on with zeros, at every layer."""
        size = self.block_size
        slots = [block_table[place // size] * size + place % size for place in range(start, len(block_table) * size)]
        for pool in (*self.keys, *self.values):
            pool[slots] = 0

    def move(self, sources: Tensor, targets: Tensor) -> None:  # [T] int64 each, slots
        """Put what lies at `sources` at `targets`, at every layer; each source is read before any target is written."""
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def read(self, layer: int, place: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, `[1, Hkv, T, Dh]` each for a slice of T slots (a view), `[B, Hkv, n * S, Dh]` for
        `[B, n]` blocks."""
        if isinstance(place, slice):
            keys, values = self._heads_first[layer]
            length = place.stop - place.start
            return keys.narrow(2, place.start, length), values.narrow(2, place.start, length)
        return self._gather(self.keys[layer], place), self._gather(self.values[layer], place)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values, `[N, S, Hkv, Dh]` each (views)."""
        keys, values = self.keys[layer], self.values[layer]
        shape = (-1, self.block_size, *keys.shape[1:])
        return keys.view(shape), values.view(shape)

    def _gather(self, pool: Tensor, blocks: Tensor) -> Tensor:
        # Block by block: rows of some kilobytes are copied at the memory's speed, single tokens are not.
        rows = pool.view(len(pool) // self.block_size, -1).index_select(0, blocks.flatten())
        return rows.view(len(blocks), -1, *pool.shape[1:]).transpose(1, 2)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes in a cache of these shapes."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
