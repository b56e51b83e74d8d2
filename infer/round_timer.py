"""How long the rounds of an engine take, level by level."""

import time
from typing import TYPE_CHECKING

import torch

from .config import SamplingParams
from .contexts import spread_contexts

if TYPE_CHECKING:
    from .engine import Engine
    from .follower import Follower


class RoundTimer:
    """Runs rounds of an engine on random prompts, which `close` aborts."""

    def __init__(self, engine: "Engine", batch_size: int, context: int, max_new_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        backbone = engine.model.backbone
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        prompts = [
            torch.randint(backbone.vocab_size, (number,), generator=generator).tolist()
            for number in spread_contexts(context, batch_size)
        ]
        self._engine = engine
        self._running: list[Follower] = [engine.follow(engine.add_request(prompt, params)) for prompt in prompts]
        while any(follower.stats.num_prefills == 0 for follower in self._running):
            self._advance()

    def seconds(self) -> dict[str, float]:
        """Run one round; by level below the target its seconds, and as `target` all others, the engine's own too.

        Raises ValueError where a text ends in it: the context is too short, or the model's logits are no numbers.
        """
        before = self._level_seconds()
        start = time.perf_counter()
        self._advance()
        total = time.perf_counter() - start
        levels = {name: after - before[name] for name, after in self._level_seconds().items()}
        return levels | {"target": total - sum(levels.values())}

    def close(self) -> None:
        """Abort the prompts."""
        for follower in self._running:
            if follower.completion is None:
                self._engine.abort(follower.request_id)

    def _advance(self) -> None:
        self._engine.advance()
        if any(follower.completion is not None for follower in self._running):
            raise ValueError(
                "a text ended while rounds were timed, because the model's context is too short or its logits are not "
                "finite; choose the method yourself"
            )

    def _level_seconds(self) -> dict[str, float]:
        """So far, of each level below the target; the sequences' shares add up to the time of the batch."""
        names = list(self._engine.stats.levels)[:-1]
        return {name: sum(follower.stats.levels[name].seconds for follower in self._running) for name in names}
