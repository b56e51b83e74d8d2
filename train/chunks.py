"""Sums over rows whose logits never exist as a whole `[rows, vocabulary]`.

N rows; D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def chunk_rows(
    windows: Tensor,  # [N] int64, the same for rows that stay together
    rows_per_chunk: int,
) -> list[slice]:
    """All rows in chunks of at most `rows_per_chunk`, none of which cuts a window that is no longer than a chunk."""
    starts = [0, *((windows[1:] != windows[:-1]).nonzero().flatten() + 1).tolist(), len(windows)]
    chunks, start, next_start = [], 0, 0
    while start < len(windows):
        stop = min(start + rows_per_chunk, len(windows))
        while next_start + 1 < len(starts) and starts[next_start + 1] <= stop:
            next_start += 1
        if starts[next_start] > start:
            stop = starts[next_start]
        chunks.append(slice(start, stop))
        start = stop
    return chunks


def chunked_sum(
    state: Tensor,  # [N, D]
    of_rows: Callable[[Tensor, slice], Tensor],  # some rows of `state` and which they are -> [] float32
    chunks: Sequence[slice],
) -> Tensor:  # [] float32
    """The sum of `of_rows` over the chunks, differentiable in `state` and in nothing else."""
    total: Tensor = _ChunkedSum.apply(state, of_rows, chunks)
    return total


class _ChunkedSum(torch.autograd.Function):
    """Takes each chunk's gradient at once, so that only one chunk's logits are alive at a time."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, of_rows: Callable[[Tensor, slice], Tensor], chunks: Sequence[slice]) -> Tensor:
        gradient = torch.zeros_like(state)
        total = torch.zeros((), dtype=torch.float32, device=state.device)
        for rows in chunks:
            part = state[rows].detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(part.requires_grad):
                value = of_rows(part, rows)
            if part.requires_grad:
                gradient[rows] = torch.autograd.grad(value, part)[0]
            total += value.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None
