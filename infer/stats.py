"""What was counted and timed while tokens were generated."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class LevelStats:
    """Counts of one level; they add up exactly."""

    num_rounds: int = 0
    """Verifications by this level, a sequence counted once each (a level that drafts: tokens that it drafted)."""
    num_drafted: int = 0
    """Tokens put before this level."""
    num_accepted: int = 0
    """Tokens of these that it kept, without the recovered or bonus token."""
    accepted_per_position: list[int] = field(default_factory=list)
    """`[k]`: how often the token at place k of a draft was kept."""
    drafted_per_position: list[int] = field(default_factory=list)
    """`[k]`: how often a draft had a token at place k."""
    num_layer_passes: int = 0
    """Decoder layers run at this level, each token counted; a `block` head counts as one."""
    seconds: float = 0.0
    """The sequence's share of the time in which this level worked on its batch."""

    @property
    def acceptance_rate(self) -> float:
        """Kept tokens of those put before this level; 0 where there were none."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verification, with the recovered or bonus token."""
        return self.num_accepted / self.num_rounds + 1 if self.num_rounds else 0.0

    def count_verification(self, num_drafted: int, num_accepted: int) -> None:
        """Add one verification of one sequence."""
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for counts, number in (
            (self.drafted_per_position, num_drafted),
            (self.accepted_per_position, num_accepted),
        ):
            counts.extend([0] * (number - len(counts)))
            for place in range(number):
                counts[place] += 1

    def add(self, other: "LevelStats") -> None:
        """Add what another sequence counted."""
        self.num_rounds += other.num_rounds
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_layer_passes += other.num_layer_passes
        self.seconds += other.seconds
        for mine, theirs in (
            (self.accepted_per_position, other.accepted_per_position),
            (self.drafted_per_position, other.drafted_per_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for place, number in enumerate(theirs):
                mine[place] += number

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as JSON-ready values."""
        return vars(self) | {
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
        }


@contextmanager
def timed(levels: Items[LevelStats]) -> Iterator[None]:
    """Share the time that the block takes out among them."""
    start = time.perf_counter()
    yield
    seconds = (time.perf_counter() - start) / len(levels)
    for level in levels:
        level.seconds += seconds


def move_seconds(seconds: float, levels: Items[Items[LevelStats]]) -> None:
    """Of time that was shared among the first levels, give so much to the second ones."""
    for source, target in zip(*levels, strict=True):
        source.seconds -= seconds / len(levels[0])
        target.seconds += seconds / len(levels[0])


@dataclass(kw_only=True)
class Stats:
    """Counts of one completion, or of an engine over all of its completions."""

    levels: dict[str, LevelStats]
    """By `draft`, `intermediate` and `target`, as far as the method has them; see `build_levels`."""
    num_committed: int = 0
    """Tokens returned."""
    num_skipped: int = 0
    """Tokens of these that the target was never asked about; 0 for every lossless method."""
    num_prompt_tokens: int = 0
    """Tokens of the prompts."""
    num_prefills: int = 0
    """Times that all committed tokens were read, each giving one token: once, and once after each preemption."""
    num_prefill_layer_passes: int = 0
    """Decoder layers run in that, each token counted."""
    prefill_seconds: float = 0.0
    """The share of time that took."""

    @classmethod
    def of_levels(cls, names: tuple[str, ...]) -> "Stats":
        """Zeros for these levels."""
        return cls(levels={name: LevelStats() for name in names})

    @property
    def layers_per_token(self) -> float:
        """Decoder layers run in rounds, per token that rounds committed; 0 where there were none."""
        passes = sum(level.num_layer_passes for level in self.levels.values())
        num_tokens = self.num_committed - self.num_prefills
        return passes / num_tokens if num_tokens else 0.0

    def add(self, other: "Stats") -> None:
        """Add what another sequence counted."""
        for name, level in other.levels.items():
            self.levels[name].add(level)
        self.num_committed += other.num_committed
        self.num_skipped += other.num_skipped
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_prefills += other.num_prefills
        self.num_prefill_layer_passes += other.num_prefill_layer_passes
        self.prefill_seconds += other.prefill_seconds

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as JSON-ready values."""
        return {
            "num_committed": self.num_committed,
            "num_skipped": self.num_skipped,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_prefills": self.num_prefills,
            "num_prefill_layer_passes": self.num_prefill_layer_passes,
            "prefill_seconds": self.prefill_seconds,
            "layers_per_token": self.layers_per_token,
            "levels": {name: level.to_dict() for name, level in self.levels.items()},
        }
