"""A plan against the clock: settings run on prompts, in turn, beside what was predicted for them."""

import statistics
import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_model import Acceptance, Costs, Prediction, Setting, predict
from .planner import AUTOREGRESSIVE, Plan
from .rate_probe import RateProbe

if TYPE_CHECKING:
    from .engine import Engine

NUM_TURNS = 4
SECONDS = 1.0
"""Of a turn."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One setting, predicted and measured."""

    prediction: Prediction
    tokens_per_second: float
    tokens_per_round: float
    disturbed_share: float
    """Of its rounds, those that something else on the machine disturbed and that do not count."""
    is_chosen: bool

    @property
    def ratio(self) -> float:
        """Measured to predicted tokens a second."""
        return self.tokens_per_second / self.prediction.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "setting": str(self.prediction.setting),
            "is_chosen": self.is_chosen,
            "tokens_per_second": self.tokens_per_second,
            "predicted_tokens_per_second": self.prediction.tokens_per_second,
            "tokens_per_round": self.tokens_per_round,
            "disturbed_share": self.disturbed_share,
            "predicted_tokens_per_round": self.prediction.tokens_per_round,
        }


def rivals(exit_layers: Items[int]) -> list[Setting]:
    """Settings that a choice is compared with: plain decoding, and each method with short and long drafts."""
    settings = [AUTOREGRESSIVE]
    if exit_layers:
        first = tuple(exit_layers[:1])
        settings += [
            Setting(method="single-layer", exit_layers=first, num_draft_tokens=number) for number in (1, 2, 3, 5)
        ]
    if len(exit_layers) > 1:
        settings += [
            Setting(
                method="hispec",
                exit_layers=tuple(exit_layers[:2]),
                num_draft_tokens=drafted,
                num_provisional_tokens=provisional,
            )
            for drafted, provisional in ((1, 1), (1, 3), (2, 2), (2, 4))
        ]
    return settings


def check_plan(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    made: Plan,
    costs: Costs,
    acceptance: Acceptance,
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,
    batch_size: int,
    *,
    show_progress: bool = False,
) -> list[Checked]:
    """The plan's choice and its rivals, run in turns so that a noisy moment does not fall on one alone."""
    chosen = made.at(batch_size)
    settings = [chosen, *(each for each in rivals(model.exit_layers) if each != chosen)]
    probes = [RateProbe(model, build_engine, each, prompts, params, batch_size) for each in settings]
    turns = [probe for _ in range(NUM_TURNS) for probe in probes]
    for probe in tqdm(turns, desc=f"batch {batch_size}", disable=not show_progress, file=sys.stderr):
        probe.run(SECONDS)
    for probe in probes:
        probe.close()
    return [
        Checked(
            prediction=predict(probe.setting, costs, acceptance, batch_size),
            tokens_per_second=probe.tokens_per_second,
            tokens_per_round=probe.tokens_per_round,
            disturbed_share=probe.disturbed_share,
            is_chosen=probe.setting == chosen,
        )
        for probe in probes
    ]


def describe_check(rows: Items[Checked]) -> str:
    """A table, and how far the predictions are off."""
    lines = [f"{'setting':<42} {'measured':>8} {'said':>8} {'ratio':>6}  tokens a round (said)"]
    for row in rows:
        lines.append(
            f"{row.prediction.setting!s:<42} {row.tokens_per_second:8.1f} {row.prediction.tokens_per_second:8.1f} "
            f"{row.ratio:6.2f}  {row.tokens_per_round:.2f} ({row.prediction.tokens_per_round:.2f})"
            + ("  <- chosen" if row.is_chosen else "")
        )
    best = max(row.tokens_per_second for row in rows)
    chosen = next(row for row in rows if row.is_chosen)
    off = statistics.median(abs(1 - row.ratio) for row in rows)
    lines.append(
        f"off by {off:.0%} in the median; the choice reaches {chosen.tokens_per_second / best:.0%} of the best here"
        f"{_disturbance(rows)}"
    )
    return "\n".join(lines)


def _disturbance(rows: Items[Checked]) -> str:
    share = statistics.mean(row.disturbed_share for row in rows)
    return f"; {share:.0%} of the rounds were disturbed by other programs and left out" if share > 0.05 else ""
