"""Where the runs of tokens of one growing text stand, and what followed them. Integers only."""

from collections.abc import Sequence as Items
from typing import NamedTuple


class Continuation(NamedTuple):
    """What followed an earlier place of a text's last tokens."""

    num_matched: int
    """Tokens before that place that are the text's last ones."""
    token_ids: list[int]


class NgramIndex:
    """Finds the newest earlier place of a text's last tokens, the longest match first.

    It reads each token once, so a text of N tokens costs N steps in all, however often it is asked.
    """

    def __init__(
        self,
        min_size: int,  # fewest tokens that must match
        max_size: int,  # most that are looked for
        max_matched: int,  # most that are counted, where it is more
    ) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._max_matched = max_matched
        self._following: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def continuation(
        self,
        token_ids: Items[int],  # the text; what it was at the last call, and more
        count: int,
    ) -> Continuation:
        """What came after the newest earlier place of its last tokens, `count` of them; nothing where there is none.

        A match that reaches into the text's end is taken to go on as it does: "a b a b" is followed by "a b a b".
        """
        self._read(token_ids)
        newest = self._newest(token_ids, len(token_ids))
        for size in self._sizes:
            start = self._following.get(newest[-size:]) if size <= len(newest) else None
            if start is not None:
                period = len(token_ids) - start
                ids = [token_ids[start + place % period] for place in range(count)]
                return Continuation(self._num_matched(token_ids, start, size), ids)
        return Continuation(0, [])

    def _num_matched(self, token_ids: Items[int], start: int, size: int) -> int:
        most = min(self._max_matched, start)
        while size < most and token_ids[start - 1 - size] == token_ids[-1 - size]:
            size += 1
        return size

    def _read(self, token_ids: Items[int]) -> None:
        for stop in range(self._num_read, len(token_ids)):
            newest = self._newest(token_ids, stop)
            for size in self._sizes:
                if size <= len(newest):
                    self._following[newest[-size:]] = stop
        self._num_read = len(token_ids)

    def _newest(self, token_ids: Items[int], stop: int) -> tuple[int, ...]:
        """As many of the tokens before a place as are looked for."""
        return tuple(token_ids[max(0, stop - self._sizes[0]) : stop])
