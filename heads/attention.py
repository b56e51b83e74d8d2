"""Attention within a packed batch of whole sequences: training and caching, where nothing is kept.

T tokens side by side; H query heads, Hkv key heads, Dh head size; B sequences, Q queries and S keys of each.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_CAPPED_QUERIES = 1024
"""At most so many queries are scored at once where scores are capped: memory grows with S, not with Q * S."""


class DenseAttention:
    """Causal attention of each sequence over itself; differentiable."""

    def __init__(self, sequence_lengths: list[int]) -> None:
        self.sequence_lengths = sequence_lengths

    def __call__(
        self,
        kv_layer: int,
        query: Tensor,  # [T, H, Dh]
        key: Tensor,  # [T, Hkv, Dh]
        value: Tensor,  # [T, Hkv, Dh]
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [T, H, Dh]
        """See `Attend`; `kv_layer` does not matter, for no state is kept."""
        parts = [
            _attend_one(*rows, scaling=scaling, window=window, softcap=softcap)
            for rows in zip(
                query.split(self.sequence_lengths),
                key.split(self.sequence_lengths),
                value.split(self.sequence_lengths),
                strict=True,
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def capped_attention(
    query: Tensor,  # [B, H, Q, Dh]
    key: Tensor,  # [B, H, S, Dh]
    value: Tensor,  # [B, H, S, Dh]
    mask: Tensor | None,  # [B or 1, 1, Q, S], True where a query sees a key; None is everywhere
    *,
    scaling: float,
    softcap: float,
) -> Tensor:  # [B, H, Q, Dh]
    """Attention with scores `softcap * tanh(score / softcap)`, for which torch has no kernel of its own."""
    outputs = []
    for start in range(0, query.shape[2], MAX_CAPPED_QUERIES):
        rows = slice(start, start + MAX_CAPPED_QUERIES)
        scores = query[:, :, rows] @ key.transpose(2, 3) * scaling
        scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, rows], -torch.inf)
        outputs.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    length = len(query)
    mask = None
    if softcap is not None or (window is not None and window < length):
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            mask = mask.triu(1 - window)
    groups = query.shape[1] // key.shape[1]
    query = query.transpose(0, 1).unsqueeze(0)
    key = key.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0)
    value = value.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0)
    if softcap is not None:
        assert mask is not None
        output = capped_attention(query, key, value, mask[None, None], scaling=scaling, softcap=softcap)
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
    return output[0].transpose(0, 1)
