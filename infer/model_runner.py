"""Runs parts of the model over packed batches of sequences.

T tokens side by side; D hidden size; V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial

import numpy as np
from torch import Tensor

from ..heads import (
    MAX_ATTENDED_ROWS,
    Drawn,
    EarlyExitModel,
    Highest,
    StateRows,
    StepChain,
    find_kernels,
)
from .at_once import DraftRows, DraftsAtOnce, Judged, add_draft, add_judgement, by_sequence, of_first
from .draft_plan import DraftPass, DraftPlan, FirstPasses
from .kv_cache import KVCache
from .level_parts import LevelParts
from .levels import Level
from .packed_rows import Bounds, PackedRows, Pass, RowPacker, places_within, rows_within
from .pass_runner import AnyRows, PassRunner
from .sequence import Chunk, Sequence
from .state_windows import StateWindows
from .step_chains import StepChains
from .token_tree import TokenTree
from .transfer import to_device

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
        self._kv_cache = kv_cache
        self._max_lag = max_lag
        backbone = model.backbone
        self.device = backbone.device
        self._few = max(FEW, backbone.row_step)
        self._has_kernels = backbone.device.type == "cpu" and find_kernels() is not None
        self._windows = StateWindows(
            len(levels), num_rows + 1, window, backbone.hidden_size, backbone.dtype, backbone.device
        )
        self.parts = LevelParts(model, levels, self._windows)
        self._layers = [self.parts.layers(index) for index in range(len(levels))]
        self._heads = [self.parts.head_part(index) for index in range(len(levels) - 1)]
        parts = [*self._layers, *self._heads]
        self._whole = self._layers[0]
        if len(levels) > 1:
            self._whole = self.parts.all_layers()
            parts.append(self._whole)
        self._packer = RowPacker(kv_cache, self._windows, backbone.device, is_exact=is_exact, by_varlen=by_varlen)
        may_chain = self._has_kernels and not is_exact and backbone.has_rotary_table
        self._chains = StepChains(self._packer, kv_cache, backbone.row_step) if may_chain else None
        self._run = PassRunner(self._packer, kv_cache, parts, uses_graphs=uses_graphs)

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
        blocks = [index for index in range(len(self.levels) - 1) if self.parts.head(index).has_block]
        if blocks:
            context = self._windows.contexts(chunks, states)
            for index in blocks:
                # Nothing is drafted behind what is read: of the head only keys and values are needed.
                self.parts.keep_of_head(index, (StateRows(exits[index][0], None), context), positions, attend)
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
        judged: Judged | None = None,  # what `draft_at_once` gave in this round
    ) -> tuple[Tensor, Highest | None]:  # [T, V]
        """`advance` the target, or all levels, and `score` it; the highest logits where these are known too."""
        index = len(self.levels) - 1
        first = 0 if is_whole else index
        bounds = [(sequence.num_computed[first], sequence.num_known) for sequence in sequences]
        are_scored = all(start == own[0] for start, own in zip(starts, bounds, strict=True))
        found = None
        if judged is not None and (judged.sequences, judged.bounds, first) == (sequences, bounds, index):
            assert are_scored
            found = judged.logits, judged.highest
        else:
            rows = Pass(sequences, bounds, has_ids=first == 0)
            if are_scored:
                found = self._judge_at_once(range(first, index + 1), rows)
            if found is None:
                part = self._whole if is_whole else self._layers[index]
                self._run(part, *self._run.pack([part], [rows]))
        for level in range(first, index + 1):
            for sequence, (_, stop) in zip(sequences, bounds, strict=True):
                self._count_layers(level, sequence, stop)
        return (self.score(index, sequences, starts), None) if found is None else found

    def _judge_at_once(self, levels: range, rows: Pass) -> tuple[Tensor, Highest] | None:
        """What `judge` gives, by a single call of our own kernels; None where these do not take something of it."""
        if self._chains is None:
            return None
        recorded = self._chains(
            levels, [rows], [], lambda chain, packed, _: add_judgement(chain, self.parts, levels, *packed)
        )
        if recorded is None:
            return None
        recorded.chain.run()
        return of_first(recorded.output, rows.num_rows)

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
        return state, self.parts.exit_logits(index, state)

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
            self.parts.keep_of_head(index, self.parts.head_source(index, rows), rows.positions, rows.attend)
        for sequence, (_, stop) in zip(sequences, bounds, strict=True):
            self._count_head(index, sequence, stop)

    def draft_at_once(
        self,
        sequences: list[Sequence],
        counts: list[int],  # of tokens that each is to draw, at least 1; never rising
        nums_active: list[int],  # by token: how many draw it
        least: list[float] | None,  # of a lone sequence: see `Drawn.least`
        *,
        judging: list[Sequence] | None,  # the same ones, whose drafts the target is asked about next
        with_probabilities: bool,
    ) -> DraftsAtOnce | None:
        """All tokens of greedy drafts, and the layers over them, by a single call of our own kernels; None where these
        do not take something of it."""
        if self._chains is None or not self.parts.head(0).may_be_native:
            return None
        lengths = [sequence.num_known for sequence in sequences]
        first = self._first_passes(sequences)
        passes = [*first.passes, _by_token(sequences, lengths, nums_active)]
        name = first.for_layers is None, first.are_same, least is not None, with_probabilities
        lists = [places_within(first.for_head.bounds, first.newest), nums_active]
        record = partial(self._record_draft, *name)
        rows = None if judging is None else self._judged_pass(judging, sequences, counts)
        recorded = None if rows is None else self._chains(name, [*passes, rows], lists, record)
        recorded = recorded or self._chains(name, passes, lists, record)
        if recorded is None:
            return None
        drawn, num_drafting, judged = recorded.output
        if least is not None:
            for place, each in enumerate(least):
                drawn.least[place] = each
        recorded.chain.run()
        num_drawn = drawn.num_drawn.value
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            self._count_layers(0, sequence, length + min(count, num_drawn))
            self._count_head(0, sequence, length + min(count, num_drawn) - 1)
        values = None if drawn.probabilities is None else drawn.probabilities.tolist()
        said = None
        if judged is not None and rows is not None:
            num_fewer = counts[0] - num_drawn  # of a lone sequence, or none
            bounds = [(start, stop - num_fewer) for start, stop in rows.bounds]
            found = of_first(judged, rows.num_rows - num_fewer)
            said = Judged(rows.sequences, bounds, *found, recorded.chain.seconds(num_drafting))
        return DraftsAtOnce(
            by_sequence(drawn.token_ids.tolist(), nums_active, num_drawn),
            None if values is None else by_sequence(values, nums_active, num_drawn),
            said,
        )

    def _judged_pass(self, judging: list[Sequence], sequences: list[Sequence], counts: list[int]) -> Pass | None:
        """The rows by which the target judges drafts of so many tokens; None where others would be needed."""
        if len(self.levels) > 2 or any(sequence.num_computed[-1] != sequence.num_known - 1 for sequence in judging):
            return None
        count_of = dict(zip(sequences, counts, strict=True))
        return Pass(judging, [(s.num_known - 1, s.num_known + count_of[s]) for s in judging])

    def _record_draft(
        self,
        is_seen: bool,
        are_same: bool,
        may_end: bool,
        with_probabilities: bool,
        chain: StepChain,
        rows: list[PackedRows],
        lists: list[Tensor],
    ) -> tuple[Drawn, int, tuple[Tensor, Highest] | None]:
        """What is drawn, the number of steps for that, and what the target says."""
        unseen = None if is_seen else rows.pop(0)
        for_head, following, *judging = rows
        drawn = add_draft(
            chain,
            self.parts,
            DraftRows(for_head if are_same else unseen, for_head, lists[0], following, lists[1]),
            may_end=may_end,
            with_probabilities=with_probabilities,
        )
        num_drafting = len(chain)
        judged = add_judgement(chain, self.parts, range(1, 2), *judging) if judging else None
        return drawn, num_drafting, judged

    def plan_draft(
        self,
        sequences: list[Sequence],
        counts: list[int],  # as of `draft_at_once`
        nums_active: list[int],
    ) -> DraftPlan:
        """Prepare to draw tokens at the lowest level one by one, and count the passes for it as run."""
        lengths = [sequence.num_known for sequence in sequences]
        first = self._first_passes(sequences)
        attends = bool(self._layers[0].kv_layers) or bool(self._heads[0].kv_layers)
        passes = list(first.passes)
        for place, number in enumerate(nums_active[1:]):
            following = [(length + place, length + place + 1) for length in lengths[:number]]
            passes.append(Pass(sequences[:number], following, attends=attends))
        rows = self._run.pack([self._layers[0], self._heads[0]], passes)
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            self._count_layers(0, sequence, length + count - 1)
            self._count_head(0, sequence, length + count - 1)
        tokens = [first.packed(rows, self.device)]
        later = zip(rows[len(first.passes) :], nums_active[1:], strict=True)
        return DraftPlan(nums_active, tokens + [DraftPass(own, own, slice(number)) for own, number in later])

    def _first_passes(self, sequences: list[Sequence]) -> FirstPasses:
        """For the first token of each."""
        unseen = [(s, (s.num_computed[0], s.num_known)) for s in sequences if s.num_computed[0] < s.num_known]
        newest = [(s.num_known - 1, s.num_known) for s in sequences]
        bounds = self._head_bounds(0, sequences, newest)
        layers_attend, head_attends = bool(self._layers[0].kv_layers), bool(self._heads[0].kv_layers)
        # Mostly the head has to see what the layers have: then both run over the same rows.
        are_same = unseen == list(zip(sequences, bounds, strict=True))
        for_layers = None
        if unseen and not are_same:
            owners, unseen_bounds = zip(*unseen, strict=True)
            for_layers = Pass(list(owners), list(unseen_bounds), has_ids=True, attends=layers_attend)
        attends = head_attends or (are_same and layers_attend)
        for_head = Pass(sequences, bounds, has_ids=are_same, attends=attends)
        return FirstPasses(for_layers, for_head, are_same, newest)

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
        return self.parts.exit_logits(0, self._head_state(0, head_rows, wanted))

    def forget_graphs(self) -> None:
        """To be called when the model's tensors have moved."""
        self._run.forget_graphs()

    def forget_chains(self) -> None:
        """To be called when the model's tensors may have changed."""
        if self._chains is not None:
            self._chains.forget()

    def _head_state(self, index: int, rows: AnyRows, wanted: Tensor | slice) -> Tensor:
        state = self._run(self._heads[index], rows)
        assert state is not None
        return state[wanted]

    def _head_bounds(self, index: int, sequences: list[Sequence], wanted: Bounds) -> Bounds:
        """What a head must run over to score what is wanted."""
        if not self.parts.head(index).has_block:
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
        if self.parts.head(index).has_block:
            passes = stop - sequence.num_head_computed[index]
            sequence.stats.levels[self.levels[index].name].num_layer_passes += passes
            sequence.num_head_computed[index] = stop


def _by_token(sequences: list[Sequence], lengths: list[int], nums_active: list[int]) -> Pass:
    """All that is drawn behind so many tokens: the first token of those that draw it, then the second, and so on."""
    if len(sequences) == 1:
        return Pass(sequences, [(lengths[0], lengths[0] + len(nums_active))], num_at_once=1)
    owners = [sequence for number in nums_active for sequence in sequences[:number]]
    bounds = [
        (length + place, length + place + 1) for place, number in enumerate(nums_active) for length in lengths[:number]
    ]
    return Pass(owners, bounds, num_at_once=len(sequences))


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
