"""The rows of a pass: tokens of several sequences side by side, and where each of them lies.

T rows; B sequences; W positions in the window of a sequence. Whatever the host knows of a pass, and of all passes of a
draft, goes to the device in one piece.
"""

from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..heads import context_position
from .attention import PagedAttention, Span, new_blocks
from .kv_cache import KVCache
from .sequence import Sequence
from .token_tree import TokenTree
from .transfer import to_device
from .varlen_attention import VarlenShape, varlen_layout, varlen_numbers, varlen_shape

if TYPE_CHECKING:
    from .state_windows import StateWindows

NUM_COLUMNS = 4
"""Numbers of each row besides those for attention."""


Bounds = list[tuple[int, int]]
"""Positions `[start, stop)` of each sequence."""


class Pass(NamedTuple):
    """What runs through a level at once."""

    sequences: list[Sequence]
    bounds: Bounds
    has_ids: bool = False
    """Whether the rows' tokens are known and are read."""
    attends: bool = True
    """Whether any layer is among what it runs through."""
    num_at_once: int | None = None
    """Rows that go through at once, where more passes follow over the next ones; None: all."""
    trees: list[TokenTree] | None = None
    """Of each sequence: the tokens of its rows, which then stand behind the start in a tree; the bounds are the places
    of its nodes, in the cache and the windows, and not their positions."""

    @property
    def num_rows(self) -> int:
        """T."""
        return sum(stop - start for start, stop in self.bounds)


class PackedRows(NamedTuple):
    """The rows of one pass, on the device."""

    token_ids: Tensor  # [T] int64, zeros where they are not known yet, or not read
    positions: Tensor  # [T] int64
    window_slots: Tensor  # [T] int64, where their hidden and final states lie
    context_slots: Tensor  # [T] int64, where the final states lie that are their committed context
    attend: PagedAttention
    number: Tensor | None = None  # [1] int64, how many of them there are when they are run over; None: all
    num_at_once: int | None = None  # that go through at once, where more passes follow over the next ones

    def at_once(self) -> "PackedRows":
        """Those that go first; the others stand behind them, as attention and positions say too."""
        number = self.num_at_once
        columns = self.token_ids[:number], self.window_slots[:number], self.context_slots[:number]
        return PackedRows(columns[0], self.positions, *columns[1:], self.attend)


class PaddedRows(NamedTuple):
    """The rows of one pass as numbers of a fixed shape; see `RowPacker.unpack`."""

    token_ids: Tensor  # [T] int64, the first of the numbers
    numbers: Tensor  # int64
    shape: VarlenShape
    new_blocks: Tensor | None  # of the KV cache, to be cleared first


class RowPacker:
    """Packs the rows of passes over one cache and windows.

    The last block of the cache and the last row of windows are nobody's: padded rows are written there.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        windows: "StateWindows",
        device: torch.device,
        *,
        is_exact: bool,
        by_varlen: bool,
    ) -> None:
        self._kv_cache = kv_cache
        self._windows = windows
        self._spare_window_slot = len(windows.final) - windows.size
        self._spare_slot = len(kv_cache.keys[0]) - kv_cache.block_size
        self._device = device
        self._attention = partial(PagedAttention, kv_cache, is_exact=is_exact)
        self._by_varlen = by_varlen

    def pack(self, passes: Items[Pass]) -> list[PackedRows]:
        """The rows of each pass."""
        spans = [spans_of(each) for each in passes]
        columns = [self.columns(each, each.num_rows) for each in passes]
        # The paged kernel takes no mask.
        if self._by_varlen and all(each.trees is None for each in passes):
            size = self._kv_cache.block_size
            shapes = [varlen_shape(each, size) for each in spans]
            parts = [
                rows + varlen_numbers(each, size, shape, self._spare_slot)
                for rows, each, shape in zip(columns, spans, shapes, strict=True)
            ]
            uploaded_parts = zip(self._upload(parts), shapes, spans, strict=True)
            packed = [self._unpack(numbers, shape, each) for numbers, shape, each in uploaded_parts]
            for each_packed, each_pass in zip(packed, passes, strict=True):
                if each_pass.attends:
                    each_packed.attend.prepare()
            return packed
        attends = [
            self._attention(each, self._device, trees=each_pass.trees)
            for each, each_pass in zip(spans, passes, strict=True)
        ]
        places = [attend.place_numbers() if each.attends else [] for attend, each in zip(attends, passes, strict=True)]
        uploaded = self._upload([part for parts in zip(columns, places, strict=True) for part in parts])
        for attend, each_places, each_pass in zip(attends, uploaded[1::2], passes, strict=True):
            if each_pass.attends:
                attend.prepare(each_places)
        return [_packed(each, attend) for each, attend in zip(uploaded[::2], attends, strict=True)]

    def pad(self, passes: Items[Pass]) -> list[PaddedRows]:
        """The rows of each pass and some that are nobody's, so that many passes are of one shape."""
        size = self._kv_cache.block_size
        spans = [spans_of(each) for each in passes]
        shapes = [varlen_shape(each, size).padded() for each in spans]
        parts = [
            self.columns(each, shape.num_rows) + varlen_numbers(places, size, shape, self._spare_slot)
            for each, places, shape in zip(passes, spans, shapes, strict=True)
        ]
        return [
            PaddedRows(numbers[: shape.num_rows], numbers, shape, new_blocks(each, size, self._device))
            for numbers, shape, each in zip(self._upload(parts), shapes, spans, strict=True)
        ]

    def unpack(self, numbers: Tensor, shape: VarlenShape) -> PackedRows:
        """The rows that `PaddedRows.numbers` say; made of operations on the device alone."""
        return self._unpack(numbers, shape, [])

    def _unpack(self, numbers: Tensor, shape: VarlenShape, spans: list[Span]) -> PackedRows:
        columns, for_attention = numbers.tensor_split([NUM_COLUMNS * shape.num_rows])
        layout = varlen_layout(for_attention, self._kv_cache.block_size, shape)
        attend = self._attention(spans, self._device, layout=layout)
        return _packed(columns, attend)

    def columns(self, rows: Pass, num_rows: int) -> list[int]:
        """The columns of `PackedRows`, each padded to so many rows."""
        ids: list[int] = []
        positions: list[int] = []
        contexts: list[int] = []
        trees: Items[TokenTree | None] = rows.trees or [None] * len(rows.sequences)
        for sequence, (start, stop), tree in zip(rows.sequences, rows.bounds, trees, strict=True):
            own = range(start, stop) if tree is None else [start + depth for depth in tree.depths]
            if tree is not None:
                ids += tree.token_ids
            elif rows.has_ids:
                ids += sequence.known_ids(start)[: stop - start]
            positions += own
            size, last_known = self._windows.size, sequence.num_computed[-1] - 1
            first = sequence.window_row * size
            contexts += [first + context_position(position, last_known) % size for position in own]
        slots = self._windows.slots(rows.sequences, rows.bounds)
        none = [0] * (num_rows - len(positions))
        spare = [self._spare_window_slot] * len(none)
        ids += [0] * (num_rows - len(ids))
        return [*ids, *positions, *none, *slots, *spare, *contexts, *spare]

    def _upload(self, parts: list[list[int]]) -> Items[Tensor]:
        numbers = to_device([number for part in parts for number in part], self._device)
        bounds = pairwise([0, *accumulate(map(len, parts))])
        return [numbers[start:stop] for start, stop in bounds]


def _packed(columns: Tensor, attend: PagedAttention) -> PackedRows:
    ids, positions, window_slots, context_slots = columns.view(NUM_COLUMNS, -1).unbind()
    return PackedRows(ids, positions, window_slots, context_slots, attend)


def spans_of(rows: Pass) -> list[Span]:
    """Where its rows are to attend."""
    return [Span(s.block_table, start, stop) for s, (start, stop) in zip(rows.sequences, rows.bounds, strict=True)]


def rows_within(bounds: Bounds, wanted: Bounds, device: torch.device) -> Tensor | slice:
    """Which rows of a pass over `bounds` are wanted, as `places_within`."""
    if bounds == wanted:
        return slice(sum(stop - start for start, stop in bounds))
    return to_device(places_within(bounds, wanted), device)


def places_within(bounds: Bounds, wanted: Bounds) -> list[int]:
    """Which rows of a pass over `bounds` are wanted: the last ones of each sequence."""
    rows: list[int] = []
    offset = 0
    for (start, stop), (first, _) in zip(bounds, wanted, strict=True):
        rows.extend(range(offset + first - start, offset + stop - start))
        offset += stop - start
    return rows
