"""From seconds of parts and of whole rounds to `Costs`. Numbers in, numbers out.

A round does all that its parts do, and more. So its levels are taken to last

    scale * (seconds of their parts, timed alone) + overheads

with one scale for everything (parts run by themselves find other things in the caches than in a round) and overheads
that are linear in the sequences and their rows, none of them negative: the non-negative least squares over all levels
of the rounds that were timed, each by its relative error. Rounds alone can hardly tell the scale from fixed overheads,
so it is drawn towards 1.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .cost_model import Costs, Overhead, Table

SCALE_WEIGHT = 2.0
"""The scale's distance from 1 counts so many times as much as a level's relative error."""
NUM_SWEEPS = 2000


class TimedRound(NamedTuple):
    """What a round was asked for, and how long its levels took."""

    batch_size: int
    exit_layers: tuple[int, ...]
    """None, the draft's, or the draft's and the intermediate's."""
    num_drafted: int
    """Tokens of its one draft."""
    seconds: Mapping[str, float]
    """By level; the target's is not looked at where there is an intermediate one: its rows are not known."""


def calibrate(
    num_layers: int,
    parts: Mapping[str | int, Table],  # by name, see `Part`: seconds behind a usual context
    near: Mapping[str | int, Table],  # `layers` and exit heads behind the context of the rounds
    rounds: Items[TimedRound],
    *,
    context: float,  # the usual one, in tokens
    near_context: float,  # that of the rounds
) -> Costs:
    """The costs of the parts behind their usual context, with what rounds take beyond them."""
    exits = sorted(name for name in parts if isinstance(name, int))
    layer = _divide(parts["layers"], num_layers)
    alone = Costs(
        num_layers=num_layers,
        layer=_divide(near["layers"], num_layers),
        target_head=parts["target"],
        exit_heads={exit_layer: near[exit_layer] for exit_layer in exits},
    )
    equations = [equation for each in rounds for equation in _equations(alone, each)]
    matrix = np.array([[value / seconds for value in row] for row, seconds in equations])
    prior = np.array([SCALE_WEIGHT] + [0.0] * (matrix.shape[1] - 1))
    values = np.array([1.0] * len(matrix) + [SCALE_WEIGHT])
    scale, *overheads = _non_negative_least_squares(np.vstack([matrix, prior]), values).tolist()
    per_pass, per_draw, per_middle = (Overhead(fixed=overheads[k], by_sequence=overheads[k + 1]) for k in (0, 2, 4))
    return Costs(
        num_layers=num_layers,
        layer=_divide(layer, 1 / scale),
        target_head=_divide(parts["target"], 1 / scale),
        exit_heads={exit_layer: _divide(parts[exit_layer], 1 / scale) for exit_layer in exits},
        per_pass=per_pass,
        per_draw=per_draw,
        per_middle=per_middle,
        per_round=Overhead(fixed=overheads[6], by_sequence=overheads[7], by_row=overheads[8]),
        context=context,
        layer_by_token=_by_token(parts["layers"], near["layers"], (context - near_context) * num_layers / scale),
    )


def _by_token(far: Table, near: Table, num_tokens: float) -> Table | None:
    if num_tokens <= 0:
        return None
    seconds = []
    for size, row in zip(far.batch_sizes, far.seconds, strict=True):
        # A line over the rows: single differences of two timings are mostly noise, and are carried far.
        rises = [value - near.at(size, rows) for rows, value in zip(far.num_rows, row, strict=True)]
        slope, start = np.polyfit(far.num_rows, rises, 1) if len(rises) > 1 else (0.0, rises[0])
        seconds.append(tuple(max(0.0, float(start + slope * rows)) / num_tokens for rows in far.num_rows))
    return replace(far, seconds=tuple(seconds))


def _equations(costs: Costs, timed: TimedRound) -> list[tuple[list[float], float]]:
    """For each level: the parts' seconds, how often it bears each overhead, and its seconds.

    Overheads stand in the order: pass, draw, middle (each fixed and by sequence), round (by row too).
    """
    batch, number, depth = timed.batch_size, timed.num_drafted, costs.num_layers
    lower = timed.exit_layers
    deepest = lower[-1] if lower else 0
    one, rows = costs.layer.at(batch, 1), number + 1 if lower else 1
    found = []
    if lower:
        # A pass more than there are drafted tokens, and under an intermediate level one for its own token.
        num_passes = number + len(lower)
        parts = num_passes * lower[0] * one + number * costs.exit_heads[lower[0]].at(batch, 1)
        overheads = [num_passes, num_passes * batch, number, number * batch, 0, 0, 0, 0, 0]
        found.append(([parts, *overheads], timed.seconds["draft"]))
    if len(lower) > 1:
        layers = (lower[1] - lower[0]) * (one + costs.layer.at(batch, rows))
        parts = layers + costs.exit_heads[lower[1]].at(batch, rows)
        found.append(([parts, 1, batch, 0, 0, 1, batch, 0, 0, 0], timed.seconds["intermediate"]))
    else:
        parts = (depth - deepest) * costs.layer.at(batch, rows) + costs.target_head.at(batch, rows)
        found.append(([parts, 0, 0, 0, 0, 0, 0, 1, batch, batch * rows], timed.seconds["target"]))
    return found


def _non_negative_least_squares(
    matrix: np.ndarray,  # [E, P]
    values: np.ndarray,  # [E]
) -> np.ndarray:  # [P]
    """The solution that no other one without negative entries beats, by coordinate descent."""
    norms = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    scaled = matrix / norms
    gram, right = scaled.T @ scaled, scaled.T @ values
    solution = np.zeros(len(right))
    for _ in range(NUM_SWEEPS):
        for k in range(len(solution)):
            if gram[k, k] > 0:
                solution[k] = max(0.0, solution[k] + (right[k] - gram[k] @ solution) / gram[k, k])
    return solution / norms


def _divide(table: Table, by: float) -> Table:
    seconds = tuple(tuple(value / by for value in row) for row in table.seconds)
    return replace(table, seconds=seconds)
