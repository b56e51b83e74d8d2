"""What the host says to the passes of one draft."""

from typing import NamedTuple

from torch import Tensor

from .pass_runner import AnyRows
from .sequence import Sequence


class DraftPass(NamedTuple):
    """The rows of one token of a draft."""

    for_layers: AnyRows | None
    """Rows that the layers have not seen,"""
    for_head: AnyRows
    """rows that the head has not: behind the first token one a sequence, for both, whose token ids are those drawn
    before,"""
    newest: Tensor | slice
    """and which of the head's are scored."""


class DraftPlan(NamedTuple):
    """The rows of all passes of one draft, on the device before the first of them."""

    sequences: list[Sequence]
    nums_active: list[int]
    """By token: how many sequences draw it, the first ones."""
    tokens: list[DraftPass]
    last: AnyRows | None
    """The last token of each, for the layers; None where nobody asked."""
    ends: list[int]
    """Of each sequence: the position behind its last token."""
