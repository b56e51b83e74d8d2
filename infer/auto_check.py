"""`plan="auto"` against plain decoding, a step of each in turn, so that both meet the same moments of the machine."""

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..heads import EarlyExitModel
from .config import SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

NUM_GROUPS = 4
"""Batches that are run of each size, at most."""


def check_auto(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,
    batch_sizes: Items[int],
    *,
    show_progress: bool = False,
) -> dict[int, float]:
    """By batch size: tokens a second of one engine with `plan="auto"` to those of plain decoding, prefill included.

    Where there are fewer prompts than a batch takes, all run side by side.
    """
    largest = max(batch_sizes)
    engines = (
        build_engine(model, method="autoregressive", max_num_seqs=largest),
        build_engine(model, plan="auto", max_num_seqs=largest),
    )
    groups = {
        size: [prompts[start : start + size] for start in range(0, len(prompts), size)][:NUM_GROUPS]
        for size in batch_sizes
    }
    num_batches = sum(map(len, groups.values()))
    ratios = {}
    with tqdm(total=num_batches, desc="auto", unit="batch", disable=not show_progress, file=sys.stderr) as progress:
        for engine in engines:  # warms up
            engine.generate(list(prompts[:1]), params)
        for size, batches in groups.items():
            seconds, tokens = [0.0, 0.0], [0, 0]
            for batch in batches:
                for index, (passed, number) in enumerate(_run_in_turn(engines, batch, params)):
                    seconds[index] += passed
                    tokens[index] += number
                progress.update()
            ratios[size] = (tokens[1] / seconds[1]) / (tokens[0] / seconds[0])
    return ratios


def describe_auto(ratios: dict[int, float]) -> str:
    """In one line."""
    values = ", ".join(f"{ratio:.2f} at batch {size}" for size, ratio in ratios.items())
    return f'plan="auto" to plain decoding, a step of each in turn, prefill included: {values}'


def _run_in_turn(
    engines: "Items[Engine]", batch: Items[list[int]], params: SamplingParams
) -> list[tuple[float, int]]:  # by engine: seconds, new tokens
    for engine in engines:
        for token_ids in batch:
            engine.add_request(token_ids, params)
    seconds = [0.0] * len(engines)
    tokens = [0] * len(engines)
    num_left = [len(batch)] * len(engines)
    while any(num_left):
        for index, engine in enumerate(engines):
            if num_left[index]:
                start = time.perf_counter()
                completions = engine.step()
                seconds[index] += time.perf_counter() - start
                num_left[index] -= len(completions)
                tokens[index] += sum(len(completion.token_ids) for completion in completions)
    return list(zip(seconds, tokens, strict=True))
