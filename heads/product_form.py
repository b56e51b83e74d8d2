"""The form of a product: in which of several ways to compute it, by the number of rows."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

Form = Literal["usual", "packed", "packed-twice", "transposed", "transposed-twice"]
"""`usual` is the library's own call, `packed` reads the packed copy, `transposed` has the weight as its first factor;
*twice* doubles the rows, for kernels that are slow for just these few."""
Packing = Literal["none", "packed", "half"]

MAX_PACKED_ROWS = 64
"""Beyond so many rows a packed weight saves little, and its kernel takes a while to be made for each number of rows."""


class ProductKind(NamedTuple):
    """What decides how fast the forms of a product are."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    packing: Packing  # `half` is a float32 weight whose packed copy has 16 bits


class FormTable(NamedTuple):
    """The form by the number of rows: `forms[i]` from `starts[i]` rows on."""

    starts: tuple[int, ...]  # rising from 1
    forms: tuple[Form, ...]

    def form(self, num_rows: int) -> Form:
        """That for so many rows."""
        return self.forms[bisect_right(self.starts, num_rows) - 1]


FormTables = Mapping[ProductKind, FormTable]

_USUAL = FormTable((1,), ("usual",))
_GUESSED: dict[tuple[torch.dtype, Packing], FormTable] = {
    (torch.float32, "none"): FormTable((1, 2, 9), ("transposed-twice", "transposed", "usual")),
    (torch.float32, "packed"): FormTable(
        (1, 2, 3, MAX_PACKED_ROWS + 1), ("transposed-twice", "packed-twice", "packed", "usual")
    ),
    # Never in another form: whatever the number of rows, a row has the same bits.
    (torch.float32, "half"): FormTable((1, MAX_PACKED_ROWS + 1), ("packed", "usual")),
    (torch.bfloat16, "packed"): FormTable(
        (1, 2, 3, MAX_PACKED_ROWS + 1), ("packed", "packed-twice", "packed", "usual")
    ),
}


def guessed_forms(kind: ProductKind) -> FormTable:
    """What was fastest on an x86 machine with AVX-512 and bfloat16; see `measure_forms` for another."""
    return _GUESSED.get((kind.dtype, kind.packing), _USUAL)


def possible_forms(kind: ProductKind, num_rows: int) -> tuple[Form, ...]:
    """All that compute so many rows of this kind to what is promised of it."""
    if kind.packing == "half":
        return (guessed_forms(kind).form(num_rows),)
    packed: tuple[Form, ...] = ("packed", "packed-twice") if kind.packing == "packed" else ()
    if kind.dtype == torch.float32:
        return ("usual", *packed, "transposed", "transposed-twice")
    # In 16 bits the model's own last bits are kept, and two rows are summed in another order than one.
    return ("usual", *(packed[:1] if num_rows == 1 else packed))
