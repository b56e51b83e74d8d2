"""Ranks: the processes of one run, under torchrun, accelerate or deepspeed, or just this one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

NOTE = "every rank has this error"

PATIENCE = timedelta(days=1)
"""Ranks wait so long for one another, for one may evaluate for hours; when one dies, the launcher ends the others."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that share the work; the main one, rank 0, writes and tells.

    What has "all ranks" in its contract must be called by all of them, in the same order.
    """

    rank: int = 0
    """Place of this process, from 0."""
    size: int = 1
    """Number of processes."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all have made."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def from_main(self, text: str) -> str:
        """What the main rank gave; all ranks."""
        return self._gather(text)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait at the end for all ranks; a ValueError or OSError of one is raised in every one, with a `NOTE`."""
        if self.size == 1:
            yield
            return
        error: ValueError | OSError | None = None
        try:
            yield
        except (ValueError, OSError) as caught:
            error = caught
        for rank, text in enumerate(self._gather(self._pack(error))):
            if text:
                raise _unpack(text, rank) from error

    def _pack(self, error: ValueError | OSError | None) -> str:
        if error is None:
            return ""
        is_known = NOTE in getattr(error, "__notes__", ())
        if isinstance(error, OSError):
            name = None if error.filename is None else str(error.filename)
            return json.dumps([is_known, error.errno, error.strerror or str(error), name])
        return json.dumps([is_known, str(error)])

    def _gather(self, text: str) -> list[str]:
        """The texts of all ranks."""
        if self.size == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = int(max(lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in texts]


def _unpack(text: str, rank: int) -> ValueError | OSError:
    is_known, *parts = json.loads(text)
    where = "" if is_known or rank == 0 else f"rank {rank}: "
    error: ValueError | OSError
    if len(parts) == 1:
        error = ValueError(where + parts[0])
    else:
        error = OSError(parts[0], where + parts[1], *([parts[2]] if parts[2] else []))
    error.add_note(NOTE)
    return error


def is_told(error: BaseException) -> bool:
    """Whether the main rank has this error too and tells it."""
    return NOTE in getattr(error, "__notes__", ())


@contextmanager
def join_ranks(local_rank: int | None = None) -> Iterator[Ranks]:
    """The ranks that a launcher started, as it says in the environment; this process alone where none did.

    `local_rank` is the flag that some launchers pass in place of the variable LOCAL_RANK. Each rank takes the GPU
    of its local rank; ValueError where the machine has fewer.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks()
        return
    ranks = Ranks(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", local_rank or 0))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU of its own: there are {torch.cuda.device_count()} here; "
                "start as many processes a machine as it has GPUs"
            )
        torch.cuda.set_device(local_rank)
        # Texts and errors go between the CPUs.
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def own_device() -> str:
    """Where this rank's base goes: its GPU, which `join_ranks` chose, or the CPU."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
