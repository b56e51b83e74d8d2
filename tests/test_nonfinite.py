"""Logits that are NaN or infinite: worthless where they draft, the end of that request alone where they decide."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from hispec.infer import Engine, SamplingParams
from hispec.infer.logits_reader import read_logits
from hispec.infer.prompt_file import PromptLine
from hispec.infer.result_file import WholeLines, write_results

from .models import build_base, build_heads, reference, shallow
from .test_batching import assert_all_is_free, fill_with_nan_what_is_free
from .test_lossless_sampling import PLAIN, VOCAB, deviations, is_lossless, sample
from .train_support import build_tokenizer

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(23)
PROMPTS = [torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in (5, 1, 18, 9)]
METHODS = ["autoregressive", "single-layer", "hispec"]


@pytest.fixture(scope="module")
def base():
    """A Llama whose tokens can be spoiled on the way in, without touching the way out."""
    return shallow(build_base("llama", num_hidden_layers=4, tie_word_embeddings=False), 3)


@pytest.fixture(scope="module")
def expected(base):
    return [reference(base, prompt, 16) for prompt in PROMPTS]


def spoiled(base, token_id, value=math.nan):
    """The base, but one token has no finite states."""
    base = copy.deepcopy(base)
    with torch.no_grad():
        base.get_input_embeddings().weight[token_id] = value
    return base


def spoil_heads(model, value, every=1):
    """Make the heads' states worthless at every so many positions."""
    for head in model.heads:
        head.register_forward_hook(
            lambda module, arguments, state: state.masked_fill((arguments[2] % every == 0)[:, None], value)
        )


def test_rows_that_are_not_finite_are_told_and_become_even():
    logits = torch.randn(6, 4)
    logits[1, 2], logits[3, 0], logits[4] = math.nan, math.inf, -math.inf
    logits[5, 1:] = -math.inf
    params = SamplingParams(temperature=1.0)
    sequences = [SimpleNamespace(params=params, uses_rejection=True, logits_processor=None) for _ in range(4)]
    rows = read_logits(logits, sequences, [(0, 1), (5, 7), (2, 4), (0, 1)], vocab_size=4)
    assert [row.first_failure for row in rows] == [None, 0, 0, None]
    probs = torch.cat([row.probs for row in rows])
    assert torch.equal(probs[[1, 3, 4]], torch.full((3, 4), 0.25))
    torch.testing.assert_close(probs[[0, 2, 5]], logits[[0, 2, 5]].softmax(-1))


@pytest.mark.parametrize(("value", "every"), [(math.nan, 1), (math.nan, 2), (math.inf, 2), (-math.inf, 1)])
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_worthless_head_changes_nothing(base, expected, value, every, method):
    model = build_heads(base, "good", (1, 2), committed_context=True, draft_vocab_size=60)
    spoil_heads(model, value, every)
    engine = Engine(model, method=method, num_blocks=24, block_size=4)
    assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] == expected
    seeded = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=3)
    texts = [[c.token_ids for c in Engine(model, method=m).generate(PROMPTS, seeded)] for m in (method, METHODS[0])]
    assert texts[0] == texts[1]
    free = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, top_k=9, top_p=0.9)
    completions = engine.generate(PROMPTS, [PARAMS, free, free, seeded])
    assert completions[0].token_ids == expected[0]
    assert [completion.finish_reason for completion in completions] == ["length"] * 4


def test_a_worthless_head_leaves_the_distribution_as_it_is():
    base = build_base("llama", vocab_size=VOCAB, num_hidden_layers=3, hidden_size=16, tie_word_embeddings=False)
    model = build_heads(base, "random", (1, 2), committed_context=True, draft_vocab_size=4)
    spoil_heads(model, math.nan, every=2)
    counts, engine = sample(model, PLAIN, seeded=False, num_samples=1500)
    assert is_lossless(model, counts, PLAIN), deviations(model, counts, PLAIN)
    assert engine.stats.levels["target"].num_drafted


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("exit_layer", [0, 1])
def test_a_draft_that_the_base_cannot_compute_changes_nothing(base, expected, method, exit_layer):
    """Every draft is a token of NaN: masked for those before it, but 0 times NaN is NaN."""
    seen = {token for tokens in expected + PROMPTS for token in tokens}
    unseen = next(token for token in range(3, 64) if token not in seen)
    model = build_heads(
        spoiled(base, unseen), "good", (exit_layer, 2), committed_context=True, draft_vocab_ids=torch.tensor([unseen])
    )
    engine = Engine(model, method=method, num_draft_tokens=3)
    completions = engine.generate(PROMPTS, PARAMS)
    assert [completion.error for completion in completions] == [None] * 4
    assert [completion.token_ids for completion in completions] == expected
    # Each row of the target decides, so the same texts end in the same errors whatever is drafted.
    each = [SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.5, seed=seed) for seed in range(2)]
    plain = Engine(model, method="autoregressive").generate(PROMPTS[:2], each)
    sampled = engine.generate(PROMPTS[:2], each)
    assert [(c.token_ids, c.error) for c in sampled] == [(c.token_ids, c.error) for c in plain]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("max_prefill_tokens", "value"), [(3, math.nan), (512, math.nan), (512, math.inf)])
def test_a_failing_request_fails_alone(base, expected, method, max_prefill_tokens, value):
    """One fails in its prompt, one where it first says a token; their blocks go to those that come later."""
    others = {token for tokens in expected[1:] + PROMPTS for token in tokens}
    place, culprit = next((i, t) for i, t in enumerate(expected[0]) if t not in others and t not in expected[0][:i])
    model = build_heads(spoiled(base, culprit, value), "good", (1, 2), committed_context=True)
    engine = Engine(
        model, method=method, num_blocks=16, block_size=4, max_num_seqs=3, max_prefill_tokens=max_prefill_tokens
    )
    fill_with_nan_what_is_free(engine)
    bad_prompt = [4, 5, 6, culprit, 8, 9]
    bad, saying, *good = engine.generate([bad_prompt, PROMPTS[0], *PROMPTS[1:], *PROMPTS[1:]], PARAMS)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "logits for the token at position 6 (prompt included, counted from 0) are NaN or infinite" in bad.error
    assert (saying.finish_reason, saying.token_ids) == ("error", expected[0][: place + 1])
    assert f"at position {len(PROMPTS[0]) + place + 1} " in saying.error
    assert [completion.token_ids for completion in good] == expected[1:] * 2
    assert {completion.finish_reason for completion in good} == {"length"}
    assert {completion.error for completion in good} == {None}
    if method == "hispec":
        # The intermediate head is right here, as long as nothing of its neighbours reaches it.
        assert all(completion.stats.levels["target"].acceptance_rate == 1 for completion in good)
    assert_all_is_free(engine)


def test_a_stream_and_the_command_tell(base, tmp_path, capsys):
    engine = Engine(build_heads(spoiled(base, 7), "good", (1, 2)), build_tokenizer())
    with pytest.raises(FloatingPointError, match="at position 3 "):
        list(engine.stream([4, 7, 5], PARAMS))
    assert not engine.has_unfinished
    params = SamplingParams(max_new_tokens=2)
    lines = [PromptLine(id=name, token_ids=ids, params=params) for name, ids in (("bad", [4, 7, 5]), ("good", [4]))]
    path = tmp_path / "answers.jsonl"
    with path.open("w", encoding="utf-8") as file:
        write_results(engine, lines, WholeLines(file, path), as_json=True)
    bad, good = map(json.loads, path.read_text().splitlines())
    assert (bad["finish_reason"], "at position 3 " in bad["error"]) == ("error", True)
    assert "error" not in good
    assert "bad: the model's logits" in capsys.readouterr().err
