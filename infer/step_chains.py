"""Chains of our own kernels' steps, recorded: the host says all that is new of a round in one piece of numbers.

To tell the kernels what to do takes Python as long as a small layer takes them. So a chain is told once. It reads how
many rows there are, where they stand, which tokens they are, and the blocks of their texts from one tensor of numbers;
all else, weights, cache and windows, stays in its place. To do it again for other rows, if there is room for them, is
to write other numbers there, as with `cuda_graph` on a GPU.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..heads import MAX_ATTENDED_ROWS, NotNative, Places, StepChain
from .attention import PagedAttention, new_block_ids
from .kv_cache import KVCache
from .packed_rows import NUM_COLUMNS, PackedRows, Pass, RowPacker, spans_of
from .varlen_attention import power_of_two

Output = TypeVar("Output")

MAX_KEPT_ROWS = 256
"""Rows of all passes of the chains that are kept, those used last: no more rows of logits are kept with them."""
MIN_WIDTH = 8
"""Blocks of a table, at least: few chains serve a growing text."""


class PassRoom(NamedTuple):
    """What tells how many numbers a pass has room for."""

    max_rows: int
    num_at_once: int
    """Of these, that go through at once."""
    max_tables: int
    """Sequences,"""
    table_width: int
    """and blocks of each."""

    @property
    def sizes(self) -> list[int]:
        """Of its parts: the number of rows, columns, the sequence of each row, tables, new blocks."""
        return [
            1,
            NUM_COLUMNS * self.max_rows,
            self.max_rows,
            self.max_tables * self.table_width,
            1 + self.max_rows,
        ]


class Recorded(NamedTuple, Generic[Output]):
    """A chain, and what it gives when it is run: the next run overwrites it."""

    chain: StepChain
    output: Output
    numbers: np.ndarray
    num_rows: int
    """That it has room for, of all passes."""


class StepChains:
    """The chains of one runner, on a CPU."""

    def __init__(
        self,
        packer: RowPacker,
        kv_cache: KVCache,
        row_step: int,  # see `Backbone.row_step`: where each row costs its own time, kernels choose by their number
    ) -> None:
        self._packer = packer
        self._kv_cache = kv_cache
        self._room = partial(_room, rounds_rows=row_step > 1)
        self._recorded: dict[Hashable, Recorded] = {}
        self._refused: set[Hashable] = set()

    def __call__(
        self,
        name: Hashable,  # of all that `record` depends on besides what it is given
        passes: Items[Pass],
        lists: Items[list[int]],  # more numbers that the chain reads
        record: Callable[[StepChain, list[PackedRows], list[Tensor]], Output],  # may raise NotNative
    ) -> Recorded[Output] | None:
        """The chain over these passes, to be run; None where our own kernels do not take something of it.

        It is recorded over rows of which there may be more than the passes have, and over lists that begin with their
        length and may go on behind their end.
        """
        rooms = [self._room(each) for each in passes]
        lengths = [power_of_two(len(each)) for each in lists]
        key = name, *rooms, *lengths
        if key in self._refused or max(room.num_at_once for room in rooms) > MAX_ATTENDED_ROWS:
            return None
        recorded = self._recorded.pop(key, None) or self._record(rooms, lengths, record)
        if recorded is None:
            self._refused.add(key)
            return None
        numbers = [number for each, room in zip(passes, rooms, strict=True) for number in self._numbers(each, room)]
        for each, length in zip(lists, lengths, strict=True):
            numbers += [len(each), *_padded(each, length)]
        recorded.numbers[:] = numbers
        self._recorded[key] = recorded  # as the newest
        while sum(each.num_rows for each in self._recorded.values()) > MAX_KEPT_ROWS:
            del self._recorded[next(iter(self._recorded))]
        return recorded

    def forget(self) -> None:
        """To be called when the model's tensors may have changed: chains read them where they lay."""
        self._recorded.clear()
        self._refused.clear()

    def _record(
        self,
        rooms: list[PassRoom],
        lengths: list[int],
        record: Callable[[StepChain, list[PackedRows], list[Tensor]], Output],
    ) -> Recorded[Output] | None:
        sizes = [size for room in rooms for size in room.sizes] + [1 + length for length in lengths]
        numbers = torch.zeros(sum(sizes), dtype=torch.int64, device="cpu")
        parts = iter([numbers[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))])
        rows = [self._rows(room, *(next(parts) for _ in room.sizes)) for room in rooms]
        chain = StepChain()
        try:
            output = record(chain, rows, list(parts))
        except NotNative:
            return None
        return Recorded(chain, output, numbers.numpy(), sum(room.num_at_once for room in rooms))

    def _numbers(self, rows: Pass, room: PassRoom) -> list[int]:
        owners = list(dict.fromkeys(rows.sequences))
        place_of = {sequence: place for place, sequence in enumerate(owners)}
        of_rows = [
            place_of[sequence]
            for sequence, (start, stop) in zip(rows.sequences, rows.bounds, strict=True)
            for _ in range(start, stop)
        ]
        tables = [block for sequence in owners for block in _padded(sequence.block_table, room.table_width)]
        blocks = new_block_ids(spans_of(rows), self._kv_cache.block_size)
        return [
            len(of_rows),
            *self._packer.columns(rows, room.max_rows),
            *_padded(of_rows, room.max_rows),
            *_padded(tables, room.max_tables * room.table_width),
            len(blocks),
            *_padded(blocks, room.max_rows),
        ]

    def _rows(
        self, room: PassRoom, count: Tensor, columns: Tensor, of_rows: Tensor, tables: Tensor, new_blocks: Tensor
    ) -> PackedRows:
        ids, positions, window_slots, context_slots = columns.view(NUM_COLUMNS, -1).unbind()
        block_size = self._kv_cache.block_size
        places = Places.of(of_rows, positions, tables.view(room.max_tables, -1), block_size)
        attend = PagedAttention.of_places(self._kv_cache, places, new_blocks, room.table_width * block_size)
        return PackedRows(ids, positions, window_slots, context_slots, attend, count, room.num_at_once)


def _room(rows: Pass, *, rounds_rows: bool) -> PassRoom:
    num_rows = rows.num_rows
    num_at_once = rows.num_at_once or num_rows
    return PassRoom(
        power_of_two(num_rows) if rounds_rows else num_rows,
        power_of_two(num_at_once) if rounds_rows else num_at_once,
        power_of_two(len(set(rows.sequences))),
        power_of_two(max(MIN_WIDTH, *(len(sequence.block_table) for sequence in rows.sequences))),
    )


def _padded(numbers: list[int], length: int) -> list[int]:
    return numbers + [0] * (length - len(numbers))
