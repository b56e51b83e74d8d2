"""Streamed text in colours that say which level proposed each token."""

import os
from collections.abc import Sequence as Items
from itertools import groupby
from typing import Literal, TextIO

from transformers import PreTrainedTokenizerBase

from .detokenizer import Detokenizer
from .follower import Delta

COLOURS = {"draft": "\033[32m", "intermediate": "\033[33m", "target": "\033[36m", "ngram": "\033[35m"}
NAMES = {"draft": "green", "intermediate": "yellow", "target": "cyan", "ngram": "magenta"}
RESET = "\033[0m"
When = Literal["auto", "always", "never"]


def wants_colour(when: str, stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: on a terminal, unless NO_COLOR is set or it is told otherwise."""
    if when != "auto":
        return when == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def legend(level_names: Items[str]) -> str:
    """One line that explains the colours of these levels."""
    parts = [f"{_colour(name)}{name}{RESET} ({NAMES.get(name, NAMES['intermediate'])})" for name in level_names]
    return f"each token in the colour of the level that proposed it: {', '.join(parts)}"


def _colour(name: str) -> str:
    return COLOURS.get(name, COLOURS["intermediate"])


class Painter:
    """Colours the deltas of one generation; without its colours a painted text is the delta's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        # What is known of the colours ahead: lengths of text in the order in which it comes.
        self._ahead: list[tuple[int, str]] = []

    def paint(self, delta: Delta) -> str:
        """The delta's text, coloured; text that waited for its last token has the colour of that one."""
        for token_id, origin in zip(delta.token_ids, delta.origins, strict=True):
            self._ahead.append((len(self._detokenizer.push([token_id])), origin))
        if delta.finish_reason is not None:
            self._ahead.append((len(self._detokenizer.finish()), delta.origins[-1]))
        pieces, start = [], 0
        while self._ahead and start < len(delta.text):
            length, origin = self._ahead.pop(0)
            piece = delta.text[start : start + length]
            pieces.append((origin, piece))
            start += len(piece)
            if len(piece) < length:
                # The delta holds text back; its colour waits for it.
                self._ahead.insert(0, (length - len(piece), origin))
        runs = groupby((item for item in pieces if item[1]), key=lambda item: item[0])
        return "".join(f"{_colour(origin)}{''.join(piece for _, piece in run)}{RESET}" for origin, run in runs)
