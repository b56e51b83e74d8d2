"""A matrix product with one weight, in the form that suits its number of rows.

T rows; D_in input size; D_out output size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .block_weight import BlockWeight, block_weight
from .half_weight import HalfWeight, half_weight
from .kernel_types import Linear, Native
from .kernels import find_kernels
from .product_form import Form, FormTable, FormTables, Packing, ProductKind, guessed_forms
from .state_rows import StateRows

Compact = BlockWeight | HalfWeight
"""A copy of a float32 weight that takes less to read."""
COMPACT: dict[Packing, type[Compact]] = {"block": BlockWeight, "half": HalfWeight}
TensorState = tuple[int, int, torch.dtype]
"""See `tensor_state`."""
PACKED_FOR = 8
"""Rows that a packed copy is laid out for."""


class Product:
    """`hidden @ weight.T + bias`, on a CPU in whichever form is fastest for the number of rows: see `Form`.

    The usual call reads a weight at a third of the memory's speed or less for few rows. In float32 the transposed
    product reads it at more than twice that, and so do our own `kernels` in any type. A *packed* weight, a second copy
    of it in the layout of the machine's own kernel, is for some more rows, in bfloat16 to the same bits as the usual
    call. Faster again is a float32 weight whose packed copy has 16 bits or less, where these hold it; see `pack`. Which
    form is taken is guessed, until `use_forms` tells. Gradients flow through the usual call alone.
    """

    def __init__(
        self,
        weight: Tensor,  # [D_out, D_in]
        bias: Tensor | None = None,  # [D_out]
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Tensor | Compact | None = None
        self._packed_from: TensorState | None = None
        self._rounds = False
        self.told: Linear | None = None
        """What `linear` told last; None where it would tell something else."""
        self._linear_from: tuple[TensorState, ...] = ()
        self._measured: FormTables = {}
        self._table = self._choose_table()

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        if hidden.device.type != "cpu" or torch.is_grad_enabled():
            return F.linear(hidden, self.weight, self.bias)
        if hidden.dtype != self._dtype:
            self._follow_dtype()
        return self.by_form(hidden, self._table.form(hidden.numel() // hidden.shape[-1]))

    def use_forms(self, measured: FormTables) -> None:
        """From now on take these forms, where they are of this kind of product."""
        self._measured = measured
        self._follow_dtype()

    def by_form(self, hidden: Tensor, form: Form) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """The product in one form, which its kind must have."""
        if form == "usual" or form == "packed":
            return self.by_kernel(hidden, packed=form == "packed")
        if form == "native":
            return self.by_native(hidden, packed=True)
        rows = hidden.reshape(-1, hidden.shape[-1])
        num_rows = len(rows)
        if form.endswith("twice"):
            rows = rows.repeat(2, 1)
        output = self.by_kernel(rows, packed=True) if form == "packed-twice" else self._transposed(rows)
        return output[:num_rows].reshape(*hidden.shape[:-1], -1)

    @property
    def kind(self) -> ProductKind:
        """What decides how fast its forms are."""
        num_outputs, num_inputs = self.weight.shape
        return ProductKind(num_outputs, num_inputs, self.weight.dtype, self.packing)

    @property
    def packing(self) -> Packing:
        """What the packed copy is."""
        for packing, compact in COMPACT.items():
            if isinstance(self._packed, compact):
                return packing
        return "packed" if self.is_packed else "none"

    def linear(self) -> Linear:
        """As our own kernels take it: the weight itself, or its shorter copy; the same object while that stands."""
        state = tensor_state(self.weight), *(() if self.bias is None else (tensor_state(self.bias),))
        if self.told is None or self._linear_from != state:
            if isinstance(self._packed, Compact):
                self.pack(rounds=self._rounds)
            self.told = self._make_linear(packed=True)
            self._linear_from = state
        return self.told

    def _make_linear(self, *, packed: bool) -> Linear:
        bias = None if self.bias is None else self.bias.detach().contiguous()
        if packed and isinstance(self._packed, Compact):
            return self._packed.linear(bias)
        kernels = find_kernels()
        assert kernels is not None
        return kernels.linear(self.weight.detach().contiguous(), bias)

    def _follow_dtype(self) -> None:
        if self.is_packed and self._dtype != self.weight.dtype:
            self.pack(rounds=self._rounds)
        self._table = self._choose_table()

    @property
    def max_native_rows(self) -> int:
        """Rows for which our own kernels are fastest; 0 without."""
        kernels = find_kernels()
        if kernels is None:
            return 0
        return self._packed.max_rows if isinstance(self._packed, Compact) else kernels.max_rows(self.weight.dtype)

    def _choose_table(self) -> FormTable:
        self._dtype = self.weight.dtype
        if isinstance(self._packed, Compact):
            return FormTable((1, self._packed.max_rows + 1), ("packed", "usual"))
        return self._measured.get(self.kind) or guessed_forms(self.kind)

    @property
    def is_packed(self) -> bool:
        """Whether there is a packed copy."""
        return self._packed is not None

    def by_native(self, hidden: Tensor, *, packed: bool) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """The product by our own kernels, over a shorter copy if `packed` and there is one; the usual one without."""
        kernels, weight = find_kernels(), self.weight
        is_fit = hidden.dtype == weight.dtype and hidden.shape[-1] == weight.shape[1] and weight.device.type == "cpu"
        if kernels is None or not is_fit:
            return self.by_kernel(hidden, packed=False)  # which says what is wrong
        return kernels.product(self.linear() if packed else self._make_linear(packed=False), hidden)

    def step(self, source: StateRows) -> Native[Tensor] | None:  # [T, D_in] -> [T, D_out]
        """The product as a step of our own kernels; None where they are not fastest, or do not take such rows."""
        kernels, table = find_kernels(), source.table
        is_fit = table.dtype == self.weight.dtype == self._dtype and table.shape[-1] == self.weight.shape[1]
        if kernels is None or not is_fit or not kernels.takes(table) or not table.is_contiguous():
            return None
        is_native = isinstance(self._packed, Compact) or self._table.form(source.num_rows) == "native"
        if not is_native or source.num_rows > self.max_native_rows:
            return None
        return kernels.product_step(self.linear(), source)

    def by_kernel(self, hidden: Tensor, *, packed: bool) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """The product by one call whatever the number of rows: of the machine's own kernel, or the usual one."""
        if packed and self._packed_from != tensor_state(self.weight):
            self.pack(rounds=self._rounds)
        if packed and isinstance(self._packed, Compact):
            output = self._packed(hidden)
            return output if self.bias is None else output.add_(self.bias)
        if packed and self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return F.linear(hidden, self.weight, self.bias)

    def pack(self, *, rounds: bool = False) -> None:
        """Keep a packed copy of the weight, made anew when the weight has changed; nothing on other devices.

        A float32 weight is packed as it was quantised where it was, see `block_weight`, or in 16 bits where these hold
        it, see `half_weight`. With `rounds` also where they do not: for what drafts, which may be anything.
        """
        self._rounds = rounds
        self.told = None
        self._packed = block_weight(self.weight) or half_weight(self.weight, rounds=rounds)
        if self._packed is None and self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_FOR)
        self._packed_from = tensor_state(self.weight)
        self._table = self._choose_table()

    def _transposed(self, rows: Tensor) -> Tensor:  # [T, D_in] -> [T, D_out]
        output = (self.weight @ rows.t()).t()
        return output if self.bias is None else output + self.bias


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's kernels take packed weights of a type, and nothing faster takes them as they are."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        kernels = find_kernels()
        is_needed = kernels is None or not kernels.uses_tiles
        return is_needed and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def tensor_state(tensor: Tensor) -> TensorState:
    """What changes when a tensor is written to, moved or brought to another type."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype
