"""One generation."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from .config import SamplingParams
from .stats import Stats

FinishReason = Literal["stop", "length"]


class Proposal(NamedTuple):
    """A token that left a level and waits for the next one."""

    token_id: int
    probs: Tensor | None  # [V], what it was drawn from; None where the rule is equality
    origin: int  # index of the level whose own choice it was


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The tokens of one generation and what is known of them at each level."""

    request_id: int
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
    block_table: list[int] = field(default_factory=list)
    window_row: int = -1
    """This sequence's place in the buffers of hidden states, while it runs."""
    noise: dict[int, Tensor] = field(default_factory=dict)
    """By position, for a seeded request: see `gumbel_noise`."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.token_ids[len(self.prompt_ids) :]

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
                self.finish_reason = "stop"
                break
            if len(self.token_ids) >= self.max_length:
                self.finish_reason = "length"
                break
        self.stats.num_committed += len(committed)
        for position in [position for position in self.noise if position < len(self.token_ids)]:
            del self.noise[position]
        return committed

    def restart(self) -> None:
        """Forget all that was computed, as after a preemption; committed tokens stay."""
        self.num_computed = [0] * len(self.num_computed)
        self.num_head_computed = [0] * len(self.num_head_computed)
        self.window_row = -1
        for level in self.proposed:
            level.clear()
