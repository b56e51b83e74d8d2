"""The levels of a method: which layers and heads they are, and how much each asks of the one below."""

from collections.abc import Sequence as Items
from typing import NamedTuple

from ..heads import EarlyExitModel
from .config import EngineConfig
from .policy import DynamicPolicy, FixedPolicy, Policy


class Level(NamedTuple):
    """Decoder layers `[start, stop)` and what reads their output."""

    name: str
    start: int
    stop: int
    head: int | None
    """Index of the exit head; None is the base's own norm and LM head."""


def build_levels(model: EarlyExitModel, method: str) -> tuple[Level, ...]:
    """From the shallowest to the target; ValueError where the model has too few heads."""
    num_exits = {"autoregressive": 0, "single-layer": 1, "hispec": 2}[method]
    if len(model.heads) < num_exits:
        raise ValueError(
            f"method {method!r} needs {num_exits} exit head{'s' * (num_exits > 1)}, but the model has "
            f"{len(model.heads)}; load an adapter that has them, or choose another method"
        )
    names = (*("draft", "intermediate")[:num_exits], "target")
    stops = (*model.exit_layers[:num_exits], model.backbone.num_layers)
    starts = (0, *stops[:-1])
    heads = (*range(num_exits), None)
    return tuple(Level(*level) for level in zip(names, starts, stops, heads, strict=True))


def draft_lengths(config: EngineConfig) -> list[int]:
    """For each level below the target, the most tokens that the next level asks of it."""
    return {
        "autoregressive": [],
        "single-layer": [config.num_draft_tokens],
        "hispec": [config.num_draft_tokens, config.num_provisional_tokens],
    }[config.method]


def build_policies(config: EngineConfig, lengths: Items[int]) -> list[Policy]:
    """One for each of `lengths`."""
    if config.draft_policy == "fixed":
        return [FixedPolicy(max_length=length) for length in lengths]
    return [DynamicPolicy(max_length=length, min_confidence=config.min_confidence) for length in lengths]
