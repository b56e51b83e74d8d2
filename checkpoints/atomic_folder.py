"""A folder that is either wholly written or not written at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def atomic_folder(
    target: Path,
    *,
    keep_existing: bool = False,  # where another process was faster, its folder stays and ours is dropped
) -> Iterator[Path]:
    """Yield an empty folder beside `target` to write files into; on success it takes the place of `target`.

    On any error `target` is what it was and the new files are gone. What the disk refuses is a ValueError.
    """
    # Through a link the folder that it points to is replaced, not the link.
    target = target.resolve()
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
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


def _settle(folder: Path) -> None:
    """Bring the files to the disk, readable for whoever may read the folder."""
    # safetensors writes files that only their owner can read, whatever the umask says.
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
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
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
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
