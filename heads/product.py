"""A matrix product with one weight, in the form that suits its number of rows.

T rows; D_in input size; D_out output size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .half_weight import HalfWeight, half_weight

MAX_FEW_ROWS = 8
"""Up to so many rows the float32 product on a CPU runs faster with the weight as its first factor."""

SLOW_ROWS = 2
"""So many rows the packed product computes slower than twice as many."""

MAX_PACKED_ROWS = 64
"""Beyond so many rows a packed weight saves little, and its kernel takes a while to be made for each number of rows."""


class Product:
    """`hidden @ weight.T + bias`, on a CPU in whichever of four forms reads the weight fastest.

    The usual call reads it at a third of the memory's speed or less for few rows. In float32 the transposed product
    reads it at more than twice that, a lone row, doubled to two, best of all. A *packed* weight, a second copy of it in
    the layout of the machine's own kernel, is as fast for any few rows and any type, in bfloat16 to the same bits as
    the usual call. Faster again is a float32 weight whose packed copy has 16 bits, where these hold it; see `pack`.
    Gradients flow through the usual call alone.
    """

    def __init__(
        self,
        weight: Tensor,  # [D_out, D_in]
        bias: Tensor | None = None,  # [D_out]
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Tensor | HalfWeight | None = None
        self._packed_from: tuple[int, int] | None = None
        self._rounds = False

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        if hidden.device.type != "cpu" or torch.is_grad_enabled():
            return F.linear(hidden, self.weight, self.bias)
        num_rows = hidden.numel() // hidden.shape[-1]
        if self.is_half:
            return self.by_kernel(hidden, packed=num_rows <= MAX_PACKED_ROWS)
        if hidden.dtype == torch.float32 and num_rows <= (MAX_FEW_ROWS if self._packed is None else 1):
            return self._transposed(hidden, num_rows)
        if self._packed is None or num_rows != SLOW_ROWS:
            return self.by_kernel(hidden, packed=self._packed is not None and num_rows <= MAX_PACKED_ROWS)
        rows = hidden.reshape(num_rows, -1).repeat(2, 1)
        return self.by_kernel(rows, packed=True)[:num_rows].view(*hidden.shape[:-1], -1)

    @property
    def is_packed(self) -> bool:
        """Whether there is a packed copy."""
        return self._packed is not None

    @property
    def is_half(self) -> bool:
        """Whether the packed copy is in 16 bits, and the weight in float32."""
        return isinstance(self._packed, HalfWeight)

    def by_kernel(self, hidden: Tensor, *, packed: bool) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """The product by one call whatever the number of rows: of the machine's own kernel, or the usual one."""
        if packed and self._packed_from != tensor_state(self.weight):
            self.pack(rounds=self._rounds)
        if packed and isinstance(self._packed, HalfWeight):
            output = self._packed(hidden)
            return output if self.bias is None else output.add_(self.bias)
        if packed and self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return F.linear(hidden, self.weight, self.bias)

    def pack(self, *, rounds: bool = False) -> None:
        """Keep a packed copy of the weight, made anew when the weight has changed; nothing on other devices.

        A float32 weight is packed in 16 bits where these hold it, see `half_weight`. With `rounds` also where they do
        not: for what drafts, which may be anything.
        """
        self._rounds = rounds
        self._packed = half_weight(self.weight, rounds=rounds)
        if self._packed is None and self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), MAX_FEW_ROWS)
        self._packed_from = tensor_state(self.weight)

    def _transposed(self, hidden: Tensor, num_rows: int) -> Tensor:
        rows = hidden.reshape(num_rows, -1)
        if num_rows == 1:
            rows = rows.repeat(2, 1)
        output = (self.weight @ rows.t()).t()[:num_rows].reshape(*hidden.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's kernels take packed weights of a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def tensor_state(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to or moved."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
