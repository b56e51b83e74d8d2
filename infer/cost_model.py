"""The cost model: what a round of speculation costs on a machine, and how many tokens it brings. Pure functions.

A round asks the draft level for K tokens; under HiSpec (arXiv 2510.01336) the intermediate level verifies these, and
again, until N provisional tokens wait; then the target verifies. Seconds come from `Costs`, measured on a machine or
computed on paper; how often a token is kept comes from `Acceptance`, measured on held-out responses or on prompts.
Taken for granted: tokens of a draft are kept independently of one another but for their distance to the last commit,
and passes cost what their rows cost.
"""

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from .config import Method


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

    def at(self, batch_size: float, num_rows: float) -> float:
        """Seconds for `batch_size` sequences of `num_rows` rows each."""
        by_batch = [_interpolate(self.num_rows, row, num_rows) for row in self.seconds]
        return _interpolate(self.batch_sizes, by_batch, batch_size)


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
    draft_overhead: Table
    """What drafting one token takes besides, at one row."""
    verify_overhead: Table
    """What a verification takes besides: drawing, comparing, committing."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How often what one exit proposes is what a deeper level says."""

    hops: Mapping[tuple[int, int], tuple[float, ...]]
    """By (exit layer, deeper exit layer or depth of the base): `[d]` is the probability that a token at distance d + 1
    to the last commit is kept, given that all before it were; the last value goes for all that follow."""

    def at(self, lower: int, upper: int, distance: int) -> float:
        """The probability at a distance, from 1."""
        values = self.hops[lower, upper]
        return values[min(distance, len(values)) - 1]


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
    if setting.method == "autoregressive":
        seconds = {"target": _verify(costs, 0, costs.num_layers, batch_size, 1)}
        return _prediction(setting, batch_size, 1.0, seconds)
    draft_exit = setting.exit_layers[0]
    num_drafted = setting.num_draft_tokens
    if setting.method == "single-layer":
        chances = [acceptance.at(draft_exit, costs.num_layers, d) for d in range(1, num_drafted + 1)]
        seconds = {
            "draft": _draft(costs, draft_exit, batch_size, num_drafted),
            "target": _verify(costs, draft_exit, costs.num_layers, batch_size, num_drafted + 1),
        }
        return _prediction(setting, batch_size, 1 + sum(survival(chances)), seconds)
    return _predict_hispec(setting, costs, acceptance, batch_size)


def survival(chances: Items[float]) -> list[float]:
    """`[k]`: the probability that tokens 0 to k are all kept, each with its chance given those before it."""
    kept, result = 1.0, []
    for chance in chances:
        kept *= chance
        result.append(kept)
    return result


def provisional_lengths(
    chances: Items[float],  # [d], that the intermediate keeps a draft at distance d + 1 to the last commit
    num_draft_tokens: int,
    num_provisional_tokens: int,
) -> tuple[list[float], list[dict[int, float]]]:
    """How the intermediate level fills up: `[j]`, the probability that it verifies a j + 1-th time, and the
    distribution of provisional tokens after each verification, over sequences that are then done."""
    waiting, going_on, finished = {0: 1.0}, [], []
    while waiting:
        going_on.append(sum(waiting.values()))
        following: dict[int, float] = {}
        for number, share in waiting.items():
            kept = share
            for place in range(num_draft_tokens):
                chance = chances[min(number + place, len(chances) - 1)]
                # Rejected here: those before it and the recovered token are provisional.
                _add(following, number + place + 1, kept * (1 - chance))
                kept *= chance
            _add(following, number + num_draft_tokens + 1, kept)
        finished.append({n: share for n, share in following.items() if n >= num_provisional_tokens})
        waiting = {n: share for n, share in following.items() if n < num_provisional_tokens and share > 0}
    return going_on, finished


def _predict_hispec(setting: Setting, costs: Costs, acceptance: Acceptance, batch_size: int) -> Prediction:
    draft_exit, middle_exit = setting.exit_layers
    num_drafted, num_wanted = setting.num_draft_tokens, setting.num_provisional_tokens
    longest = num_wanted + num_drafted
    chances = [acceptance.at(draft_exit, middle_exit, d) for d in range(1, longest + 1)]
    going_on, finished = provisional_lengths(chances, num_drafted, num_wanted)
    draft = middle = 0.0
    for share in going_on:
        # The batch goes on while any of its sequences does, with those alone that do.
        chance = 1 - (1 - share) ** batch_size
        active = batch_size * share / chance
        draft += chance * _draft(costs, draft_exit, active, num_drafted)
        middle += chance * _verify(costs, draft_exit, middle_exit, active, num_drafted + 1)
    lengths: dict[int, float] = {}
    for each in finished:
        for number, share in each.items():
            _add(lengths, number, share)
    kept = survival([acceptance.at(middle_exit, costs.num_layers, d) for d in range(1, longest + 1)])
    num_rows = 1 + sum(number * share for number, share in lengths.items())
    # The newest provisional token goes through the lower levels by itself before the target verifies.
    draft += draft_exit * costs.layer.at(batch_size, 1)
    middle += (middle_exit - draft_exit) * costs.layer.at(batch_size, 1)
    seconds = {
        "draft": draft,
        "intermediate": middle,
        "target": _verify(costs, middle_exit, costs.num_layers, batch_size, num_rows),
    }
    num_tokens = 1 + sum(share * sum(kept[:number]) for number, share in lengths.items())
    return _prediction(setting, batch_size, num_tokens, seconds)


def _draft(costs: Costs, exit_layer: int, batch_size: float, num_drafted: int) -> float:
    """Seconds of drafting; the last drafted token goes through the level too, without being scored."""
    layers = exit_layer * costs.layer.at(batch_size, 1)
    scored = costs.exit_heads[exit_layer].at(batch_size, 1) + costs.draft_overhead.at(batch_size, 1)
    return num_drafted * (layers + scored) + layers


def _verify(costs: Costs, start: int, stop: int, batch_size: float, num_rows: float) -> float:
    """Seconds of layers `[start, stop)`, of the head behind them and of the verification by it."""
    head = costs.target_head if stop == costs.num_layers else costs.exit_heads[stop]
    layers = (stop - start) * costs.layer.at(batch_size, num_rows)
    return layers + head.at(batch_size, num_rows) + costs.verify_overhead.at(batch_size, num_rows)


def _prediction(setting: Setting, batch_size: int, num_tokens: float, seconds: dict[str, float]) -> Prediction:
    total = sum(seconds.values())
    return Prediction(
        setting=setting,
        tokens_per_round=num_tokens,
        seconds_per_round=total,
        seconds_by_level=seconds,
        tokens_per_second=batch_size * num_tokens / total,
    )


def _add(shares: dict[int, float], key: int, share: float) -> None:
    shares[key] = shares.get(key, 0.0) + share


def _interpolate(points: Items[int], values: Items[float], place: float) -> float:
    if len(points) == 1:
        return values[0]
    index = min(max(bisect_right(points, place) - 1, 0), len(points) - 2)
    share = (place - points[index]) / (points[index + 1] - points[index])
    return values[index] + share * (values[index + 1] - values[index])
