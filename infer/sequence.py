"""One generation."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from .config import SamplingParams
from .jacobi_window import Columns
from .logits_processor import LogitsProcessor
from .ngram_index import Continuation, NgramIndex
from .ngram_pool import NgramPool
from .policy import INITIAL_SHARE
from .stats import Stats
from .stop_strings import StopStrings

FinishReason = Literal["stop", "length", "error"]

MAX_OVERTAKEN = 8
"""Requests that came later and may start before one that does not fit yet."""


class Logprob(NamedTuple):
    """How likely the model itself, without any sampling parameter, held a token that was chosen."""

    logprob: float
    """Natural logarithm of its probability."""
    top: dict[int, float]
    """The likeliest tokens and theirs, likeliest first; as many as were asked for."""


class Proposal(NamedTuple):
    """A token that left a level and waits for the next one."""

    token_id: int
    probs: Tensor | None  # [V], what it was drawn from; None where the rule is equality
    confidence: float  # highest probability of its row; 1 where no policy asks
    origin: int  # index of the level whose own choice it was


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The tokens of one generation and what is known of them at each level."""

    request_id: int
    index: int = 0
    """Which of the request's `n` texts."""
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end the text."""
    max_length: int
    """Most tokens, prompt included."""
    stats: Stats
    token_ids: list[int] = field(default_factory=list)
    """The prompt and all committed tokens."""
    origins: list[int] = field(default_factory=list)
    """By committed token: index of the level that proposed it, the last one for the target's own choice."""
    proposed: list[list[Proposal]]
    """By level below the target: what left it and waits for the next; higher levels come first in time."""
    num_computed: list[int]
    """By level: positions that its layers have run over and that still stand."""
    num_head_computed: list[int]
    """By level below the target: positions in its head's own KV cache."""
    kept_shares: list[float] = field(init=False)
    """By level below the target: the running share of its tokens that the next level kept."""
    num_plain_rounds: int = 0
    """Rounds in a row in which nothing was drafted for it."""
    asked: tuple[int, ...] | None = None
    """By level below the target: the length of drafts in this round, where a `RoundPolicy` chose before it began."""
    wanted: list[int] = field(init=False)
    """By level below the target: how many tokens the next level asks of it in this round, at most."""
    block_table: list[int] = field(default_factory=list)
    window_row: int = -1
    """This sequence's place in the buffers of hidden states, while it runs."""
    arrival: int = -1
    """Its number in the order of coming."""
    patience: int = MAX_OVERTAKEN
    """While it waits: later ones that may still start before it."""
    is_read: bool = False
    """Whether all committed tokens have been read, so that it decodes."""
    noise: dict[int, Tensor] = field(default_factory=dict)
    """By position, for a seeded request: see `gumbel_noise`."""
    logits_processor: LogitsProcessor | None = None
    stop_strings: StopStrings | None = None
    ngram_index: NgramIndex | None = None
    """Of its committed tokens, where the method drafts from them."""
    ngram_shares: list[float] = field(default_factory=list)
    """By class of match: how often what it was copied from went on as it does; see `free_drafts`."""
    ngram_guess: tuple[int, Continuation] | None = None
    """At so many committed tokens, what was last found to follow them; what came then is learnt from it."""
    ngram_pool: NgramPool | None = None
    """Of its guesses, under `lookahead`; None before the first round,"""
    jacobi_columns: Columns = ()
    """and what is guessed at present."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Of the committed tokens behind the prompt, where they were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The end token or the stop string that ended the text."""
    error: str | None = None
    """Why it failed, where `finish_reason` is `error`."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.kept_shares = [INITIAL_SHARE] * len(self.proposed)
        self.wanted = [0] * len(self.proposed)

    @property
    def output_ids(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_unread(self) -> int:
        """Committed tokens still to be read before it decodes."""
        return 0 if self.is_read else len(self.token_ids) - self.num_computed[-1]

    @property
    def num_known(self) -> int:
        """Committed and proposed tokens."""
        return len(self.token_ids) + sum(map(len, self.proposed))

    @property
    def room(self) -> int:
        """Tokens that may still be proposed, so that with the target's own the limit is not passed."""
        return self.max_length - 1 - self.num_known

    @property
    def uses_rejection(self) -> bool:
        """Whether its drafts are verified by rejection; by equality otherwise."""
        return not self.params.is_greedy and self.params.seed is None

    def reach(self, level: int) -> float:
        """How likely all that waits at `level` stands, as that level sees it."""
        return math.prod(proposal.confidence for proposal in self.proposed[level])

    def known_ids(self, start: int) -> list[int]:
        """Token ids from position `start` to the newest known one."""
        ids = self.token_ids[start:]
        proposed = [proposal.token_id for level in reversed(self.proposed) for proposal in level]
        return ids + proposed[max(0, start - len(self.token_ids)) :]

    def rollback(self, num_valid: int, level: int) -> None:
        """At `level` and below, forget what was computed past the first `num_valid` positions."""
        for index in range(level + 1):
            self.num_computed[index] = min(self.num_computed[index], num_valid)
        for index in range(min(level + 1, len(self.num_head_computed))):
            self.num_head_computed[index] = min(self.num_head_computed[index], num_valid)

    def commit(self, token_ids: list[int]) -> list[int]:
        """Append tokens up to the end of the text; returns those that were appended."""
        committed = []
        for token_id in token_ids:
            committed.append(token_id)
            self.token_ids.append(token_id)
            if token_id in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
                break
            if self.stop_strings is not None and self.stop_strings.push(token_id):
                self.finish_reason, self.stop_reason = "stop", self.stop_strings.found
                break
            if len(self.token_ids) >= self.max_length:
                self.finish_reason = "length"
                break
        if self.stop_strings is not None and self.finish_reason is not None:
            self.stop_strings.finish()
        self.stats.num_committed += len(committed)
        for position in [position for position in self.noise if position < len(self.token_ids)]:
            del self.noise[position]
        return committed

    def fail(self) -> None:
        """End the text where the model gave no usable logits."""
        self.finish_reason = "error"
        self.error = (
            f"the model's logits for the token at position {len(self.token_ids)} (prompt included, counted from 0) are "
            "NaN or infinite; a wider dtype such as float32 may help"
        )

    def restart(self) -> None:
        """Forget all that was computed, as after a preemption; committed tokens stay, and it is read first again."""
        self.is_read = False
        self.patience = 0
        self.num_computed = [0] * len(self.num_computed)
        self.num_head_computed = [0] * len(self.num_head_computed)
        self.window_row = -1
        for level in self.proposed:
            level.clear()


def mean_length(sequences: Items[Sequence]) -> float:
    """Committed tokens of a sequence, in the mean."""
    return sum(len(sequence.token_ids) for sequence in sequences) / len(sequences)


class Chunk(NamedTuple):
    """Committed tokens that are read in one step: positions `[start, stop)`."""

    sequence: Sequence
    start: int
    stop: int
