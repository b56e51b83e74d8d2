"""Whether drafts pay is seen in the rounds themselves."""

import random
from dataclasses import replace

import pytest

from hispec.infer.cost_model import Acceptance, Overhead, predict
from hispec.infer.draft_lengths import SingleLayerLengths
from hispec.infer.pay_watch import LONG_PATIENCE, PATIENCE, PayWatch
from hispec.infer.planner import AUTOREGRESSIVE
from hispec.infer.round_policy import CostPolicy

from .test_cost_model import COSTS, DEPTH, flat

SHARE, BATCH = 0.8, 4
TOLD = replace(COSTS, exit_heads={2: flat(0.5)}, per_round=Overhead())
"""What the policy is told: drafts pay."""


def run(true_costs, num_rounds, noise=0.0):
    """Tokens a second, in parts of those of plain decoding, of a policy that is told `TOLD` where others hold."""
    generator = random.Random(0)
    policy = CostPolicy(SingleLayerLengths(TOLD, Acceptance(hops={(2, DEPTH): (SHARE,)}), 2, 4), [SHARE])
    plain = predict(AUTOREGRESSIVE, true_costs, Acceptance(hops={}), BATCH).seconds_per_round
    watched, num_tokens, total, drafting = 0, 0, 0.0, []
    for _ in range(num_rounds):
        lengths = [length for (length,) in policy.choose([[SHARE]] * BATCH)]
        kept = [next((k for k in range(length) if generator.random() >= SHARE), length) for length in lengths]
        draft = max(lengths) * (2 * true_costs.layer.at(BATCH, 1) + true_costs.exit_heads[2].at(BATCH, 1))
        seconds = (plain + draft) * generator.uniform(1 - noise, 1 + noise)
        policy.observe(BATCH + sum(kept), seconds, has_copies=False)
        watched, num_tokens, total = watched + 1, num_tokens + BATCH + sum(kept), total + seconds
        drafting.append(any(lengths))
    return num_tokens / total / (BATCH / plain), drafting


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_cost_more_than_was_thought_end_soon(noise):
    ratio, drafting = run(replace(TOLD, exit_heads={2: flat(9.0)}), 3000, noise)
    assert drafting[0]
    assert sum(drafting[300:]) < 0.02 * len(drafting)
    assert ratio > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_pay_go_on_but_for_rounds_to_compare_with(noise):
    ratio, drafting = run(TOLD, 3000, noise)
    assert sum(drafting) > 0.97 * len(drafting)
    assert ratio > 1.3


def test_they_begin_again_where_they_pay_again():
    watch = PayWatch()
    for _ in range(60):
        watch.observe(2, 1.0, 2, 1.0, has_drafts=False, has_copies=False)
        watch.observe(2, 1.0, 3, 2.0, has_drafts=True, has_copies=False)
    assert not watch.pays(2)
    assert watch.pays(3)  # of other numbers of sequences nothing is known
    for _ in range(20):
        watch.observe(2, 1.0, 5, 2.0, has_drafts=True, has_copies=False)
    assert watch.pays(2)


def test_what_is_compared_follows_the_machine_and_the_texts_length():
    watch = PayWatch()
    for slower in (1.0, 2.0):
        for context in (1.0, 1.5):
            for _ in range(40):
                watch.observe(1, context, 1, context * slower, has_drafts=False, has_copies=False)
                watch.observe(1, context, 2, 1.6 * context * slower, has_drafts=True, has_copies=False)
            assert watch.pays(1)
    # Copies say nothing of either.
    for _ in range(40):
        watch.observe(1, 1.0, 1, 99.0, has_drafts=False, has_copies=True)
    assert watch.pays(1)


def test_one_busy_moment_ends_nothing():
    watch = PayWatch()
    watch.observe(1, 1.0, 1, 1.0, has_drafts=False, has_copies=False)
    watch.observe(1, 1.0, 2, 1000.0, has_drafts=True, has_copies=False)
    assert watch.pays(1)
    watch.observe(1, 1.0, 1, 1000.0, has_drafts=False, has_copies=False)
    for _ in range(60):
        watch.observe(1, 1.0, 1, 1.0, has_drafts=False, has_copies=False)
        watch.observe(1, 1.0, 1, 1.5, has_drafts=True, has_copies=False)
    assert not watch.pays(1)


def test_a_plain_round_is_due_when_it_was_long_ago():
    watch = PayWatch()
    assert not watch.needs_plain(1)
    watch.observe(1, 1.0, 1, 1.0, has_drafts=False, has_copies=False)
    for gain, patience in ((1.05, PATIENCE), (3.0, LONG_PATIENCE)):
        num_rounds = 0
        while not watch.needs_plain(1):
            watch.observe(1, 1.0, 1, 1 / gain, has_drafts=True, has_copies=False)
            num_rounds += 1
        assert PATIENCE <= num_rounds <= patience
        watch.observe(1, 1.0, 1, 1.0, has_drafts=False, has_copies=False)
        assert not watch.needs_plain(1)


def test_a_lone_text_is_tried_even_if_drafts_did_not_pay_in_those_before():
    policy = CostPolicy(SingleLayerLengths(TOLD, Acceptance(hops={(2, DEPTH): (SHARE,)}), 2, 4), [SHARE])
    plain = predict(AUTOREGRESSIVE, TOLD, Acceptance(hops={}), 1).seconds_per_round

    def rounds(size, number):
        """How many of so many rounds drafted; they bring nothing."""
        drafting = 0
        for _ in range(number):
            has_drafts = any(length for (length,) in policy.choose([[SHARE]] * size))
            policy.observe(size, plain * (1.2 if has_drafts else 1.0), has_copies=False)
            drafting += has_drafts
        return drafting

    for size, begins_again in (1, True), (4, False):
        rounds(size, 200)
        assert rounds(size, 60) <= 1
        policy.first_shares()
        assert (rounds(size, 60) > 1) == begins_again
        assert rounds(size, 60) <= 1
