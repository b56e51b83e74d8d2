"""The engine as its users call it."""

import itertools

import pytest
import torch

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.infer.hierarchy import Hierarchy

from .models import build_heads, shallow
from .train_support import build_tokenizer

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [[3, 4, 5], [9], [8, 7, 6, 5, 4, 3, 9, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model(base) -> EarlyExitModel:
    """Heads that are right about half of the time."""
    return build_heads(shallow(base, 3), "random", committed_context=True)


@pytest.mark.parametrize("method", ["autoregressive", "single-layer", "hispec"])
def test_counts_add_up(model, method):
    engine = Engine(model, method=method)
    completions = engine.generate(PROMPTS, PARAMS)
    assert engine.stats.num_committed == sum(len(completion.token_ids) for completion in completions)
    for stats in [completion.stats for completion in completions] + [engine.stats]:
        target = stats.levels["target"]
        # A prefill commits one token, a round what was accepted and one more; the room keeps it within the limit.
        assert stats.num_committed == stats.num_prefills + target.num_accepted + target.num_rounds
        for level in stats.levels.values():
            assert sum(level.accepted_per_position) == level.num_accepted
            assert sum(level.drafted_per_position) == level.num_drafted
            assert level.num_accepted <= level.num_drafted
        if method == "autoregressive":
            assert target.num_layer_passes == 6 * target.num_rounds
        if method == "hispec":
            middle = stats.levels["intermediate"]
            assert target.num_drafted == middle.num_accepted + middle.num_rounds
            assert middle.num_drafted == stats.levels["draft"].num_rounds


@pytest.mark.parametrize("method", ["single-layer", "hispec"])
def test_no_layer_sees_a_token_twice(base, method):
    """With drafts that are always right, nothing is ever computed again, at any level.

    Chains that are recorded run over what they are told to: `test_step_chain` compares their counts with these.
    """
    model = build_heads(shallow(base, 2), "good")
    seen: dict[tuple[int, int], int] = {}
    # Both are asked whether layers run by our own kernels or not.
    layers_steps, block_step = model.backbone.layers_steps, model.backbone.block_step

    def count(layer, positions):
        for position in positions.tolist():
            seen[layer, position] = seen.get((layer, position), 0) + 1

    def watch_layers(hidden, start, stops, positions, attend, **options):
        for first in [start, *stops[:-1]]:
            count(first, positions)
        return layers_steps(hidden, start, stops, positions, attend, **options)

    def watch_block(block, kv_layer, hidden, positions, attend, norm, **options):
        count(kv_layer, positions)
        return block_step(block, kv_layer, hidden, positions, attend, norm, **options)

    model.backbone.layers_steps, model.backbone.block_step = watch_layers, watch_block
    engine = Engine(model, method=method, num_draft_tokens=2, num_provisional_tokens=3)
    engine._runner._chains = None
    engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert engine.stats.levels["target"].acceptance_rate == 1
    assert set(seen.values()) == {1}
    assert len({layer for layer, _ in seen}) == (3 if method == "single-layer" else 5)


def test_the_base_is_not_touched(model):
    before = {name: tensor.clone() for name, tensor in model.base.state_dict().items()}
    Engine(model).generate(PROMPTS, PARAMS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.base.state_dict().items())


def test_requests_may_come_at_any_time(model):
    expected = [completion.token_ids for completion in Engine(model).generate(PROMPTS, PARAMS)]
    engine = Engine(model, max_num_seqs=2)
    ids, finished = [engine.add_request(PROMPTS[0], PARAMS)], {}
    for step in range(100):
        if step in (1, 2):
            ids.append(engine.add_request(PROMPTS[step], PARAMS))
        for completion in engine.step():
            finished[completion.request_id] = completion.token_ids
    assert [finished[request_id] for request_id in ids] == expected
    assert not engine.has_unfinished


def test_a_generate_does_not_swallow_what_others_asked_for(model):
    expected = [completion.token_ids for completion in Engine(model).generate(PROMPTS, PARAMS)]
    engine = Engine(model)
    first = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert [c.token_ids for c in engine.generate(PROMPTS[1:], PARAMS)] == expected[1:]
    assert engine.has_unfinished
    (completion,) = engine.step()
    assert (completion.request_id, completion.token_ids) == (first, expected[0][:2])
    assert not engine.has_unfinished


def test_streams_run_side_by_side(model):
    engine = Engine(model, build_tokenizer())
    expected = engine.generate(PROMPTS[:2], PARAMS)
    texts = ["", ""]
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    for deltas in itertools.zip_longest(*streams):
        for place, delta in enumerate(deltas):
            texts[place] += "" if delta is None else delta.text
    assert texts == [completion.text for completion in expected]
    assert not engine.has_unfinished


@pytest.mark.parametrize("method", ["autoregressive", "single-layer", "hispec"])
@pytest.mark.parametrize("place", [1, 4, 9])
def test_an_interruption_in_the_middle_of_a_round_costs_nothing(model, monkeypatch, method, place):
    expected = [completion.token_ids for completion in Engine(model, method=method).generate(PROMPTS, PARAMS)]
    engine = Engine(model, method=method)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    calls, verify_rows = [], Hierarchy._verify_rows

    def interrupt(*arguments):
        calls.append(None)
        if len(calls) == place:
            raise KeyboardInterrupt
        return verify_rows(*arguments)

    monkeypatch.setattr(Hierarchy, "_verify_rows", interrupt)
    finished, num_interrupted = {}, 0
    while engine.has_unfinished:
        try:
            finished |= {completion.request_id: completion.token_ids for completion in engine.step()}
        except KeyboardInterrupt:
            num_interrupted += 1
    assert [finished[request_id] for request_id in sorted(finished)] == expected
    assert num_interrupted == 1
    assert engine._scheduler._block_manager.num_free == engine._scheduler._block_manager.num_blocks


def test_a_failing_generate_leaves_nothing_behind(model):
    engine = Engine(model, num_blocks=2)
    with pytest.raises(ValueError, match="needs 3 blocks of the KV cache for 37 tokens, but there are only 2"):
        engine.generate([[3], [3] * 25], PARAMS)
    assert not engine.has_unfinished


def test_an_aborted_request_gives_everything_back(model):
    engine = Engine(model, num_blocks=8, max_num_seqs=2)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()
    for request_id in ids:
        engine.abort(request_id)
    assert not engine.has_unfinished
    assert engine._scheduler._block_manager.num_free == 8
    with pytest.raises(ValueError, match="no unfinished request"):
        engine.abort(ids[0])


def test_params_for_each_prompt(model):
    engine = Engine(model)
    each = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (1, 4, 9)]
    assert [len(c.token_ids) for c in engine.generate(PROMPTS, each)] == [1, 4, 9]
    with pytest.raises(ValueError, match="3 prompts but 2 sampling params"):
        engine.generate(PROMPTS, each[:2])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3] * 256, "256 tokens, but the model's context holds 256"),
        ([64], "token id outside 0 to 63"),
        ([-1], "token id outside 0 to 63"),
        ("text", "no tokenizer"),
    ],
)
def test_a_bad_prompt_is_refused_and_harms_nobody(model, prompt, message):
    engine = Engine(model)
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, PARAMS)
    while engine.has_unfinished:
        finished = engine.step()
    assert finished[0].request_id == request_id
    assert len(finished[0].token_ids) == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_sampling_params(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method 'magic' is unknown; choose one of autoregressive"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_bad_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


def test_a_method_needs_its_heads(base):
    with pytest.raises(ValueError, match="'hispec' needs 2 exit heads, but the model has 1"):
        Engine(EarlyExitModel.from_base(base, (2,)), method="hispec")
