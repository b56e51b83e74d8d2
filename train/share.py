"""The share of a rank: which sequences of a batch it trains on.

T rows of whole sequences side by side.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..heads import EarlyExitModel
from .cache import Batch, StateCache
from .ranks import Ranks
from .windows import random_windows


def read_share(
    cache: StateCache,
    indices: Sequence[int],  # the sequences of the whole batch
    model: EarlyExitModel,
    ranks: Ranks,
    max_window: int,
    seed: int,  # of the windows
) -> tuple[Batch, Tensor, int]:
    """A rank's share of a batch, its windows `[T]` int64, and how many loss rows all shares have (at least 1)."""
    sequences = [cache.sequences[index] for index in indices]
    lengths = [sequence.length for sequence in sequences]
    num_prompts = [len(sequence.prompt_token_ids) for sequence in sequences]
    # Drawn for the whole batch, so that they do not depend on the number of ranks.
    windows = random_windows(lengths, num_prompts, max_window, seed).split(lengths)
    num_rows = sum(max(0, len(sequence.token_ids) - 1) for sequence in sequences)
    share = share_out(lengths, ranks.size)[ranks.rank]
    # A rank without a share takes part all the same, for the others wait for it: with a sequence that does not count.
    places = share or [0]
    batch = cache.read([indices[place] for place in places], model.exit_layers, model.backbone)
    if not share:
        batch = replace(batch, loss_rows=batch.loss_rows[:0])
    return batch, torch.cat([windows[place] for place in places]), max(1, num_rows)


def share_out(num_tokens: Sequence[int], num_shares: int) -> list[list[int]]:
    """The places of `num_tokens`, in order, in so many shares of about as many tokens; some may be empty."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for place in sorted(range(len(num_tokens)), key=lambda place: -num_tokens[place]):
        lightest = totals.index(min(totals))
        shares[lightest].append(place)
        totals[lightest] += num_tokens[place]
    return [sorted(share) for share in shares]
