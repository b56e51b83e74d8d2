"""What this machine takes for the parts of a round: the `Costs` of a model, measured.

B sequences of R rows each; D hidden size.
"""

import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from tqdm import tqdm

from ..heads import EarlyExitModel
from .attention import PagedAttention, Span
from .config import SamplingParams
from .cost_model import Costs, Table
from .engine import Engine
from .kv_cache import KVCache
from .stats import LevelStats

BATCH_SIZES = (1, 2, 4, 8, 16)
NUM_ROWS = (1, 2, 3, 5, 9)
BLOCK_SIZE = 16
NUM_TIMED_ROUNDS = 8
PROBED_DRAFT = 4
"""Drafted tokens a round where overheads are measured."""


@torch.inference_mode()
def measure_costs(
    model: EarlyExitModel,
    *,
    batch_sizes: Items[int] = BATCH_SIZES,
    num_rows: Items[int] = NUM_ROWS,
    context: int = 192,  # tokens before the timed ones
    num_repeats: int = 5,  # of each part; the median counts
    show_progress: bool = False,
) -> Costs:
    """Time layers, heads and what comes beside them, on rows that say nothing: time does not depend on their values.

    Takes about ten seconds for a model of 135M parameters on two CPU cores.
    """
    parts = _Parts(model, max(batch_sizes), max(num_rows), context)
    layers = parts.backbone.num_layers
    timed: dict[tuple[object, int, int], list[float]] = {}
    cells = [(batch, rows) for batch in batch_sizes for rows in num_rows]
    # Repeats go round over all cells, so that a noisy moment does not fall on one alone.
    total = (num_repeats + 1) * len(cells)
    with tqdm(total=total, desc="measure", disable=not show_progress, file=sys.stderr) as progress:
        for repeat in range(num_repeats + 1):
            for batch, rows in cells:
                for name, run in parts.calls(batch, rows).items():
                    seconds = _seconds(run, parts.backbone.device)
                    if repeat > 0:
                        timed.setdefault((name, batch, rows), []).append(seconds)
                progress.update()
    tables = {
        name: Table(
            batch_sizes=tuple(batch_sizes),
            num_rows=tuple(num_rows),
            seconds=tuple(
                tuple(statistics.median(timed[name, batch, rows]) for rows in num_rows) for batch in batch_sizes
            ),
        )
        for name in {key[0] for key in timed}
    }
    layer = _divide(tables.pop("layers"), layers)
    target_head = tables.pop("target")
    exit_heads = {exit_layer: tables[exit_layer] for exit_layer in model.exit_layers}
    draft, verify = _overheads(model, layer, target_head, exit_heads, batch_sizes, context)
    return Costs(
        num_layers=layers,
        layer=layer,
        target_head=target_head,
        exit_heads=exit_heads,
        draft_overhead=draft,
        verify_overhead=verify,
    )


class _Parts:
    """The parts of a round, ready to be run by themselves."""

    def __init__(self, model: EarlyExitModel, max_batch: int, max_rows: int, context: int) -> None:
        self.model, self.backbone, self._context = model, model.backbone, context
        backbone = model.backbone
        blocks = -(-(context + max_rows) // BLOCK_SIZE)
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

    def calls(self, batch: int, rows: int) -> dict[object, Callable[[], object]]:
        """By name: `layers`, `target`, and the exit layer of each head."""
        backbone = self.backbone
        spans = [Span(table, self._context, self._context + rows) for table in self._tables[:batch]]
        positions = torch.arange(self._context, self._context + rows, device=backbone.device).repeat(batch)
        states = self._states[:, : batch * rows]

        def layers() -> object:
            attend = PagedAttention(self._cache, spans, backbone.device)
            return backbone.run_layers(states, 0, backbone.num_layers, positions, attend)

        def target() -> object:
            return backbone.logits(backbone.final_norm(states)[0]).argmax(-1)

        def exit_head(index: int) -> Callable[[], object]:
            def run() -> object:
                attend = PagedAttention(self._cache, spans, backbone.device)
                state = self.model.exit_heads[index](states, states, positions, attend)
                return self.model.exit_logits(index, state[0]).argmax(-1)

            return run

        heads: dict[object, Callable[[], object]] = {
            exit_layer: exit_head(index) for index, exit_layer in enumerate(self.model.exit_layers)
        }
        calls: dict[object, Callable[[], object]] = {"layers": layers, "target": target}
        return calls | heads


def _overheads(
    model: EarlyExitModel,
    layer: Table,
    target_head: Table,
    exit_heads: dict[int, Table],
    batch_sizes: Items[int],
    context: int,
) -> tuple[Table, Table]:
    """What the rounds of an engine take beyond their layers and heads, by drafted token and by verification."""
    num_layers, first = model.backbone.num_layers, min(model.exit_layers, default=0)
    plain, drafting, verifying = [], [], []
    for batch in batch_sizes:
        seconds, _ = _time_rounds(model, "autoregressive", batch, context)
        plain.append(max(0.0, seconds - num_layers * layer.at(batch, 1) - target_head.at(batch, 1)))
        if not exit_heads:
            continue
        seconds, in_draft = _time_rounds(model, "single-layer", batch, context)
        layers = (PROBED_DRAFT + 1) * first * layer.at(batch, 1)
        drafting.append(max(0.0, (in_draft - layers) / PROBED_DRAFT - exit_heads[first].at(batch, 1)))
        rows = PROBED_DRAFT + 1
        parts = (num_layers - first) * layer.at(batch, rows) + target_head.at(batch, rows)
        verifying.append(max(0.0, seconds - in_draft - parts))
    sizes = tuple(batch_sizes)
    draft = Table(batch_sizes=sizes, num_rows=(1,), seconds=tuple((each,) for each in drafting or plain))
    if not exit_heads:
        return draft, Table(batch_sizes=sizes, num_rows=(1,), seconds=tuple((each,) for each in plain))
    both = tuple(zip(plain, verifying, strict=True))
    return draft, Table(batch_sizes=sizes, num_rows=(1, PROBED_DRAFT + 1), seconds=both)


def _time_rounds(model: EarlyExitModel, method: str, batch: int, context: int) -> tuple[float, float]:
    """The median seconds of a round of the whole batch, and the mean ones of its draft level."""
    engine = Engine(
        model,
        method=method,
        max_num_seqs=batch,
        num_draft_tokens=PROBED_DRAFT,
        max_prefill_tokens=batch * context,
        num_blocks=batch * -(-(2 * context) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    )
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_new_tokens=NUM_TIMED_ROUNDS + PROBED_DRAFT, ignore_eos=True)
    prompts = torch.randint(model.backbone.vocab_size, (batch, context), generator=generator).tolist()
    for prompt in prompts:
        engine.add_request(prompt, params)
    engine.step()  # reads the prompts
    seconds = []
    while engine.has_unfinished:
        start = time.perf_counter()
        completions = engine.step()
        if not completions:
            seconds.append(time.perf_counter() - start)
    draft = engine.stats.levels.get("draft", LevelStats())
    # A sequence's share of the time is that of one in a whole batch.
    per_token = batch * draft.seconds / max(1, draft.num_rounds)
    return statistics.median(seconds), PROBED_DRAFT * per_token


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _divide(table: Table, by: int) -> Table:
    seconds = tuple(tuple(value / by for value in row) for row in table.seconds)
    return Table(batch_sizes=table.batch_sizes, num_rows=table.num_rows, seconds=seconds)
