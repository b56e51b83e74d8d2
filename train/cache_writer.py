"""The cache writer: the frozen base reads responses, teacher-forced, and its states go to disk.

T rows of whole sequences side by side; D hidden size.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..checkpoints import write_atomically
from ..heads import Backbone
from .base_states import base_states
from .cache import FORMAT, StateCache, bytes_per_token, cached_layers, column_type, read_index, wanted_columns
from .responses import Response, read_responses, write_responses

BATCH_TOKENS = 4096
"""Tokens that the base reads at once."""


def extend_cache(
    folder: Path,
    responses: Sequence[Response],
    backbone: Backbone,
    exit_layers: Sequence[int],
    *,
    fingerprint: Mapping[str, Any],  # of the base
    max_gb: float = 8.0,  # 1e9 bytes
    batch_tokens: int = BATCH_TOKENS,
    show_progress: bool = True,
) -> StateCache:
    """Read `responses` with the base and keep what heads at `exit_layers` train on.

    Goes on from what is there, and computes only what is missing: more responses or exit layers can be added
    later. The responses that are cached already must be the first of `responses`, or begin with them; those
    beyond stay on the disk, but are not in what is returned. What would exceed `max_gb` is left out, and that
    is said. Raises ValueError for a cache of another base or of other responses, and, before anything is written,
    where the disk has no room for it.
    """
    index = open_index(folder, backbone, fingerprint)
    done: dict[str, int] = index["num_rows"]
    wanted = set(wanted_columns(exit_layers))
    done |= {name: 0 for name in sorted(wanted) if name not in done}
    responses = responses[: num_fitting(responses, cached_layers(done), backbone, max_gb)]
    num_cached = check_sequences(folder, responses)
    check_disk(folder, sum(response.length for response in responses), {name: done[name] for name in wanted}, backbone)
    folder.mkdir(parents=True, exist_ok=True)
    if len(responses) > num_cached:
        write_responses(folder / "sequences.jsonl", responses)
    _write_index(folder, index)
    total = sum(response.length for response in responses)
    num_done = min(total, *(done[name] for name in wanted))
    stop = 0
    with tqdm(total=total, initial=num_done, unit="tok", desc="cache", disable=not show_progress) as progress:
        for batch in _pack(responses, batch_tokens):
            start, stop = stop, stop + sum(response.length for response in batch)
            missing = {name for name in wanted if done[name] < stop}
            if missing:
                for name, values in _compute(backbone, batch, missing):
                    _write_rows(folder / f"{name}.bin", start, values)
                done |= dict.fromkeys(missing, stop)
                _write_index(folder, index)
                progress.update(stop - max(start, num_done))
    return StateCache(folder, exit_layers, len(responses))


def _compute(backbone: Backbone, batch: Sequence[Response], missing: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The missing columns of one batch, as they are written."""
    for name, values in base_states(backbone, batch, missing):
        yield name, _to_bits(values)


def _pack(responses: Sequence[Response], batch_tokens: int) -> Iterator[list[Response]]:
    batch: list[Response] = []
    for response in responses:
        if batch and sum(other.length for other in batch) + response.length > batch_tokens:
            yield batch
            batch = []
        batch.append(response)
    if batch:
        yield batch


def num_fitting(responses: Sequence[Response], exit_layers: Sequence[int], backbone: Backbone, max_gb: float) -> int:
    """How many responses fit into `max_gb`; says so where it is not all."""
    max_rows = int(max_gb * 1e9) // bytes_per_token(backbone, exit_layers)
    num_rows = np.cumsum([response.length for response in responses])
    num_taken = int(np.searchsorted(num_rows, max_rows, side="right"))
    if num_taken == 0:
        raise ValueError(f"max_cache_gb is {max_gb}: not even the first response fits; allow more")
    if num_taken < len(responses):
        tqdm.write(
            f"the cache is bounded at {max_gb} GB (data.max_cache_gb), so that it takes {num_taken} of "
            f"{len(responses)} responses",
            file=sys.stderr,
        )
    return num_taken


def check_sequences(folder: Path, responses: Sequence[Response]) -> int:
    """How many sequences the cache has; raises ValueError unless `responses` are these, fewer or more."""
    cached = list(read_responses(folder / "sequences.jsonl"))
    num_common = min(len(cached), len(responses))
    if cached[:num_common] != list(responses[:num_common]):
        raise ValueError(f"the cache {folder} was made of other responses; remove it or use another output folder")
    return len(cached)


def _to_bits(values: Tensor) -> np.ndarray:  # [T, D] or [T], the same out
    values = values.contiguous().cpu()
    return (values.view(torch.int16) if values.dtype.itemsize == 2 else values).numpy()


def check_disk(
    folder: Path,
    num_rows: int,  # that the cache is to have
    done: Mapping[str, int],  # by column: rows that it has
    backbone: Backbone,
) -> None:
    """Raise ValueError where the columns, as far as they are missing, do not fit on the disk."""
    num_bytes = 0
    for name, num_done in done.items():
        numpy_type, width = column_type(name, backbone.dtype, backbone.hidden_size)
        num_bytes += max(0, num_rows - num_done) * np.dtype(numpy_type).itemsize * max(1, width)
    free = free_disk(folder)
    if num_bytes > free:
        raise ValueError(
            f"the cache {folder} needs {num_bytes / 1e9:.2f} GB of disk for {num_rows} tokens, and {free / 1e9:.2f} GB "
            "are free; make room, lower data.max_cache_gb or data.num_tokens, or choose another --output"
        )


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` is, or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _write_rows(path: Path, start: int, values: np.ndarray) -> None:
    """Write rows at their place and bring them to the disk before the index counts them."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(start * values[:1].nbytes)
        file.write(np.ascontiguousarray(values).data.cast("B"))
        file.flush()
        os.fsync(file.fileno())


def open_index(folder: Path, backbone: Backbone, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The cache's index, or a new one, not yet written; raises ValueError for a cache of another base."""
    made_with = {
        "format": FORMAT,
        "fingerprint": dict(fingerprint),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "hidden_size": backbone.hidden_size,
    }
    if not (folder / "index.json").exists():
        return {**made_with, "num_rows": {}}
    index = read_index(folder)
    for name, value in made_with.items():
        if index[name] != value:
            raise ValueError(
                f"the cache {folder} was made with {name} {index[name]}, now it is {value}; "
                "remove it or use another output folder"
            )
    return index


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    write_atomically(folder / "index.json", json.dumps(index))
