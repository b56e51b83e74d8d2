"""Text that grows with the tokens."""

from collections.abc import Sequence as Items

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LINE_FEED = "<0x0A>"
"""As a byte token; a tokenizer with byte fallback has all 256 of them."""


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces joined are the whole decoded at once.

    A character that is split over tokens is held back until it is whole; so is a run of byte tokens (`<0xE2>`), because
    one wrong byte makes a tokenizer with byte fallback write the whole run otherwise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # Tokens from `_start` on are decoded again: those before `_end`, whose text is out already, show the tokenizer
        # where the new ones stand (a first word may lose its leading space).
        self._start = 0
        self._end = 0
        self._num_sent = 0  # characters of the text from `_start` on that are out
        has_byte_fallback = tokenizer.convert_tokens_to_ids(LINE_FEED) not in (None, tokenizer.unk_token_id)
        # Special tokens have no text, so they end no run; None where there are no byte tokens at all.
        self._special_ids = _special_ids(tokenizer) if has_byte_fallback else None

    def push(self, token_ids: Items[int]) -> str:
        """Add tokens; the text that is certain now."""
        self._token_ids.extend(token_ids)
        return self._read(is_last=False)

    def finish(self) -> str:
        """What was held back, even if it is no whole character."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> str:
        end = len(self._token_ids) if is_last else self._num_certain()
        if end == self._end:
            return ""
        text = decode(self._tokenizer, self._token_ids[self._start : end])
        certain = text if is_last else text.rstrip(REPLACEMENT)
        piece = certain[self._num_sent :]
        self._num_sent += len(piece)
        if piece and len(certain) == len(text):
            self._start, self._end = self._end, end
            self._num_sent = len(decode(self._tokenizer, self._token_ids[self._start : end]))
        return piece

    def _num_certain(self) -> int:
        """Tokens before the byte tokens at the end."""
        end = len(self._token_ids)
        if self._special_ids is not None:
            while end > self._end and self._is_part_of_a_run(self._token_ids[end - 1]):
                end -= 1
        return end

    def _is_part_of_a_run(self, token_id: int) -> bool:
        assert self._special_ids is not None
        if token_id in self._special_ids:
            return True
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        return len(token) == len(LINE_FEED) and token.startswith("<0x") and token.endswith(">")


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Items[int]) -> str:
    """Tokens as text, without special tokens and without tidying."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that `decode` leaves out."""
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
