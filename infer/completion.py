"""A finished generation."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .detokenizer import decode
from .sequence import FinishReason, Logprob, Sequence
from .stats import Stats


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished generation."""

    request_id: int
    """As `add_request` returned it."""
    index: int
    """Which of the request's `n` texts, from 0."""
    prompt_token_ids: list[int]
    """The prompt as the model read it."""
    token_ids: list[int]
    """The generated tokens, the token that ended the text included."""
    text: str | None
    """The generated tokens as text, without special tokens, cut where a stop string ended it; None for an engine
    without a tokenizer."""
    finish_reason: FinishReason
    """`stop`: the text ended; `length`: the limit or the context was reached; `error`: see `error`."""
    stop_reason: int | str | None
    """The end token or the stop string that ended the text."""
    origins: list[str]
    """For each generated token the level whose own choice it was: a drafted token that all levels kept is `draft`'s,
    a recovered or bonus token that of the level which added it, the first one after a prompt `target`'s."""
    logprobs: list[Logprob] | None
    """One for each token, where they were asked for."""
    stats: Stats
    """What this generation took."""
    error: str | None = None
    """At which position the model's logits were NaN or infinite; the tokens before it stand."""


def build_completion(
    sequence: Sequence, level_names: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None
) -> Completion:
    """What a finished sequence comes to."""
    assert sequence.finish_reason is not None
    text = None
    if sequence.stop_strings is not None:
        text = sequence.stop_strings.text
    elif tokenizer is not None:
        text = decode(tokenizer, sequence.output_ids)
    return Completion(
        request_id=sequence.request_id,
        index=sequence.index,
        prompt_token_ids=sequence.prompt_ids,
        token_ids=sequence.output_ids,
        text=text,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        origins=[level_names[origin] for origin in sequence.origins],
        logprobs=None if sequence.params.logprobs is None else sequence.logprobs,
        stats=sequence.stats,
        error=sequence.error,
    )
