"""The training curve: one JSON line per held-out evaluation, in `metrics.jsonl`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints import write_atomically


class Curve:
    """Appends to `path`; goes on at `step`: what stands after it is dropped, for it is made again."""

    def __init__(
        self,
        path: Path,
        step: int,
        losses: Mapping[str, list[float]] | None = None,  # of a curve that was interrupted at `step`
        *,
        writes: bool = True,  # False keeps the curve in memory alone: another rank writes it
    ) -> None:
        self.path = path
        self._writes = writes
        self.records = [record for record in read_curve(path) if record["step"] <= step]
        """What stands there."""
        if writes:
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self.losses = {} if losses is None or self.last_step == step else dict(losses)
        """Losses since the last record, by exit."""

    @property
    def last_step(self) -> int:
        """Step of the last record; -1 where there is none."""
        return int(self.records[-1]["step"]) if self.records else -1

    def add(self, losses: Mapping[str, float]) -> None:
        """Note the losses of one step, by exit; `write` averages them."""
        for name, value in losses.items():
            self.losses[name] = [*self.losses.get(name, []), value]

    def write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append `record` with the mean losses since the last one; returns what was written."""
        losses = {name: round(sum(values) / len(values), 5) for name, values in self.losses.items()}
        self.losses = {}
        record = {**record, "loss": losses}
        if self._writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self.records.append(record)
        return record


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The records so far, without a line torn by an interruption; ValueError names a bad line."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{path} line {number} is damaged; delete the line, then run again")
        records.append(record)
    return records
