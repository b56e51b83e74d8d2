"""How far each sequence of a batch drafts in a round, by the cost model. Numbers in, numbers out.

The choice is that of the planner, made anew for the sequences that run and for what was kept of their own drafts: the
most tokens a second, the shortest of lengths that are alike, and nothing where drafts do not win by `planner.margin`.
Within a round `SingleLayerLengths.num_worth` says from the confidence of each drafted token whether another one pays.
"""

import math
from collections import Counter
from collections.abc import Sequence as Items
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from .cost_model import Acceptance, Costs, Setting, drafted_token_seconds, predict, verified_draft_seconds
from .planner import ALIKE, AUTOREGRESSIVE, candidates, margin

GRID = 20
"""Shares are rounded to so many parts of one, so that a choice that was made once can be looked up."""
HISPEC_GRID = 10
"""The same under `hispec`, where a choice that has to be made is that of one in fifty pairs of lengths."""
FIRST_CONTEXT, CONTEXT_GRID = 64, 1.3
"""Contexts are rounded to so many tokens, or so many times as many, and so on, for the same reason."""
MAX_CHOICES = 8192
"""Choices that are kept."""
CERTAIN = 0.02
"""Measured shares nearer to 0 or 1 than this say nothing of how shares would change together."""

Shares = tuple[float, ...]
"""Of one sequence, by level below the target: how often the next level keeps its tokens."""
Lengths = tuple[int, ...]
"""Of one sequence, by level below the target: how many tokens the next level asks of it; zeros for none at all."""


class LengthChoice(Protocol):
    """Chooses lengths for a batch from what was kept of each of its sequences."""

    shortest: Lengths
    """The shortest draft there is."""

    def __call__(self, shares: Items[Shares], context: float | None = None) -> "Choice":
        """In the order of the sequences, behind so many tokens in the mean; None: as many as the costs are for."""


class Choice(NamedTuple):
    """What a round does."""

    lengths: Items[Lengths]
    tokens_per_second: float
    """That the batch should then commit."""
    plain_seconds: float
    """Of a round that drafts nothing."""


class SingleLayerLengths:
    """For `single-layer`: every sequence its own length, those drafting longest whose drafts are kept most often."""

    shortest: Lengths = (1,)

    def __init__(self, costs: Costs, acceptance: Acceptance, exit_layer: int, max_length: int) -> None:
        kept = acceptance.hops[exit_layer, costs.num_layers]
        self._costs, self._exit_layer, self._max_length = costs, exit_layer, max_length
        self._reaches = [_reaches(shifted_shares(kept, step / GRID), max_length) for step in range(GRID + 1)]
        self._seconds = lru_cache(maxsize=None)(self._seconds_at)
        self._choose = lru_cache(maxsize=MAX_CHOICES)(self._choose_on_grid)

    def __call__(self, shares: Items[Shares], context: float | None = None) -> Choice:
        """As `LengthChoice`."""
        steps = [round(share * GRID) for (share,) in shares]
        place = on_context_grid(context)
        lengths, rate = self._choose(tuple(sorted(steps)), place)
        return Choice([lengths[step] for step in steps], rate, self._seconds(len(steps), place).plain)

    def num_worth(
        self,
        chances: Items[float],  # falling: of sequences that may draft another token, that the target keeps it
        batch_size: int,
        num_drafted: int,  # tokens of the whole batch that this round has drafted
        tokens_per_second: float,  # that time is worth
        context: float | None = None,  # as for the choice
    ) -> int:
        """How many of them, the first ones, should draft it in one pass; its cost has the target's further rows too."""
        seconds = self._seconds(batch_size, on_context_grid(context))
        verified = seconds.verified[num_drafted]
        gains = [
            kept - tokens_per_second * (seconds.drafted[number] + seconds.verified[num_drafted + number] - verified)
            for number, kept in enumerate(accumulate(chances), 1)
        ]
        best = max(gains, default=0.0)
        return gains.index(best) + 1 if best > 0 else 0

    def least_chances(
        self,
        length: int,  # of the draft, at most
        batch_size: int,
        tokens_per_second: float,
        context: float | None = None,
    ) -> list[float]:
        """The chances at which tokens of the only sequence that drafts are worth what they cost, from the second on."""
        seconds = self._seconds(batch_size, on_context_grid(context))
        return [
            tokens_per_second * (seconds.drafted[1] + after - before)
            for before, after in pairwise(seconds.verified[1 : length + 1])
        ]

    def _choose_on_grid(self, steps: tuple[int, ...], context: int | None) -> tuple[dict[int, Lengths], float]:
        """By step, and the tokens a second.

        Tokens join a round in the order of how likely they are kept, sequences that are alike together, and the best
        round on this way is taken.
        """
        batch_size, seconds = len(steps), self._seconds(len(steps), context)
        numbers = Counter(steps)
        # Behind tokens that are kept for certain one is as likely as those before it, and still comes after them.
        joining = sorted(
            (-reach, place, step) for step in numbers for place, reach in enumerate(self._reaches[step]) if reach > 0
        )
        num_kept, drafting, num_drafted = float(batch_size), 0.0, 0
        num_active = [0] * self._max_length
        rates = [(batch_size / seconds.plain, 0)]
        for place_in_line, (reach, place, step) in enumerate(joining, 1):
            before = num_active[place]
            num_active[place] += numbers[step]
            num_kept -= reach * numbers[step]
            num_drafted += numbers[step]
            drafting += seconds.drafted[num_active[place]] - seconds.drafted[before]
            rates.append((num_kept / (drafting + seconds.verified[num_drafted]), place_in_line))
        lengths = dict.fromkeys(steps, 0)
        num_joined = _shortest_of_the_best(rates, batch_size)
        for _, _, step in joining[:num_joined]:
            lengths[step] += 1
        return {step: (length,) for step, length in lengths.items()}, rates[num_joined][0]

    def _seconds_at(self, batch_size: int, context: int | None) -> "_RoundSeconds":
        costs, exit_layer = self._costs.behind(context), self._exit_layer
        most = batch_size * self._max_length
        return _RoundSeconds(
            plain=predict(AUTOREGRESSIVE, costs, Acceptance(hops={}), batch_size).seconds_per_round,
            drafted=[0.0, *(drafted_token_seconds(costs, exit_layer, 1 + n) for n in range(batch_size))],
            verified=[verified_draft_seconds(costs, exit_layer, batch_size, n / batch_size) for n in range(most + 1)],
        )


class HispecLengths:
    """For `hispec`: the same two lengths for all sequences of the batch, by the mean of their shares."""

    shortest: Lengths = (1, 1)

    def __init__(self, costs: Costs, acceptance: Acceptance, exit_layers: tuple[int, int]) -> None:
        self._costs = costs
        self._hops = (exit_layers, (exit_layers[1], costs.num_layers))
        self._kept = [acceptance.hops[hop] for hop in self._hops]
        self._settings = [each for each in candidates(exit_layers) if each.exit_layers == exit_layers]
        self._choose = lru_cache(maxsize=MAX_CHOICES)(self._choose_on_grid)

    def __call__(self, shares: Items[Shares], context: float | None = None) -> Choice:
        """As `LengthChoice`."""
        steps = tuple(round(sum(level) / len(level) * HISPEC_GRID) for level in zip(*shares, strict=True))
        lengths, rate, plain = self._choose(len(shares), steps, on_context_grid(context))
        return Choice([lengths] * len(shares), rate, len(shares) / plain)

    def _choose_on_grid(
        self, batch_size: int, steps: tuple[int, ...], context: int | None
    ) -> tuple[Lengths, float, float]:
        """The lengths, the tokens a second, and those of plain decoding."""
        costs = self._costs.behind(context)
        shares = [shifted_shares(kept, step / HISPEC_GRID) for kept, step in zip(self._kept, steps, strict=True)]
        acceptance = Acceptance(hops=dict(zip(self._hops, shares, strict=True)))

        def rate(setting: Setting) -> float:
            return predict(setting, costs, acceptance, batch_size).tokens_per_second

        lengths = [(each.num_draft_tokens, each.num_provisional_tokens) for each in self._settings]
        rates = [(rate(each), sum(length)) for each, length in zip(self._settings, lengths, strict=True)]
        # From the shortest to the longest, as `_shortest_of_the_best` looks through them.
        order = sorted(range(len(rates)), key=lambda k: (rates[k][1], -rates[k][0]))
        rising = [(rate(AUTOREGRESSIVE), 0), *((rates[k][0], place) for place, k in enumerate(order, 1))]
        place = _shortest_of_the_best(rising, batch_size)
        return lengths[order[place - 1]] if place else (0, 0), rising[place][0], rising[0][0]


def build_choice(costs: Costs, acceptance: Acceptance, longest: Setting) -> LengthChoice | None:
    """For an engine of these exits and, at most, these lengths; None where it never drafts."""
    if longest.method == "autoregressive":
        return None
    if longest.method == "single-layer":
        return SingleLayerLengths(costs, acceptance, longest.exit_layers[0], longest.num_draft_tokens)
    draft_exit, middle_exit = longest.exit_layers
    return HispecLengths(costs, acceptance, (draft_exit, middle_exit))


def on_context_grid(context: float | None) -> int | None:
    """The tokens before a round, in steps that hardly change what it costs."""
    if context is None:
        return None
    steps = max(0, round(math.log(max(context, 1.0) / FIRST_CONTEXT, CONTEXT_GRID)))
    return round(FIRST_CONTEXT * CONTEXT_GRID**steps)


def shifted_shares(kept: Items[float], first: float) -> tuple[float, ...]:
    """Shares by place that have changed together, so that the one at place 0 is `first`: all odds by one factor."""
    if first <= 0 or first >= 1:
        return (min(max(first, 0.0), 1.0),)
    odds = [min(max(share, CERTAIN), 1 - CERTAIN) for share in kept]
    odds = [share / (1 - share) for share in odds]
    factor = first / (1 - first) / odds[0]
    return tuple(factor * each / (1 + factor * each) for each in odds)


class _RoundSeconds(NamedTuple):
    """What rounds of one batch take."""

    plain: float
    drafted: Items[float]
    """`[n]`: one more token of each of n sequences."""
    verified: Items[float]
    """`[t]`: all that follows, where t tokens were drafted in all."""


def _shortest_of_the_best(rates: Items[tuple[float, int]], batch_size: int) -> int:
    """Of (tokens a second, what it is), rising in length from plain decoding, the one that is taken."""
    fastest = max(rate for rate, _ in rates)
    rate, chosen = next(each for each in rates if each[0] >= fastest * ALIKE)
    return chosen if rate > rates[0][0] * margin(batch_size) else rates[0][1]


def _reaches(kept: Items[float], max_length: int) -> list[float]:
    """`[k]`: how likely places 0 to k of a draft are all kept."""
    reach, reaches = 1.0, []
    for place in range(max_length):
        reach *= kept[min(place, len(kept) - 1)]
        reaches.append(reach)
    return reaches
