"""Costs of a machine: that calibration finds what rounds are made of, and that a tiny model can be measured."""

import json
import math
from dataclasses import replace

import pytest

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, machine
from hispec.infer.attention import MAX_STRETCH
from hispec.infer.calibration import TimedRound, calibrate
from hispec.infer.contexts import spread_contexts
from hispec.infer.cost_file import costs_from_dict, costs_to_dict, machine_key, read_costs, write_costs
from hispec.infer.cost_model import Acceptance, Costs, Overhead, Setting, Table, predict
from hispec.infer.machine import measure_costs
from hispec.infer.planner import AUTOREGRESSIVE, candidates

from .models import build_heads

SIZES, ROWS = (1, 4, 16), (1, 2, 5)
DEPTH = 12


def table(fixed, by_row):
    return Table(
        batch_sizes=SIZES,
        num_rows=ROWS,
        seconds=tuple(tuple(fixed + by_row * size * rows for rows in ROWS) for size in SIZES),
    )


def costs(scale=1.0, **overheads):
    return Costs(
        num_layers=DEPTH,
        layer=table(1.0 * scale, 0.02 * scale),
        target_head=table(2.0 * scale, 0.1 * scale),
        exit_heads={2: table(0.8 * scale, 0.03 * scale), 5: table(0.4 * scale, 0.02 * scale)},
        **overheads,
    )


OVERHEADS = {
    "per_pass": Overhead(fixed=0.3, by_sequence=0.01),
    "per_draw": Overhead(fixed=0.2, by_sequence=0.03),
    "per_middle": Overhead(fixed=0.5, by_sequence=0.05),
    "per_round": Overhead(fixed=0.9, by_sequence=0.02, by_row=0.03),
}


def timed(true_costs, number, exit_layers, size):
    """What a machine of these costs would show of a round with one draft."""
    method = ("autoregressive", "single-layer", "hispec")[len(exit_layers)]
    setting = Setting(method=method, exit_layers=exit_layers, num_draft_tokens=number, num_provisional_tokens=1)
    nothing = Acceptance(hops={(2, 5): (0.0,), (5, DEPTH): (0.0,), (2, DEPTH): (0.0,)})
    return TimedRound(size, exit_layers, number, predict(setting, true_costs, nothing, size).seconds_by_level)


def rounds_of(true_costs):
    return [
        timed(true_costs, number, exits, size)
        for size in SIZES
        for number, exits in ((1, ()), (1, (2,)), (4, (2,)), (4, (2, 5)))
    ]


def parts_of(found, *, with_target=True):
    layers = found.layer
    whole = Table(
        batch_sizes=SIZES, num_rows=ROWS, seconds=tuple(tuple(DEPTH * value for value in row) for row in layers.seconds)
    )
    return {"layers": whole, **({"target": found.target_head} if with_target else {}), **found.exit_heads}


NEAR, FAR = 96, 192


def calibrated(far, near, rounds):
    """What is made of parts behind two contexts, and of rounds behind the nearer one."""
    parts = parts_of(far), parts_of(near, with_target=False)
    return calibrate(DEPTH, *parts, rounds, context=FAR, near_context=NEAR)


def everything(found):
    """All seconds that the model predicts from these costs."""
    some = Acceptance(hops={(2, 5): (0.6,), (5, DEPTH): (0.7,), (2, DEPTH): (0.5,)})
    settings = [AUTOREGRESSIVE] + [each for each in candidates((2, 5)) if each.exit_layers in ((2,), (2, 5))]
    return [predict(each, found, some, size).seconds_per_round for each in settings for size in (1, 4, 16)]


@pytest.mark.parametrize("scale", [1.0, 0.9])
def test_calibration_finds_what_the_rounds_are_made_of(scale):
    true_costs = costs(scale, **OVERHEADS)
    found = calibrated(costs(), costs(), rounds_of(true_costs))
    tolerance = 1e-3 if scale == 1 else 0.03  # the scale is drawn towards 1
    assert everything(found) == pytest.approx(everything(true_costs), rel=tolerance)


def test_no_overhead_is_negative_where_parts_alone_are_slower():
    found = calibrated(costs(1.2), costs(1.2), rounds_of(costs()))
    for overhead in (found.per_pass, found.per_draw, found.per_middle, found.per_round):
        assert min(overhead.fixed, overhead.by_sequence, overhead.by_row) >= 0
    # What was timed twice is not lost either: the scale takes it up.
    assert everything(found) == pytest.approx(everything(costs()), rel=0.06)


def test_heads_behind_a_longer_context_keep_their_difference():
    found = calibrated(costs(2.0), costs(), rounds_of(costs()))
    assert found.layer.at(4, 2) > 1.5 * costs().layer.at(4, 2)


def test_a_layer_behind_another_context_is_read_off_the_two_that_were_timed():
    found = calibrated(replace(costs(), layer=costs(2.0).layer), costs(), rounds_of(costs()))
    for context, scale in ((NEAR, 1.0), (FAR, 2.0), (2 * FAR - NEAR, 3.0)):
        behind = found.behind(context)
        for size, rows in ((1, 1), (4, 2), (16, 8)):
            assert behind.layer.at(size, rows) == pytest.approx(scale * costs().layer.at(size, rows), rel=0.02)
    # What is left where nothing is before is not known so well.
    assert found.behind(0).layer.at(4, 2) >= 0.5 * found.layer.at(4, 2)
    assert (
        calibrated(costs(), costs(2.0), rounds_of(costs())).behind(0).layer
        == calibrated(costs(), costs(2.0), rounds_of(costs())).layer
    )


@pytest.mark.parametrize("exit_layers", [(), (0,), (2, 4)])
def test_a_tiny_model_is_measured(base, exit_layers, monkeypatch):
    monkeypatch.setattr(machine, "NUM_REPEATS", (1, 1))
    model = EarlyExitModel.from_configs(base, [])
    if exit_layers:
        model = build_heads(base, "random", exit_layers, draft_vocab_size=32, committed_context=True)
    found = measure_costs(model, Engine, max_batch=3, context=40, seconds=0.0)
    assert found.num_layers == 6
    assert set(found.exit_heads) == set(exit_layers)
    for each in (found.layer, found.target_head, *found.exit_heads.values()):
        assert each.batch_sizes == (1, 3)
        assert each.num_rows == machine.NUM_ROWS
        assert all(value > 0 for row in each.seconds for value in row)
    hops = {(a, b): (0.5,) for a in (0, 2, 4) for b in (2, 4, 6) if a < b}
    for setting in candidates(exit_layers):
        predicted = predict(setting, found, Acceptance(hops=hops), 3)
        assert all(seconds > 0 and math.isfinite(seconds) for seconds in predicted.seconds_by_level.values())


def test_a_context_too_short_to_measure_in_is_said(make_base):
    model = build_heads(make_base("llama", max_position_embeddings=16), "random")
    with pytest.raises(ValueError, match="a text ended while rounds were timed"):
        measure_costs(model, Engine, max_batch=1, seconds=60.0)


def test_costs_are_kept_on_disk(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    model = build_heads(base, "random", (2, 5))
    key = machine_key(model, {"block_size": 16, "max_num_seqs": 4})
    assert read_costs(key, 1) is None
    true_costs = replace(costs(**OVERHEADS), context=192.0, layer_by_token=costs(1e-3).layer)
    write_costs(key, true_costs)
    assert read_costs(key, 16) == true_costs
    assert read_costs(key, 17) is None
    assert key == machine_key(model, {"block_size": 16, "max_num_seqs": 8})
    assert key != machine_key(model, {"block_size": 32})
    assert key != machine_key(build_heads(base, "random", (2, 4)), {"block_size": 16})
    assert costs_from_dict(costs_to_dict(true_costs)) == true_costs
    (path,) = (tmp_path / "cache" / "costs").iterdir()
    whole = path.read_text()
    record = json.loads(whole)
    layer = record["costs"]["layer"]
    changed = [
        {"num_layers": None},
        {"exit_heads": []},
        {"layer": layer | {"seconds": [[float("nan")] * 3] * 3}},
        {"layer": layer | {"seconds": [[-1.0] * 3] * 3}},
        {"layer": layer | {"num_rows": [5, 2, 1]}},
        {"layer": layer | {"batch_sizes": [], "seconds": []}},
        {"per_pass": {"fixed": "x"}},
        {"per_pass": {"fixed": -1.0}},
        {"per_pass": 3},
    ]
    texts = [json.dumps(record | {"costs": record["costs"] | each}) for each in changed]
    for broken in ("", "{}", "[]", "3", whole[:-40], json.dumps(record | {"key": {}}), *texts):
        path.write_text(broken)
        assert read_costs(key, 1) is None, broken
    path.write_text(whole)
    assert read_costs(key, 1) == true_costs


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_texts_of_a_measured_batch_differ_as_those_of_a_real_one(batch_size):
    contexts = spread_contexts(96, batch_size)
    assert len(contexts) == batch_size
    assert sum(contexts) == pytest.approx(96 * batch_size, abs=batch_size)
    assert batch_size == 1 or max(contexts) / min(contexts) > MAX_STRETCH
    assert min(spread_contexts(1, batch_size)) == 1
