"""Losses: how far an exit head is from the base's own distribution, never as a whole `[rows, vocabulary]`.

N rows; D hidden size; V_d the head's vocabulary, whole or draft.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def forward_kl(
    head_logits: Tensor,  # [N, V_d]
    base_log_probs: Tensor,  # [N, V_d] float32; on a draft vocabulary they sum to less than 1
) -> Tensor:  # [N] float32
    """`sum p (log p - log q)` over the head's vocabulary; the base's mass outside it is dropped."""
    log_probs = head_logits.float().log_softmax(-1)
    return (base_log_probs.exp() * (base_log_probs - log_probs)).sum(-1)


def total_variation(
    head_logits: Tensor,  # [N, V_d]
    base_log_probs: Tensor,  # [N, V_d] float32, as in `forward_kl`
) -> Tensor:  # [N] float32
    """`1 - sum min(p, q)`: the probability that a draft of the head is rejected."""
    probs = head_logits.float().softmax(-1)
    return 1 - torch.minimum(base_log_probs.exp(), probs).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
}


def chunked_loss(
    state: Tensor,  # [N, D], what the head hands to the LM head
    final: Tensor,  # [N, D], the base's final state
    log_normaliser: Tensor,  # [N] float32, logsumexp of the base's logits over its whole vocabulary
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    to_logits: Callable[[Tensor], Tensor],  # [n, D] -> [n, V_d], the frozen LM head, of the base as of the head
    rows_per_chunk: int = 512,
) -> Tensor:  # [] float32
    """The loss summed over the rows, differentiable in `state` (the only input that is trained)."""

    def of_rows(part: Tensor, start: int) -> Tensor:
        rows = slice(start, start + len(part))
        with torch.no_grad():
            base_log_probs = to_logits(final[rows]).float() - log_normaliser[rows].unsqueeze(-1)
        return loss(to_logits(part), base_log_probs).sum()

    total: Tensor = _ChunkedLoss.apply(state, of_rows, rows_per_chunk)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Takes each chunk's gradient at once, so that only one chunk's logits are alive at a time."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, of_rows: Callable[[Tensor, int], Tensor], rows_per_chunk: int) -> Tensor:
        gradient = torch.zeros_like(state)
        total = torch.zeros((), dtype=torch.float32, device=state.device)
        for start in range(0, len(state), rows_per_chunk):
            part = state[start : start + rows_per_chunk].detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(part.requires_grad):
                value = of_rows(part, start)
            if part.requires_grad:
                gradient[start : start + len(part)] = torch.autograd.grad(value, part)[0]
            total += value.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None
