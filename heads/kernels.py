"""Products, decoder layers and attention over few rows by kernels of our own, compiled for this machine.

What they compute, and to which bits, is said in `kernels.cpp`. T rows; D hidden size; H query heads, Hkv key heads,
Dh head size; B sequences.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from .cache_folder import cache_folder

MAX_ROWS = 16
"""Rows that a layer takes by these kernels; with more it is the machine's own that are faster."""
MAX_ATTENDED_ROWS = 64
"""The same of attention alone, which reads keys and values where they lie."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Of the states."""
SWITCH = "HISPEC_KERNELS"
"""0 in this variable of the environment leaves them out."""
SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")
BlockKind = Literal["four-bit", "eight-bit"]
BLOCK_SIZE = 32
"""Values of a weight that are kept in blocks have one step in common."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, "four-bit": 3, "eight-bit": 4}


class Linear(ctypes.Structure):
    """A weight and a bias of a product, where they lie: they must outlive it."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("kind", c_int64),
        ("scale", c_float),
    )

    @classmethod
    def of(
        cls,
        weight: Tensor,  # [D_out, D_in], in rows one behind the other
        bias: Tensor | None,  # [D_out]
        scale: float = 1.0,  # by which the weight is to be multiplied
    ) -> "Linear":
        """From tensors."""
        assert weight.is_contiguous()
        return cls(weight.data_ptr(), pointer(bias), *weight.shape, _KINDS[weight.dtype], scale)

    @classmethod
    def of_blocks(
        cls,
        blocks: Tensor,  # [D_out, D_in / BLOCK_SIZE, bytes of a block] uint8
        kind: BlockKind,
        bias: Tensor | None,  # [D_out]
    ) -> "Linear":
        """From a weight in blocks, see `kernels.cpp`."""
        assert blocks.is_contiguous()
        num_outputs, num_blocks = blocks.shape[:2]
        return cls(blocks.data_ptr(), pointer(bias), num_outputs, num_blocks * BLOCK_SIZE, _KINDS[kind], 1.0)


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
    )


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


class Kernels:
    """The compiled kernels; whoever calls them has asked `takes`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        plan = {
            "product": [c_void_p] * 3 + [c_int64] * 2,
            "before_attention": [c_void_p] * 5 + [c_int64] * 2,
            "after_attention": [c_void_p] * 4 + [c_int64] * 2,
            "paged_attention": [c_void_p] * 8 + [c_int64, c_float, c_void_p] + [c_int64] * 2,
        }
        self._functions = {}
        for name, arguments in plan.items():
            for dtype in KERNEL_DTYPES:
                function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

    def takes(self, states: Tensor, max_rows: int = MAX_ROWS) -> bool:
        """Whether they compute with these `[..., T, D]`: few rows on a CPU, without gradients."""
        return (
            states.dtype in KERNEL_DTYPES
            and states.device.type == "cpu"
            and 0 < states.numel() <= max_rows * states.shape[-1]
            and not torch.is_grad_enabled()
        )

    def product(self, linear: Linear, states: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """`states @ weight.T * scale + bias`."""
        states = states.contiguous()
        outputs = states.new_empty(*states.shape[:-1], linear.num_outputs)
        num_rows = states.numel() // linear.num_inputs
        self._functions["product", states.dtype](
            ctypes.byref(linear), states.data_ptr(), outputs.data_ptr(), num_rows, torch.get_num_threads()
        )
        return outputs

    def before_attention(
        self,
        layer: Layer,
        states: Tensor,  # [1, T, D]
        cosines: Tensor,  # [T, 1, Dh]
        sines: Tensor,  # [T, 1, Dh], its first half negated
    ) -> Tensor:  # [T, H + 2 * Hkv, Dh]
        """Queries, keys and values, the first two turned."""
        states, cosines, sines = states.contiguous(), cosines.contiguous(), sines.contiguous()
        num_rows, head_dim = states.shape[1], layer.heads.head_dim
        heads = states.new_empty(num_rows, layer.qkv.num_outputs // head_dim, head_dim)
        self._functions["before_attention", states.dtype](
            ctypes.byref(layer),
            states.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
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

    They need Linux, a CPU with AVX-512 and g++. Compiling takes some seconds, once.
    """
    if os.environ.get(SWITCH) == "0" or not _could_run():
        return None
    try:
        kernels = Kernels(ctypes.CDLL(str(_compiled())))
    # Without a home, a compiler that works, room on the disk, or the OpenMP library that torch brings along.
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):
        return None
    return kernels if _are_right(kernels) else None


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor lies."""
    return None if tensor is None else tensor.data_ptr()


def _could_run() -> bool:
    has_lanes = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return sys.platform == "linux" and has_lanes and shutil.which("g++") is not None


def _compiled() -> Path:
    """The library for this machine, as it is kept or made anew."""
    source = SOURCE.read_bytes()
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    parts = (source, compiler, " ".join(FLAGS).encode(), flags.encode(), platform.machine().encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"{digest}.so"
    if not library.exists():
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _compile(library)
    # What another user could have written is not run.
    for path in (folder, library):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{path} could be written to by others")
    return library


def _compile(library: Path) -> None:
    with (
        tqdm(total=1, desc="compiling kernels, once", leave=False) as bar,
        tempfile.TemporaryDirectory(dir=library.parent) as folder,
    ):
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        run = {"check": True, "capture_output": True, "timeout": 300}
        subprocess.run(["g++", *FLAGS, "-c", str(SOURCE), "-o", str(compiled)], **run)  # type: ignore[call-overload]
        # Without OpenMP's library: torch has loaded its own, and a second one would have threads of its own.
        subprocess.run(["g++", "-shared", str(compiled), "-o", str(linked)], **run)  # type: ignore[call-overload]
        linked.chmod(0o755)
        linked.replace(library)
        bar.update()


@torch.inference_mode()
def _are_right(kernels: Kernels) -> bool:
    """Whether a product of each type comes out as it should."""
    generator = torch.Generator().manual_seed(0)
    for dtype in KERNEL_DTYPES:
        states = torch.randn(3, 77, generator=generator).to(dtype)
        weight = torch.randn(13, 77, generator=generator).to(dtype)
        expected = states.double() @ weight.double().t()
        found = kernels.product(Linear.of(weight, None), states).double()
        if not torch.allclose(found, expected, rtol=0.01, atol=0.05):
            return False
    return True


def _heads_together(heads: Tensor) -> Tensor:
    """`[T, H, Dh]` with the heads of a row one behind the other."""
    is_together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_together else heads.contiguous()
