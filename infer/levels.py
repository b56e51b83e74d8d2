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


METHODS = ("autoregressive", "single-layer", "hispec")
"""By the number of exits that serve."""

NGRAM_LEVEL = "ngram"
"""What n-grams that take rounds over from exits are counted under."""

NUM_EXITS = {"ngram": 0, "lookahead": 0, "adadecode": 1, "sprinter": 1} | {
    method: number for number, method in enumerate(METHODS)
}
"""How many exits serve each method; the fewest for `adadecode`, which takes as many as there are."""


def build_levels(
    model: EarlyExitModel,
    method: str,
    exit_layers: Items[int] | None = None,  # of the model's exits, those that serve; None takes the shallowest
) -> tuple[Level, ...]:
    """From the shallowest to the target; ValueError where the model has not the heads that the method needs.

    They are named `draft`, `intermediate`, `intermediate-2` and so on, as far as the method has exits, and `target`.
    """
    num_exits = NUM_EXITS[method]
    if len(model.heads) < num_exits:
        raise ValueError(
            f"method {method!r} needs {num_exits} exit head{'s' * (num_exits > 1)}, but the model has "
            f"{len(model.heads)}; load an adapter that has them, or choose another method"
        )
    if method == "adadecode":
        num_exits = len(exit_layers or model.exit_layers)
    chosen = model.exit_layers[:num_exits] if exit_layers is None else tuple(exit_layers)
    if exit_layers is not None:
        _check_chosen(chosen, model.exit_layers, method, num_exits)
    further = (f"intermediate-{number}" for number in range(2, num_exits))
    names = (*("draft", "intermediate")[:num_exits], *further, "target")
    stops = (*chosen, model.backbone.num_layers)
    starts = (0, *stops[:-1])
    heads = (*(model.exit_layers.index(layer) for layer in chosen), None)
    return tuple(Level(*level) for level in zip(names, starts, stops, heads, strict=True))


def _check_chosen(chosen: tuple[int, ...], trained: tuple[int, ...], method: str, num_exits: int) -> None:
    shown, known = ",".join(map(str, chosen)), ",".join(map(str, trained))
    for layer in chosen:
        if layer not in trained:
            raise ValueError(f"exit layer {layer} has no head; the model has exits at {known or 'no layer'}")
    if len(chosen) != num_exits:
        raise ValueError(
            f"exit layers {shown} are {len(chosen)}, but method {method!r} takes {num_exits} of the model's {known}; "
            "name as many, or choose another method"
        )
    if list(chosen) != sorted(set(chosen)):
        raise ValueError(f"exit layers {shown} are not distinct and rising; name the draft's first")


def level_names(config: EngineConfig, levels: Items[Level]) -> tuple[str, ...]:
    """What the method's statistics are counted by; the n-grams that draft are no level of the model."""
    names = (*(["draft"] if config.method in ("ngram", "lookahead") else []), *(level.name for level in levels))
    return (NGRAM_LEVEL, *names) if config.ngram_drafts else names


def draft_lengths(config: EngineConfig, num_exits: int) -> list[int]:
    """For each level below the target, the most tokens that the next level asks of it."""
    return {
        "autoregressive": [],
        "single-layer": [config.num_draft_tokens],
        "hispec": [config.num_draft_tokens, config.num_provisional_tokens],
        "ngram": [config.num_ngram_tokens],
        "lookahead": [],
        "sprinter": [config.max_skipped_tokens],
        # All exits draft for the target together.
        "adadecode": [0] * (num_exits - 1) + [config.num_draft_tokens],
    }[config.method]


MAX_LAG = 64
"""Positions that an exit head may fall behind where rounds may go without it. Longer makes windows of hidden states
larger; shorter costs more: each time part of the head's one layer is read once for so many tokens of each sequence."""


def max_lag(config: EngineConfig) -> int:
    """The most committed positions that a head has not seen when a round begins.

    A method that always drafts by exits leaves two: the last token that a level below the target added, and the
    target's own.
    """
    return MAX_LAG if config.plan is not None or config.ngram_drafts else 2


def max_proposed(config: EngineConfig, num_exits: int) -> int:
    """The most tokens that wait for the target: one short of enough, the intermediate level verifies a whole draft more
    and adds its token."""
    return max(sum(draft_lengths(config, num_exits)), config.num_ngram_tokens if config.ngram_drafts else 0)


def window_size(config: EngineConfig, num_exits: int) -> int:
    """Positions whose states are kept: what a head has not seen, a round's proposals, and one further back, whose final
    state is the context of the first."""
    return max_lag(config) + max_proposed(config, num_exits) + 1


def build_policies(config: EngineConfig, lengths: Items[int]) -> list[Policy]:
    """One for each of `lengths`."""
    if config.draft_policy == "fixed":
        return [FixedPolicy(max_length=length) for length in lengths]
    return [DynamicPolicy(max_length=length, min_confidence=config.min_confidence) for length in lengths]
