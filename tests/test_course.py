"""Courses: against the engine's own rounds, by what must hold for any, and against a simulated machine."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.infer.acceptance_length import single_layer_length
from hispec.infer.agreement import Text, score_texts
from hispec.infer.cost_model import Acceptance, Setting, predict
from hispec.infer.course import CourseTally, course_from_dict
from hispec.infer.replay import acceptance_from_list, acceptance_to_list, replay

from .test_cost_model import COSTS, DEPTH, EXITS, hispec

PROMPTS = [[5, 6, 7], [9], [11, 12, 40, 8]]


@pytest.fixture
def model(base):
    """Heads that are right now and then, and see how far the last commit is."""
    model = EarlyExitModel.from_base(base, (3, 5), "mlp", committed_context=True, draft_vocab_size=48)
    torch.manual_seed(1)
    with torch.no_grad():
        for head in model.exit_heads:
            assert head.fuse is not None
            head.fuse.weight.add_(torch.randn_like(head.fuse.weight) * 0.05)
            head.fuse.weight[:, head.fuse.in_features // 2 :] *= 8
    return model


def answer(model, params, **options):
    engine = Engine(model, num_blocks=64, **options)
    return engine, engine.generate(PROMPTS, params)


@pytest.mark.parametrize("lengths", [(1, None), (3, None), (1, 1), (2, 3), (3, 2)])
def test_greedy_courses_are_the_rounds_of_the_engine(model, lengths):
    """Token by token the same rounds, found from one reading of the texts."""
    number, provisional = lengths
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    method = "single-layer" if provisional is None else "hispec"
    engine, answers = answer(
        model, params, method=method, num_draft_tokens=number, num_provisional_tokens=provisional or 1
    )
    tally = CourseTally(number, provisional)
    texts = [Text(prompt, each.token_ids) for prompt, each in zip(PROMPTS, answers, strict=True)]
    for kept in score_texts(model, texts, 0.0):
        tally.add(*((kept[3, 6],) if provisional is None else (kept[5, 6], kept[3, 5])))
    course, level = tally.result(), engine.stats.levels["target"]
    assert course.num_rounds == level.num_rounds
    assert course.tokens_per_round == pytest.approx(3 * 39 / level.num_rounds)
    assert level.num_accepted > 5
    if provisional is None:
        assert course.num_waiting == pytest.approx(level.num_drafted / level.num_rounds)
        assert course.kept[0] == level.accepted_per_position[0] / level.drafted_per_position[0]


def test_sampled_coins_fall_as_the_engine_accepts(model):
    params = SamplingParams(max_new_tokens=120, ignore_eos=True, temperature=1.5, n=2)
    found = {}
    for number in (1, 3):
        engine, answers = answer(model, params, method="single-layer", num_draft_tokens=number)
        level = engine.stats.levels["target"]
        found[number] = level.acceptance_length
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        texts = [Text(prompt, each.token_ids) for prompt, each in zip(prompts, answers, strict=True)]
        tally = CourseTally(number)
        for kept in score_texts(model, texts, 1.5):
            tally.add(kept[3, 6])
        assert tally.result().tokens_per_round == pytest.approx(found[number], rel=0.1)
    assert found[3] > found[1] > 1.3


answers = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(answers, st.integers(1, 5))
def test_every_token_is_committed_once(rows, number):
    tally = CourseTally(number)
    for row in rows:
        tally.add([row])
    course = tally.result()
    assert course.num_rounds * course.tokens_per_round == pytest.approx(sum(map(len, rows)))
    assert 1 <= course.tokens_per_round <= number + 1
    assert course_from_dict(course.to_dict()).tokens_per_round == pytest.approx(course.tokens_per_round, abs=1e-5)


@settings(deadline=None, max_examples=50)
@given(answers, st.integers(1, 4), st.integers(1, 5), st.data())
def test_hispec_commits_every_token_once_too(rows, number, provisional, data):
    tally = CourseTally(number, provisional)
    for row in rows:
        drafts = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
        tally.add([row], [drafts])
    course = tally.result()
    assert course.num_rounds * course.tokens_per_round == pytest.approx(sum(map(len, rows)))
    assert course.num_waiting <= provisional + number
    assert list(course.verifications) == sorted(course.verifications, reverse=True)


def test_where_easy_and_hard_alternate_long_drafts_keep_less_than_shares_say():
    """What a mean over all places misses: drafts run through the easy and begin again where it is hard."""
    generator = random.Random(0)
    row = []
    while len(row) < 20_000:
        row += [generator.random() < share for share in [generator.choice((0.95, 0.2))] * 12]
    shares, alive = [], [True] * len(row)
    for place in range(4):
        alive = alive[: len(row) - place]
        reached = sum(alive)
        alive = [a and row[start + place] for start, a in enumerate(alive)]
        shares.append(sum(alive) / reached)
    tally = CourseTally(4)
    tally.add([row])
    assert tally.result().tokens_per_round < 0.9 * single_layer_length(shares, 4)


class Machine:
    """Runs rounds of a batch over texts of given agreement, and adds up what `COSTS` say of every pass."""

    def __init__(self, seed, batch_size, num_rows=4000):
        generator = random.Random(seed)
        self.rows, self.drafts, self.direct = [], [], []
        for _ in range(batch_size):
            # Hardness comes in stretches, and both exits feel it.
            row, drafts, direct = [], [], []
            while len(row) < num_rows:
                ease = generator.choice((0.25, 0.6, 0.95))
                for _ in range(generator.randint(3, 20)):
                    row.append(generator.random() < ease)
                    drafts.append(generator.random() < 0.3 + 0.7 * ease)
                    direct.append(generator.random() < ease * 0.9)
            self.rows.append(row[:num_rows])
            self.drafts.append(drafts[:num_rows])
            self.direct.append(direct[:num_rows])

    def acceptance(self):
        answers = [
            {(2, 5): [drafts], (5, DEPTH): [row], (2, DEPTH): [direct]}
            for row, drafts, direct in zip(self.rows, self.drafts, self.direct, strict=True)
        ]
        return replay(answers, EXITS, DEPTH)

    def tokens_per_second(self, setting):
        """Until the first of the batch ends."""
        starts = [0] * len(self.rows)
        seconds, tokens = 0.0, 0
        number, is_hispec = setting.num_draft_tokens, setting.method == "hispec"
        while max(starts) + 30 < len(self.rows[0]):
            waiting = [0] * len(starts)
            wanted = setting.num_provisional_tokens if is_hispec else 0
            while active := [b for b in range(len(starts)) if waiting[b] < wanted]:
                seconds += (number + 1) * (2 * 1.0 + 0.11) + number * (0.5 + 0.13) + 3 * 1.0 + 0.7 + 0.17
                for b in active:
                    waiting[b] += run_of(self.drafts[b], starts[b] + waiting[b], number) + 1
            if is_hispec:
                seconds += 2 * 1.0 + 0.11 + 3 * 1.0 + 0.11 + 7 * 1.0 + 3.0 + 0.19
            else:
                seconds += (number + 1) * (2 * 1.0 + 0.11) + number * (0.5 + 0.13) + 10 * 1.0 + 3.0 + 0.19
            for b in range(len(starts)):
                scores = self.rows[b] if is_hispec else self.direct[b]
                kept = run_of(scores, starts[b], waiting[b] if is_hispec else number) + 1
                starts[b] += kept
                tokens += kept
        return tokens / seconds


def run_of(row, start, length):
    return next((place for place in range(length) if not row[start + place]), length)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_predictions_are_what_a_simulated_machine_reaches(batch_size):
    """Within one percent, where tokens are kept in stretches and not independently at all."""
    machine = Machine(batch_size, batch_size, num_rows=12_000 // batch_size)
    found = machine.acceptance()
    singles = [Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=number) for number in (1, 2, 4)]
    shares_alone = replace(found, courses={})
    errors = []
    for setting in [*singles, hispec(1, 1), hispec(2, 2), hispec(2, 4)]:
        reached = machine.tokens_per_second(setting)
        predicted = predict(setting, COSTS, found, batch_size).tokens_per_second
        assert predicted == pytest.approx(reached, rel=0.01), str(setting)
        errors.append(abs(predict(setting, COSTS, shares_alone, batch_size).tokens_per_second / reached - 1))
    assert max(errors) > 0.03  # a test that any model passed would say nothing


def some_acceptance():
    return Machine(0, 1, num_rows=400).acceptance()


def test_courses_are_read_as_they_were_written():
    found = some_acceptance()
    again = acceptance_from_list(acceptance_to_list(found), EXITS, DEPTH)
    assert set(again.courses) == set(found.courses)
    for setting, course in found.courses.items():
        assert again.courses[setting].tokens_per_round == pytest.approx(course.tokens_per_round, abs=1e-5)
    assert set(again.hops) == {(2, 5), (5, DEPTH), (2, DEPTH)}
    for hop, shares in found.hops.items():
        assert again.hops[hop] == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_round": 0.5},
        {"tokens_per_round": float("nan")},
        {"num_rounds": 0},
        {"kept": [1.5]},
        {"kept": "x"},
        {"verifications": [0.5]},
        {"exit_layers": [2, 5, 7]},
        {"num_draft_tokens": None},
    ],
)
def test_what_is_no_course_is_refused(change):
    written = acceptance_to_list(some_acceptance())
    written[0] |= change
    with pytest.raises((ValueError, KeyError, TypeError)):
        acceptance_from_list(written, EXITS, DEPTH)
    with pytest.raises(ValueError, match="missing"):
        acceptance_from_list(acceptance_to_list(some_acceptance())[1:], EXITS, DEPTH)


def test_too_few_rounds_are_no_measurement():
    few = {(2, 5): [[True] * 10], (5, DEPTH): [[True] * 10], (2, DEPTH): [[True] * 10]}
    assert replay([few], EXITS, DEPTH) is None
    assert replay([], (), DEPTH) == Acceptance(hops={})
