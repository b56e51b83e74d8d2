"""hispec inside the `generate` of transformers: `base.generate(**inputs, custom_generate=hispec_generate(engine))`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .config import SamplingParams
from .engine import Engine


class Honoured(NamedTuple):
    """A setting of `generate` that requests have too; transformers hands it over as a logits processor."""

    processor: type
    attribute: str
    """Of the processor: its value."""
    param: str
    """Of `SamplingParams`; the generation config has it under the same name."""
    needs_sampling: bool
    """Whether it means nothing to a greedy request."""


# In the order in which the engine applies them. A new field of SamplingParams is a new line here.
HONOURED = (
    Honoured(RepetitionPenaltyLogitsProcessor, "penalty", "repetition_penalty", needs_sampling=False),
    Honoured(TemperatureLogitsWarper, "temperature", "temperature", needs_sampling=True),
    Honoured(TopKLogitsWarper, "top_k", "top_k", needs_sampling=True),
    Honoured(TopPLogitsWarper, "top_p", "top_p", needs_sampling=True),
    Honoured(MinPLogitsWarper, "min_p", "min_p", needs_sampling=True),
)

ROW_BY_ROW = (StopStringCriteria, MaxTimeCriteria)
"""Stopping criteria that look at each row by itself, so that rows may be at different lengths."""

OTHERWISE_HONOURED = {
    *("max_length", "max_new_tokens", "do_sample", "eos_token_id", "pad_token_id", "num_return_sequences"),
    *("max_time", "stop_strings", "return_dict_in_generate", "token_healing"),
}
WITHOUT_EFFECT = {
    # Names; how `generate` computes, not what; settings of beams and assistants, which are refused themselves.
    *("bos_token_id", "decoder_start_token_id", "transformers_version", "is_assistant", "use_cache", "max_cache_len"),
    *("cache_config", "compile_config", "disable_compile", "prefill_chunk_size", "early_stopping", "length_penalty"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
}
WITHOUT_EFFECT_ON_GREEDY = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
EXPECTED_INPUTS = {"attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache"}


def hispec_generate(engine: Engine) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """A `custom_generate` for the base of `engine`: the same output as without it, sooner.

    Sampled rows are seeded from torch's global generator, so `torch.manual_seed` makes them repeatable. A text ends
    where the model's context does. A stopping criterion of the user's own is asked after every token, for a batch of
    one. `generate` raises ValueError for whatever cannot be honoured, and names it.
    """

    def generate(
        model: PreTrainedModel,
        input_ids: Tensor,  # [B, T] int64
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        # Named here, it comes to us; otherwise `generate` asks for a tokenizer that it has already put away.
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:  # [B, T + new] int64
        # Transformers drops these two on the way to a callable: only in its own frame are they to be seen.
        hidden = _arguments_of_generate(inspect.currentframe())
        streamer = streamer or hidden.get("streamer")
        if hidden.get("assistant_model") is not None:
            raise _refusal("assistant_model")
        if model is not engine.model.base:
            raise ValueError(
                "this model is not the base of hispec_generate's engine; call generate of engine.model.base"
            )
        check_config(generation_config)
        prompts = unpad(input_ids, model_kwargs)
        if streamer is not None and len(prompts) > 1:
            raise ValueError(f"a streamer takes one prompt at a time, and there are {len(prompts)}; give one")
        options = sampling_options(generation_config, logits_processor) | length_options(stopping_criteria, input_ids)
        if "repetition_penalty" in options and any(len(prompt) < input_ids.shape[1] for prompt in prompts):
            # `generate` punishes the padding token too, as if the prompt said it.
            raise _refusal("repetition_penalty for prompts of different lengths")
        each = [SamplingParams(**(options | _seed(generation_config))) for _ in prompts]
        criteria = _other_criteria(stopping_criteria, len(prompts))
        if stop_strings is not None:
            if engine.tokenizer is None:
                raise ValueError("stop strings need a tokenizer; make the engine with one")
            criteria.append(StopStringCriteria(engine.tokenizer, stop_strings))
        rows = _run(engine, prompts, each, criteria, input_ids, streamer)
        sequences = cast(torch.LongTensor, _pad(input_ids, rows, generation_config))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    return generate


def check_config(config: GenerationConfig) -> None:
    """Raise ValueError for the first setting that differs from its neutral value and cannot be honoured."""
    neutral = GenerationConfig._get_default_generation_params() | {"cache_implementation": "dynamic"}
    known = OTHERWISE_HONOURED | WITHOUT_EFFECT | {honoured.param for honoured in HONOURED}
    known |= set() if config.do_sample else WITHOUT_EFFECT_ON_GREEDY
    # A model's file may have entries of its own, which `generate` ignores too.
    for name in sorted(vars(GenerationConfig()).keys() - known):
        value = getattr(config, name, None)
        is_off = name.startswith("_") or value is None or value is False or value == []
        if not is_off and value != neutral.get(name):
            raise _refusal(f"{name}={value!r}")


def unpad(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The prompts of a left-padded batch; ValueError for other inputs than ids, their mask and their positions."""
    for name, value in model_kwargs.items():
        if name not in EXPECTED_INPUTS and value is not None and value is not False:
            raise _refusal(name)
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise _refusal("cache")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    if mask.shape != input_ids.shape or (mask.diff(dim=1) < 0).any() or not mask[:, -1:].all():
        raise ValueError("hispec takes prompts padded on the left only; set `padding_side='left'` in the tokenizer")
    positions = model_kwargs.get("position_ids")
    if positions is not None and (positions != mask.cumsum(-1) - 1)[mask.bool()].any():
        raise _refusal("position_ids")
    return [ids[kept].tolist() for ids, kept in zip(input_ids, mask.bool(), strict=True)]


def sampling_options(config: GenerationConfig, processors: LogitsProcessorList) -> dict[str, Any]:
    """What the prepared logits processors say, as options of `SamplingParams`."""
    classes = [honoured.processor for honoured in HONOURED]
    places = [classes.index(type(processor)) if type(processor) in classes else None for processor in processors]
    options: dict[str, Any] = {"temperature": 1.0}
    previous = -1
    for processor, place in zip(processors, places, strict=True):
        # By hand one may stand twice, or before those that the engine applies first.
        if place is None or place <= previous:
            raise _refusal(f"the logits processor {type(processor).__name__}")
        previous = place
        options[HONOURED[place].param] = getattr(processor, HONOURED[place].attribute)
    if config.do_sample:
        return options
    greedy = {honoured.param for honoured in HONOURED if not honoured.needs_sampling}
    return {name: value for name, value in options.items() if name in greedy} | {"temperature": 0.0}


def length_options(criteria: StoppingCriteriaList, input_ids: Tensor) -> dict[str, Any]:
    """The length limit and the end tokens, as options of `SamplingParams`."""
    options: dict[str, Any] = {"ignore_eos": True}
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            options["max_new_tokens"] = criterion.max_length - input_ids.shape[1]
        elif isinstance(criterion, EosTokenCriteria):
            options["stop_token_ids"] = tuple(criterion.eos_token_id.tolist())
    return options


def _other_criteria(criteria: StoppingCriteriaList, num_rows: int) -> list[StoppingCriteria]:
    others = [criterion for criterion in criteria if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)]
    for criterion in others:
        if num_rows > 1 and not isinstance(criterion, ROW_BY_ROW):
            raise _refusal(f"the stopping criterion {type(criterion).__name__} for {num_rows} prompts together")
    return others


def _run(
    engine: Engine,
    prompts: list[list[int]],
    each: list[SamplingParams],
    criteria: list[StoppingCriteria],
    input_ids: Tensor,  # [B, T]
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """The new tokens of each row."""
    for prompt, params in zip(prompts, each, strict=True):
        engine.check_room(engine.encode(prompt), params)
    rows: list[_Row] = []
    try:
        for prompt, params, before in zip(prompts, each, input_ids, strict=True):
            rows.append(_Row(engine, engine.add_request(prompt, params), before, criteria))
        while not all(row.is_finished for row in rows):
            engine.advance()
            for row in rows:
                new = row.read()
                if streamer is not None and new:
                    streamer.put(torch.tensor(new))
    finally:
        for row in rows:
            row.finish()
    if streamer is not None:
        streamer.end()
    return [row.token_ids for row in rows]


class _Row:
    """One row of the batch."""

    def __init__(self, engine: Engine, request_id: int, before: Tensor, criteria: list[StoppingCriteria]) -> None:
        self._engine = engine
        self._follower = engine.follow(request_id)
        self._before = before
        self._criteria = criteria
        self.token_ids: list[int] = []
        self.is_finished = False

    def read(self) -> list[int]:
        """The new tokens, up to the one at which a criterion ends the row."""
        delta = None if self.is_finished else self._follower.read()
        if delta is None:
            return []
        for number, token_id in enumerate(delta.token_ids, 1):
            self.token_ids.append(token_id)
            if self._is_stopped():
                self.finish()
                return delta.token_ids[:number]
        self.is_finished = delta.finish_reason is not None
        return delta.token_ids

    def finish(self) -> None:
        """Give the request up if it still runs."""
        if not self.is_finished and self._follower.completion is None:
            self._engine.abort(self._follower.request_id)
        self.is_finished = True

    def _is_stopped(self) -> bool:
        if not self._criteria:
            return False
        new = torch.tensor(self.token_ids, device=self._before.device)
        ids = torch.cat([self._before, new]).unsqueeze(0)
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._criteria)


def _pad(input_ids: Tensor, rows: list[list[int]], config: GenerationConfig) -> Tensor:
    """Prompts and answers side by side, as `generate` returns them."""
    width = max(map(len, rows))
    pad = config._pad_token_tensor
    if pad is None and any(len(row) < width for row in rows):
        raise ValueError("the answers differ in length and there is no padding token; give pad_token_id")
    filled = [row + [0 if pad is None else int(pad)] * (width - len(row)) for row in rows]
    return torch.cat([input_ids, torch.tensor(filled, device=input_ids.device, dtype=input_ids.dtype)], dim=1)


def _seed(config: GenerationConfig) -> dict[str, Any]:
    return {"seed": int(torch.randint(2**62, ()))} if config.do_sample else {}


def _arguments_of_generate(frame: Any) -> dict[str, Any]:
    """The local variables of the caller, if that is transformers' `generate`."""
    caller = None if frame is None else frame.f_back
    code = inspect.unwrap(GenerationMixin.generate).__code__
    return {} if caller is None or caller.f_code is not code else dict(caller.f_locals)


def _refusal(what: str) -> ValueError:
    return ValueError(f"hispec_generate cannot honour {what}; leave it out, or call generate without custom_generate")
