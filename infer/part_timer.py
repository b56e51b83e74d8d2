"""How long layers and heads take by themselves.

B sequences of R rows each; D hidden size.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from ..heads import EarlyExitModel
from .attention import PagedAttention, Span
from .contexts import spread_contexts
from .kv_cache import KVCache

BLOCK_SIZE = 16


class Part(NamedTuple):
    """A part of a round, on `batch_size` sequences of `num_rows` rows each."""

    name: str | int
    """`layers` (all of them), `target` (norm and LM head), or the exit layer of a head."""
    batch_size: int
    num_rows: int


class PartTimer:
    """Runs the parts of a round on rows that say nothing: time does not depend on their values."""

    def __init__(
        self,
        model: EarlyExitModel,
        max_batch: int,
        max_rows: int,
        context: int,  # tokens before the timed ones, on average: see `spread_contexts`
    ) -> None:
        self._model, self._backbone, self._context = model, model.backbone, context
        backbone = model.backbone
        blocks = -(-(max(spread_contexts(context, max_batch)) + max_rows) // BLOCK_SIZE)
        self._tables = [list(range(b * blocks, (b + 1) * blocks)) for b in range(max_batch)]
        self._cache = KVCache(
            backbone.num_layers + len(model.heads),
            max_batch * blocks,
            BLOCK_SIZE,
            backbone.num_kv_heads,
            backbone.head_dim,
            backbone.dtype,
            backbone.device,
        )
        for pool in (*self._cache.keys, *self._cache.values):
            pool.zero_()
        generator = torch.Generator().manual_seed(0)
        shape = (1, max_batch * max_rows, backbone.hidden_size)
        self._states = torch.randn(shape, generator=generator).to(backbone.device, backbone.dtype)

    @torch.inference_mode()
    def seconds(self, part: Part) -> dict[str, float]:
        """Run it once; its time under `seconds`.

        A head has run just before, as in a draft, where one token follows another and caches hold its weights still.
        """
        run = self._prepare(part)
        if isinstance(part.name, int):
            run()
        start = time.perf_counter()
        run()
        if self._backbone.device.type == "cuda":
            torch.cuda.synchronize(self._backbone.device)
        return {"seconds": time.perf_counter() - start}

    def _prepare(self, part: Part) -> Callable[[], object]:
        backbone, model = self._backbone, self._model
        name, batch, rows = part
        contexts = spread_contexts(self._context, batch)
        tables = zip(self._tables[:batch], contexts, strict=True)
        spans = [Span(table, context, context + rows) for table, context in tables]
        places = torch.arange(rows) + torch.tensor(contexts).unsqueeze(-1)
        positions = places.flatten().to(backbone.device)
        states = self._states[:, : batch * rows]
        if name == "target":
            return lambda: backbone.logits(backbone.final_norm(states)[0]).argmax(-1)

        def run() -> object:
            # Made anew for every pass, as in a round.
            attend = PagedAttention(self._cache, spans, backbone.device)
            if name == "layers":
                return backbone.run_layers(states, 0, backbone.num_layers, positions, attend)
            index = model.exit_layers.index(int(name))
            state = model.exit_heads[index](states, states, positions, attend)
            return model.exit_logits(index, state[0]).argmax(-1)

        return run


def part_names(exit_layers: Items[int]) -> list[str | int]:
    """All parts that a model with these exits has."""
    return ["layers", "target", *exit_layers]
