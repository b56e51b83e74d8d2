"""The acceptance rule, the same at every level.

B sequences, K drafted tokens at most, V vocabulary. What leaves a level by either rule is distributed exactly as that
level's own distribution, so rules compose: the next level takes these probabilities as its `draft_probs`.
"""

import torch
from torch import Tensor

from .sampling import draw


def verify_by_rejection(
    draft_ids: Tensor,  # [B, K] int64
    draft_probs: Tensor,  # [B, K, V] float32, what each drafted token was drawn from
    target_probs: Tensor,  # [B, K + 1, V] float32, row k is what follows k accepted tokens
    num_drafted: Tensor,  # [B] int64, 0 to K
    uniforms: Tensor,  # [B, K + 1] in [0, 1)
) -> tuple[Tensor, Tensor]:  # num_accepted [B] int64, next_ids [B] int64
    """Accept with probability min(1, target / draft); then draw the recovered or the bonus token.

    The recovered token comes from `max(target_probs - draft_probs, 0)`, the bonus token from the row behind the last
    drafted token (Leviathan et al. 2023, Algorithm 1).
    """
    target_of_drafted = target_probs[:, :-1].gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1)
    draft_of_drafted = draft_probs.gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1)
    kept = uniforms[:, :-1] * draft_of_drafted < target_of_drafted
    num_accepted = _prefix_length(kept, num_drafted)
    row = torch.arange(len(draft_ids), device=draft_ids.device)
    next_probs = target_probs[row, num_accepted]
    if draft_ids.shape[1]:
        is_rejected = (num_accepted < num_drafted).unsqueeze(-1)
        drafted = draft_probs[row, num_accepted.clamp(max=draft_ids.shape[1] - 1)]
        residual = torch.where(is_rejected, (next_probs - drafted).clamp(min=0), next_probs)
        # Where both sides are equal up to rounding nothing is left over; then the target's own row is the answer.
        next_probs = torch.where(residual.sum(-1, keepdim=True) > 0, residual, next_probs)
    return num_accepted, draw(next_probs, uniforms[:, -1])


def verify_by_equality(
    draft_ids: list[int],  # K of them
    target_ids: list[int],  # K + 1, the target's own choice at each position
) -> tuple[int, int]:  # num_accepted, next_id
    """Accept while the target would choose the same token: greedy decoding, and sampling with shared noise.

    Of one sequence, on the host, where its tokens have to come anyway.
    """
    num_accepted = 0
    while num_accepted < len(draft_ids) and draft_ids[num_accepted] == target_ids[num_accepted]:
        num_accepted += 1
    return num_accepted, target_ids[num_accepted]


def _prefix_length(kept: Tensor, num_drafted: Tensor) -> Tensor:
    inside = torch.arange(kept.shape[1], device=kept.device) < num_drafted.unsqueeze(1)
    return (kept & inside).long().cumprod(1).sum(1)
