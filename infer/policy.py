"""How far to draft before asking the level above. Numbers in, numbers out.

A policy only decides whether one more token is proposed; a token that was drawn is always verified. So it changes the
speed and never the distribution.
"""

import math
from dataclasses import dataclass

MEMORY = 0.9
"""Weight of the past in the running share of kept tokens; the last ten or so verifications decide."""

INITIAL_SHARE = 0.7
"""The running share of kept tokens before anything was verified."""


@dataclass(frozen=True, kw_only=True)
class FixedPolicy:
    """Always the longest draft."""

    max_length: int

    def length(self, kept_share: float) -> int:
        """Tokens to ask for."""
        return self.max_length

    @property
    def least_reach(self) -> float:
        """How likely all tokens proposed so far must stand for one more to be worth proposing."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class DynamicPolicy:
    """Drafts on while all proposed so far stand with a probability of at least `min_confidence`."""

    max_length: int
    min_confidence: float

    def length(self, kept_share: float) -> int:
        """Tokens to ask for: so many that a draft of tokens kept this often still stands whole often enough."""
        if kept_share >= 1:
            return self.max_length
        if kept_share <= 0 or self.min_confidence >= 1:
            return 1
        if self.min_confidence <= 0:
            return self.max_length
        return min(self.max_length, 1 + int(math.log(self.min_confidence) / math.log(kept_share)))

    @property
    def least_reach(self) -> float:
        """As `FixedPolicy`."""
        return self.min_confidence


Policy = FixedPolicy | DynamicPolicy


def updated_share(
    kept_share: float,
    num_drafted: int,
    num_accepted: int,
    memory: float = MEMORY,  # weight of the past after one more token
) -> float:
    """The running share of kept tokens after one more verification; tokens behind the first rejected say nothing."""
    num_judged = min(num_drafted, num_accepted + 1)
    if num_judged == 0:
        return kept_share
    weight = memory**num_judged
    return weight * kept_share + (1 - weight) * num_accepted / num_judged
