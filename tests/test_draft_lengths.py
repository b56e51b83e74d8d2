"""Lengths chosen by the cost model: what must hold for any costs, and when it is looked again."""

import random
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hispec.infer import round_policy
from hispec.infer.cost_model import (
    Acceptance,
    Overhead,
    Setting,
    drafted_token_seconds,
    predict,
    verified_draft_seconds,
)
from hispec.infer.draft_lengths import GRID, HispecLengths, SingleLayerLengths, build_choice, shifted_shares
from hispec.infer.planner import ALIKE, AUTOREGRESSIVE, margin, plan
from hispec.infer.round_policy import FIRST_PROBE, LAST_PROBE, CostPolicy

from .test_cost_model import COSTS, DEPTH, EXITS, SOME, acceptance, costs_of_machines, flat, linear

MOST = 6
shares = st.integers(0, GRID).map(lambda step: step / GRID)
batches = st.lists(shares, min_size=1, max_size=12)
kept = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4).map(tuple)


def single(costs, found=SOME):
    return SingleLayerLengths(costs, found, EXITS[0], MOST)


def lengths_of(choice, batch):
    return [length for (length,) in choice([(share,) for share in batch]).lengths]


def rate(costs, found, batch, lengths):
    """Tokens a second of a round, place by place, from the costs alone."""
    size = len(batch)
    if not any(lengths):
        return predict(AUTOREGRESSIVE, costs, found, size).tokens_per_second
    tokens = float(size)
    for share, length in zip(batch, lengths, strict=True):
        reach, by_place = 1.0, shifted_shares(found.hops[EXITS[0], DEPTH], share)
        for place in range(length):
            reach *= by_place[min(place, len(by_place) - 1)]
            tokens += reach
    active = [sum(length > place for length in lengths) for place in range(max(lengths))]
    seconds = sum(drafted_token_seconds(costs, EXITS[0], number) for number in active)
    return tokens / (seconds + verified_draft_seconds(costs, EXITS[0], size, sum(lengths) / size))


def dearer(costs, by):
    """The same machine, on which all that drafting takes costs more."""
    overheads = (costs.per_pass, costs.per_draw)
    costlier = [Overhead(fixed=each.fixed * by, by_sequence=each.by_sequence * by) for each in overheads]
    heads = {exit_layer: scaled(table, by) for exit_layer, table in costs.exit_heads.items()}
    return replace(costs, exit_heads=heads, per_pass=costlier[0], per_draw=costlier[1])


def scaled(table, by):
    return replace(table, seconds=tuple(tuple(value * by for value in row) for row in table.seconds))


@settings(deadline=None, max_examples=30)
@given(costs_of_machines(), kept, batches)
def test_a_round_is_never_worse_than_plain_by_its_own_model(costs, draft_target, batch):
    found = acceptance((0.5,), (0.5,), draft_target)
    lengths = lengths_of(single(costs, found), batch)
    plain = predict(AUTOREGRESSIVE, costs, found, len(batch)).tokens_per_second
    assert all(0 <= length <= MOST for length in lengths)
    if any(lengths):
        assert rate(costs, found, batch, lengths) > plain * margin(len(batch)) * (1 - 1e-9)
    # Nobody drafts further than one whose drafts are kept more often.
    by_share = sorted(zip(batch, lengths, strict=True))
    assert [length for _, length in by_share] == sorted(lengths)


@settings(deadline=None, max_examples=20)
@given(costs_of_machines(), kept, shares, st.integers(1, 12))
def test_no_common_length_is_better(costs, draft_target, share, size):
    found = acceptance((0.5,), (0.5,), draft_target)
    batch = [share] * size
    lengths = lengths_of(single(costs, found), batch)
    assert len(set(lengths)) == 1
    plain = rate(costs, found, batch, [0] * size)
    chosen = rate(costs, found, batch, lengths)
    best = max(rate(costs, found, batch, [length] * size) for length in range(MOST + 1))
    assert chosen >= best * ALIKE * (1 - 1e-9) or best <= plain * margin(size) / ALIKE


@settings(deadline=None, max_examples=30)
@given(costs_of_machines(), kept, batches)
def test_no_threshold_is_better(costs, draft_target, batch):
    """Of all rounds in which every token joins that is kept so likely or more."""
    found = acceptance((0.5,), (0.5,), draft_target)
    lengths = lengths_of(single(costs, found), batch)
    reaches = []
    for share in batch:
        by_place = shifted_shares(draft_target, share)
        reaches.append(list(accumulate((by_place[min(place, len(by_place) - 1)] for place in range(MOST)), mul)))
    thresholds = {reach for each in reaches for reach in each if reach > 0}
    others = [[sum(reach >= threshold for reach in each) for each in reaches] for threshold in thresholds]
    plain = rate(costs, found, batch, [0] * len(batch))
    best = max((rate(costs, found, batch, each) for each in others), default=plain)
    chosen = rate(costs, found, batch, lengths)
    assert chosen >= best * ALIKE * (1 - 1e-9) or best <= plain * margin(len(batch)) / ALIKE


@settings(deadline=None, max_examples=30)
@given(costs_of_machines(), kept, batches, st.floats(1, 20))
def test_dearer_drafts_are_shorter(costs, draft_target, batch, by):
    found = acceptance((0.5,), (0.5,), draft_target)
    cheap, dear = (single(each, found) for each in (costs, dearer(costs, by)))
    for share in batch:
        assert lengths_of(dear, [share]) <= lengths_of(cheap, [share])
    if not any(lengths_of(cheap, batch)):
        assert not any(lengths_of(dear, batch))


@settings(deadline=None, max_examples=20)
@given(costs_of_machines(), st.integers(1, 12))
def test_nothing_kept_is_nothing_drafted(costs, size):
    assert lengths_of(single(costs), [0.0] * size) == [0] * size
    assert set(HispecLengths(costs, SOME, EXITS)([(0.0, 0.0)] * size).lengths) == {(0, 0)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_what_was_measured_leads_to_what_the_plan_says(size):
    costs = replace(COSTS, layer=linear(1.0, 0.004))
    found = acceptance((0.8, 0.85), (0.9, 0.8), (0.7, 0.75, 0.8))
    made = plan(costs, found, [size])
    for method, exits, number, provisional in (("single-layer", EXITS[:1], MOST, 1), ("hispec", EXITS, MOST, 8)):
        longest = Setting(method=method, exit_layers=exits, num_draft_tokens=number, num_provisional_tokens=provisional)
        first = (0.7,) if method == "single-layer" else (0.8, 0.9)
        lengths, tokens_per_second, _ = build_choice(costs, found, longest)([first] * size)
        (lengths,) = set(lengths)
        if longest != made.engine:
            continue
        assert tokens_per_second == pytest.approx(made.engine_choices[size].tokens_per_second)
        chosen = made.engine_choices[size].setting
        expected = (chosen.num_draft_tokens, chosen.num_provisional_tokens)[: len(lengths)]
        assert lengths == (expected if chosen != AUTOREGRESSIVE else (0,) * len(lengths))
    assert made.engine.method != "autoregressive"


def test_a_batch_drafts_less_as_it_grows():
    """Rows are free up to sixteen: alone a text drafts far, in a full batch only one that is kept well."""
    costs = replace(COSTS, layer=linear(1.0, 0.05), target_head=flat(1.0))
    choice = single(costs)
    alone, few, many = (lengths_of(choice, [0.6] * size) for size in (1, 4, 16))
    assert alone[0] > few[0] > many[0] == 0
    well, badly = lengths_of(choice, [0.95, 0.1])
    assert well > badly == 0


def test_who_drafts_alone_pays_for_one():
    """Heads cost by their rows: for one text of eight they pay, for all they would not."""
    costs = replace(COSTS, layer=flat(0.05), target_head=flat(30.0), exit_heads={2: linear(0.0, 1.0)})
    lengths = lengths_of(single(costs), [0.9] + [0.0] * 7)
    assert lengths[0] > 0
    assert lengths[1:] == [0] * 7


def test_an_engine_serves_all_of_its_sizes():
    """One that drafts where a single sequence runs and is plain in a full batch, though for that alone none would be
    built that drafts."""
    costs = replace(COSTS, layer=linear(1.0, 0.1))
    sizes = [1, 2, 4, 8, 16]
    made = plan(costs, SOME, sizes)
    assert plan(costs, SOME, [16]).engine == AUTOREGRESSIVE
    assert made.engine != AUTOREGRESSIVE
    assert made.engine.num_draft_tokens == MOST
    assert made.engine_choices[16] == made.plain[16]
    for size in sizes:
        setting = made.engine_choices[size].setting
        assert setting == AUTOREGRESSIVE or setting.exit_layers == made.engine.exit_layers
        assert made.choices[size].tokens_per_second >= made.engine_choices[size].tokens_per_second * ALIKE
    assert made.engine_choices[1] != made.plain[1]


@given(kept, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_shares_change_together(measured, low, high):
    assert shifted_shares(measured, measured[0]) == pytest.approx(measured)
    low, high = sorted((low, high))
    below, above = shifted_shares(measured, low), shifted_shares(measured, high)
    assert below[0] == pytest.approx(low)
    assert all(a <= b + 1e-12 for a, b in zip(below, above, strict=True))
    assert shifted_shares(measured, 0.0) == (0.0,)
    assert shifted_shares(measured, 1.0) == (1.0,)


chances = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda found: sorted(found, reverse=True))


@settings(deadline=None, max_examples=50)
@given(costs_of_machines(), chances, st.integers(0, 4), st.integers(0, 8), st.floats(0, 3))
def test_no_other_number_of_sequences_gains_more_by_another_token(costs, chances, others, drafted, worth):
    size = len(chances) + others
    drafted = max(len(chances), min(drafted, MOST * size - len(chances)))
    tokens_per_second = worth * predict(AUTOREGRESSIVE, costs, SOME, size).tokens_per_second

    def gain(number):
        before, after = (verified_draft_seconds(costs, EXITS[0], size, n / size) for n in (drafted, drafted + number))
        drawing = drafted_token_seconds(costs, EXITS[0], number) if number else 0.0
        return sum(chances[:number]) - tokens_per_second * (drawing + after - before)

    number = single(costs).num_worth(chances, size, drafted, tokens_per_second)
    best = max(gain(each) for each in range(len(chances) + 1))
    assert gain(number) == pytest.approx(best, abs=1e-9)


def test_nothing_more_is_drafted_where_time_is_worth_more_and_everything_where_it_is_worth_nothing():
    assert single(COSTS).num_worth([1.0, 0.9], 2, 2, 1e9) == 0
    assert single(COSTS).num_worth([1.0, 0.9, 0.1], 3, 3, 0.0) == 3
    assert single(COSTS).num_worth([], 2, 2, 1.0) == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.3, 0.95))
@example([1.0, 2.220446049250313e-16, 2.220446049250313e-16], 0.5)  # unlikely ones that cost nothing may come along
def test_the_likeliest_go_on(chances, share):
    policy = CostPolicy(single(COSTS), [share], by_confidence=True)
    assert policy.by_confidence
    assert not CostPolicy(single(COSTS), [share]).by_confidence
    policy.choose([[share]] * (len(chances) + 1))
    going = policy.going_on(chances, len(chances))
    assert len(set(going)) == len(going)
    left = [each for place, each in enumerate(chances) if place not in going]
    assert all(chances[place] >= max(left, default=0.0) for place in going)
    # One that surely stands goes on before all others, and one that cannot stand never.
    with_sure = policy.going_on([1.0, *chances], len(chances))
    assert with_sure[:1] == [0] or not (going or with_sure)
    assert policy.going_on([0.0] * len(chances), len(chances)) == []


def test_time_is_worth_what_the_round_at_hand_makes_of_it():
    chances = [0.02, 0.04, 0.3, 0.95]
    for batch in ([[0.5]] * 4, [[0.95]] * 12, [[0.1], [0.9]] * 3):
        used, fresh = (CostPolicy(single(COSTS), [0.5], by_confidence=True) for _ in range(2))
        used.choose([[0.7]] * 5)
        for each in (used, fresh):
            each.choose(batch)
        assert used.going_on(chances, 4) == fresh.going_on(chances, 4)
        assert (used._batch_size, used._tokens_per_second) == (fresh._batch_size, fresh._tokens_per_second)


def test_the_likeliest_go_on_without_the_others():
    policy = CostPolicy(single(replace(COSTS, layer=linear(1.0, 0.05))), [0.5], by_confidence=True)
    policy.choose([[0.5]] * 4)
    assert policy.going_on([0.1, 0.9, 0.3, 0.95], 4) == [3, 1, 2]


def test_pairs_of_exits_have_lengths_alone():
    assert not CostPolicy(HispecLengths(COSTS, SOME, EXITS), [0.5, 0.5], by_confidence=True).by_confidence


def never(found=0.2):
    """A policy of a machine on which drafts that are kept so often do not pay."""
    return CostPolicy(single(replace(COSTS, exit_heads={2: flat(3.0)})), [found])


def test_probes_are_rare_and_ever_rarer():
    policy = never()
    drafting = [number for number in range(20_000) if any(map(any, policy.choose([[0.2]] * 4)))]
    gaps = [after - before for before, after in zip([-1, *drafting], drafting, strict=False)]
    assert gaps[:3] == [FIRST_PROBE + 1, 2 * FIRST_PROBE + 1, 4 * FIRST_PROBE + 1]
    assert set(gaps[5:]) == {LAST_PROBE + 1}
    policy.first_shares()
    later = next(number for number in range(20_000) if any(map(any, policy.choose([[0.2]] * 4))))
    assert later <= FIRST_PROBE


def test_nothing_is_tried_where_no_text_could_make_drafts_pay():
    policy = CostPolicy(single(replace(COSTS, exit_heads={2: flat(50.0)})), [0.2])
    assert not any(any(map(any, policy.choose([[0.2]] * 4))) for _ in range(3000))


def test_all_that_draft_nothing_probe_in_the_same_round():
    policy = CostPolicy(single(COSTS), [0.5])
    batch = [[0.9], [0.0], [0.0]]
    rounds = [policy.choose(batch) for _ in range(FIRST_PROBE + 1)]
    assert all(lengths[0] > (1,) and lengths[1:] == [(0,), (0,)] for lengths in rounds[:-1])
    assert rounds[-1][1:] == [(1,), (1,)]


def simulate(policy, share_at, num_rounds, seed=0):
    """Tokens and lengths of a text whose drafts are kept with the probability of the round; as `Hierarchy` does it."""
    generator = random.Random(seed)
    own, num_plain, lengths = policy.first_shares(), 0, []
    for number in range(num_rounds):
        ((length,),) = policy.choose([own])
        num_kept = next((k for k in range(length) if generator.random() >= share_at(number)), length)
        own[0] = policy.updated_share(0, own[0], length, num_kept, num_plain)
        num_plain = 0 if length else num_plain + 1
        lengths.append((length, num_kept))
    return lengths


def round_seconds(costs, length):
    if not length:
        return predict(AUTOREGRESSIVE, costs, SOME, 1).seconds_per_round
    return length * drafted_token_seconds(costs, EXITS[0], 1) + verified_draft_seconds(costs, EXITS[0], 1, length)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3])
def test_texts_whose_drafts_do_not_pay_lose_little(share):
    """However wrong what was measured: within three percent of plain decoding over some answers."""
    costs = replace(COSTS, layer=flat(1.0), exit_heads={2: flat(2.0), 5: flat(2.0)})
    policy = CostPolicy(single(costs, acceptance((0.6,), (0.6,), (0.6,))), [0.6])
    rounds = [each for text in range(20) for each in simulate(policy, lambda number: share, 100, seed=text)]
    seconds = sum(round_seconds(costs, length) for length, _ in rounds)
    tokens = sum(1 + num_kept for _, num_kept in rounds)
    assert tokens / seconds > 0.97 / round_seconds(costs, 0)


def test_drafting_begins_again_where_a_text_changes():
    policy = CostPolicy(single(COSTS), [0.5])
    rounds = simulate(policy, lambda number: 0.05 if number < 400 else 0.9, 1500)
    drafted = [length > 0 for length, _ in rounds]
    assert sum(drafted[100:400]) < 10
    assert sum(drafted[1000:]) > 450


def test_a_new_text_begins_with_what_others_showed():
    policy = CostPolicy(single(COSTS), [0.9])
    for text in range(3):
        simulate(policy, lambda number: 0.1, 100, seed=text)
    assert policy.first_shares()[0] < 0.5


def test_what_was_learned_long_ago_counts_less():
    policy = CostPolicy(single(COSTS), [0.5])
    recent, late = (policy.updated_share(0, 0.2, 1, 1, number) for number in (1, round_policy.FIRST_PROBE))
    assert 0.2 < recent < late < 0.5
    assert policy.updated_share(0, 0.2, 0, 0, 500) == 0.2


def test_autoregressive_engines_choose_nothing():
    assert build_choice(COSTS, Acceptance(hops={}), AUTOREGRESSIVE) is None
