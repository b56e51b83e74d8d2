"""The share of a rank: which sequences of a batch it trains on, and in which parts it reads them.

T rows of whole sequences side by side.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import EarlyExitModel
from .cache import Batch, StateSource, num_loss_rows
from .ranks import Ranks
from .responses import Response
from .windows import random_windows


class Share(NamedTuple):
    """Sequences that are read at once."""

    indices: list[int]
    windows: Tensor
    """`[T]` int64."""
    counts: bool
    """Whether its loss rows are trained on."""

    def read(self, states: StateSource, model: EarlyExitModel) -> Batch:
        """The sequences' batch."""
        batch = states.read(self.indices, model.exit_layers, model.backbone)
        return batch if self.counts else replace(batch, loss_rows=batch.loss_rows[:0])


def share_of_batch(
    sequences: Sequence[Response],  # all that there are
    indices: Sequence[int],  # of these, the whole batch
    ranks: Ranks,
    num_parts: int,
    max_window: int,
    seed: int,  # of the windows
) -> tuple[list[Share], int]:
    """A rank's parts of a batch, and how many loss rows all parts of all ranks have (at least 1)."""
    batch = [sequences[index] for index in indices]
    lengths = [sequence.length for sequence in batch]
    spans = [sequence.spans for sequence in batch]
    # Drawn for the whole batch, so that they do not depend on how it is shared.
    windows = random_windows(lengths, spans, max_window, seed).split(lengths)
    shares = []
    for places in share_out(lengths, ranks.size * num_parts)[ranks.rank :: ranks.size]:
        if not places and ranks.size == 1:
            continue
        # A rank without a share takes part all the same, for the others wait for it: with a sequence that does not
        # count.
        chosen = places or [0]
        part = torch.cat([windows[place] for place in chosen])
        shares.append(Share([indices[place] for place in chosen], part, bool(places)))
    return shares, max(1, sum(map(num_loss_rows, batch)))


def share_out(num_tokens: Sequence[int], num_shares: int) -> list[list[int]]:
    """The places of `num_tokens`, in order, in so many shares of about as many tokens; some may be empty."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for place in sorted(range(len(num_tokens)), key=lambda place: -num_tokens[place]):
        lightest = totals.index(min(totals))
        shares[lightest].append(place)
        totals[lightest] += num_tokens[place]
    return [sorted(share) for share in shares]
