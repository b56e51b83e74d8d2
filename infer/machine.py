"""What this machine takes for the parts of a round: the `Costs` of a model, measured.

Layers and heads are timed by themselves, rounds of every method as a whole; `calibrate` brings them together.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..heads import EarlyExitModel
from .calibration import TimedRound, calibrate
from .config import EngineConfig, Method
from .cost_model import Costs, Table
from .part_timer import Part, PartTimer, part_names
from .round_timer import RoundTimer
from .undisturbed import undisturbed_mean

if TYPE_CHECKING:
    from .engine import Engine

BATCH_SIZES = (1, 4, 8, 16)
NUM_ROWS = (1, 2, 4, 8)
CONTEXT = 192
"""Tokens before those that layers and heads are timed on."""
PROBE_CONTEXT = 96
"""The same where whole rounds are timed: reading long prompts in would take most of the time. Shorter ones mislead, for
a round loses more to a longer context than its layers do by themselves."""
PROBED = (1, 2, 4)
"""Drafted tokens of the rounds that are timed."""
SECONDS = 8.0
"""How long is timed."""
NUM_REPEATS = 3, 12
"""Fewest and most times that everything is timed."""


def measure_costs(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",  # as `Engine`: from a model and options
    options: Mapping[str, Any] | None = None,  # of the engines to come
    *,
    max_batch: int = BATCH_SIZES[-1],
    context: int = CONTEXT,  # tokens before the timed ones, as in the texts that will be generated
    seconds: float = SECONDS,
    show_progress: bool = False,
) -> Costs:
    """Time layers, heads, and rounds of an engine, for up to `max_batch` sequences.

    Takes a few seconds more than `seconds`, or than three repeats: about fifteen for a model of 135M parameters on two
    CPU cores. Raises ValueError where rounds cannot be timed, see `RoundTimer`.
    """
    sizes = tuple(sorted({size for size in BATCH_SIZES if size < max_batch} | {max_batch}))
    probe = CostProbe(model, build_engine, options, sizes=sizes, context=context)
    try:
        _repeat(probe, seconds, show_progress=show_progress)
    finally:
        probe.close()
    return probe.costs()


class CostProbe:
    """Times every part and every round once a turn, as often as is asked, between whatever else runs."""

    def __init__(
        self,
        model: EarlyExitModel,
        build_engine: "Callable[..., Engine]",  # as `Engine`: from a model and options
        options: Mapping[str, Any] | None = None,  # of the engines to come
        *,
        sizes: Items[int],  # numbers of sequences, rising
        context: int = CONTEXT,  # tokens before the timed ones
        probe_context: int = PROBE_CONTEXT,  # the same where whole rounds are timed, which must be read in
    ) -> None:
        max_batch, max_context = sizes[-1], model.backbone.max_context
        # The longest of a batch is half as long again.
        context, probe_context = min(context, max_context // 2), min(probe_context, max_context // 4)
        self._backbone = model.backbone
        # Engines go first: what they do to the model, such as packing its weights, holds for its parts too.
        self._contexts = context, probe_context
        self._rounds = list(_build_probes(model, build_engine, options or {}, sizes, probe_context))
        far_timer = PartTimer(model, max_batch, NUM_ROWS[-1], context)
        near_timer = PartTimer(model, max_batch, NUM_ROWS[-1], probe_context)
        names = part_names(model.exit_layers)
        self._far = [Part(*cell) for cell in product(names, sizes, NUM_ROWS)]
        # The LM head looks at no context.
        self._near = [Part(*cell) for cell in product(names, sizes, NUM_ROWS) if cell[0] != "target"]
        self._jobs: list[Callable[[], Mapping[str, float]]] = [partial(far_timer.seconds, part) for part in self._far]
        self._jobs += [partial(near_timer.seconds, part) for part in self._near]
        self._jobs += [timer.seconds for timer, _ in self._rounds]
        self._found: list[list[Mapping[str, float]]] = [[] for _ in self._jobs]
        self._is_warm = False

    @property
    def num_jobs(self) -> int:
        """Jobs of a turn."""
        return len(self._jobs)

    def turn(self) -> Iterator[None]:
        """Run every job once, and stop after each. The first turn warms up; texts last for `NUM_REPEATS[1]` more."""
        for job, results in zip(self._jobs, self._found, strict=True):
            result = job()
            if self._is_warm:
                results.append(result)
            yield
        self._is_warm = True

    def costs(self) -> Costs:
        """By all turns so far, at least two."""
        found = [
            {name: undisturbed_mean([each[name] for each in results]) for name in results[0]} for results in self._found
        ]
        num_parts = len(self._far) + len(self._near)
        return calibrate(
            self._backbone.num_layers,
            _tables(self._far, found, self._backbone.row_step),
            _tables(self._near, found[len(self._far) :], self._backbone.row_step),
            [
                asked._replace(seconds=seconds)
                for (_, asked), seconds in zip(self._rounds, found[num_parts:], strict=True)
            ],
            context=self._contexts[0],
            near_context=self._contexts[1],
        )

    def close(self) -> None:
        """Abort the prompts of the rounds."""
        for timer, _ in self._rounds:
            timer.close()


def _build_probes(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    options: Mapping[str, Any],
    sizes: Items[int],
    context: int,
) -> Iterator[tuple[RoundTimer, TimedRound]]:
    """Engines that run, and what each of their rounds is asked for."""
    asked: list[tuple[Method, int, int]] = [("autoregressive", 0, 1)]
    if model.heads:
        asked += [("single-layer", 1, number) for number in PROBED]
    if len(model.heads) > 1:
        asked.append(("hispec", 2, PROBED[-1]))
    # A round commits at most its draft, the intermediate level's token and the target's.
    max_new_tokens = (PROBED[-1] + 2) * (NUM_REPEATS[1] + 2)
    for size, (method, num_exits, num_drafted) in product(sizes, asked):
        exit_layers = model.exit_layers[:num_exits]
        block_size = options.get("block_size", EngineConfig.block_size)
        own = {
            "method": method,
            "exit_layers": exit_layers,
            "num_draft_tokens": num_drafted,
            "num_provisional_tokens": 1,
            "max_num_seqs": size,
            "max_prefill_tokens": size * context,
            # Many engines live at once: each has what it needs.
            "num_blocks": size * (2 + (context + max_new_tokens + PROBED[-1] + 2) // block_size),
        }
        engine = build_engine(model, **{**options, **own})
        yield RoundTimer(engine, size, context, max_new_tokens), TimedRound(size, exit_layers, num_drafted, {})


def _repeat(probe: CostProbe, seconds: float, *, show_progress: bool) -> None:
    """Turns for about so many seconds; jobs take turns, so that a noisy moment does not fall on one alone."""
    fewest, most = NUM_REPEATS
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=1.0, desc="measure", disable=not show_progress, file=sys.stderr, bar_format=bar_format) as bar:
        start = time.perf_counter()
        for repeat in range(most + 1):
            for number, _ in enumerate(probe.turn(), 1):
                passed = (time.perf_counter() - start) / (2 * max(seconds, 1e-9))
                done = max(passed, (repeat + number / probe.num_jobs) / (most + 1))
                bar.update(max(0.0, min(1.0, done) - bar.n))
            if repeat >= fewest and time.perf_counter() - start >= seconds:
                break
        bar.update(1.0 - bar.n)


def _tables(parts: Items[Part], found: Items[Mapping[str, float]], step: int) -> dict[str | int, Table]:
    """By part: its seconds; `found` may go on behind those of `parts`."""
    seconds = {part: each["seconds"] for part, each in zip(parts, found, strict=False)}
    sizes = tuple(sorted({part.batch_size for part in parts}))
    rows = tuple(sorted({part.num_rows for part in parts}))
    return {
        name: Table(
            batch_sizes=sizes,
            num_rows=rows,
            seconds=tuple(tuple(seconds[Part(name, size, number)] for number in rows) for size in sizes),
            step=step,
        )
        for name in {part.name for part in parts}
    }
