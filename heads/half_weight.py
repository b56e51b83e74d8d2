"""A float32 weight kept in 16 bits and multiplied in float32, by half the memory to read.

Most checkpoints are released in 16 bits, so that loaded in float32 half of what a product reads is zeros.

D_in input size; D_out output size.
"""

import math
from functools import cache

import torch
from torch import Tensor

from .kernel_types import Linear
from .kernels import find_kernels
from .product_form import MAX_PACKED_ROWS

TOP_EXPONENT = 15
"""The largest value of a scaled weight is below 2 to the power of this, float16's own below 2 to the power of 16."""
MAX_SHIFT = 126
"""As far as float32 can scale both ways."""
TOLERANCE = 2.0**-36
"""Of a row's largest value, what another of its values may lose: a 4096th of what float32 itself rounds away there."""


class HalfWeight:
    """`hidden @ weight.T` with the weight in 16 bits, maybe scaled by a power of two, and everything else in float32.

    For few rows, by our own kernels or else FBGEMM's; a row comes out the same however many are computed with it.
    Without gradients.
    """

    def __init__(
        self,
        rows: Tensor,  # [D_out, D_in] float16, or for our own kernels bfloat16
        scale: float,  # `rows` by the weight
    ) -> None:
        self._unscale = 1 / scale
        self._kernels = find_kernels()
        self._held = rows if self._kernels else torch.ops.quantized.linear_prepack_fp16(rows.float(), None)
        self.max_rows = max(MAX_PACKED_ROWS, self._kernels.max_rows(rows.dtype) if self._kernels else 0)
        """Rows for which it is fast."""

    def linear(self, bias: Tensor | None = None) -> Linear:
        """As our own kernels take it."""
        assert self._kernels is not None
        return self._kernels.linear(self._held, bias, self._unscale)

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., D_in] float32 -> [..., D_out] float32
        if hidden.dim() == 1:
            return self(hidden.unsqueeze(0)).squeeze(0)
        if self._kernels is not None:
            return self._kernels.product(self.linear(), hidden)
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden, self._held)
        return output.mul_(self._unscale)


@torch.no_grad()
def half_weight(
    weight: Tensor,  # [D_out, D_in]
    *,
    rounds: bool,  # whether a weight that needs more than 16 bits is rounded to them
) -> HalfWeight | None:
    """The weight in 16 bits; None where it is not float32 on a CPU with such a kernel, or 16 bits do not hold it.

    They do for weights that were float16 or bfloat16 once, but for values so small that float32 sums lose them.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not can_halve():
        return None
    largest = max(map(abs, map(float, weight.aminmax()))) if weight.numel() else 0.0
    if not math.isfinite(largest):
        return None
    # A power of two: scaling by it rounds nothing.
    scale = 2.0 ** min(TOP_EXPONENT - math.frexp(largest)[1], MAX_SHIFT)
    scaled = weight.detach() * scale
    if (kernels := find_kernels()) is not None:
        short = scaled.bfloat16()
        # Tiles take nothing else of 16 bits.
        if (rounds and kernels.uses_tiles) or bool((short == scaled).all()):
            return HalfWeight(short, scale)
    return HalfWeight(scaled.half(), scale) if rounds or _is_held(weight, scale) else None


def _is_held(weight: Tensor, scale: float) -> bool:
    # Part by part: most weights that are not held are told by the first, without a copy of the whole.
    for rows in weight.detach().split(4096):
        part = rows * scale
        lost = (part.half().float() - part).abs().amax(1)
        if not bool((lost <= part.abs().amax(1) * TOLERANCE).all()):
            return False
    return True


def can_halve() -> bool:
    """Whether there are kernels of our own, or this machine and this torch, as it is set now, have one."""
    return find_kernels() is not None or _has_kernel(torch.backends.quantized.engine)


@cache
def _has_kernel(_engine: str) -> bool:
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    # More bits than 16, for a kernel that would round the other factor.
    long = one + 2.0**-20
    try:
        return bool(HalfWeight(one.half(), 1.0)(long) == long)
    except (AttributeError, RuntimeError):
        return False
