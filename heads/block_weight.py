"""A float32 weight kept as it was quantised: in blocks of 32 values that are a few steps apart.

A model that comes in the types Q4_0, Q4_1 or Q8_0 of GGUF is dequantised when it is loaded. Its float32 weights take
four to five times the memory to read, and say no more.

D_in input size; D_out output size; N = D_in / 32 blocks of a row.
"""

from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernel_types import Linear
from .kernels import MAX_TILED_ROWS, TILE_ROWS, Kernels, find_kernels
from .product_form import MAX_PACKED_ROWS

BLOCK_SIZE = 32
"""Values of a weight that are kept in blocks have one step in common."""
ROWS_AT_ONCE = 4096
"""Rows that are packed at once; whole tiles."""
NumBits = Literal[4, 8]
"""Of a value."""


class BlockWeight:
    """`hidden @ weight.T` with the weight in blocks, its values to the bit, and sums in float32.

    By our own kernels; a row comes out the same however many are computed with it. Without gradients.
    """

    def __init__(
        self,
        blocks: Tensor,  # uint8, as `native/weights.hpp` reads them, or where there are tiles `native/tiles.hpp`
        shape: tuple[int, int],  # D_out, D_in
        num_bits: NumBits,
        kernels: Kernels,
    ) -> None:
        self._blocks = blocks
        self._shape = shape
        self._num_bits: NumBits = num_bits
        self._kernels = kernels
        self.max_rows = MAX_TILED_ROWS if kernels.uses_tiles else MAX_PACKED_ROWS
        """Rows for which it is fast."""

    def linear(self, bias: Tensor | None = None) -> Linear:
        """As kernels take it."""
        return self._kernels.block_linear(self._blocks, bias, self._shape, self._num_bits)

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., D_in] float32 -> [..., D_out] float32
        return self._kernels.product(self.linear(), hidden)


class _Steps(NamedTuple):
    """Blocks as numbers of steps."""

    numbers: Tensor  # [R, N, 32] float32, whole
    step: Tensor  # [R, N, 1] float32, that float16 holds
    lowest: Tensor  # [R, N, 1] float32, that float16 holds, the value of number 0

    def values(self) -> Tensor:  # [R, N, 32]
        """As GGUF's readers make them: a product, which loses nothing, and a sum."""
        return self.numbers * self.step + self.lowest


@torch.no_grad()
def block_weight(weight: Tensor) -> BlockWeight | None:  # weight: [D_out, D_in]
    """The weight in blocks; None where it is not float32 on a CPU with kernels of our own, or no blocks hold it."""
    is_whole = weight.dim() == 2 and weight.numel() > 0 and weight.shape[1] % BLOCK_SIZE == 0
    kernels = find_kernels()
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not is_whole or kernels is None:
        return None
    parts = weight.detach().split(ROWS_AT_ONCE)
    # Most weights that no blocks hold are told by one row; not by one of zeros, which are held in any way.
    probe = int((parts[0] != 0).any(1).byte().argmax())
    for num_bits in _NUM_BITS:
        if not _are_read_right(num_bits, kernels) or _steps(parts[0][probe : probe + 1], num_bits) is None:
            continue
        packed = []
        for rows in parts:
            if (steps := _steps(rows, num_bits)) is None:
                break
            packed.append(_pack(steps, num_bits, kernels))
        else:
            return BlockWeight(torch.cat(packed), (weight.shape[0], weight.shape[1]), num_bits, kernels)
    return None


def _pack(steps: _Steps, num_bits: NumBits, kernels: Kernels) -> Tensor:
    """Rows as the kernels read them; of whole tiles, where others follow."""
    return (_in_tiles if kernels.uses_tiles else _in_rows)(steps, num_bits)


_NUM_BITS: tuple[NumBits, ...] = (4, 8)


def _in_rows(steps: _Steps, num_bits: NumBits) -> Tensor:  # [R, N, bytes of a block] uint8
    """Blocks one behind the other."""
    step, lowest = (part.half().view(torch.uint8) for part in (steps.step, steps.lowest))
    if num_bits == 8:
        return torch.cat([step, steps.numbers.to(torch.int8).view(torch.uint8)], -1)
    numbers = steps.numbers.to(torch.uint8)
    pairs = numbers[..., : BLOCK_SIZE // 2] | numbers[..., BLOCK_SIZE // 2 :] << 4
    return torch.cat([step, lowest, pairs], -1)


def _in_tiles(steps: _Steps, num_bits: NumBits) -> Tensor:  # [ceil(R / TILE_ROWS), bytes of a row of tiles] uint8
    """The numbers of 16 rows tile by tile, then their steps likewise."""
    padding = (0, 0, 0, 0, 0, -len(steps.step) % TILE_ROWS)
    numbers, step, lowest = (F.pad(part, padding).unflatten(0, (-1, TILE_ROWS)) for part in steps)
    scales = [step.half()] if num_bits == 8 else [step.half(), lowest.half()]
    scale_bytes = torch.cat(scales, 3).permute(0, 2, 3, 1).contiguous().view(torch.uint8)
    if num_bits == 8:
        number_bytes = numbers.to(torch.int8).transpose(1, 2).contiguous().view(torch.uint8)
    else:
        fours = numbers.to(torch.int32).unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2)  # the last are parts of a word
        words = (fours << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1).to(torch.int16)
        number_bytes = words.contiguous().view(torch.uint8)
    return torch.cat([number_bytes.flatten(1), scale_bytes.flatten(1)], 1)


def _steps(rows: Tensor, num_bits: NumBits) -> _Steps | None:  # [R, D_in]
    blocks = rows.contiguous().view(len(rows), -1, BLOCK_SIZE)
    return _four_bit(blocks) if num_bits == 4 else _eight_bit(blocks)


def _four_bit(blocks: Tensor) -> _Steps | None:
    """As Q4_1, from the lowest value up in steps of float16, or as Q4_0, eight steps around zero."""
    lowest, highest = blocks.aminmax(dim=-1, keepdim=True)
    farthest = torch.where(-lowest > highest, lowest, highest)
    # The highest number is mostly 15, but need not be.
    ways = [(_half((highest.double() - lowest.double()) / largest), lowest) for largest in range(15, 0, -1)]
    ways.insert(1, (-farthest / 8, farthest))
    return _fitting(blocks, ways, 0, 15)


def _eight_bit(blocks: Tensor) -> _Steps | None:
    """As Q8_0: up to 127 steps of float16 on either side of zero."""
    step = _half(blocks.abs().amax(-1, keepdim=True).double() / 127)
    return _fitting(blocks, [(step, torch.zeros_like(step))], -127, 127)


def _half(values: Tensor) -> Tensor:
    return values.half().float()


def _fitting(blocks: Tensor, ways: Iterable[tuple[Tensor, Tensor]], first: int, last: int) -> _Steps | None:
    """Each block in the first of some steps, from lowest values, that hold it to the bit; None where one has none."""
    found = _Steps(blocks, *(torch.zeros_like(blocks[..., :1]) for _ in range(2)))
    is_held = torch.zeros_like(blocks[..., :1], dtype=torch.bool)
    for step, lowest in ways:
        numbers = ((blocks.double() - lowest) / step).round().nan_to_num(0.0, 0.0, 0.0).clamp(first, last).float()
        steps = _Steps(numbers, step, lowest)
        fits = (steps.values() == blocks).all(-1, keepdim=True) & (_half(step) == step) & (_half(lowest) == lowest)
        found = _Steps(*(torch.where(fits & ~is_held, new, old) for new, old in zip(steps, found, strict=True)))
        is_held = fits | is_held
        if is_held.all():
            return found
    return None


@cache
def _are_read_right(num_bits: NumBits, kernels: Kernels) -> bool:
    """Whether the kernels, as compiled here, read such blocks to the bit."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (TILE_ROWS + 1, 2, BLOCK_SIZE), generator=generator, device="cpu").float()
    step, lowest = torch.rand(2, TILE_ROWS + 1, 2, 1, generator=generator, device="cpu").half().float()
    steps = _Steps(numbers, step, lowest if num_bits == 4 else torch.zeros_like(lowest))
    with torch.inference_mode():
        held = BlockWeight(_pack(steps, num_bits, kernels), (TILE_ROWS + 1, 2 * BLOCK_SIZE), num_bits, kernels)
        found = held(torch.eye(2 * BLOCK_SIZE, device="cpu"))
    return torch.equal(found.t(), steps.values().flatten(1))
