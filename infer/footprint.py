"""What generation takes of memory: measured for a stretch of time, and computed for each level."""

from pathlib import Path
from typing import Literal

import torch

from ..heads import EarlyExitModel
from .config import EngineConfig
from .kv_cache import bytes_per_token
from .levels import build_levels, window_size

MemoryKind = Literal["device", "process"]


class PeakMemory:
    """The most memory in use since `reset`: of the GPU what torch has allocated, else of the whole process (Linux).

    A process has all methods of a benchmark loaded, and what one of them has touched stays with it: its peak is an
    upper bound for the method that runs, and comparisons of methods need the computed figures.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind: MemoryKind | None = None
        """`device` or `process`; None where nothing can be measured."""
        if device.type == "cuda":
            self.kind = "device"
        elif self._reset_process():
            self.kind = "process"

    def reset(self) -> None:
        """Forget what was the most."""
        if self.kind == "device":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.kind == "process":
            self._reset_process()

    def read(self) -> int | None:
        """Bytes."""
        if self.kind == "device":
            return torch.cuda.max_memory_allocated(self._device)
        if self.kind == "process":
            lines = Path("/proc/self/status").read_text().splitlines()
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
        return None

    @staticmethod
    def _reset_process() -> bool:
        """Set the kernel's high-water mark back; whether it can be."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


def level_bytes(
    model: EarlyExitModel,
    config: EngineConfig,
    num_tokens: int,  # in the KV cache, of all sequences together
) -> dict[str, dict[str, int]]:
    """For each level below the target the bytes that it adds to the base's own, computed from shapes.

    `weights`: the head's, with the LM head's rows of its draft vocabulary, at most twice where packed copies are kept;
    `kv_cache`: the keys and values of its head's block for `num_tokens`; `hidden_states`: what waits for the next
    level.
    """
    backbone = model.backbone
    copies = 2 if model.is_packed and backbone.device.type == "cpu" else 1
    levels = build_levels(model, config.method)[:-1]
    window = window_size(config, len(levels))
    added = {}
    for level in levels:
        assert level.head is not None
        head = model.exit_heads[level.head]
        size = backbone.dtype.itemsize
        weights = sum(weight.numel() * weight.element_size() for weight in head.parameters())
        if head.draft_vocab_ids is not None:
            weights += len(head.draft_vocab_ids) * backbone.hidden_size * size
        kv_bytes = bytes_per_token(1, backbone.num_kv_heads, backbone.head_dim, backbone.dtype)
        added[level.name] = {
            "weights": weights * copies,
            "kv_cache": kv_bytes * num_tokens if head.has_block else 0,
            "hidden_states": window * config.max_num_seqs * backbone.hidden_size * size,
        }
    return added
