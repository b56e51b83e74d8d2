"""`plan="auto"`: the planner's choice as options of an engine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..heads import EarlyExitModel
from .acceptance_file import known_acceptance
from .config import EngineConfig
from .cost_file import machine_key, read_costs, write_costs
from .cost_model import Costs
from .machine import measure_costs
from .planner import Plan, plan

if TYPE_CHECKING:
    from .engine import Engine

PLANNED = ("method", "exit_layers", "num_draft_tokens", "num_provisional_tokens")
"""Options that a plan decides."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that a plan has a row for, up to the engine's own."""


def make_plan(
    model: EarlyExitModel, options: Mapping[str, Any], build_engine: "Callable[..., Engine]"
) -> tuple[Plan, dict[str, Any]]:
    """The plan for the engine that `options` describe, and these with the choice for `max_num_seqs` sequences.

    How often drafts are kept is taken as greedy requests have it: an engine does not know yet what it will be asked.
    Raises ValueError for options that contradict, and where neither the model's adapter nor `hispec-plan --prompts` has
    told how often its exits are right.
    """
    for name in (*PLANNED, "exact"):
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
    return made, {name: value for name, value in options.items() if name not in PLANNED} | setting_options(made, size)


def setting_options(made: Plan, batch_size: int) -> dict[str, Any]:
    """The options of an engine that a plan chooses for so many sequences."""
    setting = made.at(batch_size)
    return {name: getattr(setting, name) for name in PLANNED}


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
    rest = {name: value for name, value in options.items() if name not in (*PLANNED, "plan", "replan")}
    key = machine_key(model, rest)
    costs = None if anew else read_costs(key, max_batch)
    if costs is None:
        costs = measure_costs(model, build_engine, rest, max_batch=max_batch, show_progress=show_progress)
        write_costs(key, costs)
    return costs
