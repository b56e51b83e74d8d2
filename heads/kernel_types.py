"""What our own kernels are told, as `native` lays it out.

T rows; D hidden size; H query heads, Hkv key heads, Dh head size; S tokens of a block; B sequences; R rows of logits
over V tokens.
"""

import ctypes
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .rotary import Rotary
from .state_rows import JoinedRows, StateRows

Output = TypeVar("Output")


class Linear(ctypes.Structure):
    """A weight and a bias of a product, where they lie; made by `Kernels`."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("kind", c_int64),
        ("scale", c_float),
    )


class Heads(ctypes.Structure):
    """How attention is split."""

    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64))


class Layer(ctypes.Structure):
    """A decoder layer of the Llama family."""

    _fields_ = (
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("middle_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("input_eps", c_float),
        ("middle_eps", c_float),
        ("query_eps", c_float),
        ("key_eps", c_float),
        ("heads", Heads),
        ("window", c_int64),
        ("scaling", c_float),
    )

    @classmethod
    def of(
        cls,
        linears: tuple[Linear, Linear, Linear, Linear],
        norms: list[Tensor | None],  # four, each [D] or [Dh]
        eps: list[float],
        heads: Heads,
        *,
        window: int | None = None,
        scaling: float,
    ) -> "Layer":
        """From its parts, which are kept."""
        layer = cls(*linears, *map(pointer, norms), *eps, heads, window or 0, scaling)
        layer.parts = (linears, norms)
        return layer


class Strides(ctypes.Structure):
    _fields_ = (("queries", c_int64), ("keys", c_int64), ("values", c_int64))


class Places(ctypes.Structure):
    """Where the rows of a pass stand: each in a sequence, at a position of it."""

    _fields_ = (
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("tables", c_void_p),
        ("blocks_per_table", c_int64),
        ("block_size", c_int64),
    )

    @classmethod
    def of(
        cls,
        sequences: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        tables: Tensor,  # [B, n] int64
        block_size: int,
    ) -> "Places":
        """From tensors, which are kept."""
        places = cls(sequences.data_ptr(), positions.data_ptr(), tables.data_ptr(), tables.shape[1], block_size)
        places.tensors = (sequences, positions, tables)
        return places


class Layers:
    """Layers that run one after the other."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.places = (c_void_p * len(layers))(*map(ctypes.addressof, layers))


class Turns(ctypes.Structure):
    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("places", c_void_p))


class Norm(ctypes.Structure):
    """An RMS norm of rows."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "Norm":  # weight: [D]
        """From its weight, which is kept."""
        norm = cls(weight.data_ptr(), eps)
        norm.tensor = weight
        return norm


class Rows(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("places", c_void_p), ("size", c_int64))


class Source(ctypes.Structure):
    _fields_ = (("states", Rows), ("fuse", c_void_p), ("context", Rows), ("eps", c_float))


class Pools:
    """Where the keys and values of all layers are kept: `[N * S, Hkv, Dh]` each, all of a type."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.tensors = (keys, values)
        self.dtype = keys[0].dtype
        self.keys = (c_void_p * len(keys))(*map(pointer, keys))
        self.values = (c_void_p * len(values))(*map(pointer, values))


class Pages(NamedTuple):
    """What a pass reads and writes of `Pools`."""

    pools: Pools
    places: Places
    new_blocks: Tensor | None  # int64, to be filled with zeros: their number, and they


class Highest(NamedTuple):
    """The highest value of each row of logits."""

    ids: Tensor  # [R] int64, of equal ones the first; means nothing in rows with NaN
    values: Tensor  # [R] float32, NaN in rows with NaN
    probabilities: Tensor | None  # [R] float32, of these by softmax; of rows that are not finite as if they were even


class Drawn(NamedTuple):
    """The tokens of greedy drafts."""

    token_ids: Tensor  # [T] int64, by token: those of all sequences that drew it
    probabilities: Tensor | None  # [T] float32, as in `Highest`
    least: "ctypes.Array[c_double]"
    """To be set where a lone sequence's draft may end sooner: how likely all k + 1 tokens must stand for another."""
    num_drawn: c_int64
    """Tokens of the longest draft; what would be behind means nothing."""


class PagesOfLayers(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("new_blocks", c_void_p),
        ("places", Places),
    )


class LayersStep(ctypes.Structure):
    """Layers one after the other, and a norm behind them."""

    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("pages", PagesOfLayers),
        ("rotary", Turns),
        ("norm", Norm),
        ("source", Source),
        ("keep", Rows),
        ("states", c_void_p),
        ("num_rows", c_void_p),
        ("size", c_int64),
        ("keeps_only", c_int64),
    )


class ProductStep(ctypes.Structure):
    """A product."""

    _fields_ = (("linear", c_void_p), ("source", Rows), ("outputs", c_void_p), ("num_rows", c_void_p))


class HighestStep(ctypes.Structure):
    """The highest value of each row of logits."""

    _fields_ = (
        ("logits", c_void_p),
        ("names", c_void_p),
        ("ids", c_void_p),
        ("values", c_void_p),
        ("probabilities", c_void_p),
        ("num_rows", c_void_p),
        ("size", c_int64),
    )


class DraftStep(ctypes.Structure):
    """Tokens of greedy drafts, the first ones done before."""

    _fields_ = (
        ("first", c_void_p),
        ("layers", c_void_p),
        ("head", c_void_p),
        ("logits", c_void_p),
        ("highest", c_void_p),
        ("counts", c_void_p),
        ("token_ids", c_void_p),
        ("probabilities", c_void_p),
        ("least", c_void_p),
        ("num_drawn", c_void_p),
    )


class StepOfKind(ctypes.Structure):
    """A step as it is told."""

    _fields_ = (("kind", c_int64), ("what", c_void_p), ("seconds", c_double))


KINDS_OF_STEPS: tuple[type[ctypes.Structure], ...] = (LayersStep, ProductStep, HighestStep, DraftStep)
"""Their numbers."""


class Step(NamedTuple):
    """What is to be done with others in a single call; its outputs mean nothing before."""

    what: ctypes.Structure
    kept: tuple[object, ...]
    """What must not go away before."""
    dtype: torch.dtype
    """Of the states."""


class Native(NamedTuple, Generic[Output]):
    """Something as steps of our own kernels."""

    steps: list[Step]
    output: Output
    """What it gives, once they are done."""


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor lies."""
    return None if tensor is None else tensor.data_ptr()


def source_of(source: StateRows | JoinedRows) -> Source:
    """As kernels take it; its product is kept."""
    if isinstance(source, StateRows):
        return Source(rows_in(source))
    linear = source.fuse.linear()
    eps = torch.finfo(torch.float32).eps  # that `join` takes, whatever the type
    told = Source(rows_in(source.hidden), ctypes.addressof(linear), rows_in(source.context), eps)
    told.linear = linear
    return told


def rows_in(rows: StateRows) -> Rows:
    """As kernels take them."""
    return Rows(rows.table.data_ptr(), pointer(rows.places), rows.table.shape[0])


def number_of(rows: StateRows | JoinedRows | Tensor, number: Tensor | None) -> Tensor:
    """How many rows there are, where kernels read it."""
    if number is not None:
        return number
    return torch.tensor([rows.shape[0] if isinstance(rows, Tensor) else rows.num_rows], device="cpu")


def turns_of(rotary: Rotary) -> Turns:
    """As kernels take it."""
    return Turns(rotary.cos.data_ptr(), rotary.sin.data_ptr(), pointer(rotary.rows))
