"""The acceptance length that measured shares of kept tokens lead to. Numbers in, numbers out.

A share `kept[k]` is the probability that the token at place k of a draft, counted from 0, is kept, given that all
before it were; places beyond the last keep its value. The loop is that of `Hierarchy` with fixed draft lengths, in the
middle of a text: no end of sequence and no length limit cuts it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul


def single_layer_length(kept: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens committed per verification, its own one included: `1 + sum_k kept[0] ... kept[k]` over the draft."""
    return 1 + sum(_survival(kept, num_draft_tokens))


def hispec_length(
    kept_drafts: Sequence[float],  # by the intermediate, by place in a draft
    kept_provisional: Sequence[float],  # by the target, by place among the tokens that wait for it
    num_draft_tokens: int,
    num_provisional_tokens: int,
) -> float:
    """Tokens committed per verification by the target: `1 + sum_p P(p or more wait) kept[0] ... kept[p - 1]`.

    Drafts and the intermediate are taken as independent of what the target keeps; `provisional_lengths` says how
    many wait.
    """
    waiting = provisional_lengths(kept_drafts, num_draft_tokens, num_provisional_tokens)
    survival = _survival(kept_provisional, len(waiting) - 1)
    return 1 + sum(sum(waiting[place:]) * alive for place, alive in enumerate(survival, 1))


def provisional_lengths(
    kept_drafts: Sequence[float],
    num_draft_tokens: int,
    num_provisional_tokens: int,
) -> list[float]:
    """`[m]`: the probability that m provisional tokens wait when the target verifies.

    Every draft adds its kept tokens and one of the intermediate's own, until `num_provisional_tokens` wait; the last
    one is not cut short, so m may be up to `num_draft_tokens` more.
    """
    waiting = [0.0] * (num_provisional_tokens + num_draft_tokens + 1)
    for started, lengths in _verifications(kept_drafts, num_draft_tokens, num_provisional_tokens):
        del started
        for number, share in enumerate(lengths):
            waiting[number] += share if number >= num_provisional_tokens else 0
    return waiting


def verifications(
    kept_drafts: Sequence[float],
    num_draft_tokens: int,
    num_provisional_tokens: int,
) -> list[float]:
    """`[j]`: the probability that the intermediate level verifies at least j + 1 times before the target does."""
    return [started for started, _ in _verifications(kept_drafts, num_draft_tokens, num_provisional_tokens)]


def _verifications(
    kept_drafts: Sequence[float], num_draft_tokens: int, num_provisional_tokens: int
) -> Iterator[tuple[float, list[float]]]:
    """For each verification by the intermediate the probability that it comes, and how many tokens wait after it."""
    alive = [1.0, *_survival(kept_drafts, num_draft_tokens), 0.0]
    added = [0.0, *(alive[kept] - alive[kept + 1] for kept in range(num_draft_tokens + 1))]
    waiting = [1.0] + [0.0] * (num_provisional_tokens - 1)
    while (started := sum(waiting)) > 0:
        lengths = [0.0] * (num_provisional_tokens + num_draft_tokens + 1)
        for number, share in enumerate(waiting):
            for more, chance in enumerate(added):
                lengths[number + more] += share * chance
        yield started, lengths
        waiting = lengths[:num_provisional_tokens]


def _survival(kept: Sequence[float], num_places: int) -> list[float]:
    """`[k]`: the probability that places 0 to k are all kept."""
    last = kept[-1] if kept else 0.0
    return list(accumulate([*kept[:num_places], *[last] * (num_places - len(kept))], mul))
