"""Usage: the seconds and the peak memory of each stage of a run."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ..checkpoints import write_atomically

INTERVAL = 0.02
"""Seconds between two looks at the memory."""


@dataclass
class Usage:
    """What a stretch of work took; complete when `metered` ends."""

    seconds: float = 0.0
    memory: int = 0
    """Most bytes of the process in the machine's memory (resident set), files that it maps included."""
    device_memory: int | None = None
    """Most bytes of tensors on the GPU; None on a CPU."""


@contextmanager
def metered(device: torch.device) -> Iterator[Usage]:
    """Measure what happens inside, on Ctrl-C too."""
    usage, ended, process = Usage(), threading.Event(), psutil.Process()

    def watch() -> None:
        while True:
            usage.memory = max(usage.memory, process.memory_info().rss)
            if ended.wait(INTERVAL):
                return

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
        if device.type == "cuda":
            usage.device_memory = torch.cuda.max_memory_allocated(device)


class UsageFile:
    """Usage by stage, added up over all processes that worked on a run, in a JSON file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._device = device

    @contextmanager
    def stage(
        self,
        name: str,
        *,
        anew: bool = False,  # forget what earlier processes took for it: nothing of their work is left
    ) -> Iterator[None]:
        """Measure a stage and write it down, whether it ends or is interrupted."""
        stages = self.read()
        before = {} if anew else stages.get(name, {})
        usage = Usage()
        try:
            with metered(self._device) as usage:
                yield
        finally:
            stages[name] = _added(before, usage)
            # A full disk has been complained about by what stands above.
            with suppress(OSError):
                write_atomically(self._path, json.dumps(stages, indent=2) + "\n")

    def read(self) -> dict[str, dict[str, Any]]:
        """By stage: `seconds`, and `peak_memory` and `peak_device_memory` in bytes (the latter None on a CPU)."""
        try:
            stages = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            # Only a record: a damaged one is begun anew.
            return {}
        return stages if isinstance(stages, dict) else {}


def _added(before: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    on_device = [value for value in (before.get("peak_device_memory"), usage.device_memory) if value is not None]
    return {
        "seconds": round(before.get("seconds", 0.0) + usage.seconds, 2),
        "peak_memory": max(before.get("peak_memory", 0), usage.memory),
        "peak_device_memory": max(on_device, default=None),
    }


def describe_usage(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a stage in the words of the plan, to lay beside it, and one for all."""
    lines = [
        f"{name:<10} took {show_seconds(use['seconds'])}; "
        f"{show_memory(use['peak_memory'], use.get('peak_device_memory'))}"
        for name, use in stages.items()
    ]
    seconds = sum(use["seconds"] for use in stages.values())
    memory = max((use["peak_memory"] for use in stages.values()), default=0)
    on_device = [use["peak_device_memory"] for use in stages.values() if use.get("peak_device_memory") is not None]
    lines.append(f"{'in all':<10} took {show_seconds(seconds)}; {show_memory(memory, max(on_device, default=None))}")
    return "\n".join(lines)


def show_seconds(seconds: float) -> str:
    """`47 s`, `12 min` or `3 h 05 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def show_memory(memory: int, device_memory: int | None) -> str:
    """The peak in 1e9 bytes, on the GPU too where there is one."""
    on_device = "" if device_memory is None else f"{device_memory / 1e9:.2f} GB on the GPU, "
    return f"peak {on_device}{memory / 1e9:.2f} GB of memory"
