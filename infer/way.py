"""A way to answer a batch of prompts, timed; ours by an `Engine`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..heads import EarlyExitModel
from .config import LOSSY_METHODS, Method, SamplingParams
from .engine import Engine
from .follower import Follower
from .planner import MAX_DRAFT_TOKENS, MAX_PROVISIONAL_TOKENS
from .stats import Stats

BLOCK_SIZE = 16
"""Tokens in a block of an engine's KV cache."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one call made of a batch of prompts, and what it took."""

    token_ids: list[list[int]]
    """The new tokens of each prompt, its end token included."""
    seconds: float
    """From the call to the last token, prefill included."""
    first_seconds: list[float]
    """From the call to each prompt's first token."""
    stats: Stats | None = None
    """Counts and times by level, summed over the batch; None for those that are not ours."""


Way = Callable[[list[list[int]], SamplingParams], Answers]
"""From prompts (token ids) and how to sample them to answers in their order; a peer raises what it refuses with."""


@dataclass(frozen=True, kw_only=True)
class WaySettings:
    """What a way is built with."""

    num_draft_tokens: int = 2
    """As of an engine."""
    num_provisional_tokens: int = 4
    """As of an engine."""
    verifier_threshold: float = 0.5
    """As of an engine."""
    max_num_seqs: int = 1
    """Prompts in the largest batch."""
    max_length: int
    """Tokens of the longest prompt with its answer."""

    @property
    def num_blocks(self) -> int:
        """Blocks of an engine's KV cache, for the largest batch and no more."""
        ahead = self.num_draft_tokens + self.num_provisional_tokens
        return self.max_num_seqs * ((self.max_length + ahead) // BLOCK_SIZE + 2)

    @property
    def num_blocks_by_plan(self) -> int:
        """The same whatever lengths the planner chooses."""
        ahead = MAX_DRAFT_TOKENS + MAX_PROVISIONAL_TOKENS
        return self.max_num_seqs * ((self.max_length + ahead) // BLOCK_SIZE + 2)


def build_engine(model: EarlyExitModel, method: Method, settings: WaySettings, *, ngram_drafts: bool = False) -> Engine:
    """An engine without tokenizer, so that it makes token ids and no text, as `generate` does.

    It may be lossy. Raises ValueError where the model has too few heads for the method, or lacks its verifier.
    """
    return Engine(
        model,
        method=method,
        ngram_drafts=ngram_drafts,
        lossy=method in LOSSY_METHODS,
        verifier_threshold=settings.verifier_threshold,
        num_draft_tokens=settings.num_draft_tokens,
        num_provisional_tokens=settings.num_provisional_tokens,
        max_num_seqs=settings.max_num_seqs,
        block_size=BLOCK_SIZE,
        num_blocks=settings.num_blocks,
    )


def build_planned(model: EarlyExitModel, settings: WaySettings) -> Engine:
    """An engine as `build_engine` makes it, by the planner's choice for batches up to the largest.

    Raises ValueError where nothing tells how often the model's heads are right.
    """
    return Engine(
        model,
        plan="auto",
        max_num_seqs=settings.max_num_seqs,
        block_size=BLOCK_SIZE,
        num_blocks=settings.num_blocks_by_plan,
    )


def engine_way(engine: Engine) -> Way:
    """All prompts at once through `engine`, which must have none of its own in work."""

    def run(prompts: list[list[int]], params: SamplingParams) -> Answers:
        start = time.perf_counter()
        followers: list[Follower] = []
        try:
            for prompt in prompts:
                followers.append(engine.follow(engine.add_request(prompt, params)))
            first_seconds = _run_all(engine, followers, start)
        except BaseException:
            for follower in followers:
                if follower.completion is None:
                    engine.abort(follower.request_id)
            raise
        seconds = time.perf_counter() - start
        completions = [follower.completion for follower in followers if follower.completion is not None]
        for completion in completions:
            if completion.error is not None:
                raise FloatingPointError(completion.error)
        stats = Stats.of_levels(tuple(completions[0].stats.levels))
        for completion in completions:
            stats.add(completion.stats)
        return Answers(
            token_ids=[completion.token_ids for completion in completions],
            seconds=seconds,
            first_seconds=first_seconds,
            stats=stats,
        )

    return run


def _run_all(engine: Engine, followers: list[Follower], start: float) -> list[float]:
    """Run to the end; the seconds to each one's first token."""
    first_seconds: dict[int, float] = {}
    while any(follower.completion is None for follower in followers):
        engine.advance()
        now = time.perf_counter() - start
        for place, follower in enumerate(followers):
            if place not in first_seconds and follower.read() is not None:
                first_seconds[place] = now
    return [first_seconds[place] for place in range(len(followers))]
