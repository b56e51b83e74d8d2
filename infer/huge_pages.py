"""Huge pages for all that a process allocates: the C library gives them only to one that asks at its start.

In small ones speed depends on which memory a process happens to get: the same calls of two processes differ by up to
a tenth, plain `generate` by more than the engine, and ratios with them.
"""

import os
import sys
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_in_huge_pages() -> None:
    """Start this command anew with memory in huge pages; returns where it has them, or the system has none to ask for.

    For a command's beginning: what is running is replaced.
    """
    if can_ask() and _setting() is None:
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), f"{TUNABLE}=1"]))
        os.execv(sys.executable, sys.orig_argv)


def has_asked() -> bool:
    """Whether this process asked for huge pages when it was started."""
    return _setting() not in (None, "0")


def can_ask() -> bool:
    """Whether this is Linux with the GNU C library, and huge pages are for those that ask."""
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}) or not sys.orig_argv:
        return False
    return POLICY.is_file() and "[madvise]" in POLICY.read_text(encoding="ascii")


def _setting() -> str | None:
    """What the user or an earlier start has decided; "0" is none, None is nothing decided."""
    pairs = (tunable.partition("=") for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    return {name: value for name, _, value in pairs}.get(TUNABLE)
