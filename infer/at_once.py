"""Greedy drafts, and what the target says of them, as steps of our own kernels that are done in a single call.

T rows; V vocabulary. All raise NotNative where our own kernels do not take something.
"""

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..heads import Drawn, Highest, StateRows, StepChain, highest_step
from .draft_plan import DraftPass
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


def add_draft(
    chain: StepChain,
    parts: LevelParts,
    first: DraftPass[PackedRows],
    following: PackedRows,  # of all tokens: by token, those of the sequences that draw it side by side
    nums_active: list[int],  # by token: how many sequences draw it, the first ones; never rising
    *,
    may_end: bool,  # see `Drawn.least`
    with_probabilities: bool,
) -> Drawn:
    """Draw tokens at the lowest level, and let its layers run over all of them."""

    def find(chain: StepChain, state: StateRows) -> None:
        logits = chain.add(parts.exit_step(0, state))
        chain.add(highest_step(logits, parts.vocab_ids(0), with_probabilities=with_probabilities))

    if first.for_layers is not None:
        chain.add(parts.layers_steps(range(1), first.for_layers))
    wanted = first.newest if isinstance(first.newest, Tensor) else None
    find(chain, StateRows(chain.add(parts.head_step(0, first.for_head))[0], wanted))
    body, rows = StepChain(), following.of_first(nums_active[0])
    body.add(parts.layers_steps(range(1), rows))
    find(body, StateRows(body.add(parts.head_step(0, rows))[0], None))
    ids = following.token_ids
    return chain.add_draft(body, nums_active, ids, may_end=may_end, with_probabilities=with_probabilities)


def add_judgement(chain: StepChain, parts: LevelParts, levels: range, rows: PackedRows) -> tuple[Tensor, Highest]:
    """Run levels up to the target; its logits `[T, V]`, and the highest of them."""
    states = chain.add(parts.layers_steps(levels, rows))[-1][0]
    logits = chain.add(parts.logits_step(StateRows(states, None)))
    return logits, chain.add(highest_step(logits, None, with_probabilities=False))


def by_sequence(values: Items[V], nums_active: Items[int], num_drawn: int) -> list[list[V]]:
    """What lies token by token, of the first sequences each; of so many tokens."""
    firsts = list(accumulate(nums_active, initial=0))
    return [
        [values[firsts[place] + b] for place, number in enumerate(nums_active[:num_drawn]) if b < number]
        for b in range(nums_active[0])
    ]
