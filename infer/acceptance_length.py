"""The acceptance length that measured shares of kept tokens lead to. Numbers in, numbers out.

A share `kept[k]` is the probability that the token at place k of a draft, counted from 0, is kept, given that all
before it were; places beyond the last keep its value. The loop is that of `Hierarchy` with fixed draft lengths, in the
middle of a text: no end of sequence and no length limit cuts it.
"""

from collections.abc import Sequence
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
    alive = [1.0, *_survival(kept_drafts, num_draft_tokens), 0.0]
    added = [0.0, *(alive[kept] - alive[kept + 1] for kept in range(num_draft_tokens + 1))]
    waiting = [0.0] * (num_provisional_tokens + num_draft_tokens + 1)
    waiting[0] = 1.0
    for number in range(num_provisional_tokens):
        reached, waiting[number] = waiting[number], 0.0
        for more, share in enumerate(added):
            waiting[number + more] += reached * share
    return waiting


def _survival(kept: Sequence[float], num_places: int) -> list[float]:
    """`[k]`: the probability that places 0 to k are all kept."""
    last = kept[-1] if kept else 0.0
    return list(accumulate([*kept[:num_places], *[last] * (num_places - len(kept))], mul))
