"""Penalties, bias and bans: those of transformers, at every level, lossless."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from hispec.infer import Engine, SamplingParams
from hispec.infer.logits_processor import LogitsProcessor, penalise

from .models import build_heads, shallow

METHODS = ["autoregressive", "single-layer", "hispec"]
PROMPTS = [[5, 9, 5, 33, 40], [7], [11, 12, 13] * 6]


def test_penalties_are_those_of_their_formulas():
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    counts = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    seen = torch.tensor([[True, True, True, False]])
    changed = penalise(logits, counts, seen, repetition=2.0, presence=0.25, frequency=0.5)
    # seen: 2/2, -1*2, 0.5/2; then presence once and frequency by count where it stands in the text
    torch.testing.assert_close(changed, torch.tensor([[1.0 - 0.25 - 1.0, -2.0 - 0.25 - 0.5, 0.25, 3.0]]))


@pytest.fixture(scope="module")
def constrained(base):
    """A base, what it must not say and where it must end, and what transformers' own processors make of that."""
    base = shallow(base, 3)
    free = base.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    banned, end = free[0, 6].item(), free[0, 7].item()
    expected = []
    for prompt in PROMPTS:
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                SuppressTokensLogitsProcessor([banned]),
                MinNewTokensLengthLogitsProcessor(len(prompt), 10, end),
            ]
        )
        output = base.generate(
            torch.tensor([prompt]),
            logits_processor=processors,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert all(len(ids) >= 10 and banned not in ids for ids in expected)
    return base, banned, end, expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_greedy_is_that_of_transformers(constrained, method, draft_vocab_size):
    base, banned, end, expected = constrained
    model = build_heads(base, "random", committed_context=True, draft_vocab_size=draft_vocab_size)
    engine = Engine(model, method=method, num_draft_tokens=3, num_provisional_tokens=3)
    params = SamplingParams(
        max_new_tokens=24,
        min_new_tokens=10,
        repetition_penalty=1.3,
        banned_token_ids=(banned,),
        stop_token_ids=(end,),
        ignore_eos=True,
    )
    assert [completion.token_ids for completion in engine.generate(PROMPTS, params)] == expected
    assert engine.generate([PROMPTS[0]], params)[0].token_ids == expected[0]


@pytest.mark.parametrize("method", METHODS)
def test_others_in_the_batch_are_left_alone(base, method):
    model = build_heads(shallow(base, 3), "random")
    engine = Engine(model, method=method)
    plain = SamplingParams(max_new_tokens=16, ignore_eos=True)
    strange = SamplingParams(max_new_tokens=16, ignore_eos=True, repetition_penalty=2.0, logit_bias={4: 5.0})
    alone = engine.generate(PROMPTS, plain)
    mixed = engine.generate([*PROMPTS, PROMPTS[0]], [plain, plain, plain, strange])
    assert [c.token_ids for c in mixed[:3]] == [c.token_ids for c in alone]
    assert mixed[3].token_ids != alone[0].token_ids


def test_counts_follow_what_is_committed_and_what_is_proposed():
    params = SamplingParams(frequency_penalty=1.0)
    processor = LogitsProcessor(params, [1], [], 6, torch.device("cpu"))
    zeros = torch.zeros(2, 6)
    # Behind the prompt: 2 committed (3, 3), 2 proposed (4, 3); the rows are the last two.
    rows = processor(zeros, [3, 3, 4, 3], 2, 3)
    assert rows.tolist() == [[0, 0, 0, -2, -1, 0], [0, 0, 0, -3, -1, 0]]
    # The proposals were rejected.
    rows = processor(zeros[:1], [3, 3, 5], 3, 3)
    assert rows.tolist() == [[0, 0, 0, -2, 0, -1]]


def test_a_draft_vocabulary_that_is_banned_whole_is_worth_nothing_and_harms_nothing(base):
    model = build_heads(shallow(base, 3), "good", draft_vocab_size=8)
    banned = tuple(range(8))
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, banned_token_ids=banned, **sampling)
        expected = Engine(model, method="autoregressive").generate(PROMPTS, params)
        for method in METHODS[1:]:
            completions = Engine(model, method=method).generate(PROMPTS, params)
            assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
            assert not any(token in banned for completion in completions for token in completion.token_ids)
    free = SamplingParams(max_new_tokens=12, ignore_eos=True, banned_token_ids=banned, temperature=1.0)
    for completion in Engine(model).generate(PROMPTS, free):
        assert not any(token in banned for token in completion.token_ids)
