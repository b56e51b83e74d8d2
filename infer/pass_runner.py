"""Runs packed rows through a part of a level, kernel by kernel or as one CUDA graph."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from .cuda_graph import MAX_ROWS, CudaGraphs
from .kv_cache import KVCache
from .packed_rows import PackedRows, PaddedRows, Pass, RowPacker

AnyRows = PackedRows | PaddedRows


class Part(NamedTuple):
    """What of a level is run at once: its layers or its head."""

    name: str
    run: Callable[[PackedRows], Tensor | None]
    kv_layers: Items[int]
    """Where it keeps keys and values."""


class PassRunner:
    """Packs passes as their parts are run: in the fixed shapes of graphs where all of them can be graphs."""

    def __init__(self, packer: RowPacker, kv_cache: KVCache, parts: Items[Part], *, uses_graphs: bool) -> None:
        self._packer = packer
        self._kv_cache = kv_cache
        self._graphs = CudaGraphs()
        self._graphed = {part.name for part in parts if uses_graphs and self._can_be_graph(part)}

    def pack(self, parts: Items[Part], passes: list[Pass]) -> Items[AnyRows]:
        """AnyRows that each of `parts` can be run over."""
        if all(part.name in self._graphed for part in parts) and all(each.trees is None for each in passes):
            num_rows = max(sum(stop - start for start, stop in each.bounds) for each in passes)
            if num_rows <= MAX_ROWS:
                return self._packer.pad(passes)
        return self._packer.pack(passes)

    def __call__(self, part: Part, rows: AnyRows) -> Tensor | None:
        """Run it; the next call may overwrite what it returns, of which padded rows mean nothing."""
        if isinstance(rows, PackedRows):
            return part.run(rows)
        if rows.new_blocks is not None:
            for kv_layer in part.kv_layers:
                self._kv_cache.clear(kv_layer, rows.new_blocks)
        shape = rows.shape
        return self._graphs(
            (part.name, shape), rows.numbers, lambda numbers: part.run(self._packer.unpack(numbers, shape))
        )

    def forget_graphs(self) -> None:
        """The model's tensors have moved: graphs would read where they were."""
        self._graphs = CudaGraphs()

    @torch.inference_mode()
    def _can_be_graph(self, part: Part) -> bool:
        """Tried with a row that is nobody's."""
        (rows,) = self._packer.pad([Pass([], [])])
        return self._graphs.can_record(
            (part.name, rows.shape),
            rows.numbers,
            lambda numbers: part.run(self._packer.unpack(numbers, rows.shape)),
        )
