"""Chains of our own kernels' steps, recorded: the host says all that is new of a pass in one piece of numbers.

To tell the kernels what to do takes Python as long as a small layer takes them. So a chain is told once. It reads
where rows stand, which tokens they are, and the blocks of their texts from one tensor of numbers; all else, weights,
cache and windows, stays in its place. To do it again for passes of the same shapes is to write other numbers there, as
with `cuda_graph` on a GPU.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..heads import MAX_ATTENDED_ROWS, NotNative, Places, StepChain
from .attention import PagedAttention, new_block_ids
from .kv_cache import KVCache
from .packed_rows import NUM_COLUMNS, PackedRows, Pass, RowPacker, spans_of

Output = TypeVar("Output")

MAX_CHAINS = 32
"""Chains that are kept, those used last."""
MAX_ROWS = 16
"""Rows of a pass of these: with more the kernels take their time, and what they write theirs in memory."""
TABLE_STEP = 8
"""Blocks by which tables grow, so that few shapes serve a growing text."""


class PassShape(NamedTuple):
    """What tells how many numbers a pass has."""

    lengths: tuple[int, ...]
    """Rows side by side, of each sequence or of its parts."""
    num_at_once: int | None
    """As of the pass."""
    num_tables: int
    """Sequences,"""
    table_width: int
    """and blocks of each."""
    num_new_blocks: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of its parts: columns, the sequence of each row, tables, new blocks."""
        num_rows = sum(self.lengths)
        return NUM_COLUMNS * num_rows, num_rows, self.num_tables * self.table_width, self.num_new_blocks


class Recorded(NamedTuple, Generic[Output]):
    """A chain, and what it gives when it is run: the next run overwrites it."""

    chain: StepChain
    output: Output
    numbers: np.ndarray


class StepChains:
    """The chains of one runner, on a CPU."""

    def __init__(self, packer: RowPacker, kv_cache: KVCache) -> None:
        self._packer = packer
        self._kv_cache = kv_cache
        self._recorded: dict[Hashable, Recorded | None] = {}

    def __call__(
        self,
        name: Hashable,  # of all that `record` depends on besides its rows
        passes: Items[Pass],
        record: Callable[[StepChain, list[PackedRows]], Output],  # may raise NotNative
    ) -> Recorded[Output] | None:
        """The chain over these passes, to be run; None where our own kernels do not take something of it."""
        if any((each.num_at_once or each.num_rows) > MAX_ATTENDED_ROWS for each in passes):
            return None
        found = [self._numbers(each) for each in passes]
        shapes = [shape for shape, _ in found]
        numbers = [number for _, own in found for number in own]
        key = name, *shapes
        if key in self._recorded:
            recorded = self._recorded.pop(key)
        else:
            recorded = self._record(shapes, len(numbers), record)
        if recorded is None or all((each.num_at_once or each.num_rows) <= MAX_ROWS for each in passes):
            self._recorded[key] = recorded
        if len(self._recorded) > MAX_CHAINS:
            del self._recorded[next(iter(self._recorded))]
        if recorded is not None:
            recorded.numbers[:] = numbers
        return recorded

    def forget(self) -> None:
        """To be called when the model's tensors may have changed: chains read them where they lay."""
        self._recorded.clear()

    def _record(
        self, shapes: list[PassShape], num_numbers: int, record: Callable[[StepChain, list[PackedRows]], Output]
    ) -> Recorded[Output] | None:
        numbers = torch.zeros(num_numbers, dtype=torch.int64)
        chain = StepChain()
        try:
            return Recorded(chain, record(chain, self._rows(shapes, numbers)), numbers.numpy())
        except NotNative:
            return None

    def _numbers(self, rows: Pass) -> tuple[PassShape, list[int]]:
        owners = list(dict.fromkeys(rows.sequences))
        place_of = {sequence: place for place, sequence in enumerate(owners)}
        lengths = tuple(stop - start for start, stop in rows.bounds)
        of_rows = [place_of[s] for s, length in zip(rows.sequences, lengths, strict=True) for _ in range(length)]
        width = max(len(sequence.block_table) for sequence in owners)
        width += -width % TABLE_STEP
        tables = [block for s in owners for block in s.block_table + [0] * (width - len(s.block_table))]
        blocks = new_block_ids(spans_of(rows), self._kv_cache.block_size)
        shape = PassShape(lengths, rows.num_at_once, len(owners), width, len(blocks))
        return shape, [*self._packer.columns(rows, len(of_rows)), *of_rows, *tables, *blocks]

    def _rows(self, shapes: list[PassShape], numbers: Tensor) -> list[PackedRows]:
        """Views of the numbers, pass by pass."""
        sizes = [size for shape in shapes for size in shape.sizes]
        parts = iter([numbers[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))])
        return [self._rows_of(shape, *(next(parts) for _ in shape.sizes)) for shape in shapes]

    def _rows_of(
        self, shape: PassShape, columns: Tensor, of_rows: Tensor, tables: Tensor, new_blocks: Tensor
    ) -> PackedRows:
        ids, positions, window_slots, context_slots = columns.view(NUM_COLUMNS, -1).unbind()
        block_size = self._kv_cache.block_size
        attend = PagedAttention.of_places(
            self._kv_cache,
            Places.of(of_rows, positions, tables.view(shape.num_tables, -1), block_size),
            new_blocks if len(new_blocks) else None,
            shape.table_width * block_size,
        )
        return PackedRows(ids, positions, window_slots, context_slots, attend)
