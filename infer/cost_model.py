"""The cost model: what a round of speculation costs on a machine, and how many tokens it brings. Pure functions.

A round asks the draft level for K tokens; under HiSpec (arXiv 2510.01336) the intermediate level verifies these, and
again, until N provisional tokens wait; then the target verifies. Seconds come from `Costs`, measured on a machine or
computed on paper; how often a token is kept comes from `Acceptance`, measured on held-out responses or on prompts.
Where a setting's own rounds were counted (`Acceptance.courses`), these say how many tokens a round brings; elsewhere
tokens of a draft are taken to be kept independently of one another but for their distance to the last commit. Taken for
granted: sequences of a batch are independent, passes cost what their rows cost, and all sequences decode (reading
prompts, and the end of a batch that is not filled up, are left out).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from .acceptance_length import hispec_length, provisional_lengths, single_layer_length, verifications
from .config import Method
from .course import Course

FURTHER_ROWS = 7
"""Rows over which `row_cost` looks: as many as a copied draft has at most, or nearly."""
LEAST_LAYER = 0.5
"""Share of a layer's time that is taken to be left behind the shortest context: the rest could be noise."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan chooses."""

    method: Method
    exit_layers: tuple[int, ...]
    """Exits that are used: none, the draft's, or the draft's and the intermediate's."""
    num_draft_tokens: int = 1
    """K; means nothing to `autoregressive`."""
    num_provisional_tokens: int = 1
    """N; means something to `hispec` alone."""

    def __str__(self) -> str:
        if self.method == "autoregressive":
            return self.method
        exits = ", ".join(map(str, self.exit_layers))
        provisional = f", {self.num_provisional_tokens} provisional" if self.method == "hispec" else ""
        return f"{self.method} at {exits}: {self.num_draft_tokens} drafted{provisional}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds by sequences and rows of each, read between its points and, past the last, along the last slope."""

    batch_sizes: tuple[int, ...]
    num_rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    """`[batch size][rows]`."""
    step: int = 1
    """Rows, of all sequences, that the machine takes at once: one more than these takes as long as so many more."""

    def at(self, batch_size: float, num_rows: float) -> float:
        """Seconds for `batch_size` sequences of `num_rows` rows each."""
        if batch_size * num_rows > self.step > 1:
            num_rows = math.ceil(batch_size * num_rows / self.step - 1e-9) * self.step / batch_size
        by_batch = [_interpolate(self.num_rows, row, num_rows) for row in self.seconds]
        return _interpolate(self.batch_sizes, by_batch, batch_size)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds that grow with the sequences and with their rows."""

    fixed: float = 0.0
    by_sequence: float = 0.0
    by_row: float = 0.0

    def at(self, batch_size: float, num_rows: float) -> float:
        """Seconds for `batch_size` sequences of `num_rows` rows each."""
        return self.fixed + batch_size * (self.by_sequence + self.by_row * num_rows)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the parts of a round take."""

    num_layers: int
    """Depth of the base, L."""
    layer: Table
    """One decoder layer."""
    target_head: Table
    """The base's final norm and LM head."""
    exit_heads: Mapping[int, Table]
    """By exit layer: the exit head with its LM head."""
    per_pass: Overhead = Overhead()
    """What a pass through a lower level takes besides its layers."""
    per_draw: Overhead = Overhead()
    """What drafting one token takes besides its pass and its head: drawing it."""
    per_middle: Overhead = Overhead()
    """What a verification by the intermediate level takes besides its layers and head."""
    per_round: Overhead = Overhead()
    """The same for the target, with all that a round takes beside its levels."""
    context: float = 0.0
    """Tokens before those of a pass, in the mean of the sequences, for which all this holds."""
    layer_by_token: Table | None = None
    """What one more of them adds to a decoder layer; None where it is not known."""

    def behind(self, context: float | None) -> "Costs":
        """The costs behind so many tokens; as they are where None is said, or nothing is known of others."""
        if context is None or self.layer_by_token is None:
            return self
        further = context - self.context
        seconds = [
            tuple(max(value + further * by_token, value * LEAST_LAYER) for value, by_token in zip(*rows, strict=True))
            for rows in zip(self.layer.seconds, self.layer_by_token.seconds, strict=True)
        ]
        return replace(self, context=context, layer=replace(self.layer, seconds=tuple(seconds)))


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How often what one exit proposes is what a deeper level says."""

    hops: Mapping[tuple[int, int], tuple[float, ...]]
    """By (exit layer, deeper exit layer or depth of the base): the share of tokens at place 0, 1, ... of a draft that
    are kept, given that all before it were; the last one goes for all that follow."""
    courses: Mapping[Setting, Course] = field(default_factory=dict)
    """Of the settings whose own rounds were counted: more exact than `hops`, which do not know where drafts begin."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one setting does on a batch."""

    setting: Setting
    tokens_per_round: float
    """Of each sequence, with the recovered or bonus token: the acceptance length at the target."""
    seconds_per_round: float
    """Of the whole batch."""
    seconds_by_level: Mapping[str, float]
    """Of a round."""
    tokens_per_second: float
    """Of all sequences together, without prefill."""


def predict(
    setting: Setting,
    costs: Costs,
    acceptance: Acceptance,
    batch_size: int,
) -> Prediction:
    """Tokens and seconds of a round in a batch of sequences that all decode."""
    depth, num_drafted = costs.num_layers, setting.num_draft_tokens
    if setting.method == "hispec":
        return _predict_hispec(setting, costs, acceptance, batch_size)
    if setting.method == "autoregressive":
        return _prediction(setting, batch_size, 1.0, {"target": _verify(costs, 0, depth, batch_size, 1)})
    draft_exit = setting.exit_layers[0]
    seconds = {
        "draft": _draft(costs, draft_exit, batch_size, num_drafted),
        "target": _verify(costs, draft_exit, depth, batch_size, num_drafted + 1),
    }
    course = acceptance.courses.get(setting)
    if course is None:
        num_tokens = single_layer_length(acceptance.hops[draft_exit, depth], num_drafted)
    else:
        num_tokens = course.tokens_per_round
    return _prediction(setting, batch_size, num_tokens, seconds)


def _predict_hispec(setting: Setting, costs: Costs, acceptance: Acceptance, batch_size: int) -> Prediction:
    draft_exit, middle_exit = setting.exit_layers
    num_drafted = setting.num_draft_tokens
    started, num_waiting, num_tokens = _rounds(setting, acceptance, costs.num_layers)
    # The newest provisional token goes through the lower levels by itself before the target verifies.
    draft = _pass(costs, 0, draft_exit, batch_size)
    middle = _pass(costs, draft_exit, middle_exit, batch_size)
    for num_passes, active in in_batch(started, batch_size):
        draft += num_passes * _draft(costs, draft_exit, active, num_drafted)
        middle += num_passes * _verify(costs, draft_exit, middle_exit, active, num_drafted + 1)
    seconds = {
        "draft": draft,
        "intermediate": middle,
        "target": _verify(costs, middle_exit, costs.num_layers, batch_size, 1 + num_waiting),
    }
    return _prediction(setting, batch_size, num_tokens, seconds)


def _rounds(setting: Setting, acceptance: Acceptance, depth: int) -> tuple[Items[float], float, float]:
    """Of a round by `hispec`: how likely its 1st, 2nd, ... verification by the intermediate level comes, how many
    tokens wait for the target on average, and how many it commits."""
    course = acceptance.courses.get(setting)
    if course is not None:
        return course.verifications, course.num_waiting, course.tokens_per_round
    draft_exit, middle_exit = setting.exit_layers
    lengths = setting.num_draft_tokens, setting.num_provisional_tokens
    kept_drafts = acceptance.hops[draft_exit, middle_exit]
    num_waiting = sum(number * share for number, share in enumerate(provisional_lengths(kept_drafts, *lengths)))
    num_tokens = hispec_length(kept_drafts, acceptance.hops[middle_exit, depth], *lengths)
    return verifications(kept_drafts, *lengths), num_waiting, num_tokens


def middle_passes(
    kept_drafts: Items[float],  # by the intermediate, by place in a draft
    num_draft_tokens: int,
    num_provisional_tokens: int,
    batch_size: int,
) -> list[tuple[float, float]]:
    """Of the 1st, 2nd, ... verification by the intermediate level in a round of a batch: the probability that it comes,
    and how many sequences it then has on average.

    The batch goes on while any of its sequences does, with those alone that do.
    """
    return in_batch(verifications(kept_drafts, num_draft_tokens, num_provisional_tokens), batch_size)


def in_batch(
    started: Items[float],  # by verification: the probability that it comes for one sequence
    batch_size: int,
) -> list[tuple[float, float]]:
    """For each verification: the probability that it comes for any of the batch, and for how many it then does."""
    passes = []
    for share in started:
        if share > 0:
            # `1 - (1 - share) ** batch_size`, for shares however small.
            chance = 1.0 if share >= 1 else -math.expm1(batch_size * math.log1p(-share))
            passes.append((chance, batch_size * share / chance))
    return passes


def _pass(costs: Costs, start: int, stop: int, batch_size: float) -> float:
    """Seconds of one token of each sequence through layers `[start, stop)` of a lower level."""
    return (stop - start) * costs.layer.at(batch_size, 1) + costs.per_pass.at(batch_size, 1)


def _draft(costs: Costs, exit_layer: int, batch_size: float, num_drafted: int) -> float:
    """Seconds of drafting; the last drafted token goes through the level too, without being scored."""
    scored = costs.exit_heads[exit_layer].at(batch_size, 1) + costs.per_draw.at(batch_size, 1)
    return (num_drafted + 1) * _pass(costs, 0, exit_layer, batch_size) + num_drafted * scored


def _verify(costs: Costs, start: int, stop: int, batch_size: float, num_rows: float) -> float:
    """Seconds of layers `[start, stop)`, of the head behind them and of the verification by it."""
    is_target = stop == costs.num_layers
    head = costs.target_head if is_target else costs.exit_heads[stop]
    overhead = costs.per_round if is_target else costs.per_middle
    layers = (stop - start) * costs.layer.at(batch_size, num_rows)
    return layers + head.at(batch_size, num_rows) + overhead.at(batch_size, num_rows)


def _prediction(setting: Setting, batch_size: int, num_tokens: float, seconds: dict[str, float]) -> Prediction:
    total = sum(seconds.values())
    return Prediction(
        setting=setting,
        tokens_per_round=num_tokens,
        seconds_per_round=total,
        seconds_by_level=seconds,
        tokens_per_second=batch_size * num_tokens / total,
    )


def _interpolate(points: Items[int], values: Items[float], place: float) -> float:
    if len(points) == 1:
        return values[0]
    index = min(max(bisect_right(points, place) - 1, 0), len(points) - 2)
    share = (place - points[index]) / (points[index + 1] - points[index])
    rise = values[index + 1] - values[index]
    if place > points[-1]:
        # Two noisy points may fall; more rows never take less time.
        return values[-1] + (share - 1) * max(0.0, rise)
    return values[index] + share * rise


def drafted_token_seconds(costs: Costs, exit_layer: int, batch_size: float) -> float:
    """Seconds of drafting one token of each of so many sequences: its pass, its head and its draw."""
    scored = costs.exit_heads[exit_layer].at(batch_size, 1) + costs.per_draw.at(batch_size, 1)
    return _pass(costs, 0, exit_layer, batch_size) + scored


def verified_draft_seconds(costs: Costs, exit_layer: int, batch_size: float, num_drafted: float) -> float:
    """Seconds of a round by `single-layer` behind its draws, where sequences have drafted so many tokens on average:
    the newest token of each through the lower level, and the target's verification."""
    return _pass(costs, 0, exit_layer, batch_size) + _verify(
        costs, exit_layer, costs.num_layers, batch_size, num_drafted + 1
    )


def row_cost(costs: Costs, batch_size: int) -> float:
    """What one more row adds to the target's pass over a batch, in parts of what the pass takes whatever its rows."""
    plain, longer = (
        _verify(costs, 0, costs.num_layers, batch_size, 1 + further / batch_size) for further in (0, FURTHER_ROWS)
    )
    by_row = max(0.0, (longer - plain) / FURTHER_ROWS)
    fixed = plain - batch_size * by_row
    return by_row / fixed if fixed > by_row else 1.0
