"""Runs parts of the model over packed batches of sequences.

T tokens side by side; D hidden size; V vocabulary; W positions in the window of a sequence.
"""

from collections.abc import Sequence as Items
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..heads import EarlyExitModel, ExitHead, context_positions
from .attention import PagedAttention, Span
from .kv_cache import KVCache
from .levels import Level
from .sequence import Chunk, Sequence


class ModelRunner:
    """Runs levels and heads, and keeps between them what the next one needs.

    Hidden states wait in windows `[rows, W, D]`, one row a running sequence, position modulo W: a rollback is a
    smaller count and moves nothing, and memory does not grow with the context.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        levels: tuple[Level, ...],
        kv_cache: KVCache,
        num_rows: int,
        window: int,
        *,
        is_exact: bool = False,  # attend as exact mode does; the model must be row-invariant
        by_varlen: bool = False,  # attend by the GPU's paged kernel
    ) -> None:
        self.model = model
        self.levels = levels
        self._kv_cache = kv_cache
        self._window = window
        self._attention = partial(PagedAttention, is_exact=is_exact, by_varlen=by_varlen)
        backbone = model.backbone
        shape = (num_rows * window, backbone.hidden_size)
        self._final_states = torch.zeros(shape, dtype=backbone.dtype, device=backbone.device)
        self._hidden = [torch.zeros_like(self._final_states) for _ in levels[:-1]]

    def vocab_ids(self, index: int) -> Tensor | None:  # [V_d] int64
        """The token ids that level `index` scores; None is the whole vocabulary."""
        head = self.levels[index].head
        return None if head is None else self._head(self.levels[index]).draft_vocab_ids

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> Tensor | None:  # [C, V], of C chunks that reach their sequence's end
        """Read committed tokens at every level; logits of what follows those read to the end, None if none is."""
        backbone = self.model.backbone
        sequences = [chunk.sequence for chunk in chunks]
        bounds = [(chunk.start, chunk.stop) for chunk in chunks]
        positions = self._positions(bounds)
        attend = self._attend(sequences, bounds)
        ids = [token_id for chunk in chunks for token_id in chunk.sequence.token_ids[chunk.start : chunk.stop]]
        hidden = backbone.embed(torch.tensor(ids, device=backbone.device), positions)
        exits = []
        for level in self.levels:
            hidden = backbone.run_layers(hidden, level.start, level.stop, positions, attend)
            exits.append(hidden)
        states = backbone.final_norm(hidden)
        blocks = [index for index in range(len(self.levels) - 1) if self._head(self.levels[index]).has_block]
        if blocks:
            context = self._states_before(states, chunks)
            for index in blocks:
                self._head(self.levels[index])(exits[index], context, positions, attend)
        last_rows = np.cumsum([stop - start for start, stop in bounds]) - 1
        ends = []
        for chunk, last_row in zip(chunks, last_rows, strict=True):
            sequence, length = chunk.sequence, chunk.stop - chunk.start
            kept = min(length, self._window)
            rows = states[0, last_row + 1 - kept : last_row + 1]
            self._final_states[self._window_slots([sequence], [(chunk.stop - kept, chunk.stop)])] = rows
            sequence.num_computed = [chunk.stop] * len(self.levels)
            sequence.num_head_computed = [chunk.stop] * (len(self.levels) - 1)
            sequence.stats.num_prefill_layer_passes += length * backbone.num_layers
            if chunk.stop == len(sequence.token_ids):
                ends.append(int(last_row))
        return backbone.logits(states[0, ends]) if ends else None

    @torch.inference_mode()
    def advance(self, index: int, sequences: list[Sequence]) -> None:
        """Run level `index` over all known tokens that it has not seen; the level before it must have."""
        level, backbone = self.levels[index], self.model.backbone
        sequences = [sequence for sequence in sequences if sequence.num_computed[index] < sequence.num_known]
        if not sequences:
            return
        bounds = [(sequence.num_computed[index], sequence.num_known) for sequence in sequences]
        positions = self._positions(bounds)
        slots = self._window_slots(sequences, bounds)
        if index == 0:
            ids = [i for sequence, (start, _) in zip(sequences, bounds, strict=True) for i in sequence.known_ids(start)]
            hidden = backbone.embed(torch.tensor(ids, device=backbone.device), positions)
        else:
            hidden = self._hidden[index - 1][slots].unsqueeze(0)
        if level.start < level.stop:
            attend = self._attend(sequences, bounds)
            hidden = backbone.run_layers(hidden, level.start, level.stop, positions, attend)
        if level.head is None:
            self._final_states[slots] = backbone.final_norm(hidden)[0]
        else:
            self._hidden[index][slots] = hidden[0]
        for sequence, (start, stop) in zip(sequences, bounds, strict=True):
            sequence.num_computed[index] = stop
            passes = (stop - start) * (level.stop - level.start)
            sequence.stats.levels[level.name].num_layer_passes += passes

    @torch.inference_mode()
    def erase_stale(self, sequence: Sequence) -> None:
        """Forget keys and values behind all that stands: NaN among them would reach others through its mask."""
        self._kv_cache.erase(sequence.block_table, max(sequence.num_computed))

    @torch.inference_mode()
    def score(self, index: int, sequences: list[Sequence], starts: Items[int]) -> Tensor:
        """Logits of level `index` at positions `[starts[b], known)` of each sequence, packed: `[T, V or V_d]`.

        `advance` must have run over them.
        """
        bounds = [(start, sequence.num_known) for sequence, start in zip(sequences, starts, strict=True)]
        level = self.levels[index]
        if level.head is None:
            return self.model.backbone.logits(self._final_states[self._window_slots(sequences, bounds)])
        return self.model.exit_logits(level.head, self._run_head(index, sequences, bounds))

    def _run_head(self, index: int, sequences: list[Sequence], bounds: list[tuple[int, int]]) -> Tensor:  # [T, D]
        head = self._head(self.levels[index])
        wanted = bounds
        if head.has_block:
            # Positions that no draft was asked from (after a bonus token) must still be in the block's cache.
            bounds = [
                (min(s.num_head_computed[index], start), stop)
                for s, (start, stop) in zip(sequences, wanted, strict=True)
            ]
        positions = self._positions(bounds)
        hidden = self._hidden[index][self._window_slots(sequences, bounds)].unsqueeze(0)
        context = self._context(sequences, bounds, positions) if head.config.committed_context else None
        state = head(hidden, context, positions, self._attend(sequences, bounds))[0]
        if not head.has_block:
            return state
        for sequence, (start, stop) in zip(sequences, bounds, strict=True):
            sequence.num_head_computed[index] = stop
            sequence.stats.levels[self.levels[index].name].num_layer_passes += stop - start
        if bounds == wanted:
            return state
        rows: list[int] = []
        offset = 0
        for (start, stop), (first, _) in zip(bounds, wanted, strict=True):
            rows.extend(range(offset + first - start, offset + stop - start))
            offset += stop - start
        return state[rows]

    def _states_before(self, states: Tensor, chunks: list[Chunk]) -> Tensor:  # states and result: [1, T, D]
        """The context of positions that are read in: the final state of the position before, zeros at position 0."""
        device = states.device
        first_rows = np.cumsum([0] + [chunk.stop - chunk.start for chunk in chunks[:-1]])
        slots = self._window_slots(
            [chunk.sequence for chunk in chunks], [(chunk.start - 1, chunk.start) for chunk in chunks]
        )
        has_before = torch.tensor([chunk.start > 0 for chunk in chunks], device=device).unsqueeze(-1)
        context = states.roll(1, dims=1)
        # Chosen, not multiplied by 0: what lies in the place of a state that does not exist may be NaN.
        context[0, torch.from_numpy(first_rows).to(device)] = torch.where(has_before, self._final_states[slots], 0)
        return context

    def _context(self, sequences: list[Sequence], bounds: list[tuple[int, int]], positions: Tensor) -> Tensor:
        last_known = np.repeat([s.num_computed[-1] - 1 for s in sequences], [stop - start for start, stop in bounds])
        known = context_positions(positions, torch.from_numpy(last_known).to(positions.device))
        rows = np.repeat([s.window_row for s in sequences], [stop - start for start, stop in bounds])
        slots = torch.from_numpy(rows * self._window).to(positions.device) + known % self._window
        return self._final_states[slots].unsqueeze(0)

    def _head(self, level: Level) -> ExitHead:
        assert level.head is not None
        head = self.model.heads[level.head]
        assert isinstance(head, ExitHead)
        return head

    def _positions(self, bounds: list[tuple[int, int]]) -> Tensor:  # [T]
        device = self.model.backbone.device
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in bounds])

    def _window_slots(self, sequences: list[Sequence], bounds: list[tuple[int, int]]) -> Tensor:  # [T]
        slots = [
            sequence.window_row * self._window + position % self._window
            for sequence, (start, stop) in zip(sequences, bounds, strict=True)
            for position in range(start, stop)
        ]
        return torch.tensor(slots, device=self.model.backbone.device)

    def _attend(self, sequences: list[Sequence], bounds: list[tuple[int, int]]) -> PagedAttention:
        spans = [
            Span(sequence.block_table, start, stop) for sequence, (start, stop) in zip(sequences, bounds, strict=True)
        ]
        return self._attention(self._kv_cache, spans, self.model.backbone.device)
