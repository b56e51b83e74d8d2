"""What a draft copied from the text promises, and whether that is more than the exits promise. Numbers in, numbers out.

The chance of a copied token rises with the number of tokens before it that stand as they stood there before. The first
has `num_matched` of them, and each that is kept is one more for the next.

What a round costs is told in parts of what a pass takes whatever its rows. A batch shares that, so there a row too many
weighs more.
"""

from bisect import bisect_left
from collections.abc import Sequence as Items
from itertools import pairwise

MAX_MATCHED = 10
"""More tokens that match say no more."""

FIRST_SHARES = (0.21, 0.48, 0.66, 0.76, 0.81, 0.92)
"""How often a copied token is the target's where nothing is known of the text yet: behind 1, 2, 3, 4 or 5, 6 to 9, and
more matching tokens. SmolLM2-135M, greedy, 50 prompts of five kinds, 11 000 tokens."""

_LAST_OF_CLASS = (1, 2, 3, 5, 9)

MEMORY = 0.9
"""Weight of the past in a share after one more token of its class."""

ROW_COST = 0.08
"""What one more row adds to a pass, where it was not measured: of SmolLM2 on two CPU cores by our own kernels 0.06 up
to 4 rows and 0.1 up to 8."""

MARGIN, MARGIN_PER_SEQUENCE, MOST_MARGIN = 1.03, 0.03, 1.5
"""A copy must promise so many times the rate of plain decoding, and so much more for each sequence of the round, up to
the last: shares are guesses, and the more sequences, the less sure is what one more row costs."""

MAX_ROWS = 16
"""Rows of a pass, of all its sequences, that are still cheap: so many a machine's tiles take at once, and with one long
copy more attention may pad all the others."""


def size_class(num_matched: int) -> int:
    """Index into the shares of a token with so many matching tokens before it."""
    return bisect_left(_LAST_OF_CLASS, num_matched)


def updated_shares(
    shares: Items[float],
    num_matched: int,
    copied_ids: Items[int],  # what followed the earlier place
    token_ids: Items[int],  # what was committed
) -> list[float]:
    """The shares after the target has said what follows; tokens behind the first that differs say nothing."""
    updated = list(shares)
    for place, (copied, committed) in enumerate(zip(copied_ids, token_ids, strict=False)):
        index = size_class(num_matched + place)
        updated[index] = MEMORY * updated[index] + (1 - MEMORY) * (copied == committed)
        if copied != committed:
            break
    return updated


def expected_tokens(share: float, num_drafted: int) -> float:
    """Kept tokens of a draft of tokens that are each kept with this chance while those before them are."""
    return sum(share**place for place in range(1, num_drafted + 1))


def best_copy(
    shares: Items[float],
    num_matched: int,
    max_length: int,
    num_seqs: int,  # in the round
    row_cost: float | None = None,  # of one more row; None where it was not measured
) -> tuple[int, float]:
    """How many tokens to copy, and the tokens per cost of a round that does; 0 tokens is plain decoding."""
    plain = 1 / _pass_cost(1, num_seqs, row_cost)
    length, best = 0, plain
    reach, expected = 1.0, 1.0
    # Each further token is kept less often and costs as much: once the rate falls it never rises again.
    for place in range(min(max_length, max_copied(num_seqs))):
        reach *= shares[size_class(num_matched + place)]
        expected += reach
        rate = expected / _pass_cost(place + 2, num_seqs, row_cost)
        if rate <= best:
            break
        length, best = place + 1, rate
    return (length, best) if best > margin(num_seqs) * plain else (0, plain)


def max_copied(num_seqs: int) -> int:
    """The most tokens that each sequence of so many in a round may copy."""
    return max(0, MAX_ROWS // num_seqs - 1)


def margin(num_seqs: int) -> float:
    """Times the rate of plain decoding that a copy must promise."""
    return min(MARGIN + MARGIN_PER_SEQUENCE * num_seqs, MOST_MARGIN)


def exits_rate(
    share: float,  # of the exits' tokens, that the target keeps
    num_drafted: int,
    token_cost: float,  # of a token that the exits draft, in passes of one row through the whole model
    num_seqs: int,  # in the round
    row_cost: float | None = None,  # of one more row; None where it was not measured
) -> float:
    """Tokens per cost of a round for which the exits draft so many tokens."""
    plain = _pass_cost(1, num_seqs, row_cost)
    cost = _pass_cost(num_drafted + 1, num_seqs, row_cost) + num_drafted * token_cost * plain
    return (1 + expected_tokens(share, num_drafted)) / cost


def exits_cost(
    exit_layers: Items[int],  # that serve, the draft's first
    num_layers: int,
    lengths: Items[int],  # tokens that each exit's verifier asks of it
    shares: Items[float],  # of these, that it keeps
) -> float:
    """The `token_cost` of what leaves the deepest exit: decoder layers that are run for it, a head counted as one.

    A level above the lowest adds a token of its own to those that it keeps.
    """
    cost = exit_layers[0] + 1.0
    for (start, stop), length, share in zip(pairwise(exit_layers), lengths, shares, strict=False):
        cost = (length * cost + stop - start + 1) / (1 + expected_tokens(share, length))
    return cost / num_layers


def _pass_cost(num_rows: int, num_seqs: int, row_cost: float | None) -> float:
    return 1 / num_seqs + (ROW_COST if row_cost is None else row_cost) * num_rows
