"""Products, decoder layers and attention over few rows by kernels of our own, compiled for this machine.

What they compute, and to which bits, is said in `native/kernels.cpp`. T rows; D hidden size; H query heads, Hkv key
heads, Dh head size; B sequences.
"""

import ctypes
import os
import subprocess
import sys
import warnings
from ctypes import c_double, c_float, c_int64, c_void_p
from functools import cache, partial

import torch
from torch import Tensor

from .kernel_library import find_library
from .kernel_types import (
    KINDS_OF_STEPS,
    DraftStep,
    Drawn,
    Heads,
    Highest,
    HighestStep,
    Layer,
    Layers,
    LayersStep,
    Linear,
    Native,
    Norm,
    Pages,
    PagesOfLayers,
    Places,
    ProductStep,
    Rows,
    Step,
    StepOfKind,
    Strides,
    number_of,
    pointer,
    rows_in,
    source_of,
    turns_of,
)
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
_NO_NORM, _NOWHERE = Norm(), Rows()


class Kernels:
    """The compiled kernels, of states in `KERNEL_DTYPES` on a CPU, without gradients."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.has_tiles.restype = c_int64
        self.uses_tiles = bool(library.has_tiles()) and os.environ.get(SWITCH) != "lanes"
        """Whether a weight in bfloat16 or in blocks goes by tiles, 16 rows at about the cost of one."""
        self._kinds = _KINDS | (_TILE_KINDS if self.uses_tiles else {})
        plan = {
            "run": [c_void_p] + [c_int64] * 2,
            "before_attention": [c_void_p] * 4 + [c_int64] * 2,
            "after_attention": [c_void_p] * 4 + [c_int64] * 2,
            "paged_attention": [c_void_p] * 8 + [c_int64, c_float, c_void_p] + [c_int64] * 2,
        }
        self._functions = {}
        for name, arguments in plan.items():
            for dtype in KERNEL_DTYPES:
                function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
                function.argtypes, function.restype = arguments, c_int64 if name == "run" else None
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
        native = self.product_step(linear, StateRows(states.reshape(-1, linear.num_inputs).contiguous(), None))
        self.run(self.tell(native.steps), states.dtype)
        return native.output.view(*states.shape[:-1], -1)

    def product_step(self, linear: Linear, source: StateRows) -> Native[Tensor]:  # [T, D_out]
        """As `product`, of rows."""
        outputs = source.table.new_empty(source.num_rows, linear.num_outputs)
        count = number_of(source, source.number)
        what = ProductStep(ctypes.addressof(linear), rows_in(source), outputs.data_ptr(), count.data_ptr())
        return Native([Step(what, (linear, source, outputs, count), outputs.dtype)], outputs)

    def highest_step(
        self,
        logits: Tensor,  # [R, V]
        names: Tensor | None,  # [V] int64, what places are called
        *,
        with_probabilities: bool,
        number: Tensor | None = None,  # as of `StateRows`
    ) -> Native[Highest]:
        """The highest value of each row."""
        logits = logits.contiguous()
        num_rows, size = logits.shape
        ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        values = torch.empty(num_rows, dtype=torch.float32, device="cpu")
        probabilities = torch.empty_like(values) if with_probabilities else None
        places = map(pointer, (logits, names, ids, values, probabilities))
        found = Highest(ids, values, probabilities)
        count = number_of(logits, number)
        step = Step(HighestStep(*places, count.data_ptr(), size), (logits, names, found, count), logits.dtype)
        return Native([step], found)

    def draft_step(
        self,
        first: Step,  # the highest logits behind all that is known, which are done before
        body: list[Step],  # layers over tokens drawn last, a head, its logits, the highest of these
        counts: Tensor,  # int64: tokens, and by token: sequences that draw it, the first ones; never rising
        token_ids: Tensor,  # [T] int64, by token: where the layers read what was drawn, and the rows of `body` stand
        *,
        may_end: bool,  # whether a lone sequence's draft may end sooner: see `Drawn.least`
        with_probabilities: bool,
    ) -> Native[Drawn]:
        """The tokens of greedy drafts. What comes behind may have a row for each of them; it has fewer then, too.

        `body` and what reads its rows is told of the first token's; the others' stand behind these.
        """
        probabilities = torch.empty(len(token_ids), dtype=torch.float32, device="cpu") if with_probabilities else None
        assert with_probabilities or not may_end
        least = (c_double * len(counts))()
        layers, head, logits, highest = body
        drawn = Drawn(token_ids, probabilities, least, c_int64())
        what = DraftStep(
            *(ctypes.addressof(step.what) for step in (first, layers, head, logits, highest)),
            counts.data_ptr(),
            token_ids.data_ptr(),
            pointer(probabilities),
            ctypes.addressof(least) if may_end else None,
            ctypes.addressof(drawn.num_drawn),
        )
        return Native([Step(what, (first, body, counts, drawn), first.dtype)], drawn)

    def tell(self, steps: list[Step]) -> "ctypes.Array[StepOfKind]":
        """What `run` is to do; the steps must be kept."""
        kinds = [StepOfKind(KINDS_OF_STEPS.index(type(step.what)), ctypes.addressof(step.what)) for step in steps]
        return (StepOfKind * len(kinds))(*kinds)

    def run(self, told: "ctypes.Array[StepOfKind]", dtype: torch.dtype) -> None:
        """Do one step after the other; all have states of this type.

        Raises IndexError for a row outside of its table.
        """
        if not self._functions["run", dtype](told, len(told), torch.get_num_threads()):
            raise IndexError("a row of states lies outside of its table, such as the embedding of an unknown token")

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
            ctypes.byref(turns_of(rotary)),
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

    def layers_step(
        self,
        layers: Layers,
        first: int,  # whose keys and values are those of the first layer; the next ones follow
        source: StateRows | JoinedRows,  # what the first layer takes; tables in whole rows
        rotary: Rotary,
        pages: Pages,
        norm: Norm | None = None,  # of what the last layer gives
        keep: StateRows | None = None,  # where what is returned is put as well
        *,
        keeps_only: bool = False,  # of a single layer nothing but its keys and values, and nothing is returned
    ) -> Native[Tensor]:  # [1, T, D]
        """Whole layers one after the other, each with the attention of `paged_attention`."""
        table, num_rows = source.table, source.num_rows
        states = table.new_empty(1, num_rows, table.shape[1])
        pools, places, new_blocks = pages
        offset = first * ctypes.sizeof(c_void_p)
        where = PagesOfLayers(
            ctypes.addressof(pools.keys) + offset,
            ctypes.addressof(pools.values) + offset,
            pointer(new_blocks),
            places,
        )
        told, count = source_of(source), number_of(source, source.number)
        what = LayersStep(
            ctypes.addressof(layers.places),
            len(layers.places),
            where,
            turns_of(rotary),
            norm or _NO_NORM,
            told,
            _NOWHERE if keep is None else rows_in(keep),
            states.data_ptr(),
            count.data_ptr(),
            table.shape[1],
            keeps_only,
        )
        kept = (layers, source, told, rotary, pages, norm, keep, states, count)
        return Native([Step(what, kept, states.dtype)], states)

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
            ctypes.byref(Strides(query.stride(0), key.stride(0), value.stride(0))),
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


def _heads_together(heads: Tensor) -> Tensor:
    """`[T, H, Dh]` with the heads of a row one behind the other."""
    is_together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_together else heads.contiguous()
