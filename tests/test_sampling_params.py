"""What a user may ask for: values that are refused, several texts, log-probabilities."""

import math
from functools import partial

import pytest
import torch

from hispec.infer import Engine, SamplingParams

from .models import build_heads, shallow

METHODS = ["autoregressive", "single-layer", "hispec"]
PROMPTS = [[5, 9, 5, 33, 40], [7], [11, 12, 13] * 6]


@pytest.fixture(scope="module")
def model(base):
    return build_heads(shallow(base, 3), "random", committed_context=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; it must be an integer"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, more than max_new_tokens, 8"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": {1: math.nan}}, "logit_bias holds 1: nan"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias holds '1'"),
        ({"banned_token_ids": [-1]}, "banned_token_ids holds -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
        ({"stop": ""}, "stop holds ''"),
        ({"stop": ["a", 3]}, "stop holds 3"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"n": 0}, "n is 0"),
        ({"n": 2}, "n is 2 at temperature 0"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_wrong_values_are_refused_at_once(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"banned_token_ids": (64,)}, "banned_token_ids holds 64, but the model's token ids end at 63"),
        ({"logit_bias": {99: 1.0}}, "logit_bias holds 99"),
        ({"stop_token_ids": (64,)}, "stop_token_ids holds 64"),
        ({"banned_token_ids": tuple(range(64))}, "ban every token"),
        ({"logprobs": 65}, "logprobs is 65"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_anything_runs(model, values, message):
    engine = Engine(model)
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, [SamplingParams(), SamplingParams(), SamplingParams(**values)])
    assert not engine.has_unfinished


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [None, 5])
def test_several_texts_of_one_prompt(model, method, seed):
    engine = Engine(model, method=method, max_num_seqs=4)
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed, n=n, ignore_eos=True) for n in (3, 1, 2)]
    completions = engine.generate(PROMPTS, params)
    assert [completion.index for completion in completions] == [0, 1, 2, 0, 0, 1]
    assert [completion.prompt_token_ids for completion in completions] == [
        PROMPTS[place] for place in (0, 0, 0, 1, 2, 2)
    ]
    assert len({tuple(completion.token_ids) for completion in completions[:3]}) == 3
    if seed is not None:
        alone = engine.generate(
            PROMPTS[:1], SamplingParams(max_new_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
        )
        assert completions[0].token_ids == alone[0].token_ids


def test_all_texts_of_a_request_are_aborted_together(model):
    engine = Engine(model, max_num_seqs=2)
    request_id = engine.add_request(PROMPTS[0], SamplingParams(temperature=1.0, n=3))
    engine.step()
    engine.abort(request_id)
    assert not engine.has_unfinished
    assert engine._scheduler._block_manager.num_free == engine._scheduler._block_manager.num_blocks


def test_a_stream_is_one_text(model):
    from .train_support import build_tokenizer

    with pytest.raises(ValueError, match="a stream is one text"):
        next(Engine(model, build_tokenizer()).stream(PROMPTS[0], SamplingParams(temperature=1.0, n=2)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 1}, {"temperature": 0.8, "top_k": 5}])
def test_logprobs_are_those_of_one_pass_over_the_text(model, method, sampling):
    engine = Engine(model, method=method, num_blocks=12, block_size=8, max_num_seqs=3)
    params = SamplingParams(max_new_tokens=20, logprobs=3, repetition_penalty=1.2, ignore_eos=True, **sampling)
    for completion in engine.generate(PROMPTS, params):
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            rows = model.base(ids).logits[0].log_softmax(-1)[len(completion.prompt_token_ids) - 1 : -1]
        chosen = rows.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        # The texts are others each time, and our own kernels sum in another order than the library.
        close = partial(torch.testing.assert_close, rtol=0, atol=5e-5)
        close(torch.tensor([each.logprob for each in completion.logprobs]), chosen)
        for row, each in zip(rows, completion.logprobs, strict=True):
            top = row.topk(3)
            assert list(each.top) == top.indices.tolist()
            close(torch.tensor(list(each.top.values())), top.values)


def test_logprobs_of_none_and_of_the_chosen_alone(model):
    engine = Engine(model)
    assert engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))[0].logprobs is None
    completion = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0))[0]
    assert [each.top for each in completion.logprobs] == [{}, {}, {}]
