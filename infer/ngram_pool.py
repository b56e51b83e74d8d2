"""The n-grams that a text's guesses have formed, by their first token. Integers only."""

from collections.abc import Sequence as Items

MAX_FIRST_TOKENS = 8192
"""First tokens that are remembered at once, so that a pool is bounded whatever a text's length or vocabulary."""


class NgramPool:
    """Keeps the newest n-grams of each first token; which first tokens, the newest again."""

    def __init__(
        self,
        max_each: int,  # n-grams of one first token
        max_first_tokens: int = MAX_FIRST_TOKENS,
    ) -> None:
        self._max_each = max_each
        self._max_first_tokens = max_first_tokens
        # Dictionaries as ordered sets, the oldest first.
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Items[int]) -> None:
        """Remember an n-gram; where it is known already, as the newest."""
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.pop(first, {})
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._max_each:
            del rests[next(iter(rests))]
        self._rests[first] = rests
        if len(self._rests) > self._max_first_tokens:
            del self._rests[next(iter(self._rests))]

    def rests(self, first: int) -> list[tuple[int, ...]]:
        """What followed `first` in its n-grams, the newest of them first."""
        return list(self._rests.get(first, ()))[::-1]
