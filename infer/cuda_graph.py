"""Passes replayed as CUDA graphs: the host launches one graph where it would launch every kernel of every layer.

A graph repeats its kernels on the very memory that they were recorded with. So a pass is a function of one tensor of
numbers, of a shape that never changes; everything else that it reads or writes, weights, cache and windows, stays in
its place.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_ROWS = 256
"""Passes of more rows have work enough for a GPU while the host launches the next kernels."""

Run = Callable[[Tensor], Tensor | None]
"""Runs a pass over its numbers. To run it again is to write the same again."""


class _Recorded(NamedTuple):
    numbers: Tensor  # read by the graph
    replay: Callable[[], None]
    output: Tensor | None  # overwritten by each replay


class CudaGraphs:
    """The graphs of one engine, recorded as their shapes are met, in one pool of memory."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded | None] = {}
        self._pool: Any = None

    def can_record(self, key: Hashable, numbers: Tensor, run: Run) -> bool:
        """Try it; a pass that waits for the device, as some layers with experts do, is no graph."""
        return self._record(key, numbers, run) is not None

    def __call__(self, key: Hashable, numbers: Tensor, run: Run) -> Tensor | None:
        """`run(numbers)`, by the graph of `key`, which must tell all shapes; the next call overwrites the result."""
        recorded = self._recorded[key] if key in self._recorded else self._record(key, numbers, run)
        if recorded is None:
            return run(numbers)
        recorded.numbers.copy_(numbers)
        recorded.replay()
        return recorded.output

    def _record(self, key: Hashable, numbers: Tensor, run: Run) -> _Recorded | None:
        static = numbers.clone()
        try:
            if self._pool is None:
                self._pool = new_pool()
            self._recorded[key] = _Recorded(static, *record(lambda: run(static), self._pool))
        except (NotImplementedError, RuntimeError) as error:
            logger.warning("%s cannot be a CUDA graph and runs without: %s", key, error)
            self._recorded[key] = None
            self._pool = None  # what is left of a failed recording must not be recorded into
        return self._recorded[key]


def new_pool() -> Any:
    """Memory that graphs share which never run at the same time."""
    return torch.cuda.graph_pool_handle()


def record(run: Callable[[], Tensor | None], pool: Any) -> tuple[Callable[[], None], Tensor | None]:
    """Record what `run` does; returns what does it again and where the result will then lie."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are loaded and chosen outside of the recording
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = run()
    return graph.replay, output
