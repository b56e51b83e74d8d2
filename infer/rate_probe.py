"""Tokens a second that a setting reaches on prompts, measured while its whole batch decodes."""

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_model import Setting

if TYPE_CHECKING:
    from .engine import Engine
    from .follower import Follower


DISTURBED = 1.6
"""A round that takes so many times the median was disturbed: its own courses differ by less."""


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
        options: dict[str, Any] = {
            "method": setting.method,
            "exit_layers": setting.exit_layers,
            "num_draft_tokens": setting.num_draft_tokens,
            "num_provisional_tokens": setting.num_provisional_tokens,
        }
        self.setting = setting
        longest = max(map(len, prompts))
        self._engine = build_engine(
            model,
            max_num_seqs=batch_size,
            max_prefill_tokens=batch_size * longest,
            num_blocks=batch_size * (3 + (longest + params.max_new_tokens) // 16),
            **options,
        )
        self._prompts, self._params, self._batch_size = cycle(prompts), params, batch_size
        self._running: list[Follower] = []
        self._rounds: list[tuple[float, int]] = []

    def run(self, seconds: float) -> None:
        """Decode for so long, reading not counted."""
        left = seconds
        while left > 0:
            self._running = [follower for follower in self._running if follower.completion is None]
            while len(self._running) < self._batch_size:
                request_id = self._engine.add_request(next(self._prompts), self._params)
                self._running.append(self._engine.follow(request_id))
            counts = all(follower.stats.num_prefills > 0 for follower in self._running)
            before = self._num_committed()
            start = time.perf_counter()
            self._engine.advance()
            passed = time.perf_counter() - start
            if counts:
                left -= passed
                self._rounds.append((passed, self._num_committed() - before))

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
        limit = DISTURBED * statistics.median(seconds for seconds, _ in self._rounds)
        return statistics.mean(seconds for seconds, _ in self._rounds if seconds <= limit)

    @property
    def disturbed_share(self) -> float:
        """The share of rounds that were left out."""
        limit = DISTURBED * statistics.median(seconds for seconds, _ in self._rounds)
        return statistics.mean(float(seconds > limit) for seconds, _ in self._rounds)

    def close(self) -> None:
        """Abort what runs."""
        for follower in self._running:
            if follower.completion is None:
                self._engine.abort(follower.request_id)
        self._running = []

    def _num_committed(self) -> int:
        return sum(follower.stats.num_committed for follower in self._running)
