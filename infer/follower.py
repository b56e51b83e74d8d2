"""A generation as it grows."""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .completion import Completion
from .detokenizer import Detokenizer
from .sequence import FinishReason, Sequence
from .stats import Stats


class Delta(NamedTuple):
    """What was added to a generation since the last look."""

    text: str
    """In whole characters; what is held back comes with a later delta."""
    token_ids: list[int]
    """At least one, except where the generation failed."""
    origins: list[str]
    """For each token the level that proposed it, as in a `Completion`."""
    finish_reason: FinishReason | None
    """None except in the last delta."""


class Follower:
    """Reads what one generation has committed since the last look; without a tokenizer the texts are empty."""

    def __init__(
        self, sequence: Sequence, level_names: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._sequence = sequence
        self._level_names = level_names
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._num_read = self._num_chars = 0
        self._is_over = False
        self.completion: Completion | None = None
        """Set when the generation has finished."""

    @property
    def request_id(self) -> int:
        """As `add_request` returned it."""
        return self._sequence.request_id

    @property
    def stats(self) -> Stats:
        """The generation's own counts so far; they grow with it."""
        return self._sequence.stats

    @property
    def error(self) -> str | None:
        """Why the generation failed, if it did."""
        return self._sequence.error

    def read(self) -> Delta | None:
        """What is new since the last call; None where nothing is."""
        sequence, start = self._sequence, self._num_read
        self._num_read = len(sequence.origins)
        if self._is_over or (self._num_read == start and sequence.finish_reason is None):
            return None
        self._is_over = sequence.finish_reason is not None
        token_ids = sequence.token_ids[len(sequence.prompt_ids) + start :]
        text = ""
        if sequence.stop_strings is not None:
            text = sequence.stop_strings.certain[self._num_chars :]
            self._num_chars += len(text)
        elif self._detokenizer is not None:
            text = self._detokenizer.push(token_ids)
            if self._is_over:
                text += self._detokenizer.finish()
        origins = [self._level_names[origin] for origin in sequence.origins[start:]]
        return Delta(text, token_ids, origins, sequence.finish_reason)


class StreamerFeed:
    """Hands one generation to a streamer of transformers: the prompt at once, then what each round commits."""

    def __init__(self, streamer: BaseStreamer, sequence: Sequence, level_names: tuple[str, ...]) -> None:
        self._streamer = streamer
        self._follower = Follower(sequence, level_names, None)
        streamer.put(torch.tensor([sequence.prompt_ids]))

    def update(self) -> None:
        """Put what is new, and end the streamer after the last token."""
        if (delta := self._follower.read()) is not None:
            self._streamer.put(torch.tensor(delta.token_ids))
            if delta.finish_reason is not None:
                self._streamer.end()
