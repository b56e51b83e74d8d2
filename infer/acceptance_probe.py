"""How often each exit is right on given prompts, by the engine's own methods with long drafts."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import combinations
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..heads import EarlyExitModel
from .config import SamplingParams
from .cost_model import Acceptance
from .planner import MIN_DRAFTS
from .stats import LevelStats

if TYPE_CHECKING:
    from .engine import Engine

NUM_DRAFTED = 8


def measure_acceptance(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",  # as `Engine`: from a model and options
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,
    *,
    max_num_seqs: int = 16,
    show_progress: bool = False,
) -> Acceptance:
    """Run each exit as the draft of the target, and of every deeper exit, and count.

    Raises ValueError where too few tokens come together.
    """
    depth = model.backbone.num_layers
    hops: dict[tuple[int, int], tuple[float, ...]] = {}
    chosen = [(exit_layer,) for exit_layer in model.exit_layers] + list(combinations(model.exit_layers, 2))
    for exits in tqdm(chosen, desc="acceptance", unit="hop", disable=not show_progress, file=sys.stderr):
        options: dict[str, Any] = {"method": ("single-layer", "hispec")[len(exits) - 1], "exit_layers": exits}
        engine = build_engine(
            model, num_draft_tokens=NUM_DRAFTED, num_provisional_tokens=1, max_num_seqs=max_num_seqs, **options
        )
        engine.generate(prompts, params)
        level = engine.stats.levels["target" if len(exits) == 1 else "intermediate"]
        hops[exits[0], exits[1] if len(exits) > 1 else depth] = kept_shares(level)
    return Acceptance(hops=hops)


def kept_shares(level: LevelStats) -> tuple[float, ...]:
    """The share of tokens at place 0, 1, ... that were kept, of the drafts whose tokens before were all kept.

    Raises ValueError where there were fewer than `MIN_DRAFTS`.
    """
    shares = []
    reached = level.num_rounds
    for drafted, kept in zip(level.drafted_per_position, level.accepted_per_position, strict=False):
        # A draft that the end of its text cut short may have been kept to its end without reaching this place.
        reached = min(reached, drafted)
        if reached < MIN_DRAFTS:
            break
        shares.append(kept / reached)
        reached = kept
    else:
        # Places at the end at which nothing was kept have no count.
        if reached >= MIN_DRAFTS and len(level.accepted_per_position) < len(level.drafted_per_position):
            shares.append(0.0)
    if not shares:
        raise ValueError(
            f"the prompts led to {level.num_rounds} drafts, too few to measure by; give more of them, or longer answers"
        )
    return tuple(shares)
