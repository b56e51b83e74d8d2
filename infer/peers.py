"""Transformers' own ways to answer, run as its users run them."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..heads import EarlyExitModel
from .config import SamplingParams
from .way import Answers, Way, WaySettings

PROMPT_LOOKUP_TOKENS = 5
"""Tokens that prompt lookup copies from the prompt at once."""
PAGE_SIZE = 256
"""Tokens in a page of the cache of `generate_batch`, its own default."""


def build_generate(model: EarlyExitModel, settings: WaySettings, **config: Any) -> Way:
    """The plain `generate`; further settings of its `GenerationConfig` make it another."""

    def run(prompts: list[list[int]], params: SamplingParams) -> Answers:
        return run_generate(model.base, prompts, params, **config)

    return run


def build_prompt_lookup(model: EarlyExitModel, settings: WaySettings) -> Way:
    """`generate` with drafts copied from the text so far."""
    return build_generate(model, settings, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)


def build_early_exit(model: EarlyExitModel, settings: WaySettings) -> Way:
    """`generate` with drafts of the model's own first quarter of layers, read by its own head."""
    generate = build_generate(model, settings, assistant_early_exit=max(1, model.backbone.num_layers // 4))
    config, num_layers = model.base.config, model.backbone.num_layers

    def run(prompts: list[list[int]], params: SamplingParams) -> Answers:
        try:
            return generate(prompts, params)
        finally:
            # Where it fails, transformers leaves the base with the number of layers that the draft had.
            config.num_hidden_layers = num_layers

    return run


def build_generate_batch(model: EarlyExitModel, settings: WaySettings) -> Way:
    """`generate_batch`, continuous batching with a paged cache."""
    return GenerateBatch(model.base, settings)


def run_generate(base: PreTrainedModel, prompts: list[list[int]], params: SamplingParams, **config: Any) -> Answers:
    """One call of `generate` for all prompts, padded on the left."""
    generation_config = _generation_config(base, params, **config)
    width = max(map(len, prompts))
    pad = generation_config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=base.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=base.device)
    _seed(params)
    watch = _FirstToken()
    generate: Any = base.generate
    output: Tensor = generate(ids, attention_mask=mask, generation_config=generation_config, streamer=watch)
    rows = output[:, width:].tolist()
    seconds = time.perf_counter() - watch.start
    end_ids = _end_ids(base)
    return Answers(
        token_ids=[cut_at_end(row, end_ids) for row in rows],
        seconds=seconds,
        first_seconds=[watch.seconds] * len(prompts),
    )


class GenerateBatch:
    """Calls of `generate_batch` that keep its manager, as a server does: what it takes to make one is not timed.

    A call ends with its last token; the second that the manager may spend on cleaning up behind it is not timed either.
    """

    def __init__(self, base: PreTrainedModel, settings: WaySettings) -> None:
        self._base: Any = base
        # By default its cache takes most of the machine's memory. Shared blocks would spare it the prompts that it has
        # seen before.
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings.max_num_seqs * (settings.max_length // PAGE_SIZE + 2),
            max_requests_per_batch=settings.max_num_seqs,
            allow_block_sharing=False,
        )
        self._max_length = settings.max_length
        self._params: SamplingParams | None = None

    def __call__(self, prompts: list[list[int]], params: SamplingParams) -> Answers:
        """As `Way`; RuntimeError where it gives up on a prompt."""
        if params != self._params:
            # The manager has the sampling of the call that it was made for.
            self._base.destroy_cached_continuous_batching_manager()
            self._config.seed = None if params.is_greedy else params.seed
            self._params = params
            # It takes its sizes from its first call.
            self._answer([[0] * (self._max_length - 1)], replace(params, max_new_tokens=1))
        return self._answer(prompts, params)

    def _answer(self, prompts: list[list[int]], params: SamplingParams) -> Answers:
        start = time.perf_counter()
        results = list(
            self._base.generate_batch(
                prompts,
                generation_config=_generation_config(self._base, params),
                continuous_batching_config=self._config,
                max_new_tokens=params.max_new_tokens,
                record_timestamps=True,
                persistent_manager=True,
            ).values()
        )
        errors = [str(result.error) for result in results if result.error is not None]
        if errors or len(results) < len(prompts):
            reason = errors[0] if errors else "its log says why"
            raise RuntimeError(f"it answered {len(results) - len(errors)} of {len(prompts)} prompts ({reason})")
        end_ids = _end_ids(self._base)
        return Answers(
            token_ids=[cut_at_end(result.generated_tokens, end_ids) for result in results],
            seconds=max(result.timestamps[-1] for result in results) - start,
            first_seconds=[result.timestamps[0] - start for result in results],
        )


def cut_at_end(token_ids: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, which is kept; behind it `generate` pads."""
    for place, token_id in enumerate(token_ids, 1):
        if token_id in end_ids:
            return token_ids[:place]
    return list(token_ids)


class _FirstToken(BaseStreamer):
    """Notes when the first new token came; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds = 0.0
        self._num_puts = 0

    def put(self, value: Tensor) -> None:
        """Count what comes."""
        self._num_puts += 1
        if self._num_puts == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        """Nothing is left to do."""


def _generation_config(base: PreTrainedModel, params: SamplingParams, **config: Any) -> GenerationConfig:
    # Of the model's own settings only the special tokens: some ask for penalties that our requests do not have.
    own: GenerationConfig | None = base.generation_config
    pad = None if own is None else own.pad_token_id
    sampling = {} if params.is_greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        do_sample=not params.is_greedy,
        eos_token_id=None if own is None else own.eos_token_id,
        # Behind an answer's end, and hidden before a prompt: which one it is does not matter.
        pad_token_id=min(_end_ids(base), default=0) if pad is None else pad,
        **sampling,
        **config,
    )


def _end_ids(base: PreTrainedModel) -> frozenset[int]:
    own: GenerationConfig | None = base.generation_config
    eos = None if own is None else own.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _seed(params: SamplingParams) -> None:
    if not params.is_greedy and params.seed is not None:
        torch.manual_seed(params.seed)
