"""Results on their way out: whole lines, in the order of the prompts."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from .completion import Completion
from .engine import Engine
from .prompt_file import PromptLine
from .recheck import Rechecker


class WholeLines:
    """Writes whole lines, each at once: a full disk costs the line that did not fit, and leaves no part of it."""

    def __init__(self, file: IO[str], path: Path | None) -> None:
        self._file = file
        self._path = path

    def write(self, text: str) -> None:
        """Write `text` and a line's end; OSError names the output and the remedy."""
        start = 0 if self._path is None else self._path.stat().st_size
        try:
            self._file.write(text + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._path is not None:
                os.truncate(self._path, start)
            place = self._path or "standard output"
            raise OSError(f"{place} cannot be written: {error.strerror}; make room, then run again") from None


def write_results(
    engine: Engine,
    lines: Sequence[PromptLine],
    output: WholeLines,
    *,
    as_json: bool,
    recheck: Rechecker | None = None,
) -> None:
    """Write a prompt's texts as soon as they and all before them are finished; after Ctrl-C, all that are finished."""
    places = {engine.add_request(line.token_ids, line.params): place for place, line in enumerate(lines)}
    finished: dict[int, list[Completion]] = {place: [] for place in range(len(lines))}
    num_written = 0

    def write(place: int) -> None:
        line = lines[place]
        for completion in sorted(finished.pop(place), key=lambda completion: completion.index):
            record = to_record(line, completion)
            if recheck is not None:
                text = recheck(line.token_ids, completion.token_ids, line.params, index=completion.index)
                record["recheck"] = text.to_dict()
            output.write(json.dumps(record) if as_json else f"--- {line.id}\n{completion.text}")
            if completion.error is not None:
                tqdm.write(f"{line.id}: {completion.error}", file=sys.stderr)

    with tqdm(total=sum(line.params.n for line in lines), unit="text", file=sys.stderr) as bar:
        try:
            while engine.has_unfinished:
                for completion in engine.step():
                    finished[places[completion.request_id]].append(completion)
                    bar.update()
                while num_written in finished and len(finished[num_written]) == lines[num_written].params.n:
                    write(num_written)
                    num_written += 1
        except KeyboardInterrupt:
            for place in sorted(finished):
                write(place)
            raise


def to_record(line: PromptLine, completion: Completion) -> dict[str, Any]:
    """A completion as JSON-ready values; what was not asked for, or did not happen, is left out."""
    record: dict[str, Any] = {} if completion.error is None else {"error": completion.error}
    record |= {"id": line.id}
    if line.params.n > 1:
        record["index"] = completion.index
    record |= {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [each._asdict() for each in completion.logprobs]
    return record | {"stats": completion.stats.to_dict()}


def check_output(path: Path | None, source: Path | None) -> None:
    """Raise ValueError, before a model is loaded, where the output cannot be written or is the input."""
    if path is None:
        return
    if source is not None and path.resolve() == source.resolve():
        raise ValueError(f"the output {path} is the input; choose another --output")
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"the output {path} cannot be written; choose another --output")


def open_output(path: Path | None) -> IO[str]:
    """The output file, or standard output; ValueError if it cannot be written."""
    if path is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the output {path} cannot be written: {error.strerror}; choose another --output") from None
