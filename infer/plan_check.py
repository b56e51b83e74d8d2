"""A plan against the clock: settings run on prompts, beside what is predicted for them by costs of the same minutes.

The parts of rounds are timed between the runs, some after each, so that whatever the machine does beside, prediction
and measurement both meet it. Tokens a round are counted over all prompts, apart from the clock: a few seconds meet too
few of them.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, combinations, islice, repeat
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_model import Acceptance, Prediction, Setting, predict
from .machine import CostProbe
from .planner import AUTOREGRESSIVE, Plan
from .rate_probe import RateProbe, count_tokens_per_round

if TYPE_CHECKING:
    from .engine import Engine

NUM_TURNS = 4
SECONDS = 1.0
"""Of a turn."""
COST_TURNS = 2
"""Of the costs, spread over a turn of the settings."""
PROVISIONAL = ((1, 1), (1, 3), (2, 2), (2, 4))
"""Lengths of `hispec` that are tried: drafted, provisional."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One setting, predicted and measured."""

    prediction: Prediction
    tokens_per_second: float
    tokens_per_round: float
    disturbed_share: float
    """Of its rounds, those that something else on the machine disturbed and that do not count."""
    seconds_by_level: Mapping[str, float]
    """Of a round."""
    is_chosen: bool

    @property
    def ratio(self) -> float:
        """Measured to predicted tokens a second."""
        return self.tokens_per_second / self.prediction.tokens_per_second

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured; above 0 it was too fast."""
        return self.prediction.tokens_per_second / self.tokens_per_second - 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "setting": str(self.prediction.setting),
            "is_chosen": self.is_chosen,
            "tokens_per_second": self.tokens_per_second,
            "predicted_tokens_per_second": self.prediction.tokens_per_second,
            "error": self.error,
            "tokens_per_round": self.tokens_per_round,
            "predicted_tokens_per_round": self.prediction.tokens_per_round,
            "seconds_by_level": dict(self.seconds_by_level),
            "predicted_seconds_by_level": dict(self.prediction.seconds_by_level),
            "disturbed_share": self.disturbed_share,
        }


def rivals(exit_layers: Items[int]) -> list[Setting]:
    """Settings that a choice is compared with: plain decoding, and each method with short and long drafts."""
    return [
        AUTOREGRESSIVE,
        *(_single(exit_layer, number) for exit_layer in exit_layers[:1] for number in (1, 2, 3, 5)),
        *(_hispec(pair, *lengths) for pair in list(combinations(exit_layers[:2], 2)) for lengths in PROVISIONAL),
    ]


def sweep(exit_layers: Items[int]) -> list[Setting]:
    """Plain decoding, every exit with drafts of 1 to 4 tokens, and every pair of exits with some lengths."""
    return [
        AUTOREGRESSIVE,
        *(_single(exit_layer, number) for exit_layer in exit_layers for number in (1, 2, 3, 4)),
        *(_hispec(pair, *lengths) for pair in combinations(exit_layers, 2) for lengths in PROVISIONAL),
    ]


def _single(exit_layer: int, number: int) -> Setting:
    return Setting(method="single-layer", exit_layers=(exit_layer,), num_draft_tokens=number)


def _hispec(exit_layers: tuple[int, ...], drafted: int, provisional: int) -> Setting:
    return Setting(
        method="hispec", exit_layers=exit_layers, num_draft_tokens=drafted, num_provisional_tokens=provisional
    )


def check_plan(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    made: Plan,
    others: Items[Setting],  # that the plan's choices are compared with
    acceptance: Acceptance,
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,
    *,
    show_progress: bool = False,
) -> dict[int, list[Checked]]:
    """By batch size of the plan: its choice and the others, predicted and measured."""
    chosen = {size: made.at(size) for size in made.choices}
    counts: dict[Setting, float] = {}
    settings = list(dict.fromkeys([*chosen.values(), *others]))
    for setting in tqdm(settings, desc="count", unit="setting", disable=not show_progress, file=sys.stderr):
        counts[setting] = count_tokens_per_round(model, build_engine, setting, prompts, params)
    return {
        size: _check(
            model,
            build_engine,
            list(dict.fromkeys([chosen[size], *others])),
            counts,
            acceptance,
            prompts,
            params,
            size,
            show_progress=show_progress,
        )
        for size in chosen
    }


def _check(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    settings: list[Setting],  # the chosen one first
    counts: Mapping[Setting, float],  # tokens a round
    acceptance: Acceptance,
    prompts: Items[list[int]],
    params: SamplingParams,
    batch_size: int,
    *,
    show_progress: bool,
) -> list[Checked]:
    """One batch size: settings and costs in turns."""
    # While texts grow, as long as they are on average.
    context = round(statistics.mean(map(len, prompts)) + params.max_new_tokens / 2)
    cost_probe = CostProbe(model, build_engine, sizes=(batch_size,), context=context, probe_context=context)
    probes = [RateProbe(model, build_engine, each, prompts, params, batch_size) for each in settings]
    jobs = chain.from_iterable(cost_probe.turn() for _ in repeat(None))
    num_jobs = -(-COST_TURNS * cost_probe.num_jobs // len(probes))
    for _ in islice(jobs, cost_probe.num_jobs):  # warms up
        pass
    turns = [probes[:: 1 - 2 * (turn % 2)] for turn in range(NUM_TURNS)]
    steps = tqdm(list(chain(*turns)), desc=f"batch {batch_size}", disable=not show_progress, file=sys.stderr)
    for probe in steps:
        probe.run(SECONDS)
        for _ in islice(jobs, num_jobs):
            pass
    cost_probe.close()
    for probe in probes:
        probe.close()
    costs = cost_probe.costs()
    return [
        Checked(
            prediction=predict(probe.setting, costs, acceptance, batch_size),
            tokens_per_second=batch_size * counts[probe.setting] / probe.seconds_per_round,
            tokens_per_round=counts[probe.setting],
            disturbed_share=probe.disturbed_share,
            seconds_by_level=probe.seconds_by_level,
            is_chosen=probe.setting == settings[0],
        )
        for probe in probes
    ]


def median_error(rows: Items[Checked]) -> float:
    """Of the predicted tokens a second, as shares of the measured ones."""
    return statistics.median(abs(row.error) for row in rows)


def choice_share(rows: Items[Checked]) -> float:
    """What the choice for a batch size reaches of the best that was measured at it."""
    chosen = next(row for row in rows if row.is_chosen)
    return chosen.tokens_per_second / max(row.tokens_per_second for row in rows)


def describe_check(rows: Items[Checked]) -> str:
    """A table of one batch size: each setting predicted and measured."""
    lines = [f"{'setting':<42} {'predicted':>9} {'measured':>8} {'error':>7}  tokens a round (predicted)"]
    for row in rows:
        lines.append(
            f"{row.prediction.setting!s:<42} {row.prediction.tokens_per_second:9.1f} {row.tokens_per_second:8.1f} "
            f"{row.error:+7.1%}  {row.tokens_per_round:.2f} ({row.prediction.tokens_per_round:.2f})"
            + ("  <- chosen" if row.is_chosen else "")
        )
    share = statistics.mean(row.disturbed_share for row in rows)
    if share > 0.05:
        lines.append(f"{share:.0%} of the rounds were disturbed by other programs and left out")
    return "\n".join(lines)


def describe_result(checked: Mapping[int, Items[Checked]]) -> str:
    """In one line how far predictions are off, and what the choices are worth."""
    rows = [row for each in checked.values() for row in each]
    worst = min(checked, key=lambda size: choice_share(checked[size]))
    shares = ", ".join(f"{choice_share(each):.1%} at batch {size}" for size, each in checked.items())
    return (
        f"predictions are off by {median_error(rows):.1%} in the median over {len(rows)} configurations; the planner's "
        f"choice reaches {shares} of the best measured, at least {choice_share(checked[worst]):.1%}"
    )
