"""The planner: which method, exits and lengths are fastest here, by the cost model."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from math import log
from typing import Any

from .cost_model import Acceptance, Costs, Prediction, Setting, predict
from .replay import MIN_DRAFTS, acceptance_from_list

MAX_DRAFT_TOKENS = 6
MAX_PROVISIONAL_TOKENS = 8
MARGIN, MARGIN_PER_SEQUENCE = 1.05, 0.01
"""Drafts must win by so much over plain decoding, and by so much more for each sequence of the batch: predictions are
wrong by 1.5 % for one sequence and 5 % for four (medians), and a batch gains less."""

ALIKE = 0.98
"""Predictions at least so close to the best are alike, and the one with the shortest drafts is taken: it loses least
where tokens are kept less often than was measured."""

AUTOREGRESSIVE = Setting(method="autoregressive", exit_layers=())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do at every batch size."""

    choices: Mapping[int, Prediction]
    """By batch size, rising; a size between two goes by the smaller one."""
    plain: Mapping[int, Prediction]
    """By batch size: what plain decoding would do."""
    engine: Setting
    """What one engine for all of these sizes is built with: method, exits, and the longest drafts of any round."""
    engine_choices: Mapping[int, Prediction]
    """By batch size: what that engine does where drafts are kept as was measured; its rounds follow what is kept."""

    def at(self, batch_size: int) -> Setting:
        """The setting for so many sequences."""
        sizes = [size for size in self.choices if size <= batch_size]
        return self.choices[max(sizes, default=min(self.choices))].setting


def candidates(exit_layers: Items[int]) -> Iterator[Setting]:
    """Every setting that heads at these exits allow."""
    yield AUTOREGRESSIVE
    for exit_layer in exit_layers:
        for number in range(1, MAX_DRAFT_TOKENS + 1):
            yield Setting(method="single-layer", exit_layers=(exit_layer,), num_draft_tokens=number)
    for pair in combinations(exit_layers, 2):
        for number in range(1, MAX_DRAFT_TOKENS + 1):
            for provisional in range(1, MAX_PROVISIONAL_TOKENS + 1):
                yield Setting(
                    method="hispec",
                    exit_layers=pair,
                    num_draft_tokens=number,
                    num_provisional_tokens=provisional,
                )


def plan(costs: Costs, acceptance: Acceptance, batch_sizes: Items[int]) -> Plan:
    """The fastest setting by `predict` for each batch size, plain decoding unless another one wins by `MARGIN`."""
    settings = list(candidates(sorted(costs.exit_heads)))
    plain = {size: predict(AUTOREGRESSIVE, costs, acceptance, size) for size in sorted(batch_sizes)}
    found = {size: [predict(each, costs, acceptance, size) for each in settings] for size in plain}
    choices = {size: _choose(found[size], plain[size], size) for size in plain}
    # An engine has one method and exits, and may be plain in any round: it loses nothing where drafts do not pay.
    engines = {}
    for setting in map(_longest, settings):
        engines[setting] = {
            size: _choose([each for each in found[size] if _longest(each.setting) == setting], plain[size], size)
            for size in plain
        }

    def gain(setting: Setting) -> float:
        rates = engines[setting]
        return sum(log(rates[size].tokens_per_second / plain[size].tokens_per_second) for size in plain)

    engine = max(engines, key=gain)
    return Plan(choices=choices, plain=plain, engine=engine, engine_choices=engines[engine])


def margin(batch_size: int) -> float:
    """Times the tokens a second of plain decoding that drafts must promise."""
    return MARGIN + MARGIN_PER_SEQUENCE * batch_size


def _choose(predictions: Items[Prediction], plain: Prediction, batch_size: int) -> Prediction:
    best = _shortest_of_the_best([plain, *predictions])
    return best if best.tokens_per_second > plain.tokens_per_second * margin(batch_size) else plain


def _longest(setting: Setting) -> Setting:
    """The same method and exits with the longest drafts."""
    if setting.method == "autoregressive":
        return setting
    provisional = MAX_PROVISIONAL_TOKENS if setting.method == "hispec" else setting.num_provisional_tokens
    return replace(setting, num_draft_tokens=MAX_DRAFT_TOKENS, num_provisional_tokens=provisional)


def _shortest_of_the_best(predictions: Items[Prediction]) -> Prediction:
    fastest = max(prediction.tokens_per_second for prediction in predictions)
    alike = [prediction for prediction in predictions if prediction.tokens_per_second >= fastest * ALIKE]
    return min(alike, key=lambda p: (_length(p.setting), -p.tokens_per_second))


def _length(setting: Setting) -> int:
    lengths = (0, setting.num_draft_tokens, setting.num_draft_tokens + setting.num_provisional_tokens)
    return lengths[len(setting.exit_layers)]


def measured_acceptance(
    report: Mapping[str, Any] | None,  # `acceptance` of an adapter's run.json, as `hispec.train.evaluate` writes it
    exit_layers: Items[int],
    num_layers: int,
    *,
    greedy: bool = True,
) -> Acceptance:
    """What an adapter's report tells: the rounds of every setting, greedy or sampled at temperature 1.

    Reports that are older tell only shares by place in a draft, which promise too much to long drafts; their sampled
    ones are scaled by what the expected acceptance is to the agreement. Raises ValueError where there are exits and the
    report does not tell how they do.
    """
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        kept = (report or {})["courses"]["greedy" if greedy else "sampled"]
        return acceptance_from_list(kept, exit_layers, num_layers)
    levels = [*exit_layers, num_layers]
    hops = {}
    try:
        for lower, upper in combinations(levels, 2):
            name = f"{lower}->{'target' if upper == num_layers else upper}"
            found = (report or {})["by_place"][name]
            factor = 1.0
            if not greedy:
                whole = (report or {})["hops"][name]
                factor = whole["acceptance"] / max(whole["agreement"], 1e-9)
            pairs = zip(found["agreement"], found["num_drafts"], strict=True)
            shares = [float(share) for share, number in pairs if number >= MIN_DRAFTS]
            if not shares or not all(0 <= share <= 1 for share in shares):
                raise ValueError(name)
            hops[lower, upper] = tuple(min(1.0, share * factor) for share in shares)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "the adapter's run.json does not tell how often each exit is right; let `hispec-plan --prompts FILE` "
            "measure it and choose the method that it prints, or train the adapter anew"
        ) from error
    return Acceptance(hops=hops)


def describe(plan: Plan) -> str:
    """The plan as a table, with the reason for each choice."""
    lines = [f"{'batch':>5}  {'chosen':<42} {'tokens/s':>8} {'plain':>8} {'ratio':>6}  tokens a round, and why"]
    for size, chosen in plan.choices.items():
        plain = plan.plain[size]
        ratio = chosen.tokens_per_second / plain.tokens_per_second
        lines.append(
            f"{size:>5}  {chosen.setting!s:<42} {chosen.tokens_per_second:8.1f} {plain.tokens_per_second:8.1f} "
            f"{ratio:6.2f}  {_reason(chosen, plain, size)}"
        )
    return "\n".join([*lines, _describe_engine(plan)])


def _describe_engine(plan: Plan) -> str:
    engine, sizes = plan.engine, list(plan.engine_choices)
    title = f'plan="auto" for up to {sizes[-1]} sequence{"s" * (sizes[-1] > 1)}: {engine.method}'
    if engine.method == "autoregressive":
        return title
    lengths = ", ".join(f"{size}: {_lengths(plan.engine_choices[size].setting)}" for size in sizes)
    return (
        f"{title} at {', '.join(map(str, engine.exit_layers))}; tokens drafted, by sequences that run, {lengths}; "
        "each round follows what is kept, and copies from the text where that promises more"
    )


def _lengths(setting: Setting) -> str:
    if setting.method == "autoregressive":
        return "0"
    return str(setting.num_draft_tokens) + f"/{setting.num_provisional_tokens}" * (setting.method == "hispec")


def _reason(chosen: Prediction, plain: Prediction, batch_size: int) -> str:
    if chosen.setting == plain.setting:
        return f"1.00: no draft brings {(margin(batch_size) - 1) * 100:.0f} % more than its cost"
    cost = chosen.seconds_per_round / plain.seconds_per_round
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in chosen.seconds_by_level.items())
    return f"{chosen.tokens_per_round:.2f} for {cost:.2f} plain steps ({parts} ms)"
