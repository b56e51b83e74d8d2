"""Where hispec keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$HISPEC_CACHE`, else `hispec` in the user's cache folder; RuntimeError where the user has no home."""
    if folder := os.environ.get("HISPEC_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "hispec"
