"""`plan="auto"`: the planner's choice as options of an engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..heads import EarlyExitModel
from .acceptance_file import known_acceptance
from .config import EngineConfig
from .cost_file import machine_key, read_costs, write_costs
from .cost_model import Acceptance, Costs, Setting, row_cost
from .draft_lengths import build_choice, on_context_grid
from .machine import measure_costs
from .ngram_proposer import RowCost
from .planner import Plan, plan
from .round_policy import CostPolicy

if TYPE_CHECKING:
    from .engine import Engine

PLANNED = ("method", "exit_layers", "num_draft_tokens", "num_provisional_tokens")
"""Options that a plan decides."""
UNPRICED = ("plan", "replan", "ngram_drafts")
"""Options that no setting of the planner is measured with."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that a plan has a row for, up to the engine's own."""


class AutoPlan(NamedTuple):
    """What an engine with `plan="auto"` is made of."""

    plan: Plan
    options: dict[str, Any]
    """Those given, with method, exits and longest drafts."""
    round_policy: CostPolicy | None
    """Chooses the lengths of each round; None where no exit ever drafts."""
    row_cost: RowCost
    """What a copied token costs."""


def make_plan(model: EarlyExitModel, options: Mapping[str, Any], build_engine: "Callable[..., Engine]") -> AutoPlan:
    """The plan of the engine that `options` describe, and what follows from it.

    How often drafts are kept is taken as greedy requests have it: an engine does not know yet what it will be asked.
    Raises ValueError for options that contradict, and where neither the model's adapter nor `hispec-plan --prompts` has
    told how often its exits are right.
    """
    for name in (*PLANNED, "draft_policy", "exact"):
        if options.get(name, False) not in (None, False):
            raise ValueError(
                f"plan='auto' does not go with {name}={options[name]!r}"
                f"{', which it has no costs for' if name == 'exact' else ', which it chooses'}; leave one of them out"
            )
    size = EngineConfig(**options).max_num_seqs
    acceptance = known_acceptance(model)
    costs = model_costs(model, options, build_engine, max_batch=size, anew=bool(options.get("replan")))
    sizes = sorted({each for each in BATCH_SIZES if each < size} | {size})
    made = plan(costs, acceptance, sizes)
    made = replace(made, choices=made.engine_choices)
    planned = {name: getattr(made.engine, name) for name in PLANNED}
    if options.get("ngram_drafts") is not False:
        # Copied drafts cost nothing where there are none, so they go with every choice.
        is_plain = made.engine.method == "autoregressive"
        planned |= {"method": "ngram", "ngram_drafts": None} if is_plain else {"ngram_drafts": True}
    # Elsewhere the host would wait for the device at each token, which costs more than a token too many.
    by_confidence = model.backbone.device.type == "cpu"
    return AutoPlan(
        plan=made,
        options={**options, **planned},
        round_policy=build_policy(costs, acceptance, made.engine, by_confidence=by_confidence),
        row_cost=_row_cost_by_grid(costs),
    )


def _row_cost_by_grid(costs: Costs) -> RowCost:
    @cache
    def at(num_seqs: int, context: int | None) -> float:
        return row_cost(costs.behind(context), num_seqs)

    return lambda num_seqs, context: at(num_seqs, on_context_grid(context))


def build_policy(
    costs: Costs, acceptance: Acceptance, engine: Setting, *, by_confidence: bool = False
) -> CostPolicy | None:
    """For rounds of an engine with these exits and longest drafts; texts begin with the measured shares."""
    choice = build_choice(costs, acceptance, engine)
    shares = [acceptance.hops[hop][0] for hop in pairwise([*engine.exit_layers, costs.num_layers])]
    return None if choice is None else CostPolicy(choice, shares, by_confidence=by_confidence)


def model_costs(
    model: EarlyExitModel,
    options: Mapping[str, Any],  # of the engine
    build_engine: "Callable[..., Engine]",
    *,
    max_batch: int,
    anew: bool = False,  # measure even where there are costs on disk
    show_progress: bool = True,
) -> Costs:
    """This machine's costs, from the disk or measured and put there."""
    rest = {name: value for name, value in options.items() if name not in (*PLANNED, *UNPRICED)}
    key = machine_key(model, rest)
    costs = None if anew else read_costs(key, max_batch)
    if costs is None:
        costs = measure_costs(model, build_engine, rest, max_batch=max_batch, show_progress=show_progress)
        write_costs(key, costs)
    return costs
