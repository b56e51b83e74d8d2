"""Texts that end a generation."""

from collections.abc import Sequence as Items

from transformers import PreTrainedTokenizerBase

from .detokenizer import Detokenizer


class StopStrings:
    """Watches one text grow token by token for the first of `stop` to appear in it.

    A stop string may lie across tokens or inside one. Those that were complete before `min_new_tokens` tokens don't
    count.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Items[str], *, include_stop: bool, min_new_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._include_stop = include_stop
        self._num_early = min_new_tokens
        self._longest = max(map(len, stop))
        self.text = ""
        """The text so far, cut where a stop string ended it."""
        self._is_finished = False
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> bool:
        """Add a token; whether it ended the text."""
        num_before = len(self.text)
        self.text += self._detokenizer.push([token_id])
        self._num_early -= 1
        if self._num_early > 0:
            return False
        # What was complete before this token is an early one.
        matches = [
            (place, text)
            for text in self._stop
            if (place := self.text.find(text, max(0, num_before - len(text) + 1))) >= 0
        ]
        if not matches:
            return False
        place, self.found = min(matches, key=lambda match: match[0])
        self._is_finished = True
        self.text = self.text[: place + len(self.found) * self._include_stop]
        return True

    def finish(self) -> None:
        """The text has ended, by a stop string or otherwise."""
        if not self._is_finished:
            self.text += self._detokenizer.finish()
            self._is_finished = True

    @property
    def certain(self) -> str:
        """The text, until it is finished without an ending that a stop string may yet begin with."""
        if self._is_finished:
            return self.text
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            ending = self.text[-length:]
            if any(text.startswith(ending) for text in self._stop):
                return self.text[:-length]
        return self.text
