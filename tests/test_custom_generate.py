"""hispec inside the `generate` of transformers says what `generate` says, or refuses."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
)

from hispec.infer import Engine, SamplingParams, hispec_generate

from .models import build_heads, shallow
from .train_support import build_tokenizer

NUM_BLOCKS = 60
INPUTS = {
    "input_ids": torch.tensor([[0, 0, 3, 4, 5], [9, 8, 7, 6, 5], [0, 0, 0, 0, 9]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]),
}
ONE = {name: value[:1, 2:] for name, value in INPUTS.items()}


@pytest.fixture(scope="module")
def engine(base):
    """Good but not perfect heads."""
    return Engine(build_heads(shallow(base, 3), "good"), build_tokenizer(), num_blocks=NUM_BLOCKS)


def both(engine, inputs, **options):
    """What `generate` says without and with hispec."""
    base = engine.model.base
    plain = base.generate(**inputs, **options)
    return plain, base.generate(**inputs, custom_generate=hispec_generate(engine), **options)


def common_tokens(engine) -> list[int]:
    """Tokens that end the rows at different places."""
    new = engine.model.base.generate(**INPUTS, max_new_tokens=12, eos_token_id=None)[:, 5:].tolist()
    return [new[0][3], new[1][6]]


def test_a_batch_padded_on_the_left_and_ended_by_tokens(engine):
    plain, ours = both(engine, INPUTS, max_new_tokens=12, eos_token_id=common_tokens(engine), pad_token_id=0)
    assert torch.equal(plain, ours)
    assert (plain[:, -1] == 0).any(), "no row was padded"
    assert ours.dtype == torch.int64


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_length": 14},
        {},
        {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=[5, 6], pad_token_id=0)},
        {"max_new_tokens": 9, "temperature": 0.3, "top_k": 5, "min_p": 0.2, "use_cache": False},
        {"max_new_tokens": 5, "max_time": 1000.0},
    ],
)
def test_lengths_and_settings_of_no_effect(engine, options):
    assert torch.equal(*both(engine, INPUTS, **options))


def test_one_prompt_without_a_mask(engine):
    assert torch.equal(*both(engine, {"inputs": ONE["input_ids"]}, max_new_tokens=9))


def test_a_dict_is_returned_if_asked(engine):
    plain, ours = both(engine, INPUTS, max_new_tokens=6, return_dict_in_generate=True)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)


def test_sampling_hands_over_its_settings_and_follows_manual_seed(engine, monkeypatch):
    seen, add_request = [], engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda ids, params: (seen.append(params), add_request(ids, params))[1])
    run = hispec_generate(engine)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "num_return_sequences": 2}

    def sample(seed):
        torch.manual_seed(seed)
        return engine.model.base.generate(**INPUTS, custom_generate=run, max_new_tokens=10, **options)

    first = sample(0)
    assert first.shape[0] == 6
    assert {(p.temperature, p.top_k, p.top_p, p.max_new_tokens) for p in seen} == {(0.7, 9, 0.8, 10)}
    assert {(p.ignore_eos, p.stop_token_ids) for p in seen} == {(True, (2,))}
    assert torch.equal(first, sample(0))
    assert not torch.equal(first, sample(1)[:, : first.shape[1]])
    # Each row draws its own.
    assert not torch.equal(first[0], first[1])


def test_sampling_from_one_token_is_greedy(engine):
    greedy = engine.model.base.generate(**INPUTS, max_new_tokens=8)
    run = hispec_generate(engine)
    assert torch.equal(
        greedy, engine.model.base.generate(**INPUTS, custom_generate=run, max_new_tokens=8, do_sample=True, top_k=1)
    )


def test_the_default_top_k_of_transformers_is_kept(engine, monkeypatch):
    seen, add_request = [], engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda ids, params: (seen.append(params), add_request(ids, params))[1])
    engine.model.base.generate(**ONE, custom_generate=hispec_generate(engine), max_new_tokens=2, do_sample=True)
    assert [(params.temperature, params.top_k, params.top_p) for params in seen] == [(1.0, 50, 1.0)]


class Contains(StoppingCriteria):
    """Ends a text that contains a token."""

    def __init__(self, token_id):
        self.token_id = token_id

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 3:] == self.token_id).any(dim=1)


def test_stop_strings_end_each_row(engine, monkeypatch):
    # A word that transformers tokenizes to see how tokens are joined.
    tokenizer = build_tokenizer(extra=("abcdef",))
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    words = [f"w{token_id}" for token_id in common_tokens(engine)]
    plain, ours = both(engine, INPUTS, max_new_tokens=12, stop_strings=words, tokenizer=tokenizer)
    assert torch.equal(plain, ours)
    assert plain.shape[1] < 17 or (plain[:, -1] == 0).any()
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, words)])
    assert torch.equal(plain, both(engine, INPUTS, max_new_tokens=12, stopping_criteria=criteria)[1])
    assert not engine.has_unfinished


def test_a_criterion_of_the_users_own_for_one_prompt(engine, capsys):
    plain = engine.model.base.generate(**ONE, max_new_tokens=12)
    criteria = StoppingCriteriaList([Contains(int(plain[0, 8]))])
    plain, ours = both(engine, ONE, max_new_tokens=12, stopping_criteria=criteria)
    assert torch.equal(plain, ours)
    assert plain.shape[1] < 15
    assert not engine.has_unfinished
    both(engine, ONE, max_new_tokens=12, stopping_criteria=criteria, streamer=TextStreamer(build_tokenizer()))
    streamed_plain, streamed_ours = capsys.readouterr().out.splitlines()
    assert streamed_plain == streamed_ours


def test_generates_own_streamer_gets_all(engine, capsys):
    """Transformers does not hand `streamer` to a callable: this fails where our way to it breaks."""
    streamer = TextStreamer(build_tokenizer())
    both(engine, ONE, max_new_tokens=9, streamer=streamer)
    plain, ours = capsys.readouterr().out.splitlines()
    assert plain == ours
    assert len(ours.split()) == 12


class Double(LogitsProcessor):
    """Does something."""

    def __call__(self, input_ids, scores):
        return scores * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
        ({"bad_words_ids": [[5]]}, r"bad_words_ids=\[\[5\]\]"),
        ({"suppress_tokens": [5]}, r"suppress_tokens=\[5\]"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p=0.5"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"cache": DynamicCache()}, "cache"),
        ({"logits_processor": LogitsProcessorList([Double()])}, "the logits processor Double"),
        (
            {"logits_processor": [TemperatureLogitsWarper(0.5)], "do_sample": True, "temperature": 0.7},
            "the logits processor TemperatureLogitsWarper",
        ),
        ({"prefix_allowed_tokens_fn": lambda *_: [5]}, "the logits processor PrefixConstrainedLogitsProcessor"),
        ({"stopping_criteria": [Contains(5)]}, "the stopping criterion Contains for 3 prompts together"),
        ({"position_ids": torch.arange(5).expand(3, 5)}, "position_ids"),
    ],
)
def test_what_cannot_be_honoured_is_named(engine, options, message):
    with pytest.raises(ValueError, match=f"hispec_generate cannot honour {message}; leave it out"):
        engine.model.base.generate(**INPUTS, custom_generate=hispec_generate(engine), max_new_tokens=4, **options)
    assert not engine.has_unfinished


def test_an_assistant_is_refused(engine, make_base):
    """Transformers does not hand `assistant_model` to a callable either."""
    with pytest.raises(ValueError, match="cannot honour assistant_model"):
        engine.model.base.generate(
            **ONE, custom_generate=hispec_generate(engine), assistant_model=make_base("llama"), max_new_tokens=4
        )


def test_other_ways_to_be_wrong(engine, make_base):
    run = hispec_generate(engine)
    with pytest.raises(ValueError, match="not the base of hispec_generate's engine"):
        make_base("llama").generate(**ONE, custom_generate=run, max_new_tokens=4)
    base = engine.model.base
    right = {name: value.flip(1) for name, value in INPUTS.items()}
    with pytest.raises(ValueError, match="padded on the left only"):
        base.generate(**right, custom_generate=run, max_new_tokens=4)
    embeds = base.get_input_embeddings()(ONE["input_ids"])
    with pytest.raises(ValueError, match="cannot honour inputs_embeds"):
        base.generate(inputs_embeds=embeds, custom_generate=run, max_new_tokens=4)
    assert not engine.has_unfinished


def test_others_of_the_same_engine_lose_nothing(engine):
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    request_id = engine.add_request([3, 4, 5], params)
    assert torch.equal(*both(engine, INPUTS, max_new_tokens=9))
    while engine.has_unfinished:
        finished = engine.step()
    assert [(c.request_id, len(c.token_ids)) for c in finished] == [(request_id, 5)]
