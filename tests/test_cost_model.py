"""The cost model: against a simulation of the loop, and what must hold for any costs."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer.cost_model import (
    Acceptance,
    Costs,
    Overhead,
    Setting,
    Table,
    middle_passes,
    predict,
    row_cost,
)
from hispec.infer.planner import AUTOREGRESSIVE, candidates, margin, plan

DEPTH, EXITS = 12, (2, 5)


def flat(seconds):
    """So many seconds whatever the rows."""
    return Table(batch_sizes=(1,), num_rows=(1,), seconds=((seconds,),))


def linear(fixed, by_row):
    """`fixed + by_row * batch * rows`."""
    sizes, rows = (1, 64), (1, 64)
    seconds = tuple(tuple(fixed + by_row * size * row for row in rows) for size in sizes)
    return Table(batch_sizes=sizes, num_rows=rows, seconds=seconds)


COSTS = Costs(
    num_layers=DEPTH,
    layer=flat(1.0),
    target_head=flat(3.0),
    exit_heads={2: flat(0.5), 5: flat(0.7)},
    per_pass=Overhead(fixed=0.11),
    per_draw=Overhead(fixed=0.13),
    per_middle=Overhead(fixed=0.17),
    per_round=Overhead(fixed=0.19),
)


def acceptance(draft_middle, middle_target, draft_target):
    return Acceptance(hops={(2, 5): draft_middle, (5, DEPTH): middle_target, (2, DEPTH): draft_target})


SOME = acceptance((0.6, 0.7), (0.8, 0.7, 0.9), (0.5, 0.6))


def hispec(num_drafted, num_provisional):
    return Setting(
        method="hispec",
        exit_layers=EXITS,
        num_draft_tokens=num_drafted,
        num_provisional_tokens=num_provisional,
    )


def kept(generator, shares, number):
    """Tokens of a draft that are kept, each place by itself."""
    for place in range(number):
        if generator.random() >= shares[min(place, len(shares) - 1)]:
            return place
    return number


class Simulation:
    """The loop of `Hierarchy` on a batch, with independent acceptances: what it runs, and on how many sequences."""

    def __init__(self, found, num_drafted, num_provisional, batch_size, num_rounds=1500):
        generator = random.Random(0)
        self.seconds = {"draft": 0.0, "intermediate": 0.0, "target": 0.0}
        self.num_tokens = self.num_middle_passes = self.num_middle_rows = 0.0
        for _ in range(num_rounds):
            waiting = [0] * batch_size
            while active := [b for b in range(batch_size) if waiting[b] < num_provisional]:
                for _ in range(num_drafted):
                    self.seconds["draft"] += 2 * 1.0 + 0.11 + 0.5 + 0.13
                self.seconds["draft"] += 2 * 1.0 + 0.11
                self.seconds["intermediate"] += 3 * 1.0 + 0.7 + 0.17
                self.num_middle_passes += 1 / num_rounds
                self.num_middle_rows += len(active) / num_rounds
                for b in active:
                    waiting[b] += kept(generator, found.hops[2, 5], num_drafted) + 1
            self.seconds["draft"] += 2 * 1.0 + 0.11
            self.seconds["intermediate"] += 3 * 1.0 + 0.11
            self.seconds["target"] += 7 * 1.0 + 3.0 + 0.19
            for number in waiting:
                self.num_tokens += (1 + kept(generator, found.hops[5, DEPTH], number)) / batch_size / num_rounds
        self.seconds = {name: value / num_rounds for name, value in self.seconds.items()}


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 4), (3, 2)])
def test_hispec_is_what_a_simulation_of_the_loop_does(lengths, batch_size):
    simulated = Simulation(SOME, *lengths, batch_size)
    predicted = predict(hispec(*lengths), COSTS, SOME, batch_size)
    assert predicted.tokens_per_round == pytest.approx(simulated.num_tokens, rel=0.04)
    for name, seconds in simulated.seconds.items():
        assert predicted.seconds_by_level[name] == pytest.approx(seconds, rel=0.04)
    passes = middle_passes(SOME.hops[2, 5], *lengths, batch_size)
    assert sum(chance for chance, _ in passes) == pytest.approx(simulated.num_middle_passes, rel=0.04)
    assert sum(chance * active for chance, active in passes) == pytest.approx(simulated.num_middle_rows, rel=0.04)


def test_a_verification_that_hardly_ever_comes_costs_hardly_anything():
    passes = middle_passes((1 - 2**-53,), 3, 4, 5)
    assert all(chance > 0 and 0 < active <= 5 for chance, active in passes)
    assert passes[0] == (1.0, 5.0)
    assert passes[1][1] == pytest.approx(1.0)


def test_the_other_methods_add_up():
    plain = predict(AUTOREGRESSIVE, COSTS, SOME, 4)
    assert plain.seconds_by_level == {"target": pytest.approx(12 + 3 + 0.19)}
    assert plain.tokens_per_second == pytest.approx(4 / 15.19)
    setting = Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=3)
    single = predict(setting, COSTS, SOME, 4)
    assert single.seconds_by_level["draft"] == pytest.approx(4 * 2.11 + 3 * 0.63)
    assert single.seconds_by_level["target"] == pytest.approx(10 + 3 + 0.19)
    assert single.tokens_per_round == pytest.approx(1 + 0.5 + 0.5 * 0.6 + 0.5 * 0.6 * 0.6)


def test_rows_are_those_of_the_draft_and_its_last_token():
    costs = replace(COSTS, layer=linear(0.0, 1.0), target_head=flat(0.0), exit_heads={2: flat(0.0), 5: flat(0.0)})
    setting = Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=3)
    seconds = predict(setting, costs, SOME, 5).seconds_by_level
    assert seconds["target"] == pytest.approx(10 * 5 * 4 + 0.19)
    assert seconds["draft"] == pytest.approx(2 * 5 * 4 + 4 * 0.11 + 3 * 0.13)


def test_tables_are_read_between_and_beyond_their_points():
    table = Table(batch_sizes=(1, 3), num_rows=(1, 2, 4), seconds=((1.0, 2.0, 6.0), (3.0, 4.0, 8.0)))
    assert table.at(1, 1) == 1.0
    assert table.at(1, 3) == pytest.approx(4.0)
    assert table.at(2, 2) == pytest.approx(3.0)
    assert table.at(1, 6) == pytest.approx(10.0)
    assert table.at(5, 1) == pytest.approx(5.0)


def test_rows_that_a_machine_takes_at_once_cost_as_much_as_all_of_them():
    table = Table(batch_sizes=(1, 8), num_rows=(1, 2, 4), seconds=((1.0, 1.1, 1.2), (2.0, 2.5, 5.0)), step=16)
    assert [table.at(8, rows) for rows in (1, 1.5, 2)] == pytest.approx([2.0, 2.25, 2.5])
    assert {table.at(8, rows) for rows in (17 / 8, 3, 31 / 8, 4)} == {5.0}
    assert table.at(8, 33 / 8) == pytest.approx(7.5)
    assert table.at(1, 3) == pytest.approx(1.15)


shares = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple)
sizes = st.integers(1, 16)


@st.composite
def costs_of_machines(draw):
    """Costs that grow with rows, or do not."""
    some = st.floats(1e-4, 1.0)
    tables = [linear(draw(some), draw(st.floats(0, 0.1))) for _ in range(4)]
    overheads = [Overhead(fixed=draw(some), by_sequence=draw(some)) for _ in range(4)]
    names = ("per_pass", "per_draw", "per_middle", "per_round")
    return Costs(
        num_layers=DEPTH,
        layer=tables[0],
        target_head=tables[1],
        exit_heads={2: tables[2], 5: tables[3]},
        **dict(zip(names, overheads, strict=True)),
    )


@settings(deadline=None, max_examples=25)
@given(costs_of_machines(), shares, shares, shares, sizes, st.floats(0, 1))
def test_more_kept_by_the_target_is_never_slower(costs, draft_middle, middle_target, draft_target, size, better):
    def raised(values):
        return tuple(value + (1 - value) * better for value in values)

    worse = acceptance(draft_middle, middle_target, draft_target)
    best = acceptance(draft_middle, raised(middle_target), raised(draft_target))
    for setting in (hispec(2, 3), Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=3)):
        before, after = (predict(setting, costs, found, size) for found in (worse, best))
        assert after.tokens_per_second >= before.tokens_per_second * (1 - 1e-9)
        assert before.tokens_per_round >= 1
        assert min(before.seconds_by_level.values()) > 0


@settings(deadline=None, max_examples=25)
@given(shares, shares, sizes, st.floats(0, 1), st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 4)]))
def test_more_kept_by_the_middle_commits_no_less_for_no_more_verifications(drafts, target, size, better, lengths):
    raised = tuple(value + (1 - value) * better for value in drafts)
    before, after = (
        predict(hispec(*lengths), COSTS, acceptance(each, target, target), size) for each in (drafts, raised)
    )
    assert after.seconds_per_round <= before.seconds_per_round * (1 + 1e-9)
    if lengths[1] == 1:
        assert after.tokens_per_round >= before.tokens_per_round * (1 - 1e-9)


@settings(deadline=None, max_examples=15)
@given(costs_of_machines(), sizes)
def test_nothing_kept_is_plain_decoding(costs, size):
    made = plan(costs, acceptance((0.0,), (0.0,), (0.0,)), [size])
    assert made.at(size) == AUTOREGRESSIVE


@settings(deadline=None, max_examples=15)
@given(costs_of_machines(), shares, shares, shares, sizes)
def test_the_choice_is_the_best_of_all_or_plain(costs, draft_middle, middle_target, draft_target, size):
    found = acceptance(draft_middle, middle_target, draft_target)
    made = plan(costs, found, [size])
    rates = {each: predict(each, costs, found, size).tokens_per_second for each in candidates(EXITS)}
    chosen, best = rates[made.at(size)], max(rates.values())
    assert chosen >= rates[AUTOREGRESSIVE]
    assert chosen >= best * 0.98 or (made.at(size) == AUTOREGRESSIVE and best <= chosen * margin(size) / 0.98)


def test_of_settings_alike_the_shortest_drafts_are_taken():
    # A third drafted token brings as much as it costs: nearly nothing.
    found = acceptance((0.0,), (0.0,), (0.9, 0.9, 0.01))
    made = plan(replace(COSTS, exit_heads={2: flat(0.0), 5: flat(0.0)}), found, [1])
    rates = {
        number: predict(
            Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=number), COSTS, found, 1
        ).tokens_per_second
        for number in (1, 2, 3)
    }
    assert rates[2] > rates[1]
    assert made.at(1).num_draft_tokens == 2


def test_a_further_row_costs_its_part_of_what_all_rows_share():
    assert row_cost(COSTS, 1) == row_cost(COSTS, 8) == 0
    # A layer 1 and 0.1 a row, the head 3 and 0.2 a row, 0.5 a round.
    costs = replace(
        COSTS, layer=linear(1.0, 0.1), target_head=linear(3.0, 0.2), per_round=Overhead(fixed=0.5, by_row=0.3)
    )
    for batch_size in (1, 3, 16):
        assert row_cost(costs, batch_size) == pytest.approx((0.1 * DEPTH + 0.5) / (DEPTH + 3.5))
    assert row_cost(replace(COSTS, layer=linear(0.0, 1.0), target_head=flat(0.0), per_round=Overhead()), 4) == 1


def test_free_drafts_that_are_always_kept_are_taken():
    costs = replace(COSTS, exit_heads={2: flat(0.0), 5: flat(0.0)}, per_pass=Overhead(), per_draw=Overhead())
    made = plan(costs, acceptance((1.0,), (1.0,), (0.1,)), [1])
    assert made.at(1).method == "hispec"
    made = plan(costs, acceptance((0.1,), (0.1,), (1.0,)), [1])
    assert made.at(1).method == "single-layer"
    assert made.at(1).num_draft_tokens == max(each.num_draft_tokens for each in candidates(EXITS))


def test_candidates_cover_every_method_and_pair():
    found = list(candidates((0, 2, 5)))
    assert found[0] == AUTOREGRESSIVE
    assert {each.exit_layers for each in found} == {(), (0,), (2,), (5,), (0, 2), (0, 5), (2, 5)}
    assert len(set(found)) == len(found)
    assert list(candidates(())) == [AUTOREGRESSIVE]


@pytest.mark.parametrize(("fixed", "by_sequence", "by_row"), list(product((0.0, 1.0), repeat=3)))
def test_overheads_are_linear(fixed, by_sequence, by_row):
    overhead = Overhead(fixed=fixed, by_sequence=by_sequence, by_row=by_row)
    assert overhead.at(3, 2) == fixed + 3 * by_sequence + 6 * by_row
