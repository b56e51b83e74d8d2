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
        self._text = ""

    def push(self, token_ids: Items[int]) -> str:
        """Add tokens; the text that is certain now."""
        self._token_ids.extend(token_ids)
        text = decode(self._tokenizer, self._token_ids)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def finish(self) -> str:
        """What was held back, even if it is no whole character."""
        return self._emit(decode(self._tokenizer, self._token_ids))

    def _emit(self, text: str) -> str:
        piece, self._text = text[len(self._text) :], text
        return piece


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Items[int]) -> str:
    """Tokens as text, without special tokens and without tidying."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
