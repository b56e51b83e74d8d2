"""Products, decoder layers and attention over few rows by kernels of our own, compiled for this machine.

What they compute, and to which bits, is said in `native/kernels.cpp`. T rows; D hidden size; H query heads, Hkv key
heads, Dh head size; B sequences.
"""

import ctypes
import os
import subprocess
import sys
import warnings
from ctypes import c_float, c_int64, c_void_p
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel_library import find_library
from .rotary import Rotary
from .state_rows import JoinedRows, StateRows

MAX_ROWS = 16
"""Rows for which these kernels are fastest, of a weight that the library multiplies by in the same type."""
MAX_TILED_ROWS = 256
"""The same of a weight that goes by tiles."""
TILE_ROWS = 16
"""Rows of inputs that a tile takes at once, and of a weight."""
MAX_ATTENDED_ROWS = 64
"""The same of attention, which reads keys and values where they lie."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Of the states."""
SWITCH = "HISPEC_KERNELS"
"""0 in this variable of the environment leaves them out, `lanes` the machine's tiles."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, 4: 3, 8: 4}
_TILE_KINDS = {torch.bfloat16: 5, 4: 6, 8: 7}
"""By the type, or the bits of a value of blocks; where there are tiles."""


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


class _Strides(ctypes.Structure):
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


class _Rotary(ctypes.Structure):
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


class _StateRows(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("places", c_void_p), ("size", c_int64))


class _Source(ctypes.Structure):
    _fields_ = (("states", _StateRows), ("fuse", c_void_p), ("context", _StateRows), ("eps", c_float))


_NO_NORM, _NOWHERE = Norm(), _StateRows()


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
    new_blocks: Tensor | None  # [n] int64, to be filled with zeros


class Highest(NamedTuple):
    """The highest value of each row of logits."""

    ids: Tensor  # [R] int64, of equal ones the first; means nothing in rows with NaN
    values: Tensor  # [R] float32, NaN in rows with NaN
    probabilities: Tensor | None  # [R] float32, of these by softmax; of rows that are not finite as if they were even


class _Pages(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("new_blocks", c_void_p),
        ("num_new_blocks", c_int64),
        ("places", Places),
    )


class Kernels:
    """The compiled kernels, of states in `KERNEL_DTYPES` on a CPU, without gradients."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.has_tiles.restype = c_int64
        self.uses_tiles = bool(library.has_tiles()) and os.environ.get(SWITCH) != "lanes"
        """Whether a weight in bfloat16 or in blocks goes by tiles, 16 rows at about the cost of one."""
        self._kinds = _KINDS | (_TILE_KINDS if self.uses_tiles else {})
        plan = {
            "highest": [c_void_p] * 5 + [c_int64] * 3,
            "product": [c_void_p] * 3 + [c_int64] * 2,
            "before_attention": [c_void_p] * 4 + [c_int64] * 2,
            "after_attention": [c_void_p] * 4 + [c_int64] * 2,
            "run_layers": [c_void_p, c_int64] + [c_void_p] * 6 + [c_int64] * 2,
            "paged_attention": [c_void_p] * 8 + [c_int64, c_float, c_void_p] + [c_int64] * 2,
        }
        self._functions = {}
        for name, arguments in plan.items():
            for dtype in KERNEL_DTYPES:
                function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
                function.argtypes, function.restype = arguments, c_int64 if name == "run_layers" else None
                self._functions[name, dtype] = function

    def takes(self, states: Tensor) -> bool:
        """Whether they compute with such rows: some, on a CPU, without gradients."""
        is_of_type = states.dtype in KERNEL_DTYPES and states.device.type == "cpu"
        return is_of_type and states.numel() > 0 and not torch.is_grad_enabled()

    def max_rows(self, dtype: torch.dtype) -> int:
        """Rows for which they are fastest, of a weight of this type; 0 where they do not take it."""
        if self.uses_tiles and dtype == torch.bfloat16:
            return MAX_TILED_ROWS
        return MAX_ROWS if dtype in KERNEL_DTYPES else 0

    def linear(
        self,
        weight: Tensor,  # [D_out, D_in], in rows one behind the other
        bias: Tensor | None,  # [D_out]
        scale: float = 1.0,  # by which the weight is to be multiplied
    ) -> Linear:
        """A weight and a bias, which are kept."""
        return self._linear(weight, bias, (weight.shape[0], weight.shape[1]), weight.dtype, scale)

    def block_linear(
        self,
        blocks: Tensor,  # uint8, as `BlockWeight` has them
        bias: Tensor | None,  # [D_out]
        shape: tuple[int, int],  # D_out, D_in
        num_bits: int,  # of a value
    ) -> Linear:
        """A weight in blocks and a bias, which are kept."""
        return self._linear(blocks, bias, shape, num_bits, 1.0)

    def _linear(
        self, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], what: torch.dtype | int, scale: float
    ) -> Linear:
        assert weight.is_contiguous()
        assert bias is None or bias.is_contiguous()
        linear = Linear(weight.data_ptr(), pointer(bias), *shape, self._kinds[what], scale)
        linear.tensors = (weight, bias)
        return linear

    def product(self, linear: Linear, states: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """`states @ weight.T * scale + bias`."""
        assert states.shape[-1] == linear.num_inputs
        states = states.contiguous()
        outputs = states.new_empty(*states.shape[:-1], linear.num_outputs)
        num_rows = states.numel() // linear.num_inputs
        self._functions["product", states.dtype](
            ctypes.byref(linear), states.data_ptr(), outputs.data_ptr(), num_rows, torch.get_num_threads()
        )
        return outputs

    def highest(
        self,
        logits: Tensor,  # [R, V]
        names: Tensor | None,  # [V] int64, what places are called
        *,
        with_probabilities: bool,
    ) -> Highest:
        """The highest value of each row."""
        logits = logits.contiguous()
        num_rows, size = logits.shape
        ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        values = torch.empty(num_rows, dtype=torch.float32, device="cpu")
        probabilities = torch.empty_like(values) if with_probabilities else None
        self._functions["highest", logits.dtype](
            logits.data_ptr(),
            pointer(names),
            ids.data_ptr(),
            values.data_ptr(),
            pointer(probabilities),
            num_rows,
            size,
            torch.get_num_threads(),
        )
        return Highest(ids, values, probabilities)

    def before_attention(
        self,
        layer: Layer,
        states: Tensor,  # [1, T, D]
        rotary: Rotary,
    ) -> Tensor:  # [T, H + 2 * Hkv, Dh]
        """Queries, keys and values, the first two turned."""
        states = states.contiguous()
        num_rows, head_dim = states.shape[1], layer.heads.head_dim
        heads = states.new_empty(num_rows, layer.qkv.num_outputs // head_dim, head_dim)
        self._functions["before_attention", states.dtype](
            ctypes.byref(layer),
            states.data_ptr(),
            ctypes.byref(_turns(rotary)),
            heads.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
        return heads

    def after_attention(
        self,
        layer: Layer,
        states: Tensor,  # [1, T, D], what the layer was given
        attended: Tensor,  # [T, H, Dh]
    ) -> Tensor:  # [1, T, D]
        """The layer's output."""
        states, attended = states.contiguous(), attended.contiguous()
        outputs = torch.empty_like(states)
        self._functions["after_attention", states.dtype](
            ctypes.byref(layer),
            states.data_ptr(),
            attended.data_ptr(),
            outputs.data_ptr(),
            states.shape[1],
            torch.get_num_threads(),
        )
        return outputs

    def run_layers(
        self,
        layers: Layers,
        first: int,  # whose keys and values are those of the first layer; the next ones follow
        source: StateRows | JoinedRows,  # what the first layer takes; tables in whole rows
        rotary: Rotary,
        pages: Pages,
        norm: Norm | None = None,  # of what the last layer gives
        keep: StateRows | None = None,  # where what is returned is put as well
    ) -> Tensor:  # [1, T, D]
        """Whole layers one after the other, each with the attention of `paged_attention`.

        Raises IndexError for a row outside of its table.
        """
        table, num_rows = source.table, source.num_rows
        states = table.new_empty(1, num_rows, table.shape[1])
        pools, places, new_blocks = pages
        offset = first * ctypes.sizeof(c_void_p)
        where = _Pages(
            ctypes.addressof(pools.keys) + offset,
            ctypes.addressof(pools.values) + offset,
            pointer(new_blocks),
            0 if new_blocks is None else len(new_blocks),
            places,
        )
        is_done = self._functions["run_layers", states.dtype](
            layers.places,
            len(layers.places),
            ctypes.byref(where),
            ctypes.byref(_turns(rotary)),
            ctypes.byref(norm or _NO_NORM),
            ctypes.byref(_source(source)),
            ctypes.byref(_NOWHERE if keep is None else _rows(keep)),
            states.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
        if not is_done:
            raise IndexError("a row of states lies outside of its table, such as the embedding of an unknown token")
        return states

    def paged_attention(
        self,
        query: Tensor,  # [T, H, Dh]
        key: Tensor,  # [T, Hkv, Dh], the new ones
        value: Tensor,  # [T, Hkv, Dh]
        keys: Tensor,  # [N * S, Hkv, Dh], all that are kept
        values: Tensor,  # [N * S, Hkv, Dh]
        places: Places,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:  # [T, H, Dh]
        """Keep the new keys and values; then each row's attention over its sequence as far as its position."""
        query, key, value = map(_heads_together, (query, key, value))
        outputs = query.new_empty(query.shape)
        num_rows, num_heads, head_dim = query.shape
        self._functions["paged_attention", query.dtype](
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            ctypes.byref(_Strides(query.stride(0), key.stride(0), value.stride(0))),
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.byref(places),
            ctypes.byref(Heads(num_heads, key.shape[1], head_dim)),
            window or 0,
            scaling,
            outputs.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
        return outputs


@cache
def find_kernels() -> Kernels | None:
    """The kernels, compiled where this machine has not yet; None where it cannot, or was told not to.

    They need Linux, a CPU with AVX-512 and, to be compiled, g++ of version 10 or newer. Compiling takes some seconds,
    once. Where it fails a warning says why.
    """
    has_lanes = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or not has_lanes:
        return None
    try:
        library = find_library()
        if library is None:
            return None
        kernels = Kernels(ctypes.CDLL(str(library)))
        if not _are_right(kernels):
            raise RuntimeError("what they compute is wrong")
    # Without a home, a compiler that works, room on the disk, or the OpenMP library that torch brings along.
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        text = next(iter(reason.decode(errors="replace").strip().splitlines()), repr(error))
        warnings.warn(f"hispec runs without its own kernels, several times slower: {text}", stacklevel=2)
        return None
    return kernels


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor lies."""
    return None if tensor is None else tensor.data_ptr()


@torch.inference_mode()
def _are_right(kernels: Kernels) -> bool:
    """Whether products and attention come out as they should here, and each row as alone."""
    generator = torch.Generator().manual_seed(0)
    for dtype in KERNEL_DTYPES:
        make = partial(_random, generator, dtype)
        states, weight = make(19, 77), make(13, 77)
        expected = states.double() @ weight.double().t()
        linear = kernels.linear(weight, None)
        found = kernels.product(linear, states)
        if not torch.allclose(found.double(), expected, rtol=0.01, atol=0.05):
            return False
        if not torch.equal(kernels.product(linear, states[18:]), found[18:]):
            return False
        query, keys, values = make(1, 2, 24), make(20, 1, 24), make(20, 1, 24)
        sequences, positions, tables = (torch.tensor(n, device="cpu") for n in ([0], [19], [[0, 1, 2, 3, 4]]))
        places = Places.of(sequences, positions, tables, 4)
        expected = (query[0].double() @ keys[:, 0].double().t() * 0.2).softmax(-1) @ values[:, 0].double()
        new = keys[19:].clone(), values[19:].clone()
        found = kernels.paged_attention(query, *new, keys, values, places, scaling=0.2, window=None)
        if not torch.allclose(found[0].double(), expected, rtol=0.01, atol=0.02):
            return False
    return True


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype)


def _source(source: StateRows | JoinedRows) -> _Source:
    if isinstance(source, StateRows):
        return _Source(_rows(source))
    linear = source.fuse.linear()
    eps = torch.finfo(source.table.dtype).eps  # that `join` takes
    return _Source(_rows(source.hidden), ctypes.addressof(linear), _rows(source.context), eps)


def _rows(rows: StateRows) -> _StateRows:
    return _StateRows(rows.table.data_ptr(), pointer(rows.places), len(rows.table))


def _turns(rotary: Rotary) -> _Rotary:
    return _Rotary(rotary.cos.data_ptr(), rotary.sin.data_ptr(), pointer(rotary.rows))


def _heads_together(heads: Tensor) -> Tensor:
    """`[T, H, Dh]` with the heads of a row one behind the other."""
    is_together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_together else heads.contiguous()
