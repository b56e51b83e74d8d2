"""States where they lie, so that nothing is copied on the way to what reads them.

T rows; N rows of a table; D hidden size.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .product import Product


class StateRows(NamedTuple):
    """Some rows of a table of states."""

    table: Tensor  # [N, D]
    places: Tensor | None  # [T] int64; None: all rows, in their order
    number: Tensor | None = None  # [1] int64: how many of them, to be read when something is done with them; None: all

    @property
    def num_rows(self) -> int:
        """T."""
        return (self.table if self.places is None else self.places).shape[0]

    def states(self) -> Tensor:  # [1, T, D]
        """The rows side by side."""
        rows = self.table if self.places is None else self.table.index_select(0, self.places)
        return rows.unsqueeze(0)

    def put(self, states: Tensor) -> None:  # [1, T, D]
        """Write to the rows."""
        if self.places is None:
            self.table.copy_(states[0])
        else:
            self.table.index_copy_(0, self.places, states[0])


class JoinedRows(NamedTuple):
    """What a product makes of states and of their contexts, normed, side by side: the input of a head's own layer."""

    hidden: StateRows
    context: StateRows
    fuse: "Product"  # [D, 2D]

    @property
    def table(self) -> Tensor:  # [N, D]
        """Where the states lie."""
        return self.hidden.table

    @property
    def num_rows(self) -> int:
        """T."""
        return self.hidden.num_rows

    @property
    def number(self) -> Tensor | None:
        """As of `StateRows`."""
        return self.hidden.number

    def states(self) -> Tensor:  # [1, T, D]
        """The rows side by side."""
        return self.fuse(join(self.hidden.states(), self.context.states()))


States = Tensor | StateRows | JoinedRows
"""`[1, T, D]`, or where they lie."""


def states_of(states: States) -> Tensor:  # [1, T, D]
    """The states side by side."""
    return states if isinstance(states, Tensor) else states.states()


def rows_of(states: States) -> StateRows | JoinedRows:
    """The states as rows."""
    return StateRows(states[0].contiguous(), None) if isinstance(states, Tensor) else states


def join(hidden: Tensor, context: Tensor) -> Tensor:  # [1, T, D] each -> [1, T, 2D]
    """States and their contexts, as a head's first product takes them."""
    # Without weights: final states differ in scale from the hidden states of shallow layers.
    return torch.cat([hidden, F.rms_norm(context, context.shape[-1:])], dim=-1)
