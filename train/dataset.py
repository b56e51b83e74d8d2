"""Data sets: rows of local files or of the hub, one by one, so that a huge set is never in memory."""

import glob
import gzip
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from huggingface_hub import snapshot_download

from ..checkpoints.hub import explain

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Where a row stands, for messages, and the row."""

EXTENSIONS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt")
ZIPPED = (".jsonl.gz", ".ndjson.gz", ".json.gz", ".txt.gz")
HUB_ID = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^:]+))?(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?"
HOW = (
    f"give a file ({', '.join(EXTENSIONS)}), a folder of them, or a hub data set "
    "(user/name, user/name:config or user/name:config:split)"
)
MAX_PARAGRAPH = 100_000
"""Characters after which a paragraph without an end is cut, so that memory is bounded."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that was found, and not yet read."""

    name: str
    """What it is called, and for files what tells whether they have changed."""
    rows: Callable[[], Rows]
    """Reads it from its first row on; raises ValueError where that fails."""


def find_source(data: str, fallback: Path | None = None) -> Source:
    """The data set that a path, a pattern of paths or a hub id stands for; ValueError where there is none.

    `fallback` is the path that a name means where no such path is here. A hub id is not looked up yet.
    """
    path = Path(data).expanduser()
    if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return Source(name=f"{data} ({_digest(sorted(path.rglob('state.json')))})", rows=partial(_read_saved, path))
    # Path.glob takes no pattern from the root.
    paths = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path)))]  # noqa: PTH207
    if path.is_dir():
        paths = sorted(found for found in path.iterdir() if _extension(found))
    if not paths and fallback is not None:
        paths = [fallback]
    if not paths:
        hub = re.fullmatch(HUB_ID, data)
        if path.is_dir() or hub is None or _extension(Path(data)):
            what = "holds no data files" if path.is_dir() else "does not exist"
            raise ValueError(f"the data {data!r} {what}; {HOW}")
        return Source(name=data, rows=partial(_read_hub, **hub.groupdict()))
    for found in paths:
        if not _extension(found):
            raise ValueError(f"the data file {found} has a name that tells no known format; {HOW}")
    return Source(name=f"{data} ({_digest(paths)})", rows=lambda: chain.from_iterable(map(_read_file, paths)))


def mix(rows: Iterable[Any], seed: int, size: int = 5000) -> Iterator[Any]:
    """The rows in an order drawn at random among `size` neighbours, the same for the same seed."""
    rng = random.Random(seed)
    waiting: list[Any] = []
    for row in rows:
        if len(waiting) < size:
            waiting.append(row)
            continue
        place = rng.randrange(size)
        yield waiting[place]
        waiting[place] = row
    rng.shuffle(waiting)
    yield from waiting


def _extension(path: Path) -> str:
    return next((ext for ext in (*ZIPPED, *EXTENSIONS) if path.name.lower().endswith(ext)), "")


def _digest(paths: list[Path]) -> str:
    """Size and a digest of both ends of every file: tells a changed file without reading gigabytes."""
    digest, num_bytes = hashlib.sha256(), 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{size}/".encode() + file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
        num_bytes += size
    return f"{num_bytes} bytes, {digest.hexdigest()[:8]}"


def _read_file(path: Path) -> Rows:
    extension = _extension(path).removesuffix(".gz")
    if extension in (".parquet", ".arrow", ".csv", ".tsv"):
        yield from _read_table(path, extension)
        return
    try:
        with _open_text(path) as file:
            if extension == ".txt":
                yield from _read_paragraphs(file, path)
            elif extension == ".json" and _starts_list(file):
                yield from _read_list(file, path)
            else:
                yield from _read_lines(file, path)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({error}); mend the file") from None


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_lines(file: Iterable[str], path: Path) -> Rows:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
        yield where, _as_row(row, where)


def _starts_list(file: IO[str]) -> bool:
    start = file.read(1000).lstrip()
    file.seek(0)
    return start.startswith("[")


def _read_list(file: IO[str], path: Path) -> Rows:
    """The items of one JSON list, decoded as the file is read."""
    decoder, text, number = json.JSONDecoder(), file.read(1 << 16).lstrip()[1:], 0
    step = 1 << 16
    while True:
        text = text.lstrip(" \t\r\n,")
        if text.startswith("]"):
            return
        try:
            row, end = decoder.raw_decode(text)
        except json.JSONDecodeError as error:
            # The item may go on behind what has been read; twice as much each time keeps this linear.
            if more := file.read(step):
                text, step = text + more, 2 * step
                continue
            raise ValueError(f"{path} item {number + 1} is not JSON: {error.msg}") from None
        number += 1
        yield f"{path} item {number}", _as_row(row, f"{path} item {number}")
        text, step = text[end:], 1 << 16


def _as_row(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(
            f'{where} is a JSON {type(row).__name__}; every row must be an object such as {{"text": "..."}}'
        )
    return row


def _read_paragraphs(file: Iterable[str], path: Path) -> Rows:
    """Documents are set apart by empty lines."""
    lines: list[str] = []
    num_characters, number = 0, 0
    for line in chain(file, [""]):
        if line.strip():
            lines.append(line)
            num_characters += len(line)
        if lines and (not line.strip() or num_characters >= MAX_PARAGRAPH):
            number += 1
            yield f"{path} paragraph {number}", {"text": "".join(lines).rstrip()}
            lines, num_characters = [], 0


def _read_table(path: Path, extension: str) -> Rows:
    # Takes seconds to import, and most runs need none of it.
    import datasets

    builder = {".tsv": "csv"}.get(extension, extension[1:])
    options = {"sep": "\t"} if extension == ".tsv" else {}
    yield from _rows_of(
        lambda: datasets.load_dataset(builder, data_files=str(path), split="train", streaming=True, **options),
        str(path),
        lambda error: ValueError(f"{path} cannot be read as {builder} ({_line(error)}); mend the file"),
    )


def _read_saved(folder: Path) -> Rows:
    import datasets

    def load() -> Any:
        saved = datasets.load_from_disk(str(folder))
        return _pick_split(saved, None, str(folder)) if isinstance(saved, dict) else saved

    yield from _rows_of(
        load, str(folder), lambda error: ValueError(f"the data set in {folder} cannot be read ({_line(error)})")
    )


def _read_hub(repo: str, revision: str | None, config: str | None, split: str | None) -> Rows:
    """The rows of a hub data set, streamed."""
    try:
        # Fails at once and clearly where the library would try again and again without a network.
        snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=["README.md"])
    except Exception as error:
        raise ValueError(f"the data {explain(error, repo, revision)}") from error
    import datasets

    yield from _rows_of(
        lambda: _pick_split(
            datasets.load_dataset(repo, config or None, revision=revision, streaming=True), split, repo
        ),
        repo,
        lambda error: ValueError(f"the data set {repo!r} cannot be read ({_line(error)}); {HOW}"),
    )


def _pick_split(splits: Any, split: str | None, name: str) -> Any:
    """The split asked for, or `train`, or the only one."""
    known = list(splits)
    wanted = split or ("train" if "train" in known else known[0] if len(known) == 1 else None)
    if wanted not in known:
        asked = f"no split {split!r}" if split else "no split train"
        raise ValueError(f"it has {asked} but {', '.join(known)}: name one of these")
    return splits[wanted]


def _rows_of(load: Callable[[], Any], name: str, explain: Callable[[Exception], ValueError]) -> Rows:
    number = 0
    rows: Iterator[dict[str, Any]] | None = None
    while True:
        try:
            rows = iter(load()) if rows is None else rows
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            # The library and those under it raise of every kind, and whichever it is, these rows cannot be had.
            raise explain(error) from error
        number += 1
        yield f"{name} row {number}", row


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
