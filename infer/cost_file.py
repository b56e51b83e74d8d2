"""Measured costs on disk, so that a machine is measured once for a model."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from platform import processor
from typing import Any

import torch

from ..checkpoints import fingerprint, write_atomically
from ..heads import EarlyExitModel, cache_folder, find_kernels
from .config import EngineConfig
from .cost_model import Costs, Overhead, Table

FORMAT_VERSION = 7
NEUTRAL_OPTIONS = frozenset({"max_num_seqs", "num_blocks", "max_prefill_tokens", "plan", "replan"})
"""Options of an engine that do not change what a round takes."""


def machine_key(model: EarlyExitModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that costs depend on, JSON-ready: model, heads, options of the engine, device, threads and versions."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    told = {name: value for name, value in options.items() if value != defaults.get(name, MISSING)}
    return {
        "format_version": FORMAT_VERSION,
        "base": fingerprint(model.base),
        "heads": [head.config.to_dict() for head in model.exit_heads],
        "dtype": str(model.backbone.dtype),
        "options": {name: repr(value) for name, value in sorted(told.items()) if name not in NEUTRAL_OPTIONS},
        **device_key(model.backbone.device),
    }


def device_key(device: torch.device) -> dict[str, Any]:
    """The device, whether it has kernels of our own, threads and versions, JSON-ready."""
    return {
        "has_kernels": device.type == "cpu" and find_kernels() is not None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "num_threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in ("hispec", "torch", "transformers")},
    }


def read_costs(key: Mapping[str, Any], max_batch: int) -> Costs | None:
    """What was kept for this key and covers so many sequences; None where nothing readable was."""
    try:
        record = json.loads(kept_path(key).read_text(encoding="utf-8"))
        costs = costs_from_dict(record["costs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return costs if record.get("key") == key and costs.layer.batch_sizes[-1] >= max_batch else None


def write_costs(key: Mapping[str, Any], costs: Costs) -> None:
    """Keep them; where the disk refuses, they will be measured again."""
    path = kept_path(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, "costs": costs_to_dict(costs)}, indent=2) + "\n")


def costs_to_dict(costs: Costs) -> dict[str, Any]:
    """JSON-ready; `costs_from_dict` reads it."""
    return asdict(costs)


def costs_from_dict(values: Mapping[str, Any]) -> Costs:
    """From what was JSON; ValueError, KeyError or TypeError for anything but costs."""
    return Costs(
        num_layers=int(values["num_layers"]),
        layer=_table(values["layer"]),
        target_head=_table(values["target_head"]),
        exit_heads={int(exit_layer): _table(table) for exit_layer, table in values["exit_heads"].items()},
        per_pass=_overhead(values["per_pass"]),
        per_draw=_overhead(values["per_draw"]),
        per_middle=_overhead(values["per_middle"]),
        per_round=_overhead(values["per_round"]),
        context=_at_least_nothing(values["context"]),
        layer_by_token=None if values["layer_by_token"] is None else _table(values["layer_by_token"], least=0.0),
    )


def _table(values: Mapping[str, Any], least: float = math.ulp(0.0)) -> Table:
    table = Table(
        batch_sizes=tuple(map(int, values["batch_sizes"])),
        num_rows=tuple(map(int, values["num_rows"])),
        seconds=tuple(tuple(map(float, row)) for row in values["seconds"]),
        step=int(values["step"]),
    )
    if table.step < 1:
        raise ValueError("a table's step is no number of rows")
    if {len(row) for row in table.seconds} != {len(table.num_rows)} or len(table.seconds) != len(table.batch_sizes):
        raise ValueError("a table's rows do not fit its sides")
    for side in (table.batch_sizes, table.num_rows):
        if not side or side[0] < 1 or any(a >= b for a, b in pairwise(side)):
            raise ValueError("a table's sides do not rise")
    if not all(math.isfinite(value) and value >= least for row in table.seconds for value in row):
        raise ValueError("a table holds what are no seconds")
    return table


def _overhead(values: Mapping[str, Any]) -> Overhead:
    return Overhead(**{name: _at_least_nothing(value) for name, value in values.items()})


def _at_least_nothing(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("costs hold what is no time and no number of tokens")
    return number


def kept_path(key: Mapping[str, Any]) -> Path:
    """The file of what was measured under this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "costs" / f"{digest}.json"


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
