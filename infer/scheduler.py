"""Who runs next. Integers only.

A waiting sequence is admitted when its tokens fit into the free blocks; when blocks run out, the sequence that came
last gives its blocks back and is computed anew later. Nothing is ever dropped.
"""

from collections import deque

from .block_manager import BlockManager
from .sequence import Sequence


class Scheduler:
    """Keeps waiting and running sequences within the blocks, window rows and prompt tokens of a step."""

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_prefill_tokens: int, max_proposed: int
    ) -> None:
        self._block_manager = block_manager
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._max_prefill_tokens = max_prefill_tokens
        self._max_proposed = max_proposed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

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
        self.waiting.append(sequence)

    def schedule(self) -> tuple[list[Sequence], list[Sequence]]:
        """Who is read in (prefill) and who decodes in this step; blocks for all of it are theirs on return."""
        decoding: list[Sequence] = []
        for sequence in list(self.running):
            if sequence in self.running and self._make_room(sequence):
                decoding.append(sequence)
        return self._admit(), decoding

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

    def _make_room(self, sequence: Sequence) -> bool:
        """Grow the sequence's blocks at the expense of those that came after it; False if it had to give way itself."""
        while not self._block_manager.can_grow(sequence.block_table, self._num_tokens(sequence)):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        self._block_manager.grow(sequence.block_table, self._num_tokens(sequence))
        return True

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        num_tokens = 0
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            num_tokens += len(sequence.token_ids)
            if admitted and num_tokens > self._max_prefill_tokens:
                break
            if not self._block_manager.can_grow(sequence.block_table, self._num_tokens(sequence)):
                break
            self._block_manager.grow(sequence.block_table, self._num_tokens(sequence))
            sequence.window_row = self._free_rows.pop()
            admitted.append(self.waiting.popleft())
        self.running.extend(admitted)
        return admitted

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
