"""The form of a product: in which of several ways to compute it, by the number of rows."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from .kernels import MAX_ROWS, find_kernels

Form = Literal["usual", "native", "packed", "packed-twice", "transposed", "transposed-twice"]
"""`usual` is the library's own call, `native` one of our own `kernels`, `packed` reads the packed copy, `transposed`
has the weight as its first factor; *twice* doubles the rows, for kernels that are slow for just these few."""
Packing = Literal["none", "packed", "half", "block"]

MAX_PACKED_ROWS = 64
"""Beyond so many rows a packed weight saves little, and its kernel takes a while to be made for each number of rows."""


class ProductKind(NamedTuple):
    """What decides how fast the forms of a product are."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    packing: Packing  # `half` is a float32 weight whose packed copy has 16 bits, `block` has fewer


class FormTable(NamedTuple):
    """The form by the number of rows: `forms[i]` from `starts[i]` rows on."""

    starts: tuple[int, ...]  # rising from 1
    forms: tuple[Form, ...]

    def form(self, num_rows: int) -> Form:
        """That for so many rows."""
        return self.forms[bisect_right(self.starts, num_rows) - 1]


FormTables = Mapping[ProductKind, FormTable]

_USUAL = FormTable((1,), ("usual",))
_PACKED = FormTable((1,), ("packed",))
_GUESSED: dict[tuple[torch.dtype, Packing], FormTable] = {
    (torch.float32, "none"): FormTable((1, 2, 9), ("transposed-twice", "transposed", "usual")),
    (torch.float32, "packed"): FormTable(
        (1, 2, 3, MAX_PACKED_ROWS + 1), ("transposed-twice", "packed-twice", "packed", "usual")
    ),
    # As far as these serve; never in another form: whatever the number of rows, a row has the same bits.
    (torch.float32, "half"): _PACKED,
    (torch.float32, "block"): _PACKED,
    (torch.bfloat16, "packed"): FormTable(
        (1, 2, 3, MAX_PACKED_ROWS + 1), ("packed", "packed-twice", "packed", "usual")
    ),
}


_NATIVE: dict[tuple[torch.dtype, Packing], FormTable] = {
    (torch.float32, "none"): FormTable((1, MAX_ROWS + 1), ("native", "usual")),
    (torch.float32, "packed"): FormTable((1, MAX_ROWS + 1, MAX_PACKED_ROWS + 1), ("native", "packed", "usual")),
    (torch.bfloat16, "none"): FormTable((1, MAX_ROWS + 1), ("native", "usual")),
    (torch.bfloat16, "packed"): FormTable((1, 8, MAX_PACKED_ROWS + 1), ("native", "packed", "usual")),
}


def guessed_forms(kind: ProductKind) -> FormTable:
    """What was fastest on x86 machines with AVX-512 and bfloat16; see `measure_forms` for another."""
    kernels = find_kernels()
    if kernels is not None and kernels.max_rows(kind.dtype) > MAX_ROWS:
        return FormTable((1, kernels.max_rows(kind.dtype) + 1), ("native", "usual"))
    with_kernels = {} if kernels is None else _NATIVE
    key = kind.dtype, kind.packing
    return with_kernels.get(key) or _GUESSED.get(key, _USUAL)


def possible_forms(kind: ProductKind, num_rows: int) -> tuple[Form, ...]:
    """All that compute so many rows of this kind to what is promised of it."""
    kernels = find_kernels()
    max_rows = 0 if kernels is None else kernels.max_rows(kind.dtype)
    # Nothing else comes near a weight in tiles.
    if kind.packing in ("half", "block") or max_rows > MAX_ROWS:
        return (guessed_forms(kind).form(num_rows),)
    packed: tuple[Form, ...] = ("packed", "packed-twice") if kind.packing == "packed" else ()
    native: tuple[Form, ...] = ("native",) if num_rows <= max_rows else ()
    if kind.dtype == torch.float32:
        return ("usual", *native, *packed, "transposed", "transposed-twice")
    # Doubled, one row or many would go to another of the machine's kernels, which sums in another order.
    return ("usual", *native, *(packed if 1 < num_rows <= MAX_ROWS else packed[:1]))
