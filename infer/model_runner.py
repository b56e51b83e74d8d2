"""Runs parts of the model over packed batches of sequences.

T tokens side by side; D hidden size; V vocabulary.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..heads import (
    MAX_ATTENDED_ROWS,
    EarlyExitModel,
    ExitHead,
    Highest,
    Native,
    NotNative,
    StateRows,
    States,
    StepChain,
    find_kernels,
    highest_step,
    run_native,
)
from .attention import IsKept, KeepOnly, PagedAttention
from .draft_plan import DraftPass, DraftPlan
from .kv_cache import KVCache
from .levels import Level
from .packed_rows import Bounds, PackedRows, Pass, RowPacker, rows_within
from .pass_runner import AnyRows, Part, PassRunner
from .sequence import Chunk, Sequence
from .state_windows import StateWindows
from .token_tree import TokenTree
from .transfer import to_device

R = TypeVar("R")

FEW = 8
"""Positions that a head may see with its next draft, or as many as cost no more than one: more are worth a pass of
their own."""


class ModelRunner:
    """Runs levels and heads; states wait between them in `StateWindows`."""

    def __init__(
        self,
        model: EarlyExitModel,
        levels: tuple[Level, ...],
        kv_cache: KVCache,
        num_rows: int,  # sequences that run at once
        window: int,  # positions whose states are kept
        *,
        max_lag: int,  # see `behind`
        is_exact: bool = False,  # attend as exact mode does; the model must be row-invariant
        by_varlen: bool = False,  # attend by the GPU's paged kernel
        uses_graphs: bool = False,  # with it: replay passes of few rows as CUDA graphs
    ) -> None:
        self.model = model
        self.levels = levels
        self._exit_heads = model.exit_heads
        self._kv_cache = kv_cache
        self._max_lag = max_lag
        backbone = model.backbone
        self.device = backbone.device
        self._few = max(FEW, backbone.row_step)
        self._has_kernels = backbone.device.type == "cpu" and find_kernels() is not None
        self._windows = StateWindows(
            len(levels), num_rows + 1, window, backbone.hidden_size, backbone.dtype, backbone.device
        )
        self._layers = [self._layers_part(index) for index in range(len(levels))]
        self._heads = [self._head_part(index) for index in range(len(levels) - 1)]
        parts = [*self._layers, *self._heads]
        self._whole = self._layers[0]
        if len(levels) > 1:
            self._whole = Part(
                "layers of all levels", partial(self._run_layers, range(len(levels))), range(backbone.num_layers)
            )
            parts.append(self._whole)
        self._packer = RowPacker(kv_cache, self._windows, backbone.device, is_exact=is_exact, by_varlen=by_varlen)
        self._run = PassRunner(self._packer, kv_cache, parts, uses_graphs=uses_graphs)
        self._drafts_natively = self._has_kernels and not is_exact and len(levels) > 1 and self._head(0).may_be_native

    def vocab_ids(self, index: int) -> Tensor | None:  # [V_d] int64
        """The token ids that level `index` scores; None is the whole vocabulary."""
        return None if self.levels[index].head is None else self._head(index).draft_vocab_ids

    def prefill(self, chunks: list[Chunk]) -> Tensor | None:  # [C, V], of C chunks that reach their sequence's end
        """Read committed tokens at every level; logits of what follows those read to the end, None if none is."""
        backbone = self.model.backbone
        sequences = [chunk.sequence for chunk in chunks]
        bounds = [(chunk.start, chunk.stop) for chunk in chunks]
        (rows,) = self._packer.pack([Pass(sequences, bounds, has_ids=True)])
        positions, attend = rows.positions, rows.attend
        hidden = backbone.embed(rows.token_ids, positions)
        stops = [level.stop for level in self.levels]
        *exits, states = backbone.run_through(hidden, 0, stops, positions, attend, norms=True)
        blocks = [index for index in range(len(self.levels) - 1) if self._head(index).has_block]
        if blocks:
            context = self._windows.contexts(chunks, states)
            for index in blocks:
                # Nothing is drafted behind what is read: of the head only keys and values are needed.
                self._keep_of_head(index, (StateRows(exits[index][0], None), context), positions, attend)
        self._windows.keep_newest(chunks, states)
        last_rows = np.cumsum([stop - start for start, stop in bounds]) - 1
        ends = []
        for chunk, last_row in zip(chunks, last_rows, strict=True):
            sequence, length = chunk.sequence, chunk.stop - chunk.start
            sequence.num_computed = [chunk.stop] * len(self.levels)
            sequence.num_head_computed = [chunk.stop] * (len(self.levels) - 1)
            sequence.stats.num_prefill_layer_passes += length * backbone.num_layers
            if chunk.stop == len(sequence.token_ids):
                ends.append(int(last_row))
        return backbone.logits(states[0, ends]) if ends else None

    def advance(self, index: int, sequences: list[Sequence]) -> None:
        """Run level `index` over all known tokens that it has not seen; the level before it must have."""
        sequences = [sequence for sequence in sequences if sequence.num_computed[index] < sequence.num_known]
        if not sequences:
            return
        bounds = [(sequence.num_computed[index], sequence.num_known) for sequence in sequences]
        part = self._layers[index]
        (rows,) = self._run.pack([part], [Pass(sequences, bounds, has_ids=index == 0, attends=bool(part.kv_layers))])
        self._run(part, rows)
        for sequence, (_, stop) in zip(sequences, bounds, strict=True):
            self._count_layers(index, sequence, stop)

    def judge(
        self,
        sequences: list[Sequence],
        starts: Items[int],
        *,
        is_whole: bool,  # run the levels below too, which have seen the same tokens before
    ) -> tuple[Tensor, Highest | None]:  # [T, V]
        """`advance` the target, or all levels, and `score` it; the highest logits where these are known too."""
        index = len(self.levels) - 1
        first = 0 if is_whole else index
        bounds = [(sequence.num_computed[first], sequence.num_known) for sequence in sequences]
        part = self._whole if is_whole else self._layers[index]
        (rows,) = self._run.pack([part], [Pass(sequences, bounds, has_ids=first == 0)])
        found = None
        if (
            self._has_kernels
            and isinstance(rows, PackedRows)
            and all(start == own[0] for start, own in zip(starts, bounds, strict=True))
        ):
            found = self._judge_at_once(range(first, index + 1), rows)
        if found is None:
            self._run(part, rows)
        for level in range(first, index + 1):
            for sequence, (_, stop) in zip(sequences, bounds, strict=True):
                self._count_layers(level, sequence, stop)
        return (self.score(index, sequences, starts), None) if found is None else found

    def _judge_at_once(self, levels: range, rows: PackedRows) -> tuple[Tensor, Highest] | None:
        """What `judge` gives, by a single call of our own kernels; None where these do not take something of it."""
        chain = StepChain()
        try:
            states = chain.add(self._layers_steps(levels, rows, rows.token_ids))[-1][0]
            logits = chain.add(self.model.backbone.logits_step(StateRows(states, None)))
            highest = chain.add(highest_step(logits, None, with_probabilities=False))
        except NotNative:
            return None
        chain.run()
        return logits, highest

    def advance_trees(self, index: int, sequences: list[Sequence], trees: list[TokenTree]) -> None:
        """Run level `index` over trees of tokens, whose roots are the newest known tokens; the level before it must
        have. They lie in the slots and window places from the root's on, for which there must be room, and none of
        their nodes counts as computed before `keep_paths`.
        """
        bounds = [(s.num_known - 1, s.num_known - 1 + len(tree)) for s, tree in zip(sequences, trees, strict=True)]
        level, part = self.levels[index], self._layers[index]
        (rows,) = self._run.pack([part], [Pass(sequences, bounds, has_ids=True, trees=trees)])
        self._run(part, rows)
        for sequence, (start, stop) in zip(sequences, bounds, strict=True):
            assert sequence.num_computed[index] == start
            sequence.stats.levels[level.name].num_layer_passes += (stop - start) * (level.stop - level.start)

    def score_nodes(self, sequences: Items[Sequence], nodes: Items[Items[int]]) -> Tensor:
        """The target's logits at nodes of each sequence's tree, packed: `[T, V]`; `advance_trees` must have run."""
        slots = [slot for s, chosen in zip(sequences, nodes, strict=True) for slot in self._windows.places(s, chosen)]
        return self.model.backbone.logits(self._windows.final_states(slots))

    def keep_paths(
        self,
        sequences: list[Sequence],
        paths: list[list[int]],  # nodes of each sequence's tree, root first, each the parent of the next
    ) -> None:
        """Keep these nodes of the trees that all levels have run over, and nothing else of them.

        What they left in the cache and the windows moves to where those of consecutive positions lie.
        """
        moved = [
            (sequence, path[place:], range(place, len(path)))
            for sequence, path in zip(sequences, paths, strict=True)
            if (place := _first_out_of_place(path)) < len(path)
        ]
        if moved:
            size = self._kv_cache.block_size
            for place_of, move in (
                (partial(_kv_places, size), self._kv_cache.move),
                (self._windows.places, self._windows.move),
            ):
                sources = [slot for sequence, nodes, _ in moved for slot in place_of(sequence, nodes)]
                targets = [slot for sequence, _, places in moved for slot in place_of(sequence, places)]
                move(*to_device(sources + targets, self.device).view(2, -1).unbind())
        for sequence, path in zip(sequences, paths, strict=True):
            sequence.num_computed = [sequence.num_known - 1 + len(path)] * len(self.levels)

    def max_nodes(self, sequence: Sequence) -> int:
        """Nodes that the tree of a sequence has room for."""
        num_slots = len(sequence.block_table) * self._kv_cache.block_size
        return min(num_slots - sequence.num_known + 1, self._windows.size)

    def erase_stale(self, sequence: Sequence) -> None:
        """Forget keys and values behind all that stands: NaN among them would reach others through its mask."""
        self._kv_cache.erase(sequence.block_table, max(sequence.num_computed))

    def score(self, index: int, sequences: list[Sequence], starts: Items[int]) -> Tensor:
        """Logits of level `index` at positions `[starts[b], known)` of each sequence, packed: `[T, V or V_d]`.

        `advance` must have run over them.
        """
        if self.levels[index].head is None:
            wanted = [(start, sequence.num_known) for sequence, start in zip(sequences, starts, strict=True)]
            return self.model.backbone.logits(self._windows.final_states(self._windows.slots(sequences, wanted)))
        return self.score_exit(index, sequences, starts)[1]

    def score_exit(
        self, index: int, sequences: list[Sequence], starts: Items[int]
    ) -> tuple[Tensor, Tensor]:  # [T, D], [T, V or V_d]
        """As `score` below the target, with the states that the LM head made the logits of."""
        wanted = [(start, sequence.num_known) for sequence, start in zip(sequences, starts, strict=True)]
        bounds = self._head_bounds(index, sequences, wanted)
        head = self._heads[index]
        (rows,) = self._run.pack([head], [Pass(sequences, bounds, attends=bool(head.kv_layers))])
        state = self._head_state(index, rows, rows_within(bounds, wanted, self.device))
        for sequence, (_, stop) in zip(sequences, bounds, strict=True):
            self._count_head(index, sequence, stop)
        return state, self._exit_logits(index, state)

    def behind(self, index: int, sequences: list[Sequence]) -> list[Sequence]:
        """Who needs `complete_head` before a round begins: all, where states would leave a window unseen; else those
        that may draft and have many positions to see, over which their draft would run the whole head."""
        if not self._heads[index].kv_layers:
            return []
        lags = [len(sequence.token_ids) - sequence.num_head_computed[index] for sequence in sequences]
        if max(lags) > self._max_lag:
            return sequences
        return [
            sequence
            for sequence, lag in zip(sequences, lags, strict=True)
            if lag > self._few and (sequence.asked is None or any(sequence.asked))
        ]

    def complete_head(self, index: int, sequences: list[Sequence]) -> None:
        """Let the head of level `index` keep keys and values of all that its layers have seen, if it keeps any.

        What it has not seen must still lie in the window. The keys and values of its one layer are made of the layer's
        input alone, so this costs a fraction of the head.
        """
        sequences = [s for s in sequences if s.num_head_computed[index] < s.num_computed[index]]
        if not sequences or not self._heads[index].kv_layers:
            return
        bounds = [(sequence.num_head_computed[index], sequence.num_computed[index]) for sequence in sequences]
        for some in _in_passes(bounds) if self._has_kernels else [slice(None)]:
            (rows,) = self._packer.pack([Pass(sequences[some], bounds[some])])
            self._keep_of_head(index, self._head_source(index, rows), rows.positions, rows.attend)
        for sequence, (_, stop) in zip(sequences, bounds, strict=True):
            self._count_head(index, sequence, stop)

    def plan_draft(
        self,
        sequences: list[Sequence],
        counts: list[int],  # of tokens that each is to draw, at least 1; never rising
        nums_active: list[int],  # by token: how many draw it
        *,
        may_be_at_once: bool = False,  # whether `draft_at_once` is to be tried
    ) -> DraftPlan:
        """Prepare to draw tokens at the lowest level, and count the passes for it as run."""
        lengths = [sequence.num_known for sequence in sequences]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        unseen = [(s, (s.num_computed[0], s.num_known)) for s in sequences if s.num_computed[0] < s.num_known]
        newest = [(length - 1, length) for length in lengths]
        bounds = self._head_bounds(0, sequences, newest)
        layers_attend, head_attends = bool(self._layers[0].kv_layers), bool(self._heads[0].kv_layers)
        passes = []
        # Mostly the head has to see what the layers have: then both run over the same rows.
        are_same = unseen == list(zip(sequences, bounds, strict=True))
        if unseen and not are_same:
            owners, unseen_bounds = zip(*unseen, strict=True)
            passes.append(Pass(list(owners), list(unseen_bounds), has_ids=True, attends=layers_attend))
        attends = head_attends or (are_same and layers_attend)
        passes.append(Pass(sequences, bounds, has_ids=are_same, attends=attends))
        for place, number in enumerate(nums_active[1:]):
            following = [(length + place, length + place + 1) for length in lengths[:number]]
            passes.append(Pass(sequences[:number], following, attends=layers_attend or head_attends))
        has_last = may_be_at_once and self._drafts_natively
        if has_last:
            passes.append(Pass(sequences, [(end - 1, end) for end in ends], attends=layers_attend))
        rows = list(self._run.pack([self._layers[0], self._heads[0]], passes))
        last = rows.pop() if has_last else None
        first = rows.pop(0) if unseen and not are_same else None
        unscored = rows.pop(0)
        for sequence, end in zip(sequences, ends, strict=True):
            self._count_layers(0, sequence, end - 1)
            self._count_head(0, sequence, end - 1)
        tokens = [DraftPass(unscored if are_same else first, unscored, rows_within(bounds, newest, self.device))]
        tokens += [DraftPass(own, own, slice(number)) for own, number in zip(rows, nums_active[1:], strict=True)]
        return DraftPlan(sequences, nums_active, tokens, last, ends)

    def draft(
        self,
        plan: DraftPlan,
        place: int,  # of the token in the draft, counted from 0
        ids: Tensor | None,  # [B] int64, the tokens before it; None for the first
    ) -> Tensor:  # [B, V or V_d], of the sequences that are active
        """Logits of the draft's next token; nothing waits for the device, and nothing is sent to it."""
        layer_rows, head_rows, wanted = plan.tokens[place]
        if ids is not None:
            active = slice(plan.nums_active[place])
            head_rows.token_ids[active] = ids[active]
        if layer_rows is not None:
            self._run(self._layers[0], layer_rows)
        return self._exit_logits(0, self._head_state(0, head_rows, wanted))

    def draft_at_once(self, plan: DraftPlan, *, with_probabilities: bool) -> list[Highest] | None:
        """All tokens of a greedy draft, and the layers over the last ones, by a single call of our own kernels; None
        where these do not take something of it."""
        if plan.last is None:
            return None
        chain, found = StepChain(), []
        latest = torch.zeros(plan.nums_active[0], dtype=torch.int64)
        try:
            for place, (layer_rows, head_rows, wanted) in enumerate(plan.tokens):
                if layer_rows is not None:
                    token_ids = layer_rows.token_ids if place == 0 else latest[: plan.nums_active[place]]
                    chain.add(self._layers_steps(range(1), layer_rows, token_ids))
                state = chain.add(self._head_step(0, head_rows))[0]
                chosen = StateRows(state, wanted) if isinstance(wanted, Tensor) else StateRows(state[wanted], None)
                logits = chain.add(self.model.exit_step(self._head_number(0), chosen))
                found.append(
                    chain.add(
                        highest_step(
                            logits,
                            self.vocab_ids(0),
                            with_probabilities=with_probabilities,
                            latest=latest[: plan.nums_active[place]],
                        )
                    )
                )
            chain.add(self._layers_steps(range(1), plan.last, latest))
        except NotNative:
            return None
        chain.run()
        for sequence, end in zip(plan.sequences, plan.ends, strict=True):
            self._count_layers(0, sequence, end)
        return found

    def forget_graphs(self) -> None:
        """To be called when the model's tensors have moved."""
        self._run.forget_graphs()

    def _layers_part(self, index: int) -> Part:
        level = self.levels[index]
        name = f"layers {level.start} to {level.stop} of the {level.name} level"
        return Part(name, partial(self._run_layers, range(index, index + 1)), range(level.start, level.stop))

    def _head_part(self, index: int) -> Part:
        head = self._head(index)
        kv_layers = [head.kv_layer] if head.has_block else []
        return Part(f"head of the {self.levels[index].name} level", partial(self._run_head, index), kv_layers)

    def _run_layers(self, levels: range, rows: PackedRows) -> None:
        self._by_layers(self.model.backbone.run_through, levels, rows, rows.token_ids)

    def _by_layers(self, run: Callable[..., R], levels: range, rows: PackedRows, token_ids: Tensor) -> R:
        """Call what runs layers, or makes steps of them, for some levels."""
        return run(
            self._source(levels[0], rows, token_ids),
            self.levels[levels[0]].start,
            [self.levels[index].stop for index in levels],
            rows.positions,
            rows.attend,
            norms=self.levels[levels[-1]].head is None,
            keeps=[self._kept(index, rows) for index in levels],
        )

    def _layers_steps(self, levels: range, rows: AnyRows, token_ids: Tensor) -> Native[list[Tensor]] | None:
        if not isinstance(rows, PackedRows):
            return None
        return self._by_layers(self.model.backbone.layers_steps, levels, rows, token_ids)

    def _source(self, index: int, rows: PackedRows, token_ids: Tensor) -> States:
        """What the layers of a level take."""
        if index == 0:
            return self.model.backbone.embedded(token_ids, rows.positions)
        return StateRows(self._windows.tables[index - 1], rows.window_slots)

    def _kept(self, index: int, rows: PackedRows) -> StateRows:
        """Where what the layers of a level make is kept."""
        return StateRows(self._windows.tables[index], rows.window_slots)

    def _run_head(self, index: int, rows: PackedRows) -> Tensor:  # [T, D]
        return self._head(index)(*self._head_source(index, rows), rows.positions, rows.attend)[0]

    def _keep_of_head(
        self, index: int, source: tuple[StateRows, StateRows | None], positions: Tensor, attend: PagedAttention
    ) -> None:
        """Keep what a head's layer has of keys and values, and compute no more."""
        native = self._head(index).step(*source, positions, attend, keeps_only=True) if self._has_kernels else None
        if native is not None:
            run_native(native)
            return
        with suppress(IsKept):
            self._head(index)(*source, positions, KeepOnly(attend))

    def _head_step(self, index: int, rows: AnyRows) -> Native[Tensor] | None:  # [1, T, D]
        if not isinstance(rows, PackedRows):
            return None
        return self._head(index).step(*self._head_source(index, rows), rows.positions, rows.attend)

    def _head_source(self, index: int, rows: PackedRows) -> tuple[StateRows, StateRows | None]:
        """What a head takes: states at its exit layer, and their contexts where it has them."""
        context = StateRows(self._windows.final, rows.context_slots)
        has_context = self._head(index).config.committed_context
        return StateRows(self._windows.tables[index], rows.window_slots), context if has_context else None

    def _head_state(self, index: int, rows: AnyRows, wanted: Tensor | slice) -> Tensor:
        state = self._run(self._heads[index], rows)
        assert state is not None
        return state[wanted]

    def _exit_logits(self, index: int, state: Tensor) -> Tensor:
        return self.model.exit_logits(self._head_number(index), state)

    def _head_bounds(self, index: int, sequences: list[Sequence], wanted: Bounds) -> Bounds:
        """What a head must run over to score what is wanted."""
        if not self._head(index).has_block:
            return wanted
        # Positions that no draft was asked from (after a bonus token) must still be in the block's cache.
        return [
            (min(s.num_head_computed[index], start), stop) for s, (start, stop) in zip(sequences, wanted, strict=True)
        ]

    def _count_layers(self, index: int, sequence: Sequence, stop: int) -> None:
        level = self.levels[index]
        passes = (stop - sequence.num_computed[index]) * (level.stop - level.start)
        sequence.stats.levels[level.name].num_layer_passes += passes
        sequence.num_computed[index] = stop

    def _count_head(self, index: int, sequence: Sequence, stop: int) -> None:
        if self._head(index).has_block:
            passes = stop - sequence.num_head_computed[index]
            sequence.stats.levels[self.levels[index].name].num_layer_passes += passes
            sequence.num_head_computed[index] = stop

    def _head_number(self, index: int) -> int:
        """Which of the model's heads a level has."""
        number = self.levels[index].head
        assert number is not None
        return number

    def _head(self, index: int) -> ExitHead:
        return self._exit_heads[self._head_number(index)]


def _in_passes(bounds: Bounds) -> Iterator[slice]:
    """Which sequences go together, so that kernels take their rows in one pass."""
    first, num_rows = 0, 0
    for place, (start, stop) in enumerate(bounds):
        if place > first and num_rows + stop - start > MAX_ATTENDED_ROWS:
            yield slice(first, place)
            first, num_rows = place, 0
        num_rows += stop - start
    yield slice(first, len(bounds))


def _first_out_of_place(path: list[int]) -> int:
    """How many of a path's first nodes lie where they belong."""
    return next((place for place, node in enumerate(path) if node != place), len(path))


def _kv_places(block_size: int, sequence: Sequence, nodes: Items[int]) -> list[int]:
    """The slots of a tree's nodes."""
    places = [sequence.num_known - 1 + node for node in nodes]
    return [sequence.block_table[place // block_size] * block_size + place % block_size for place in places]
