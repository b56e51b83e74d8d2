"""A finished text, read again by the base's own forward."""

import pytest
import torch

from hispec.infer import Engine, SamplingParams
from hispec.infer import recheck as module
from hispec.infer.recheck import Recheck, recheck

from .models import build_base, build_heads, reference, shallow

PROMPTS = [[3, 4, 5], [9], list(range(3, 40))]
SEEDED = {"temperature": 1.1, "seed": 4}


@pytest.mark.parametrize("max_rows", [4, 256])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_new_tokens": 8},
        SEEDED,
        SEEDED | {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.3, "n": 2},
    ],
)
def test_own_texts_are_the_choice_and_others_are_not(base, monkeypatch, params, max_rows):
    monkeypatch.setattr(module, "MAX_ROWS", max_rows)
    params = SamplingParams(max_new_tokens=14, **params)
    engine = Engine(build_heads(shallow(base, 3), "random"), num_blocks=64)
    base = engine.model.base
    for completion in engine.generate(PROMPTS, params):
        prompt, tokens, options = completion.prompt_token_ids, completion.token_ids, {"index": completion.index}
        options["end_ids"] = [base.generation_config.eos_token_id]
        result = recheck(base, prompt, tokens, params, **options)
        assert (result.num_tokens, result.num_not_chosen) == (len(tokens), 0)
        assert result.largest_gap == 0
        # The last token decides nothing behind it: one wrong token is one.
        for token in {8, 60} - {tokens[-1]}:
            result = recheck(base, prompt, [*tokens[:-1], token], params, **options)
            assert result.num_not_chosen == 1
            assert result.largest_gap > 0


def test_the_gap_is_that_of_the_logits(base):
    prompt = [7, 8, 9]
    own = reference(base, prompt, 6)
    with torch.no_grad():
        logits = base(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
    second = logits[-1].topk(2)
    result = recheck(base, prompt, [*own[:-1], int(second.indices[1])], SamplingParams())
    gap = pytest.approx(float(-second.values.diff()), abs=1e-4)
    assert result == Recheck(num_tokens=6, num_not_chosen=1, largest_gap=gap)
    assert "5 of 6 tokens are its first choice, the others at most" in result.describe()
    total = Recheck(num_tokens=2)
    total.add(result)
    assert (total.num_tokens, total.num_not_chosen, total.largest_gap) == (8, 1, result.largest_gap)


def test_another_seed_or_base_is_noticed(base):
    engine = Engine(build_heads(base, "good"), num_blocks=64)
    params = SamplingParams(max_new_tokens=14, **SEEDED)
    completion = engine.generate([PROMPTS[0]], params)[0]
    text = completion.prompt_token_ids, completion.token_ids
    assert recheck(base, *text, SamplingParams(temperature=1.1, seed=5)).num_not_chosen > 3
    assert recheck(build_base("qwen3"), *text, params).num_not_chosen > 3


def test_a_token_that_was_cut_off_has_no_finite_gap(base):
    result = recheck(base, [5], [6, 7, 8], SamplingParams(temperature=1.0, top_k=1, seed=0))
    assert result.num_not_chosen
    assert result.to_dict()["largest_gap"] is None


def test_sampling_without_a_seed_is_refused(base):
    with pytest.raises(ValueError, match=r"temperature is 0\.5 without a seed"):
        recheck(base, [5], [6], SamplingParams(temperature=0.5))
    assert recheck(base, [5], [], SamplingParams()) == Recheck()
