"""A float32 weight kept in 16 bits, multiplied in float32: half the memory to read, and the same numbers.

Most checkpoints are released in 16 bits, so that loaded in float32 half of what a product reads is zeros.

T rows; D_in input size; D_out output size.
"""

import math
from functools import cache

import torch
from torch import Tensor

MAX_EXPONENT = 14
"""A scaled weight stays below 2 to the power of one more than this, where float16 ends at 2 to the power of 16."""
TOLERANCE = 2.0**-36
"""Of a row's largest value, what another of its values may lose: a 4096th of what float32 itself rounds away there."""


class HalfWeight:
    """`hidden @ weight.T + bias` with the weight in float16, scaled by a power of two, and everything else in float32.

    By FBGEMM's kernel for few rows; a row comes out the same however many are computed with it. Without gradients.
    """

    def __init__(
        self,
        scaled: Tensor,  # [D_out, D_in] float32
        bias: Tensor | None,  # [D_out] float32
        scale: float,  # `scaled` by the weight
    ) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None if bias is None else bias * scale)
        self._unscale = 1 / scale

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] float32 -> [..., T, D_out] float32
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden, self._packed)
        return output if self._unscale == 1 else output.mul_(self._unscale)


@torch.no_grad()
def half_weight(
    weight: Tensor,  # [D_out, D_in]
    bias: Tensor | None,  # [D_out]
    *,
    rounds: bool,  # whether a weight that needs more than 16 bits is rounded to them
) -> HalfWeight | None:
    """The weight in 16 bits; None where it is not float32 on a CPU with such a kernel, or 16 bits do not hold it.

    They do for weights that were float16 or bfloat16 once, but for values so small that float32 sums lose them.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not can_halve():
        return None
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not math.isfinite(largest):
        return None
    # A power of two: scaling by it rounds nothing.
    scale = 2.0 ** (MAX_EXPONENT - math.frexp(largest)[1] + 1) if largest else 1.0
    if not math.isfinite(scale):
        return None
    scaled = weight.detach() * scale
    if not rounds and not _is_held(scaled):
        return None
    return HalfWeight(scaled, None if bias is None else bias.detach(), scale)


def _is_held(scaled: Tensor) -> bool:
    for part in scaled.split(4096):
        lost = (part.half().float() - part).abs().amax(1)
        if not bool((lost <= part.abs().amax(1) * TOLERANCE).all()):
            return False
    return True


@cache
def can_halve() -> bool:
    """Whether this machine and this torch have the kernel."""
    try:
        one = HalfWeight(torch.ones(1, 1), None, 1.0)(torch.ones(1, 1))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(one == 1)
