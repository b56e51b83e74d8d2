"""Drafts from n-grams that take rounds over from the exits: what they promise, and that they change no text."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hispec.infer import Engine, EngineConfig, SamplingParams, free_drafts, levels, ngram_proposer
from hispec.infer import engine as engine_module
from hispec.infer.flags import build_parser, engine_options
from hispec.infer.free_drafts import (
    FIRST_SHARES,
    best_copy,
    exits_cost,
    exits_rate,
    expected_tokens,
    margin,
    size_class,
    updated_shares,
)
from hispec.infer.methods import METHODS
from hispec.infer.model_runner import ModelRunner

from .models import build_base, build_heads, reference, shallow
from .test_lossless_sampling import SAMPLINGS, deviations, eager_copies, is_lossless, mutate_ngram_probs, sample
from .test_lossless_sampling import model as sampled_model
from .train_support import build_tokenizer

five_tokens, eager = sampled_model, eager_copies  # fixtures
"""Three levels over five tokens that disagree strongly."""

GENERATOR = torch.Generator().manual_seed(23)
PERIODIC = [7, 8, 9, 10] * 5
CYCLE = list(range(10, 20))
PROMPTS = [[5], PERIODIC, torch.randint(3, 64, (17,), generator=GENERATOR).tolist(), [9, 9, 4], [7, 8, 9, 10, 7, 8]]
shares = st.lists(st.floats(0, 1), min_size=6, max_size=6)


@given(
    shares=shares,
    num_matched=st.integers(1, 12),
    max_length=st.integers(0, 9),
    num_seqs=st.integers(1, 40),
    row_cost=st.none() | st.floats(0, 1),
)
def test_the_best_length_is_that_of_the_highest_rate(shares, num_matched, max_length, num_seqs, row_cost):
    by_row = free_drafts.ROW_COST if row_cost is None else row_cost

    def rate(length):
        kept = [shares[size_class(num_matched + place)] for place in range(length)]
        expected = 1 + sum(torch.tensor(kept, dtype=torch.float64).cumprod(0).tolist())
        return expected / (1 / num_seqs + by_row * (length + 1))

    length, best = best_copy(shares, num_matched, max_length, num_seqs, row_cost)
    assert 0 <= length <= max_length
    assert best == pytest.approx(rate(length))
    # Up to where rows are cheap.
    most = min(max_length, max(0, free_drafts.MAX_ROWS // num_seqs - 1))
    assert length <= most
    highest = max(map(rate, range(most + 1)))
    assert best >= highest - 1e-9 or (length == 0 and highest <= margin(num_seqs) * best + 1e-9)
    assert length == 0 or best > margin(num_seqs) * rate(0)


@given(num_matched=st.integers(1, 10), num_seqs=st.integers(1, 63))
def test_larger_batches_copy_less_and_longer_matches_more(num_matched, num_seqs):
    length, _ = best_copy(FIRST_SHARES, num_matched, 8, num_seqs)
    assert best_copy(FIRST_SHARES, num_matched, 8, num_seqs + 1)[0] <= length
    assert best_copy(FIRST_SHARES, num_matched + 1, 8, num_seqs)[0] >= length


@pytest.mark.parametrize("options", [{"method": "ngram"}, {"method": "single-layer", "ngram_drafts": True}])
def test_rows_that_are_measured_to_be_dear_are_not_spent_on_copies(monkeypatch, options):
    model = build_heads(build_base("llama"), "random")
    for row_cost, copies in (
        (None, True),
        (lambda num_seqs, context: 0.01, True),
        (lambda num_seqs, context: 1.0, False),
    ):
        with monkeypatch.context() as patch:
            made = None, {**options, "num_blocks": 40}, None, row_cost
            patch.setattr(engine_module, "make_plan", lambda model, options, build, made=made: made)
            engine = Engine(model, plan="auto")
        (completion,) = engine.generate([PERIODIC], SamplingParams(max_new_tokens=12, ignore_eos=True))
        name = "draft" if options["method"] == "ngram" else "ngram"
        assert (completion.stats.levels[name].num_rounds > 0) == copies


def test_which_source_promises_more():
    """As it is for the shipped adapter: 2 layers and a head of 30 for a drafted token, some half of which are kept."""
    cost = exits_cost([2], 30, [2], [0.5])
    assert cost == pytest.approx(0.1)
    exits = exits_rate(0.5, 2, cost, 1)
    assert best_copy(FIRST_SHARES, 1, 8, 1)[1] < exits < best_copy(FIRST_SHARES, 2, 8, 1)[1]
    assert exits_rate(0.5, 2, cost, 1, 0.5) < best_copy(FIRST_SHARES, 9, 8, 1, 0.5)[1] < exits
    assert exits_rate(0.9, 2, cost, 1) > best_copy(FIRST_SHARES, 2, 8, 1)[1]
    # Nothing is drafted, and nothing is kept: plain decoding.
    assert exits_rate(0.5, 0, cost, 1) == best_copy([0.0] * 6, 5, 8, 1)[1]
    # By the intermediate exit: two drafts and its own pass for the tokens that it keeps, and one that it adds.
    assert exits_cost([2, 8], 30, [2, 4], [0.5, 0.4]) == pytest.approx((2 * 3 + 7) / 1.75 / 30)
    assert exits_cost([0], 30, [2], [0.5]) == pytest.approx(1 / 30)
    assert expected_tokens(1.0, 3) == 3


@given(
    num_matched=st.integers(1, 12),
    copied=st.lists(st.integers(0, 2), max_size=8),
    came=st.lists(st.integers(0, 2), max_size=9),
)
def test_shares_learn_from_tokens_up_to_the_first_that_differs(num_matched, copied, came):
    expected = list(FIRST_SHARES)
    for place in range(min(len(copied), len(came))):
        index = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4)[num_matched + place] if num_matched + place < 10 else 5
        is_kept = copied[place] == came[place]
        expected[index] = 0.9 * expected[index] + 0.1 * is_kept
        if not is_kept:
            break
    assert updated_shares(FIRST_SHARES, num_matched, copied, came) == pytest.approx(expected)


@pytest.fixture(scope="module")
def base():
    """Texts that run in circles at times."""
    return shallow(build_base("llama", tie_word_embeddings=False), 1)


@pytest.fixture(scope="module")
def model(base):
    """Block heads with committed context, right now and then."""
    return build_heads(base, "random", (2, 4), head="block", committed_context=True)


def build(model, method, **options):
    defaults = {"num_draft_tokens": 2, "num_blocks": 60, "block_size": 8}
    return Engine(model, method=method, ngram_drafts=True, **(defaults | options))


METHOD_NAMES = ["single-layer", "hispec"]


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize(
    "options", [{"draft_policy": "dynamic", "num_ngram_tokens": 3}, {"num_blocks": 16, "max_num_seqs": 4}]
)
def test_greedy_texts_are_the_bases_and_counts_add_up(base, model, method, options):
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    engine = build(model, method, **options)
    completions = engine.generate(PROMPTS, params)
    assert [completion.token_ids for completion in completions] == [reference(base, prompt, 32) for prompt in PROMPTS]
    assert list(engine.stats.levels) == ["ngram", "draft", *(["intermediate"] if method == "hispec" else []), "target"]
    for stats in [engine.stats] + [completion.stats for completion in completions]:
        counts, target = stats.levels, stats.levels["target"]
        assert stats.num_committed == stats.num_prefills + target.num_accepted + target.num_rounds
        if method == "single-layer":
            assert target.num_drafted == counts["ngram"].num_rounds + counts["draft"].num_rounds
        else:
            middle = counts["intermediate"]
            assert counts["draft"].num_rounds == middle.num_drafted
            assert target.num_drafted == counts["ngram"].num_rounds + middle.num_accepted + middle.num_rounds
        assert counts["ngram"].num_layer_passes == counts["ngram"].num_drafted == 0 < counts["ngram"].seconds
    origins = [origin for completion in completions for origin in completion.origins]
    kept = {name: origins.count(name) for name in engine.stats.levels}
    assert kept["ngram"] > 20
    assert kept["draft"] + kept.get("intermediate", 0) > 0
    assert sum(kept.values()) - kept["target"] == engine.stats.levels["target"].num_accepted


def ring(**changes):
    """A base whose text goes round in `CYCLE`, whatever came before."""
    base = shallow(build_base("llama", tie_word_embeddings=False, **changes), 0)
    with torch.no_grad():
        states = base.model.norm(base.model.embed_tokens.weight)
        base.lm_head.weight.zero_()[CYCLE[1:] + CYCLE[:1]] = states[CYCLE]
    assert reference(base, CYCLE, 10) == CYCLE
    return base


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_heads_catch_up_before_their_states_leave_the_window(monkeypatch, method):
    """After a long run of rounds without any exit, what a head keeps is what reading the text gives."""
    monkeypatch.setattr(levels, "MAX_LAG", 7)
    monkeypatch.setattr(ngram_proposer, "exits_rate", lambda *arguments: 0.0)
    model = build_heads(ring(), "random", (2, 4), head="block", committed_context=True)
    engine = build(model, method, num_ngram_tokens=5, block_size=4)
    runner = engine._hierarchy._runner
    assert runner._windows.size == 7 + max(5, 2 if method == "single-layer" else 6) + 1
    request_id = engine.add_request(CYCLE * 2, SamplingParams(max_new_tokens=90, ignore_eos=True))
    (sequence,) = engine._unfinished[request_id]
    while len(sequence.token_ids) < 90:
        engine.step()
    assert sequence.stats.levels["draft"].num_rounds == 0 < sequence.stats.levels["draft"].num_layer_passes
    fresh = Engine(model, method=method, num_blocks=60, block_size=4)
    (again,) = fresh._unfinished[fresh.add_request(sequence.token_ids, SamplingParams(max_new_tokens=9))]
    fresh.step()
    for index in range(len(runner.levels) - 1):
        num_read = sequence.num_head_computed[index]
        assert len(sequence.token_ids) - 7 - 6 <= num_read < len(sequence.token_ids)
        kept = []
        for each, owner in ((engine, sequence), (fresh, again)):
            cache = each._hierarchy._runner._kv_cache
            slots = [owner.block_table[place // 4] * 4 + place % 4 for place in range(num_read)]
            kept.append(cache.keys[model.heads[index].kv_layer][slots])
        torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-4)
    # Then the exits draft again.
    monkeypatch.setattr(ngram_proposer, "exits_rate", lambda *arguments: 99.0)
    while engine.has_unfinished:
        (completion,) = engine.step() or [None]
    assert completion.token_ids == CYCLE * 9
    assert completion.stats.levels["draft"].num_rounds


def test_the_intermediate_level_never_judges_a_copied_token(model, monkeypatch):
    engine = build(model, "hispec")
    seen, score = [], ModelRunner.score

    def watched(self, index, sequences, starts):
        if index == 1:
            seen.extend(bool(sequence.proposed[1]) and sequence.proposed[1][0].origin == 0 for sequence in sequences)
        return score(self, index, sequences, starts)

    monkeypatch.setattr(ModelRunner, "score", watched)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert engine.stats.levels["ngram"].num_rounds
    assert seen
    assert not any(seen)


def test_shares_of_exits_and_of_copies_are_learnt_apart(model):
    """Of copies also from those that were looked up and not used."""
    engine = build(model, "single-layer", draft_policy="dynamic")
    request_id = engine.add_request(list(range(3, 64)), SamplingParams(max_new_tokens=60, ignore_eos=True))
    (sequence,) = engine._unfinished[request_id]
    engine.step()
    # Every token has stood there once; exits that were right so far are trusted more than that.
    sequence.kept_shares[0] = 1.0
    engine.step()
    used = set()
    while len(sequence.token_ids) < 110:
        num_copied, kept = sequence.stats.levels["ngram"].num_rounds, sequence.kept_shares[0]
        learnt = sequence.ngram_shares
        length, (num_matched, copied_ids) = sequence.ngram_guess
        came = sequence.token_ids[length:]
        engine.step()
        assert sequence.ngram_shares == updated_shares(learnt, num_matched, copied_ids, came)
        is_copied = sequence.stats.levels["ngram"].num_rounds > num_copied
        assert is_copied == (sequence.kept_shares[0] == kept)
        used.add((is_copied, sequence.ngram_guess[1].num_matched > 0))
    assert used >= {(True, True), (False, True)}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_text_may_end_inside_a_copied_draft(method):
    """At every place of a text that goes on as its prompt does: by the limit, the context, an end token, a text."""
    base, cycle = ring(max_position_embeddings=64), CYCLE
    tokenizer, prompt = build_tokenizer(), cycle * 3
    cases = []
    for place, token_id in list(enumerate(cycle))[::3]:
        for params in (
            SamplingParams(max_new_tokens=place + 1, ignore_eos=True),
            SamplingParams(ignore_eos=True, stop_token_ids=(token_id,)),
            SamplingParams(ignore_eos=True, stop=f"w{token_id}"),
        ):
            cases.append((prompt, params))
        cases.append(((cycle * 20)[: 62 - place], SamplingParams(max_new_tokens=99, ignore_eos=True)))
    model = build_heads(base, "random", (2, 4), committed_context=True)
    plain, engine = (
        Engine(model, tokenizer, num_blocks=80, max_num_seqs=4, **options)
        for options in ({"method": "autoregressive"}, {"method": method, "ngram_drafts": True})
    )
    each = [prompt for prompt, _ in cases], [params for _, params in cases]
    num_cut = 0
    for expected, found in zip(plain.generate(*each), engine.generate(*each), strict=True):
        assert (found.token_ids, found.finish_reason, found.stop_reason, found.text) == (
            expected.token_ids,
            expected.finish_reason,
            expected.stop_reason,
            expected.text,
        )
        assert len(found.origins) == len(found.token_ids) == found.stats.num_committed
        target = found.stats.levels["target"]
        num_cut += found.stats.num_committed < 1 + target.num_accepted + target.num_rounds
    assert num_cut >= 4
    assert engine.stats.levels["ngram"].num_rounds > len(cases)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_penalties_seeds_and_greedy_side_by_side(model, method, monkeypatch):
    monkeypatch.setattr(free_drafts, "ROW_COST", 0.02)
    each = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.02, frequency_penalty=0.05),
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.7, seed=4, presence_penalty=0.2),
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.4, seed=5),
        SamplingParams(max_new_tokens=20, ignore_eos=True),
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.4),
    ]
    prompts = [PERIODIC] * 5
    plain = Engine(model, method="autoregressive", num_blocks=60).generate(prompts, each)
    engine = build(model, method, num_blocks=40, max_num_seqs=3)
    found = engine.generate(prompts, each)
    assert [completion.token_ids for completion in found[:4]] == [completion.token_ids for completion in plain[:4]]
    assert len(found[4].token_ids) == 20
    assert all(completion.stats.levels["ngram"].num_rounds for completion in found)


@pytest.mark.parametrize(
    ("method", "name", "seeded"),
    [
        ("single-layer", "filtered", False),
        ("single-layer", "penalised", True),
        ("hispec", "filtered", False),
        pytest.param("hispec", "penalised", True, marks=pytest.mark.slow),
    ],
)
def test_two_sources_have_the_distribution_of_the_base(five_tokens, eager, method, name, seeded):
    sampling = SAMPLINGS[name]
    counts, engine = sample(
        five_tokens, sampling, seeded=seeded, method=method, num_samples=1200, ngram_drafts=True, num_ngram_tokens=3
    )
    assert is_lossless(five_tokens, counts, sampling), deviations(five_tokens, counts, sampling)
    for level in ("ngram", "draft"):
        assert engine.stats.levels[level].num_rounds > 300


def test_copies_with_the_probabilities_of_another_source_are_found_out(five_tokens, eager, monkeypatch):
    mutate_ngram_probs(monkeypatch)
    sampling = SAMPLINGS["plain"]
    counts, _ = sample(five_tokens, sampling, seeded=False, method="single-layer", num_samples=4000, ngram_drafts=True)
    assert not is_lossless(five_tokens, counts, sampling), deviations(five_tokens, counts, sampling)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngram"}, "stands in for the exits of single-layer and hispec, not of 'ngram'"),
        ({"method": "autoregressive"}, "not of 'autoregressive'"),
        ({"num_ngram_tokens": 0}, "num_ngram_tokens is 0; it must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(ngram_drafts=True, **values)


def test_flags_and_benchmark_methods_reach_the_engine():
    parse = build_parser().parse_args
    for flag, expected in itertools.product(("ngram-drafts", "ngram_drafts"), (True, False)):
        arguments = [f"--{flag}" if expected else f"--no-{flag}"]
        if not expected:
            arguments = [arguments[0].replace("no-ngram_drafts", "no_ngram_drafts")]
        assert engine_options(parse(arguments))["ngram_drafts"] is expected
    assert "ngram_drafts" not in engine_options(parse([]))
    assert engine_options(parse(["--num-ngram-tokens", "5"]))["num_ngram_tokens"] == 5
    for name in ("single-layer+ngram", "hispec+ngram"):
        assert METHODS[name].ngram_drafts
        assert not METHODS[name].by_default
