"""What the host says to the passes of one draft."""

from collections.abc import Sequence as Items
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .packed_rows import Bounds, Pass, rows_within
from .pass_runner import AnyRows

Rows = TypeVar("Rows", bound=AnyRows)


class DraftPass(NamedTuple, Generic[Rows]):
    """The rows of one token of a draft."""

    for_layers: Rows | None
    """Rows that the layers have not seen,"""
    for_head: Rows
    """rows that the head has not: behind the first token one a sequence, for both, whose token ids are those drawn
    before,"""
    newest: Tensor | slice
    """and which of the head's are scored."""


class FirstPasses(NamedTuple):
    """What is to be packed for the first token."""

    passes: list[Pass]
    """Of the layers, where it is one of its own or there is any, and of the head."""
    newest: Bounds
    """Which of the head's rows are scored."""
    are_same: bool
    """Whether layers and head run over the same rows."""

    def packed(self, rows: Items[Rows], device: torch.device) -> DraftPass[Rows]:
        """Their rows; behind these there may be others."""
        *before, for_head = rows[: len(self.passes)]
        for_layers = for_head if self.are_same else before[0] if before else None
        return DraftPass(for_layers, for_head, rows_within(self.passes[-1].bounds, self.newest, device))


class DraftPlan(NamedTuple):
    """The rows of all passes of one draft, on the device before the first of them."""

    nums_active: list[int]
    """By token: how many sequences draw it, the first ones."""
    tokens: list[DraftPass[AnyRows]]
