"""Windows: which final state a row takes as its committed context in training and in evaluation.

T rows of whole sequences side by side. `spans` are the answers of each sequence, `[start, stop)` in its rows; the rows
outside them are read as a prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..heads import context_positions


def random_windows(
    lengths: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
    max_window: int,
    seed: int,
) -> Tensor:  # [T] int64, newest row with a known final state, counted within each sequence
    """Answers cut at random into windows of 1 to `max_window` rows, as drafts meet them in inference.

    All rows of a window that starts at row s know the final states up to s - 1; an answer begins a window.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for length, answers in zip(lengths, spans, strict=True):
        known = torch.arange(length) - 1
        for start, stop in answers:
            num_rows = stop - start
            sizes = torch.randint(1, max_window + 1, (num_rows,), generator=generator)
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])[:num_rows]
            known[start:stop] = start + starts.repeat_interleave(sizes)[:num_rows] - 1
        parts.append(known)
    return torch.cat(parts)


def fixed_distance(
    lengths: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
    distance: int,  # rows back to the newest committed one, at least 1
) -> Tensor:  # [T] int64, as in `random_windows`
    """Every row of an answer knows the final states up to `distance` rows back, and all before the answer."""
    parts = []
    for length, answers in zip(lengths, spans, strict=True):
        known = torch.arange(length) - 1
        for start, stop in answers:
            known[start:stop] = (known[start:stop] + 1 - distance).clamp_min(start - 1)
        parts.append(known)
    return torch.cat(parts)


def window_starts(
    positions: Tensor,  # [T] int64, within each sequence
    last_known: Tensor,  # [T] int64, from one of the functions above
) -> Tensor:  # [T] int64, among all T rows
    """The row with which the window of every row begins: the one behind the newest known state."""
    return torch.arange(len(positions)) - positions + last_known + 1


def gather_context(
    final: Tensor,  # [T, D]
    lengths: Sequence[int],
    positions: Tensor,  # [T] int64, within each sequence
    last_known: Tensor,  # [T] int64, from one of the functions above
) -> Tensor:  # [1, T, D]
    """The committed context of every row; zeros where nothing is known yet."""
    starts = torch.tensor([0, *lengths[:-1]], device=final.device).cumsum(0)
    starts = starts.repeat_interleave(torch.tensor(lengths, device=final.device))
    index = context_positions(positions, last_known.to(final.device))
    # One row of zeros goes first, so that "none yet" has a row to point at.
    rows = torch.where(index < 0, 0, starts + index + 1)
    return F.pad(final, (0, 0, 1, 0))[rows].unsqueeze(0)
