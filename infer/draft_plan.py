"""What the host says to the passes of one draft."""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from .packed_rows import Bounds, Pass, rows_within
from .pass_runner import AnyRows


class DraftPass(NamedTuple):
    """The rows of one token of a draft."""

    for_layers: AnyRows | None
    """Rows that the layers have not seen,"""
    for_head: AnyRows
    """rows that the head has not: behind the first token one a sequence, for both, whose token ids are those drawn
    before,"""
    newest: Tensor | slice
    """and which of the head's are scored."""


class FirstPasses(NamedTuple):
    """What is to be packed for the first token."""

    for_layers: Pass | None
    """Of rows that the layers have not seen, where these are not the head's."""
    for_head: Pass
    are_same: bool
    """Whether the layers run over the head's rows."""
    newest: Bounds
    """Which of the head's rows are scored."""

    @property
    def passes(self) -> list[Pass]:
        """Those that there are."""
        return [self.for_head] if self.for_layers is None else [self.for_layers, self.for_head]

    def packed(self, rows: Items[AnyRows], device: torch.device) -> DraftPass:
        """Their rows; behind these there may be others."""
        for_head = rows[len(self.passes) - 1]
        for_layers = for_head if self.are_same else None
        if self.for_layers is not None:
            for_layers = rows[0]
        return DraftPass(for_layers, for_head, rows_within(self.for_head.bounds, self.newest, device))


class DraftPlan(NamedTuple):
    """The rows of all passes of one draft, on the device before the first of them."""

    nums_active: list[int]
    """By token: how many sequences draw it, the first ones."""
    tokens: list[DraftPass]
