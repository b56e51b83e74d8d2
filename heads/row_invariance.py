"""Layers whose rows do not depend, to the bit, on how many rows are computed with them.

A kernel may choose its order of summation by the number of rows: one row goes another way than two, in float32 any
number that is no multiple of 4 another way than one that is. And element-wise functions may compute the last few
elements of what a thread was given by another formula. `row_invariant` keeps both from mattering.

T rows; D_in input size; D_out output size.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .fused_linear import FusedLinear, FusedPart
from .kernels import KERNEL_DTYPES, find_kernels
from .product import Product
from .stand_in import is_stand_in

ROW_COUNTS = (4, 8, 16, 32, 64)
"""The only numbers of rows that a `TiledProduct` calls a kernel with, so that all of them can be tried beforehand."""


class TiledProduct(nn.Module):
    """A `Product` in tiles: the rows that are missing to the next of `ROW_COUNTS` are zeros.

    Our own `kernels` compute each row by itself. No library promises that it comes out the same in all these tiles and
    at every place in them: see `is_invariant`. It is packed, or not, as `product` is when this is made, so that a later
    `Product.pack` for somebody else's sake changes nothing.
    """

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product
        self._packed = product.is_packed

    def forward(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """`hidden @ weight.T + bias`."""
        outputs = []
        for tile in hidden.reshape(-1, hidden.shape[-1]).split(ROW_COUNTS[-1]):
            # Always memory of its own: kernels also look at strides and alignment.
            padded = hidden.new_zeros(next(count for count in ROW_COUNTS if count >= len(tile)), hidden.shape[-1])
            padded[: len(tile)] = tile
            outputs.append(self._multiply(self._product, padded)[: len(tile)])
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(*hidden.shape[:-1], -1)

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self._product.weight.shape

    @property
    def kind(self) -> tuple[object, ...]:
        """What a kernel chooses its ways by."""
        product, weight = self._product, self._product.weight
        return weight.shape, weight.dtype, weight.device, product.bias is None, product.packing

    def is_invariant(self) -> bool:
        """Try all tiles and places on this machine, with a weight of the same kind.

        Its rows are orthogonal to the inputs, up to rounding: what comes out is nothing but the rounding errors, which
        are others for any other order of summation, and not lost in the rounding to a short type.
        """
        weight, bias = self._product.weight, self._product.bias
        num_outputs, size = weight.shape
        generator = torch.Generator().manual_seed(0)
        pattern, inputs = torch.randn(2, ROW_COUNTS[-1], size // 2, generator=generator).to(weight.device, weight.dtype)
        if self._product.packing == "half":
            pattern = pattern.bfloat16().to(weight.dtype)
        if self._product.packing == "block":
            pattern = (pattern * 3).round().clamp(-7, 7)
        order = torch.randperm(size // 2 * 2, generator=generator).to(weight.device)
        padding = (0, size % 2)
        pattern = nn.functional.pad(torch.cat([pattern, -pattern], dim=1)[:, order], padding)
        inputs = nn.functional.pad(torch.cat([inputs, inputs], dim=1)[:, order], padding)
        numbers = torch.arange(num_outputs, device=weight.device) % len(pattern)
        product = Product(pattern[numbers], None if bias is None else torch.zeros_like(bias))
        if self._packed:
            product.pack()
        expected = self._multiply(product, inputs)
        moved = self._multiply(product, inputs.roll(1, 0))
        if not torch.equal(moved, expected.roll(1, 0)):
            return False
        # One row further back than in the largest tile.
        tiles = [slice(1, 1 + count) for count in ROW_COUNTS[:-1]]
        return all(torch.equal(self._multiply(product, inputs[rows].clone()), expected[rows]) for rows in tiles)

    def _multiply(self, product: Product, rows: Tensor) -> Tensor:  # [T, D_in] -> [T, D_out]
        if rows.device.type == "cpu" and rows.dtype in KERNEL_DTYPES and find_kernels() is not None:
            return product.by_native(rows, packed=self._packed)
        return product.by_kernel(rows, packed=self._packed)


class RowByRow(nn.Module):
    """An element-wise function, called for one row after the other: its kernel sees the same shape every time."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that whoever walks the modules does not wrap it again.
        self._function = (function,)

    def forward(self, hidden: Tensor) -> Tensor:
        """`function(hidden)`, of the same shape."""
        return torch.cat([self._function[0](row) for row in hidden.split(1, dim=-2)], dim=-2)


def row_invariant(module: nn.Module) -> nn.Module:
    """A twin, over the same tensors, of a module that `fuse_linears` went through.

    Raises ValueError where it multiplies by a weight in a way that cannot be put in tiles, as experts do.
    """
    if is_stand_in(module):
        raise ValueError(f"its {type(module).__name__} is no plain linear layer, but adapted or quantised")
    twin = copy.copy(module)
    fused: dict[FusedLinear, FusedLinear] = {}
    for name, part in vars(module).items():
        if isinstance(part, FusedPart):
            if part.fused not in fused:
                fused[part.fused] = part.fused.twin(TiledProduct)
            setattr(twin, name, FusedPart(fused[part.fused], part.index))
    is_norm = hasattr(module, "eps") or hasattr(module, "variance_epsilon")  # its weights scale element by element
    if not is_norm and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
        raise ValueError(f"its {type(module).__name__} computes with weights that are not plain linear layers")
    is_plain = not fused and not module._modules and not module._parameters and not module._buffers
    if is_plain and not isinstance(module, nn.Dropout | nn.Identity):
        return RowByRow(module)
    twin._modules = {name: child and row_invariant(child) for name, child in module._modules.items()}
    return twin.eval()


def tiled_products(module: nn.Module) -> Iterator[TiledProduct]:
    """All that `row_invariant` put into a module and below."""
    for part in module.modules():
        if isinstance(part, TiledProduct):
            yield part
        for attribute in vars(part).values():
            if isinstance(attribute, FusedPart) and isinstance(attribute.fused.multiply, TiledProduct):
                yield attribute.fused.multiply
