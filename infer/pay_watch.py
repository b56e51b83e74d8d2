"""Whether drafts pay, as rounds themselves show: against the cost model's errors. Numbers in, numbers out.

By the number of sequences. What a plain round takes is known from those that came, in proportion to what the cost model
says, which follows the texts' length; so now and then one must come. What a round with drafts is worth is the time of
the plain rounds that would have brought its tokens.
"""

from collections import defaultdict
from dataclasses import dataclass

PLAIN_MEMORY, GAIN_MEMORY = 0.8, 0.95
"""Weight of the past in how long plain rounds take, and in what drafts gain, after one more round."""
FIRST_GAIN = 0.2
"""What drafts are taken to gain, in parts of a plain round, before any is seen: one noisy round says little."""
SECOND_GAIN = 0.1
"""The same for another text that runs alone, where drafts did not gain in those before: it may be of another kind."""
MOST_PLAIN, MOST_GAIN = 2.0, 3.0
"""A round counts as at most so many times what was known, at first by the cost model, or so much gain: the machine may
have been busy."""
FIRST_PATIENCE, PATIENCE, LONG_PATIENCE = 8, 48, 192
"""Rounds with drafts to the first plain one, to the next, and where drafts gain more than `CLEAR_GAIN`."""
CLEAR_GAIN = 0.3


@dataclass
class _Known:
    plain_scale: float | None = None
    """Seconds of a plain round, in parts of what the cost model says."""
    gain: float = FIRST_GAIN
    """Of a round with drafts, in plain rounds."""
    num_since_plain: int = 0


class PayWatch:
    """Learns from rounds, and says what the next one should be."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Known] = defaultdict(_Known)

    def meet_text(self) -> None:
        """To be called when a new text comes."""
        lone = self._by_size[1]
        lone.gain = max(lone.gain, SECOND_GAIN)

    def pays(self, batch_size: int) -> bool:
        """Whether rounds with drafts have been worth their time."""
        return self._by_size[batch_size].gain > 0

    def needs_plain(self, batch_size: int) -> bool:
        """Whether a plain round should come, to compare with."""
        known = self._by_size[batch_size]
        if known.plain_scale is None:
            return known.num_since_plain >= FIRST_PATIENCE
        return known.num_since_plain >= (LONG_PATIENCE if known.gain > CLEAR_GAIN else PATIENCE)

    def observe(
        self,
        batch_size: int,
        plain_seconds: float,  # of a plain round, by the cost model
        num_tokens: int,  # that all sequences committed
        seconds: float,
        *,
        has_drafts: bool,  # whether any of an exit's were asked for
        has_copies: bool,  # whether any were copied
    ) -> None:
        """Learn from a round."""
        known = self._by_size[batch_size]
        if has_copies:
            # They say nothing of the exits, and a plain round is only tried for now and then.
            known.num_since_plain = known.num_since_plain + 1 if has_drafts else 0
        elif has_drafts:
            known.num_since_plain += 1
            if known.plain_scale is not None:
                plain = plain_seconds * known.plain_scale
                gain = min(max(num_tokens / batch_size - seconds / plain, -1.0), MOST_GAIN)
                known.gain = GAIN_MEMORY * known.gain + (1 - GAIN_MEMORY) * gain
        else:
            known.num_since_plain = 0
            scale = min(seconds / plain_seconds, MOST_PLAIN * (known.plain_scale or 1.0))
            if known.plain_scale is not None:
                scale = PLAIN_MEMORY * known.plain_scale + (1 - PLAIN_MEMORY) * scale
            known.plain_scale = scale
