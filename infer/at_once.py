"""Greedy drafts, and what the target says of them, as steps of our own kernels that are done in a single call.

T rows; V vocabulary. All raise NotNative where our own kernels do not take something.
"""

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..heads import Drawn, Highest, StateRows, StepChain, highest_step
from .level_parts import LevelParts
from .packed_rows import Bounds, PackedRows
from .sequence import Sequence

V = TypeVar("V")


class Judged(NamedTuple):
    """What the target says of drafts."""

    sequences: list[Sequence]
    bounds: Bounds
    """Positions of its rows."""
    logits: Tensor  # [T, V]
    highest: Highest
    seconds: float
    """That it took."""


class DraftsAtOnce(NamedTuple):
    """Drafts that were drawn together, by sequence."""

    token_ids: list[list[int]]
    confidences: list[list[float]] | None
    """The highest probability of each token's row, where it was asked for."""
    judged: Judged | None
    """None where the target was not asked."""


class DraftRows(NamedTuple):
    """What drafts run over."""

    unseen: PackedRows | None
    """Rows that the layers have not seen."""
    for_head: PackedRows
    """Rows that the head has not: those of the first tokens,"""
    newest: Tensor  # int64
    """of which so many, these, are scored."""
    following: PackedRows
    """All tokens, by token, those of the sequences that draw it side by side; for the layers, and then for the head."""
    counts: Tensor  # int64
    """How many tokens, and by token how many sequences draw it, the first ones; never rising."""


def add_draft(
    chain: StepChain,
    parts: LevelParts,
    rows: DraftRows,
    *,
    may_end: bool,  # see `Drawn.least`
    with_probabilities: bool,
) -> Drawn:
    """Draw tokens at the lowest level, and let its layers run over all of them."""

    def find(chain: StepChain, state: StateRows) -> None:
        logits = chain.add(parts.exit_step(0, state))
        vocab_ids = parts.vocab_ids(0)
        chain.add(highest_step(logits, vocab_ids, with_probabilities=with_probabilities, number=state.number))

    if rows.unseen is not None:
        chain.add(parts.layers_steps(range(1), rows.unseen))
    find(chain, StateRows(chain.add(parts.head_step(0, rows.for_head))[0], rows.newest[1:], rows.newest[:1]))
    body, following = StepChain(), rows.following.at_once()
    body.add(parts.layers_steps(range(1), following))
    find(body, StateRows(body.add(parts.head_step(0, following))[0], None))
    ids = rows.following.token_ids
    return chain.add_draft(body, rows.counts, ids, may_end=may_end, with_probabilities=with_probabilities)


def add_judgement(chain: StepChain, parts: LevelParts, levels: range, rows: PackedRows) -> tuple[Tensor, Highest]:
    """Run levels up to the target; its logits `[T, V]`, and the highest of them."""
    states = chain.add(parts.layers_steps(levels, rows))[-1][0]
    logits = chain.add(parts.logits_step(StateRows(states, None, rows.number)))
    return logits, chain.add(highest_step(logits, None, with_probabilities=False, number=rows.number))


def of_first(found: tuple[Tensor, Highest], number: int) -> tuple[Tensor, Highest]:
    """What `add_judgement` gives, of the first rows."""
    logits, highest = found
    if len(logits) == number:
        return found
    return logits[:number], Highest(highest.ids[:number], highest.values[:number], None)


def by_sequence(values: Items[V], nums_active: Items[int], num_drawn: int) -> list[list[V]]:
    """What lies token by token, of the first sequences each; of so many tokens."""
    firsts = list(accumulate(nums_active, initial=0))
    return [
        [values[firsts[place] + b] for place, number in enumerate(nums_active[:num_drawn]) if b < number]
        for b in range(nums_active[0])
    ]
