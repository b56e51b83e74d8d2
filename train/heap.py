"""The heap: what the C library keeps of memory that was freed."""

import ctypes
import sys


def give_back() -> None:
    """Return freed memory to the system; some milliseconds, and nothing where the C library is not glibc.

    Batches of ever other lengths leave holes that no tensor fits into any more: without this a run on a CPU was seen
    to take twice the memory that it uses.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
