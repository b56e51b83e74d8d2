"""From recipe to adapter: the base's own responses, cached states, trained heads, measured acceptance."""

from .cache import StateCache
from .evaluate import evaluate
from .online import OnlineStates
from .pipeline import make_adapter, preprocess, train_adapter
from .plan import describe_plan
from .report import describe_acceptance
from .responses import Response
from .split import split_sequences
from .trainer import Trainer
from .vocabulary import frequent_tokens

__all__ = [
    "OnlineStates",
    "Response",
    "StateCache",
    "Trainer",
    "describe_acceptance",
    "describe_plan",
    "evaluate",
    "frequent_tokens",
    "make_adapter",
    "preprocess",
    "split_sequences",
    "train_adapter",
]
