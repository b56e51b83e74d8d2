"""Paged memory for keys and values.

N blocks of S tokens; Hkv key heads of size Dh.
"""

import torch
from torch import Tensor


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

    def write(self, layer: int, slots: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Put keys and values `[T, Hkv, Dh]` at `slots` ([T] int64, or a slice)."""
        self.keys[layer][slots] = key
        self.values[layer][slots] = value

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at `slots`: `[1, S, Hkv, Dh]` each for a slice (a view), `[B, S, Hkv, Dh]` for [B, S]."""
        if isinstance(slots, slice):
            return self.keys[layer][slots].unsqueeze(0), self.values[layer][slots].unsqueeze(0)
        return self._gather(self.keys[layer], slots), self._gather(self.values[layer], slots)

    def _gather(self, pool: Tensor, slots: Tensor) -> Tensor:
        return pool.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:])


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes in a cache of these shapes."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
