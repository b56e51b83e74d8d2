"""What the host says to the passes of one draft."""

from collections.abc import Sequence as Items
from typing import NamedTuple

from torch import Tensor

from .pass_runner import AnyRows


class DraftPlan(NamedTuple):
    """The rows of all passes of one draft, on the device before the first of them."""

    nums_active: list[int]
    """By token: how many sequences draw it, the first ones."""
    unseen: AnyRows | None
    """Before the first token: rows that the layers have not seen,"""
    unscored: AnyRows
    """rows that the head has not,"""
    newest: Tensor | slice
    """and which of the head's are scored."""
    following: Items[AnyRows]
    """By further token: one row a sequence, for layers and head; its token ids are those drawn before."""
