"""From recipe to adapter: the base's own responses, cached states, trained heads, measured acceptance."""

from .cache import Batch, StateCache
from .cache_writer import extend_cache
from .evaluate import evaluate
from .loss import LOSSES, chunked_loss
from .pipeline import (
    cache_states,
    finished_responses,
    make_adapter,
    make_model,
    regenerate_responses,
    resolve,
    train_adapter,
)
from .prompts import Prompt, read_prompts
from .report import describe_acceptance
from .responses import Response, regenerate, response_order
from .split import split_sequences
from .trainer import Trainer
from .vocabulary import frequent_tokens

__all__ = [
    "LOSSES",
    "Batch",
    "Prompt",
    "Response",
    "StateCache",
    "Trainer",
    "cache_states",
    "chunked_loss",
    "describe_acceptance",
    "evaluate",
    "extend_cache",
    "finished_responses",
    "frequent_tokens",
    "make_adapter",
    "make_model",
    "read_prompts",
    "regenerate",
    "regenerate_responses",
    "resolve",
    "response_order",
    "split_sequences",
    "train_adapter",
]
