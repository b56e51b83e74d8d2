"""Which blocks of the KV cache belong to whom. Integers only."""

import heapq


class BlockManager:
    """Hands out blocks of `block_size` tokens and takes them back.

    The lowest free block goes first, so that a sequence that runs alone lies in one piece.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def can_grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.num_needed(num_tokens) - len(block_table) <= len(self._free)

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Add blocks to `block_table` until it holds `num_tokens`; ask `can_grow` before."""
        while len(block_table) < self.num_needed(num_tokens):
            block_table.append(heapq.heappop(self._free))

    def shrink(self, block_table: list[int], num_tokens: int) -> None:
        """Take back the blocks behind the first `num_tokens` tokens."""
        while len(block_table) > self.num_needed(num_tokens):
            heapq.heappush(self._free, block_table.pop())
