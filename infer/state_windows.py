"""Where the states of a running sequence's newest positions lie, for what reads them next.

T rows; D hidden size; W positions of a window.
"""

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from ..heads import StateRows
from .packed_rows import Bounds
from .sequence import Chunk, Sequence
from .transfer import to_device


class StateWindows:
    """Windows `[rows, W, D]` of each level, one row a running sequence, position modulo W: a rollback is a smaller
    count and moves nothing, and memory does not grow with the context.

    Of the target they hold final states, of those below hidden ones. The last row is nobody's.
    """

    def __init__(
        self,
        num_levels: int,
        num_rows: int,
        size: int,  # W
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size = size
        shape = (num_rows * size, hidden_size)
        self.tables = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_levels)]
        """By level, `[rows * W, D]` each."""
        self._device = device

    @property
    def final(self) -> Tensor:  # [rows * W, D]
        """The target's."""
        return self.tables[-1]

    def slots(self, sequences: Items[Sequence], bounds: Bounds) -> list[int]:
        """Where the states of positions `[start, stop)` of each sequence lie."""
        return [
            sequence.window_row * self.size + position % self.size
            for sequence, (start, stop) in zip(sequences, bounds, strict=True)
            for position in range(start, stop)
        ]

    def places(self, sequence: Sequence, nodes: Items[int]) -> list[int]:
        """Where the states of a tree's nodes lie."""
        root = sequence.num_known - 1
        return [sequence.window_row * self.size + (root + node) % self.size for node in nodes]

    def final_states(self, slots: list[int]) -> Tensor:  # [T, D]
        """Those at some slots."""
        return self.final[to_device(slots, self._device)]

    def move(self, sources: Tensor, targets: Tensor) -> None:  # [T] int64 each, slots
        """Put what lies at `sources` at `targets`, at every level; each source is read before any target is written."""
        for states in self.tables:
            states[targets] = states[sources]

    def keep_newest(self, chunks: list[Chunk], states: Tensor) -> None:  # [1, T, D], of the chunks
        """Keep the newest final states of what was read, as many as windows hold."""
        last = 0
        for chunk in chunks:
            last += chunk.stop - chunk.start
            kept = min(chunk.stop - chunk.start, self.size)
            slots = self.slots([chunk.sequence], [(chunk.stop - kept, chunk.stop)])
            self.final[to_device(slots, self._device)] = states[0, last - kept : last]

    def contexts(self, chunks: list[Chunk], states: Tensor) -> StateRows:  # [1, T, D], of the chunks
        """What a head takes for positions that are read: the final state of the one before, zeros at position 0."""
        first_rows = np.cumsum([0] + [chunk.stop - chunk.start for chunk in chunks[:-1]])
        slots = self.slots([chunk.sequence for chunk in chunks], [(chunk.start - 1, chunk.start) for chunk in chunks])
        has_before = torch.tensor([chunk.start > 0 for chunk in chunks], device=self._device).unsqueeze(-1)
        context = states.roll(1, dims=1)[0]
        # Chosen, not multiplied by 0: what lies in the place of a state that does not exist may be NaN.
        first = torch.where(has_before, self.final_states(slots), 0)
        context[torch.from_numpy(first_rows).to(self._device)] = first
        return StateRows(context, None)
