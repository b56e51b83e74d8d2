"""Files and folders that are either wholly written or not written at all."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

SECONDS_TO_WRITE = 24 * 60 * 60
"""No process writes one folder for longer: what is older was left by one that was killed."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file at once: whenever this is interrupted or killed, `path` holds its old content or the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(
    target: Path,
    *,
    keep_existing: bool = False,  # where another process was faster, its folder stays and ours is dropped
) -> Iterator[Path]:
    """Yield an empty folder beside `target` to write files into; on success it takes the place of `target`.

    After an error or an interruption `target` is wholly the old folder or wholly the new one, and nothing lies
    beside it. A process that is killed may leave files beside it, and in the moment between two renames the
    old folder itself: the next call for `target` puts it back. What the disk refuses is a ValueError.
    """
    # Through a link the folder that it points to is replaced, not the link.
    target = target.resolve()
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        _mend(target)
        partial.mkdir(parents=True)
        yield partial
        _settle(partial)
        _move_into_place(partial, target, keep_existing)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(
            f"cannot write {target} ({reason}), nothing there has changed; make room or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _mend(target: Path) -> None:
    """Put back what a killed process had moved aside, and remove what it had begun."""
    # Another process may be at work here, and be done with what was seen a moment ago.
    with suppress(FileNotFoundError):
        for old in _beside(target, "old"):
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for partial in _beside(target, "partial"):
            if time.time() - partial.stat().st_mtime > SECONDS_TO_WRITE:
                shutil.rmtree(partial, ignore_errors=True)


def _beside(target: Path, suffix: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{suffix}")
    return [path for path in target.parent.glob(f".*.{suffix}") if pattern.fullmatch(path.name)]


def _settle(folder: Path) -> None:
    """Bring the files to the disk, readable for whoever may read the folder."""
    # safetensors writes files that only their owner can read, whatever the umask says.
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        if path.is_dir():
            _settle(path)
            continue
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _move_into_place(partial: Path, target: Path, keep_existing: bool) -> None:
    if keep_existing and target.is_dir():
        return
    if target.is_dir() and any(target.iterdir()):
        # A folder cannot be renamed onto one with files: the old one steps aside, whole, and is dropped last.
        old = partial.with_suffix(".old")
        try:
            target.rename(old)
            partial.rename(target)
        finally:
            # Whatever came between, Ctrl-C included, one of the two stands there.
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(old, ignore_errors=True)
    else:
        try:
            partial.rename(target)
        except OSError:
            if not (keep_existing and target.is_dir()):
                raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    # Where folders cannot be opened (Windows), there is nothing to sync.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
