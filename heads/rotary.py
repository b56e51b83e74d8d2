"""By how much a position turns queries and keys: Su et al., RoFormer (arXiv 2104.09864).

T rows; N positions; Dh head size.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

FIRST_LENGTH = 256
"""Positions of a table at first."""


class Rotary:
    """By how much each row's position turns its queries and keys."""

    def __init__(
        self,
        cos: Tensor,  # [N, 1, Dh]
        sin: Tensor,  # [N, 1, Dh], its first half negated
        rows: Tensor | None = None,  # [T] int64, where each row stands in them; None: row after row
    ) -> None:
        self.cos = cos
        self.sin = sin
        self.rows = rows

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> "Rotary":  # [1, T, Dh] each, as the library has them
        """From the library's own."""
        first, second = sin.chunk(2, dim=-1)
        return cls(cos.transpose(0, 1).contiguous(), torch.cat([-first, second], dim=-1).transpose(0, 1).contiguous())

    def turn(self, heads: Tensor) -> Tensor:  # [T, any number of heads, Dh]
        """`heads * cos + rotate_half(heads) * sin`."""
        cos, sin = self._by_row
        return heads.mul(cos).add_(heads.roll(heads.shape[-1] // 2, -1).mul_(sin))

    @cached_property
    def _by_row(self) -> tuple[Tensor, Tensor]:  # [T, 1, Dh] each
        if self.rows is None:
            return self.cos, self.sin
        return self.cos.index_select(0, self.rows), self.sin.index_select(0, self.rows)


class RotaryTable:
    """What the library's rotary embedding says to each position, asked once: it takes as long as some small products.

    On a CPU, where the frequencies do not depend on how long the text is.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._rows: Rotary | None = None
        self._made_of: tuple[Any, ...] = ()

    @staticmethod
    def serves(embedding: Any) -> bool:
        """Whether a module of the library turns a position alike in every text."""
        rope_type = getattr(embedding, "rope_type", None)
        return isinstance(rope_type, str) and "dynamic" not in rope_type and rope_type != "longrope"

    def __call__(
        self,
        like: Tensor,
        positions: Tensor,  # [T] int64
        num_positions: int,  # more than the greatest of them
    ) -> Rotary:
        """For these positions, in the type of `like`."""
        frequencies = self._embedding.inv_freq
        version = 0 if frequencies.is_inference() else frequencies._version
        made_of = like.dtype, frequencies.data_ptr(), version, frequencies.dtype, self._embedding.attention_scaling
        if self._rows is None or self._made_of != made_of or num_positions > self._rows.cos.shape[0]:
            length = max(FIRST_LENGTH, 1 << (num_positions - 1).bit_length())
            everywhere = torch.arange(length, device=like.device).unsqueeze(0)
            self._rows = Rotary.of(*self._embedding(like, position_ids=everywhere))
            self._made_of = made_of
        return Rotary(self._rows.cos, self._rows.sin, positions)
