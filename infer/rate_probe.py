"""Tokens a second that a setting reaches on prompts, measured while its whole batch decodes."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_model import Setting
from .undisturbed import disturbed_share, undisturbed_mean

if TYPE_CHECKING:
    from .engine import Engine
    from .follower import Follower


COUNT_BATCH = 16


class RateProbe:
    """An engine kept full: where a text ends the next prompt comes, and rounds beside its reading do not count."""

    def __init__(
        self,
        model: EarlyExitModel,
        build_engine: "Callable[..., Engine]",  # as `Engine`: from a model and options
        setting: Setting,
        prompts: Items[list[int]],  # token ids; they come round again
        params: SamplingParams,
        batch_size: int,
    ) -> None:
        self.setting = setting
        self._engine = build_engine(model, **_options(setting, prompts, params, batch_size))
        self._levels = list(self._engine.stats.levels)
        self._prompts, self._params, self._batch_size = cycle(prompts), params, batch_size
        self._running: list[Follower] = []
        self._rounds: list[tuple[dict[str, float], int]] = []

    def run(self, seconds: float) -> None:
        """Decode for so long, reading not counted."""
        left = seconds
        while left > 0:
            self._running = [follower for follower in self._running if follower.completion is None]
            while len(self._running) < self._batch_size:
                request_id = self._engine.add_request(next(self._prompts), self._params)
                self._running.append(self._engine.follow(request_id))
            counts = all(follower.stats.num_prefills > 0 for follower in self._running)
            before, num_before = self._level_seconds(), self._num_committed()
            start = time.perf_counter()
            self._engine.advance()
            passed = time.perf_counter() - start
            if counts:
                left -= passed
                levels = {name: after - before[name] for name, after in self._level_seconds().items()}
                levels["target"] = passed - sum(levels.values())
                self._rounds.append((levels, self._num_committed() - num_before))

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, without prefill."""
        return self._batch_size * self.tokens_per_round / self.seconds_per_round

    @property
    def tokens_per_round(self) -> float:
        """Of each sequence."""
        return statistics.mean(number for _, number in self._rounds) / self._batch_size

    @property
    def seconds_per_round(self) -> float:
        """The mean, without the rounds that something else on the machine disturbed."""
        return undisturbed_mean(self._totals())

    @property
    def seconds_by_level(self) -> dict[str, float]:
        """Of a round: means by level, which add up to its seconds; the engine's own time is the target's."""
        sums: dict[str, float] = defaultdict(float)
        for levels, _ in self._rounds:
            for name in self._levels:
                sums[name] += levels[name]
        factor = self.seconds_per_round / sum(sums.values())
        return {name: seconds * factor for name, seconds in sums.items()}

    @property
    def disturbed_share(self) -> float:
        """The share of rounds that were left out."""
        return disturbed_share(self._totals())

    def close(self) -> None:
        """Abort what runs."""
        for follower in self._running:
            if follower.completion is None:
                self._engine.abort(follower.request_id)
        self._running = []

    def _num_committed(self) -> int:
        return sum(follower.stats.num_committed for follower in self._running)

    def _totals(self) -> list[float]:
        return [sum(levels.values()) for levels, _ in self._rounds]

    def _level_seconds(self) -> dict[str, float]:
        """So far, of each level below the target; the sequences' shares add up to the time of the batch."""
        return {
            name: sum(follower.stats.levels[name].seconds for follower in self._running) for name in self._levels[:-1]
        }


def count_tokens_per_round(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",
    setting: Setting,
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,
) -> float:
    """Tokens that a round of a sequence brings, over the whole answers to all prompts; not timed."""
    engine = build_engine(model, **_options(setting, prompts, params, min(COUNT_BATCH, len(prompts))))
    engine.generate(prompts, params)
    stats = engine.stats
    return (stats.num_committed - stats.num_prefills) / max(1, stats.levels["target"].num_rounds)


def _options(setting: Setting, prompts: Items[list[int]], params: SamplingParams, batch_size: int) -> dict[str, Any]:
    longest = max(map(len, prompts))
    ahead = setting.num_draft_tokens + setting.num_provisional_tokens
    return {
        "method": setting.method,
        "exit_layers": setting.exit_layers,
        "num_draft_tokens": setting.num_draft_tokens,
        "num_provisional_tokens": setting.num_provisional_tokens,
        "max_num_seqs": batch_size,
        "max_prefill_tokens": batch_size * longest,
        "num_blocks": batch_size * (3 + (longest + params.max_new_tokens + ahead) // 16),
    }
