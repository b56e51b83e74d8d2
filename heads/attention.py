"""Attention within a packed batch of whole sequences: training and caching, where nothing is kept.

T tokens side by side; H query heads, Hkv key heads, Dh head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


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


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    assert softcap is None, "no supported architecture caps its attention scores"
    length = len(query)
    mask = None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    groups = query.shape[1] // key.shape[1]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0),
        value.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return output[0].transpose(0, 1)
