"""A matrix product in the form that suits its number of rows.

T rows; D_in input size; D_out output size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_FEW_ROWS = 8
"""Up to so many rows the float32 product on a CPU runs faster with the weight as its first factor."""


def product(
    hidden: Tensor,  # [..., T, D_in]
    weight: Tensor,  # [D_out, D_in]
    bias: Tensor | None = None,  # [D_out]
) -> Tensor:  # [..., T, D_out]
    """`hidden @ weight.T + bias`.

    For few rows in float32 the usual call reads the weight at a third of the memory's speed or less, one row and two
    or three being its slowest; the transposed product, one row doubled to two, reads it at more than twice that.
    """
    num_rows = hidden.numel() // hidden.shape[-1]
    if num_rows > MAX_FEW_ROWS or hidden.dtype != torch.float32 or hidden.device.type != "cpu":
        return F.linear(hidden, weight, bias)
    rows = hidden.reshape(num_rows, -1)
    if num_rows == 1:
        rows = rows.repeat(2, 1)
    output = (weight @ rows.t()).t()[:num_rows].reshape(*hidden.shape[:-1], -1)
    return output if bias is None else output + bias
