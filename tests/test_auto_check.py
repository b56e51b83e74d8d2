"""`plan="auto"` against plain decoding, a step of each in turn."""

import itertools
from types import SimpleNamespace

import pytest

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams, auto_check
from hispec.infer.auto_check import check_auto

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 3, 4], [5, 5]]


@pytest.fixture
def steps(base, monkeypatch):
    """The steps of both engines behind the warm-up, where each takes a second; one that is planned does two at once."""
    taken = []
    clock = itertools.count()
    monkeypatch.setattr(auto_check, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def build(model, **options):
        plan = options.pop("plan", "plain")
        engine = Engine(model, **options | {"method": "autoregressive"})
        step, generate = engine.step, engine.generate

        def counted():
            taken.append(plan)
            return [*step(), *(step() if plan == "auto" else [])]

        def warm_up(*arguments):
            generate(*arguments)
            taken.clear()

        engine.step, engine.generate = counted, warm_up
        return engine

    return EarlyExitModel.from_configs(base, []), build, taken


@pytest.mark.parametrize("size", [1, 4])
def test_the_ratio_is_that_of_tokens_to_time(steps, size):
    model, build, taken = steps
    ratio = check_auto(model, build, PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True), (size,))[size]
    assert ratio == pytest.approx(taken.count("plain") / taken.count("auto"))
    assert 1.5 < ratio < 2.5


def test_engines_step_in_turn(steps):
    model, build, taken = steps
    check_auto(model, build, PROMPTS[:1], SamplingParams(max_new_tokens=9, ignore_eos=True), (1,))
    number = taken.count("auto")
    assert number > 2
    assert taken == ["plain", "auto"] * number + ["plain"] * (len(taken) - 2 * number)


def test_no_more_batches_than_are_needed(steps):
    model, build, taken = steps
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    check_auto(model, build, PROMPTS[:1], params, (1,))
    number = len(taken)
    check_auto(model, build, PROMPTS[:1] * 11, params, (2,))
    assert len(taken) == number * auto_check.NUM_GROUPS
