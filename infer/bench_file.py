"""The measurements of a benchmark on disk, a line a call, so that an interrupted one goes on.

The first line says what is measured, the last one that all of it was.
"""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from ..checkpoints import write_atomically
from .benchmark import Record, Round
from .result_file import WholeLines

FILE_NAME = "measurements.jsonl"


class BenchFile:
    """The file of one benchmark in `folder`; use as a context."""

    def __init__(self, folder: Path, start: Mapping[str, Any], num_methods: int) -> None:
        """Take over what an unfinished run of the same benchmark has measured; a finished one is measured anew.

        `start` is JSON-ready and says all that makes two runs the same benchmark. Raises ValueError where the folder
        holds another one, or cannot be written.
        """
        self._path = folder / FILE_NAME
        self.records: list[Record] = []
        """What is measured so far, whole rounds only."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._take_over(start, num_methods)
            lines = [{"start": start}, *self.records]
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines))
            self._file: IO[str] = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"the output {folder} cannot be written: {error.strerror}; choose another --output"
            ) from None
        self._lines = WholeLines(self._file, self._path)

    def __enter__(self) -> "BenchFile":
        return self

    def __exit__(self, *arguments: object) -> None:
        self._file.close()

    @property
    def measured(self) -> set[tuple[Any, ...]]:
        """Keys of the rounds in `records`."""
        return {round_key(record) for record in self.records}

    def append(self, records: list[Record]) -> None:
        """Keep one round's records, all at once; OSError on a full disk, which costs this round alone."""
        self._lines.write("\n".join(json.dumps(record) for record in records))
        self.records += records

    def finish(self) -> None:
        """Note that nothing is left to measure."""
        self._lines.write(json.dumps({"end": True}))

    def _take_over(self, start: Mapping[str, Any], num_methods: int) -> None:
        lines = []
        for line in self._path.read_text(encoding="utf-8").split("\n"):
            try:
                lines.append(json.loads(line))
            except ValueError:
                # The end, or the line at which a machine went down.
                break
        known = lines[0].get("start") if lines and isinstance(lines[0], dict) else None
        if known is None:
            raise ValueError(f"{self._path} is not a benchmark's file; choose another --output")
        if difference := explain_difference(known, json.loads(json.dumps(start))):
            raise ValueError(
                f"the output {self._path.parent} holds another benchmark ({difference}); choose another --output, or "
                "remove it"
            )
        if lines[-1] == {"end": True}:
            return
        for _, records in groupby(lines[1:], key=round_key):
            whole = list(records)
            if len(whole) == num_methods:
                self.records += whole


def round_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The `Round.key` that a record belongs to."""
    return Round(record["repeat"], record["batch_size"], record["temperature"], record["set"], record["group"]).key


def explain_difference(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """In what two benchmarks differ first, in words; None where they are the same."""
    for name in dict.fromkeys([*wanted, *known]):
        old, new = known.get(name), wanted.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := explain_difference(old, new):
                return f"{name}: {inner}"
        elif old != new:
            return f"{name} was {old}, now {new}"
    return None
