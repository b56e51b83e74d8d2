"""The library of our own kernels, compiled for this machine and kept."""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from tqdm import tqdm

from .cache_folder import cache_folder

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")


def find_library() -> Path | None:
    """The library as it is kept, or made anew; None where it has to be made and there is no compiler.

    Raises OSError where somebody else could have written it, and what the compiler's failing raises.
    """
    folder, digest = _folder(), _digest()
    # Its name tells its content, so that one that is not whole is told.
    for library in folder.glob(f"{digest}-*.so"):
        status = library.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{library} could be written to by others")
        if library.stem.endswith(_short(library.read_bytes())):
            return library
        library.unlink()
    return None if shutil.which("g++") is None else _compiled(folder, digest)


def _folder() -> Path:
    """Where it is kept; OSError where somebody else could write to it: what they wrote is not run."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder = folder.resolve()
    for path in (folder, *folder.parents):
        status = path.stat()
        # A group of the user's own, as many systems have it, is nobody else.
        others = 0o022 if path == folder or status.st_gid != os.getgid() else 0o002
        is_open = status.st_mode & others and not status.st_mode & stat.S_ISVTX
        if is_open or status.st_uid not in (os.getuid(), 0):
            raise OSError(f"{path} could be written to by others")
    return folder


def _digest() -> str:
    """Of all that decides what is compiled, but for the compiler."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    sources = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".hpp")]
    parts = (*sources, " ".join(FLAGS).encode(), flags.encode(), platform.machine().encode())
    return _short(b"\0".join(parts))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compiled(folder: Path, digest: str) -> Path:
    with (
        tqdm(total=1, desc="compiling kernels, once", leave=False) as bar,
        tempfile.TemporaryDirectory(dir=folder) as scratch,
    ):
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        source = SOURCES / "kernels.cpp"
        run = {"check": True, "capture_output": True, "timeout": 300}
        subprocess.run(["g++", *FLAGS, "-c", str(source), "-o", str(compiled)], **run)  # type: ignore[call-overload]
        # Without OpenMP's library: torch has loaded its own, and a second one would have threads of its own.
        subprocess.run(["g++", "-shared", str(compiled), "-o", str(linked)], **run)  # type: ignore[call-overload]
        linked.chmod(0o755)
        library = folder / f"{digest}-{_short(linked.read_bytes())}.so"
        linked.replace(library)
        bar.update()
    return library
