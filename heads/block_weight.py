"""A float32 weight kept as it was quantised: in blocks of 32 values that are a few steps apart.

A model that comes in the types Q4_0, Q4_1 or Q8_0 of GGUF is dequantised when it is loaded. Its float32 weights take
four to five times the memory to read, and say no more.

D_in input size; D_out output size; N = D_in / 32 blocks of a row.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .kernels import BLOCK_SIZE, BlockKind, Linear, find_kernels

ROWS_AT_ONCE = 4096
Bits = Literal[4, 8]


class BlockWeight:
    """`hidden @ weight.T` with the weight in blocks, its values to the bit, and sums in float32.

    By our own kernels; a row comes out the same however many are computed with it. Without gradients.
    """

    def __init__(
        self,
        blocks: Tensor,  # [D_out, N, bytes of a block] uint8, as `kernels.cpp` reads them
        kind: BlockKind,
    ) -> None:
        self._blocks = blocks
        self._kind = kind

    def linear(self, bias: Tensor | None = None) -> Linear:
        """As kernels take it; the weight must outlive it."""
        return Linear.of_blocks(self._blocks, self._kind, bias)

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., D_in] float32 -> [..., D_out] float32
        kernels = find_kernels()
        assert kernels is not None
        return kernels.product(self.linear(), hidden)


class _Steps(NamedTuple):
    """Blocks as numbers of steps."""

    numbers: Tensor  # [..., N, 32] float32, whole
    step: Tensor  # [..., N, 1] float32
    lowest: Tensor  # [..., N, 1] float32, the value of number 0

    def values(self) -> Tensor:  # [..., N, 32]
        """As GGUF's readers make them: a product, rounded, and a sum."""
        return self.numbers * self.step + self.lowest


@torch.no_grad()
def block_weight(weight: Tensor) -> BlockWeight | None:  # weight: [D_out, D_in]
    """The weight in blocks; None where it is not float32 on a CPU with kernels of our own, or no blocks hold it."""
    is_whole = weight.dim() == 2 and weight.numel() > 0 and weight.shape[1] % BLOCK_SIZE == 0
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not is_whole or find_kernels() is None:
        return None
    # Most weights that no blocks hold are told by the first row.
    for kind in ("four-bit", "eight-bit"):
        if _packed(weight[:1], kind) is not None:
            parts = [_packed(rows, kind) for rows in weight.split(ROWS_AT_ONCE)]
            found = [part for part in parts if part is not None]
            return BlockWeight(torch.cat(found), kind) if len(found) == len(parts) else None
    return None


def _packed(rows: Tensor, kind: BlockKind) -> Tensor | None:  # [R, D_in] -> [R, N, bytes of a block] uint8
    blocks = rows.detach().contiguous().view(len(rows), -1, BLOCK_SIZE)
    steps = _four_bit(blocks) if kind == "four-bit" else _eight_bit(blocks)
    if steps is None:
        return None
    if kind == "eight-bit":
        return torch.cat(
            [steps.step.contiguous().view(torch.uint8), steps.numbers.to(torch.int8).view(torch.uint8)], -1
        )
    numbers = steps.numbers.to(torch.uint8)
    pairs = numbers[..., : BLOCK_SIZE // 2] | numbers[..., BLOCK_SIZE // 2 :] << 4
    return torch.cat([torch.cat([steps.step, steps.lowest], -1).view(torch.uint8), pairs], -1)


def _four_bit(blocks: Tensor) -> _Steps | None:
    """As Q4_1, from the lowest value up in steps of float16, or as Q4_0, eight steps around zero."""
    lowest, highest = blocks.aminmax(dim=-1, keepdim=True)
    # The highest number is mostly 15, but need not be.
    for largest in range(15, 0, -1):
        step = ((highest.double() - lowest.double()) / largest).half().float()
        if (steps := _fitting(blocks, step, lowest, 0, 15)) is not None:
            return steps
        if largest == 15:
            farthest = torch.where(-lowest > highest, lowest, highest)
            if (steps := _fitting(blocks, -farthest / 8, farthest, 0, 15)) is not None:
                return steps
    return None


def _eight_bit(blocks: Tensor) -> _Steps | None:
    """As Q8_0: up to 127 steps of float16 on either side of zero."""
    step = (blocks.abs().amax(-1, keepdim=True).double() / 127).half().float()
    return _fitting(blocks, step, torch.zeros_like(step), -127, 127)


def _fitting(blocks: Tensor, step: Tensor, lowest: Tensor, first: int, last: int) -> _Steps | None:
    """The blocks in these steps, if that is what they are to the bit."""
    numbers = ((blocks.double() - lowest) / step).round().nan_to_num(0.0, 0.0, 0.0).clamp(first, last).float()
    steps = _Steps(numbers, step, lowest)
    return steps if bool((steps.values() == blocks).all()) else None
