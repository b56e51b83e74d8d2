"""Who runs next. Integers only.

*First come, first served*: waiting sequences start in the order of their coming, when their tokens fit into the free
blocks. One that does not fit yet may be overtaken by `MAX_OVERTAKEN` later ones that do; then the line stands still
until there is room for it. Nobody waits for ever: those that run end, and nobody passes any more.

*Reading in* (prefill): all that run and are not read to the end share the prompt tokens of a step, which may be more
while nobody decodes and would have to wait. Half goes to the one that came first, which so comes to its end however
many short ones arrive; the rest to those with the fewest tokens left, so that a short prompt does not wait for a long
one. Those that are read decode in every step meanwhile.

*Giving way*: when blocks run out, the running sequence that came last gives all its blocks back. It is first in line
then, cannot be overtaken, and reads its prompt and committed tokens anew. The first to come never gives way, so
something always gets done. Nothing is ever dropped.
"""

import bisect
import itertools
from collections import deque

from .block_manager import BlockManager
from .sequence import MAX_OVERTAKEN, Chunk, Sequence


class Scheduler:
    """Keeps waiting and running sequences within the blocks, window rows and prompt tokens of a step."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_proposed: int,
        max_branched: int = 0,  # tokens of other branches that a sequence may have a place for, besides those proposed
        *,
        max_undisturbed: int | None = None,  # `max_prefill_tokens` of a step in which nobody decodes; None is the same
    ) -> None:
        self._max_branched = max_branched
        self._block_manager = block_manager
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._max_prefill_tokens = max_prefill_tokens
        self._max_undisturbed = max_prefill_tokens if max_undisturbed is None else max_undisturbed
        self._max_proposed = max_proposed
        self._arrivals = itertools.count()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of their coming."""

    def check(self, num_tokens: int) -> None:
        """Raise ValueError if the pool could never hold a sequence of so many tokens."""
        needed = self._block_manager.num_needed(num_tokens)
        if needed > self._block_manager.num_blocks:
            raise ValueError(
                f"the request needs {needed} blocks of the KV cache for {num_tokens} tokens, but there are "
                f"only {self._block_manager.num_blocks}; raise num_blocks or lower max_new_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others; `check` must allow its length."""
        sequence.arrival = next(self._arrivals)
        self.waiting.append(sequence)

    def schedule(self) -> tuple[list[Chunk], list[Sequence]]:
        """What is read in (prefill) and who decodes in this step; blocks for all of it are theirs on return."""
        for sequence in list(self.running):
            if sequence.is_read and sequence in self.running:
                self._make_room(sequence)
        decoding = [sequence for sequence in self.running if sequence.is_read]
        self._admit()
        for sequence in decoding if self._max_branched else ():
            self._branch_out(sequence)
        reading = [sequence for sequence in self.running if not sequence.is_read]
        return self._share_out(reading, self._max_prefill_tokens if decoding else self._max_undisturbed), decoding

    def finish(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, running or waiting."""
        if sequence in self.running:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind what is computed."""
        self._block_manager.shrink(sequence.block_table, len(sequence.token_ids))

    def _num_tokens(self, sequence: Sequence) -> int:
        """Tokens that must have a place until the end of the next round."""
        return min(len(sequence.token_ids) + self._max_proposed, sequence.max_length)

    def _make_room(self, sequence: Sequence) -> None:
        """Grow the sequence's blocks at the expense of those that came after it, or else put it back itself."""
        while not self._block_manager.can_grow(sequence.block_table, self._num_tokens(sequence)):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return
        self._block_manager.grow(sequence.block_table, self._num_tokens(sequence))

    def _branch_out(self, sequence: Sequence) -> None:
        """Add blocks for branches as far as nobody else needs them now; `trim` takes them back."""
        num_tokens = self._num_tokens(sequence) + self._max_branched
        num_blocks = min(
            self._block_manager.num_needed(num_tokens), len(sequence.block_table) + self._block_manager.num_free
        )
        self._block_manager.grow(sequence.block_table, num_blocks * self._block_manager.block_size)

    def _admit(self) -> None:
        place = 0
        while place < min(len(self.waiting), MAX_OVERTAKEN + 1) and self._free_rows:
            sequence = self.waiting[place]
            if self._fits(sequence):
                for overtaken in itertools.islice(self.waiting, place):
                    overtaken.patience -= 1
                del self.waiting[place]
                self._block_manager.grow(sequence.block_table, self._num_tokens(sequence))
                sequence.window_row = self._free_rows.pop()
                bisect.insort(self.running, sequence, key=lambda running: running.arrival)
                # Whoever is still ahead in the line did not fit before either.
                if any(ahead.patience == 0 for ahead in itertools.islice(self.waiting, place)):
                    return
            elif sequence.patience == 0:
                return
            else:
                place += 1

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its blocks are free, and one more for each that runs and may grow: else it would soon give way."""
        needed = self._block_manager.num_needed
        num_growing = sum(needed(running.max_length) > len(running.block_table) for running in self.running)
        return needed(self._num_tokens(sequence)) + num_growing <= self._block_manager.num_free

    def _share_out(self, reading: list[Sequence], left: int) -> list[Chunk]:
        """Half of `left` tokens for the prompt that came first, the rest for those with the fewest left to read."""
        shares = dict.fromkeys(reading, 0)
        first = [(sequence, -(-left // 2)) for sequence in reading[:1]]
        for sequence, limit in first + [
            (sequence, left) for sequence in sorted(reading, key=lambda sequence: sequence.num_unread)
        ]:
            share = min(sequence.num_unread - shares[sequence], limit, left)
            shares[sequence] += share
            left -= share
        return [
            Chunk(sequence, sequence.num_computed[-1], sequence.num_computed[-1] + share)
            for sequence, share in shares.items()
            if share
        ]

    def preempt_all(self) -> None:
        """Put all running sequences back, in their order, to be computed anew."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.restart()
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._block_manager.shrink(sequence.block_table, 0)
        self._free_rows.append(sequence.window_row)
