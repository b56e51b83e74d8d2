"""How far to draft in each round. Numbers in, numbers out.

Who drafts at all is chosen before a round begins, from committed tokens and earlier verifications. How far may then be
decided token by token, from how sure the draft exit was of those before; a token that was drawn is always verified. So
the distribution of the text does not depend on either. `CostPolicy` follows the batch as it shrinks and grows, and each
text as its drafts are kept or not.

*By confidence*: the highest probability of the draft exit's rows tells how likely its tokens stand (of SmolLM2's greedy
ones within 0.02 in nine of ten classes; sampled at 0.8 low ones are kept more often, high ones less), and the share
that was kept of a text's drafts how likely the next one does. Their product, against what the next one's time is worth
in tokens, decides: followed along held-out greedy answers that commits 4 % more tokens a second than lengths chosen
before each round, along sampled ones 3 %, and 6 and 4 % more than always two.

*Watching*: what rounds take and bring is measured as they run (`pay_watch`). Where drafts have cost more than they
brought at this number of sequences, none are asked for, whatever the cost model says, but for probes, and for a few
rounds of the next text that runs alone.

*Probing*: where nothing is drafted nothing is learned. After `FIRST_PROBE` rounds in which some sequence drafted
nothing, all such sequences draft the shortest draft in one round, together, because what a pass costs hardly depends on
how many take part. After each probe it takes twice as many rounds to the next, up to `LAST_PROBE`; it begins anew when
all draft, and when a new text comes. Nothing is tried where even `HOPE` would not pay, as in large batches: there the
heads of all would first have to catch up with their texts. So a batch in which drafting does not pay runs at most one
round in 65 with a shortest draft (by confidence it may go on), and one in 1025 after a while: where such a round costs
a third more than a plain one, the loss is at most 0.5 %, and less by what is kept of the drafts.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from . import policy
from .draft_lengths import LengthChoice, Lengths, SingleLayerLengths
from .pay_watch import PayWatch

MEMORY = 0.95
"""Weight of a text's past in its share of kept tokens, after one more; the last twenty or so decide."""
STALE = 0.8
"""Weight of what was learned before a pause of `FIRST_PROBE` rounds: the text may be another one since."""
SHARED_MEMORY = 0.97
"""As `MEMORY`, over all texts: what a new one begins with."""
FIRST_PROBE, LAST_PROBE = 64, 1024
"""Rounds to the first probe, and the most between two."""
HOPE = 0.9
"""The share of kept tokens that a probe may find, at best."""


class RoundPolicy(Protocol):
    """Chooses who drafts in each round, and how far."""

    @property
    def by_confidence(self) -> bool:
        """Whether drafts go on, token by token, as far as `going_on` says; else they have the lengths chosen."""

    def first_shares(self) -> list[float]:
        """By level below the target: the running share of kept tokens that a new text begins with."""

    def choose(self, kept_shares: Items[Items[float]], context: float | None = None) -> Items[Lengths]:
        """From each sequence's running shares, and the tokens that they have in the mean, how much is asked of each
        level below the target, at most, in the round that begins; zeros for none at all. By confidence this is what is
        expected, and only zeros bind."""

    def going_on(
        self,
        chances: Items[float],  # that this token is reached and kept
        num_drafted: int,  # tokens of the whole batch that exits have drafted in this round
    ) -> Items[int]:
        """Which of the sequences that have room draft one more token behind theirs, in the round that was last chosen;
        as places in `chances`."""

    def least_chances(self, length: int) -> list[float]:
        """The same where a single sequence of them drafts, so many tokens at most: the chance that a token must have to
        be drafted, by how many are before it, but for the first, which is drafted anyway."""

    def observe(self, num_tokens: int, seconds: float, *, has_copies: bool) -> None:
        """Learn how many tokens the round that was last chosen committed, how long it took, and whether any tokens were
        copied in it."""

    def updated_share(
        self,
        level: int,  # whose tokens were verified
        kept_share: float,
        num_drafted: int,
        num_accepted: int,
        num_plain_rounds: int,  # in a row before this one, of the same sequence
    ) -> float:
        """The running share after one more verification."""


class CostPolicy:
    """As far as the cost model says; one for an engine."""

    def __init__(
        self,
        choice: LengthChoice,
        shares: Items[float],  # that texts begin with
        *,
        by_confidence: bool = False,
    ) -> None:
        self._choice = choice
        self._lengths = choice if by_confidence and isinstance(choice, SingleLayerLengths) else None
        self._shares = list(shares)
        self._batch_size, self._tokens_per_second = 0, 0.0
        self._context: float | None = None
        self._watch = PayWatch()
        self._plain_seconds, self._has_drafts = 0.0, False
        self._num_idle = 0
        self._interval = FIRST_PROBE

    @property
    def by_confidence(self) -> bool:
        """As `RoundPolicy`."""
        return self._lengths is not None

    def first_shares(self) -> list[float]:
        """As `RoundPolicy`."""
        self._interval = FIRST_PROBE
        self._watch.meet_text()
        return list(self._shares)

    def choose(self, kept_shares: Items[Items[float]], context: float | None = None) -> Items[Lengths]:
        """As `RoundPolicy`."""
        lengths = self._choose(kept_shares, context)
        self._has_drafts = any(map(any, lengths))
        return lengths

    def _choose(self, kept_shares: Items[Items[float]], context: float | None) -> Items[Lengths]:
        self._batch_size, self._context = len(kept_shares), context
        chosen, self._tokens_per_second, self._plain_seconds = self._choice([tuple(s) for s in kept_shares], context)
        nothing = [(0,) * len(lengths) for lengths in chosen]
        if any(map(any, chosen)) and self._watch.needs_plain(self._batch_size):
            return nothing
        if not self._watch.pays(self._batch_size):
            chosen = nothing
        if all(map(any, chosen)):
            self._num_idle, self._interval = 0, FIRST_PROBE
            return chosen
        if self._num_idle < self._interval:
            self._num_idle += 1
            return chosen
        if not self._may_ever_pay(kept_shares, context):
            return chosen
        self._num_idle, self._interval = 0, min(2 * self._interval, LAST_PROBE)
        return [lengths if any(lengths) else self._choice.shortest for lengths in chosen]

    def _may_ever_pay(self, kept_shares: Items[Items[float]], context: float | None) -> bool:
        hopeful = [(HOPE,) * len(shares) for shares in kept_shares]
        return any(map(any, self._choice(hopeful, context).lengths))

    def observe(self, num_tokens: int, seconds: float, *, has_copies: bool) -> None:
        """As `RoundPolicy`."""
        self._watch.observe(
            self._batch_size,
            self._plain_seconds,
            num_tokens,
            seconds,
            has_drafts=self._has_drafts,
            has_copies=has_copies,
        )

    def going_on(self, chances: Items[float], num_drafted: int) -> Items[int]:
        """As `RoundPolicy`."""
        assert self._lengths is not None
        places = sorted(range(len(chances)), key=lambda place: -chances[place])
        falling = [chances[place] for place in places]
        worth = self._lengths.num_worth(falling, self._batch_size, num_drafted, self._tokens_per_second, self._context)
        return places[:worth]

    def least_chances(self, length: int) -> list[float]:
        """As `RoundPolicy`."""
        assert self._lengths is not None
        return self._lengths.least_chances(length, self._batch_size, self._tokens_per_second, self._context)

    def updated_share(
        self, level: int, kept_share: float, num_drafted: int, num_accepted: int, num_plain_rounds: int
    ) -> float:
        """As `RoundPolicy`; the shares of all texts learn too."""
        self._shares[level] = policy.updated_share(self._shares[level], num_drafted, num_accepted, SHARED_MEMORY)
        memory = MEMORY * STALE if num_plain_rounds >= FIRST_PROBE else MEMORY
        return policy.updated_share(kept_share, num_drafted, num_accepted, memory)
