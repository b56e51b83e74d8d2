"""The state cache: what the frozen base computed over its own responses, memory-mapped for training.

Rows are tokens, sequence after sequence, each a prompt and what was answered. T rows; R loss rows; D hidden size.
"""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..heads import Backbone
from .responses import Response, read_responses

FORMAT = 1
FINAL, LOG_NORMALISER, TOP_TOKEN = "final", "log_normaliser", "top_token"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of whole sequences side by side."""

    lengths: list[int]
    """Rows of each sequence."""
    spans: list[list[tuple[int, int]]]
    """The answers of each sequence: `Response.spans`."""
    kinds: list[str]
    """`Response.kind` of each sequence."""
    positions: Tensor
    """`[T]` int64, within each sequence."""
    hidden: dict[int, Tensor]
    """By exit layer: `[1, T, D]` in the base's dtype."""
    final: Tensor
    """`[T, D]`: the base's final state, after its final norm."""
    log_normaliser: Tensor
    """`[T]` float32: logsumexp of the base's logits, on loss rows."""
    top_token: Tensor
    """`[T]` int64: the base's most likely next token, on loss rows."""
    loss_rows: Tensor
    """`[R]` int64: see `pack_loss_rows`."""

    @property
    def num_loss_rows(self) -> list[int]:
        """Loss rows of each sequence; they add up to R."""
        return [sum(max(0, stop - start - 1) for start, stop in answers) for answers in self.spans]


class StateSource(Protocol):
    """Where the states of the base come from: a `StateCache`, or `OnlineStates`."""

    sequences: list[Response]

    def read(self, indices: Sequence[int], exit_layers: Sequence[int], backbone: Backbone) -> Batch:
        """The sequences at `indices`, with the hidden states of `exit_layers`."""


class StateCache:
    """The cached columns of a folder that `extend_cache` made, with the sequences that all of them have."""

    def __init__(
        self,
        folder: Path,
        exit_layers: Sequence[int] | None = None,  # None takes all that are there
        max_sequences: int | None = None,
    ) -> None:
        index = read_index(folder)
        self.folder = folder
        self.dtype: torch.dtype = getattr(torch, index["dtype"])
        self.exit_layers = tuple(sorted(cached_layers(index["num_rows"])))
        names = wanted_columns(self.exit_layers if exit_layers is None else exit_layers)
        for name in names:
            self._check_has(name, index["num_rows"])
        self.exit_layers = tuple(sorted(cached_layers(names)))
        # An interruption may have left one column behind, and an extension one that is not wanted now.
        num_rows = min(index["num_rows"][name] for name in names)
        self._columns = {name: _map_column(folder, name, num_rows, self.dtype, index["hidden_size"]) for name in names}
        self.sequences: list[Response] = []
        self._starts: list[int] = []
        start = 0
        for sequence in islice(read_responses(folder / "sequences.jsonl"), max_sequences):
            if start + sequence.length > num_rows:
                break
            self.sequences.append(sequence)
            self._starts.append(start)
            start += sequence.length

    def read(self, indices: Sequence[int], exit_layers: Sequence[int], backbone: Backbone) -> Batch:
        """The sequences at `indices`, with the hidden states of `exit_layers`; layer 0 is embedded anew."""
        sequences = [self.sequences[index] for index in indices]
        rows = [
            slice(self._starts[index], self._starts[index] + sequence.length)
            for index, sequence in zip(indices, sequences, strict=True)
        ]
        columns = {name: self._gather(name, rows).to(backbone.device) for name in wanted_columns(exit_layers)}
        return make_batch(sequences, columns, exit_layers, backbone)

    def _gather(self, name: str, rows: Sequence[slice]) -> Tensor:
        self._check_has(name, self._columns)
        column = self._columns[name]
        values = torch.from_numpy(np.concatenate([column[part] for part in rows]))
        return values if column.ndim == 1 else values.view(self.dtype)

    def _check_has(self, name: str, columns: Container[str]) -> None:
        if name not in columns:
            have = ", ".join(map(str, self.exit_layers))
            raise ValueError(f"the cache {self.folder} has exit layers {have}, but no {name}; extend it first")


def make_batch(
    sequences: Sequence[Response],
    columns: Mapping[str, Tensor],  # those of `wanted_columns`, on the backbone's device
    exit_layers: Sequence[int],
    backbone: Backbone,
) -> Batch:
    """Sequences with the base's states; layer 0 is embedded anew."""
    lengths = [sequence.length for sequence in sequences]
    spans = [sequence.spans for sequence in sequences]
    positions = pack_positions(lengths).to(backbone.device)
    hidden = {}
    for exit_layer in exit_layers:
        if exit_layer == 0:
            with torch.no_grad():
                hidden[0] = backbone.embed(pack_token_ids(sequences).to(backbone.device), positions)
        else:
            hidden[exit_layer] = columns[layer_column(exit_layer)].unsqueeze(0)
    return Batch(
        lengths=lengths,
        spans=spans,
        kinds=[sequence.kind for sequence in sequences],
        positions=positions,
        hidden=hidden,
        final=columns[FINAL],
        log_normaliser=columns[LOG_NORMALISER],
        top_token=columns[TOP_TOKEN].long(),
        loss_rows=pack_loss_rows(lengths, spans).to(backbone.device),
    )


def bytes_per_token(backbone: Backbone, exit_layers: Sequence[int]) -> int:
    """Disk that one row takes."""
    num_states = 1 + sum(layer > 0 for layer in exit_layers)
    return num_states * backbone.hidden_size * backbone.dtype.itemsize + 8


def layer_column(exit_layer: int) -> str:
    """Name of the column of an exit layer's hidden states."""
    return f"layer_{exit_layer}"


def wanted_columns(exit_layers: Sequence[int]) -> list[str]:
    """The columns that heads at `exit_layers` train on; layer 0 has none."""
    return [FINAL, LOG_NORMALISER, TOP_TOKEN, *(layer_column(layer) for layer in exit_layers if layer > 0)]


def cached_layers(columns: Mapping[str, Any] | Sequence[str]) -> list[int]:
    """The exit layers among the names of columns."""
    return [int(name.removeprefix("layer_")) for name in columns if name.startswith("layer_")]


def column_type(name: str, dtype: torch.dtype, hidden_size: int) -> tuple[type, int]:
    """The numpy type of a column, and its width (0 for one value a row); 16-bit states are raw bits."""
    if name == LOG_NORMALISER:
        return np.float32, 0
    if name == TOP_TOKEN:
        return np.int32, 0
    return (np.float32 if dtype == torch.float32 else np.int16), hidden_size


def read_index(folder: Path) -> dict[str, Any]:
    """How far each column is, and what the cache was made with; ValueError where there is no cache."""
    path = folder / "index.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no state cache; run hispec-train to make one")
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        index = None
    if not isinstance(index, dict) or not {"format", "fingerprint", "dtype", "hidden_size", "num_rows"} <= index.keys():
        raise ValueError(f"{path} is damaged; remove the folder {folder}, then run again: the cache is made anew")
    if index["format"] != FORMAT:
        raise ValueError(f"the cache {folder} has format {index['format']}, this version reads {FORMAT}; remove it")
    return index


def pack_token_ids(sequences: Sequence[Response]) -> Tensor:  # [T] int64
    """The tokens of whole sequences side by side."""
    return torch.tensor([i for sequence in sequences for i in (*sequence.prompt_token_ids, *sequence.token_ids)])


def pack_positions(lengths: Sequence[int]) -> Tensor:  # [T] int64
    """Positions of whole sequences side by side."""
    return torch.cat([torch.arange(length) for length in lengths])


def pack_loss_rows(
    lengths: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],  # the answers of each sequence, in its rows
) -> Tensor:  # [R] int64
    """Rows that hold a token of an answer and are followed by one.

    The row before the first token of an answer is none of them: prefill gives that token, no draft does.
    """
    parts, before = [torch.empty(0, dtype=torch.int64)], 0
    for length, answers in zip(lengths, spans, strict=True):
        parts += [torch.arange(before + start, before + max(start, stop - 1)) for start, stop in answers]
        before += length
    return torch.cat(parts)


def num_loss_rows(sequence: Response) -> int:
    """How many rows of a sequence `pack_loss_rows` takes."""
    return sum(max(0, stop - start - 1) for start, stop in sequence.spans)


def _map_column(folder: Path, name: str, num_rows: int, dtype: torch.dtype, hidden_size: int) -> np.ndarray:
    numpy_type, width = column_type(name, dtype, hidden_size)
    shape = (num_rows, width) if width else (num_rows,)
    # An empty file cannot be mapped.
    if num_rows == 0:
        return np.empty(shape, numpy_type)
    return np.memmap(folder / f"{name}.bin", numpy_type, "r", shape=shape)
