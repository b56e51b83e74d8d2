"""Text that grows with the tokens."""

from collections.abc import Sequence as Items

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces joined are the whole decoded at once.

    A character that is split over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # Tokens from here on are decoded again: those before `_num_read`, whose text is out already, show the
        # tokenizer where the new ones stand (a first word may lose its leading space).
        self._start = 0
        self._num_read = 0

    def push(self, token_ids: Items[int]) -> str:
        """Add tokens; the text that is certain now."""
        self._token_ids.extend(token_ids)
        return self._read(is_last=False)

    def finish(self) -> str:
        """What was held back, even if it is no whole character."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> str:
        if self._num_read == len(self._token_ids):
            return ""
        before = decode(self._tokenizer, self._token_ids[self._start : self._num_read])
        text = decode(self._tokenizer, self._token_ids[self._start :])
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        piece = text[len(before) :]
        if piece:
            self._start, self._num_read = self._num_read, len(self._token_ids)
        return piece


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Items[int]) -> str:
    """Tokens as text, without special tokens and without tidying."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
