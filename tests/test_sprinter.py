"""SPRINTER: what it commits without the target, what the target then makes of it, and what it refuses."""

import math
from itertools import count

import pytest
import torch

from hispec.heads import DenseAttention, DraftVerifier, EarlyExitModel, draft_features, num_features
from hispec.infer import Engine, EngineConfig, SamplingParams

from .models import build_base, build_heads, reference, shallow
from .test_batching import assert_all_is_free
from .train_support import build_tokenizer

PROMPTS = [[5], [7, 8, 9, 10, 11, 12], list(range(3, 33)), [9, 9, 4]]
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
NO, YES = -50.0, 50.0
LOSSY = {"method": "sprinter", "lossy": True}


@pytest.fixture(scope="module")
def model():
    """A draft exit, with context, that is right now and then."""
    return build_heads(shallow(build_base("llama"), 3), "random", (2, 4), head="mlp", committed_context=True)


@pytest.fixture(scope="module")
def lone():
    """A draft exit whose choice depends on nothing but the tokens, so that it can be computed by itself."""
    return build_heads(shallow(build_base("llama"), 3), "random", (2,), draft_vocab_size=60)


def verifier(bias=0.0, margin=0.0):
    """One that looks at the margin alone."""
    weight = torch.zeros(num_features(32))
    weight[-2] = margin
    return DraftVerifier(exit_layer=2, weight=weight, bias=torch.tensor(float(bias)))


def engine_for(model, judge, **options):
    model.verifier = judge
    return Engine(model, **(LOSSY | {"num_blocks": 60} | options))


def assert_counts(stats):
    draft, target = stats.levels.values()
    assert draft.num_rounds == stats.num_skipped + target.num_drafted
    assert stats.num_committed == stats.num_prefills + stats.num_skipped + target.num_accepted + target.num_rounds


@torch.no_grad()
def target_choices(base, prompt, token_ids):
    """The base's greedy choice in the place of each token, given all before it."""
    logits = base(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def sprint(model, judge, prompt, *, length=40, cap=8, threshold=0.5):
    """The method in its plainest form: everything computed anew for every token."""
    backbone, head = model.backbone, model.exit_heads[0]
    known, origins = list(prompt), []

    def ask_target():
        return int(model.base(input_ids=torch.tensor([known])).logits[0, -1].argmax())

    known.append(ask_target())
    origins.append("target")
    while (left := length - len(origins)) > 0:
        for _ in range(min(cap, left - 1)):
            positions = torch.arange(len(known))
            attend = DenseAttention([len(known)])
            hidden = backbone.run_layers(backbone.embed(torch.tensor(known), positions), 0, 2, positions, attend)
            state = head(hidden, None, positions, DenseAttention([len(known)]))[0, -1:]
            logits = model.exit_logits(0, state)
            token_id = int(logits.argmax())
            if judge.of_features(draft_features(state, logits)).item() < threshold:
                if ask_target() == token_id:
                    known.append(token_id)
                    origins.append("draft")
                break
            known.append(token_id)
            origins.append("draft")
        known.append(ask_target())
        origins.append("target")
    return known[len(prompt) :], origins


@pytest.mark.parametrize(
    ("bias", "margin", "cap"), [(NO, 0, 3), (YES, 0, 8), (-2.5, 10, 1), (-2.5, 10, 3), (-2.5, 10, 8)]
)
def test_it_is_the_method_computed_anew_for_every_token(lone, bias, margin, cap):
    judge = verifier(bias, margin)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    completions = engine_for(lone, judge, max_skipped_tokens=cap, block_size=4).generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert (completion.token_ids, completion.origins) == sprint(lone, judge, prompt, length=20, cap=cap)
        assert_counts(completion.stats)
    if margin:
        assert any(
            0 < completion.stats.num_skipped < completion.stats.levels["draft"].num_rounds for completion in completions
        )


@pytest.mark.parametrize("length", [1, 2, 6, 7])
def test_the_limit_falls_anywhere(lone, length):
    judge = verifier(YES)
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    for prompt, completion in zip(
        PROMPTS, engine_for(lone, judge, max_skipped_tokens=4).generate(PROMPTS, params), strict=True
    ):
        assert completion.token_ids == sprint(lone, judge, prompt, length=length, cap=4)[0]
        assert completion.finish_reason == "length"


def test_the_context_ends(lone):
    prompt = [3 + place % 50 for place in range(246)]
    (completion,) = engine_for(lone, verifier(YES), num_blocks=16).generate([prompt], PARAMS)
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")
    assert completion.token_ids == sprint(lone, verifier(YES), prompt, length=10)[0]


@pytest.mark.parametrize("judge", [verifier(NO), verifier(math.nan), verifier(YES, math.nan)])
def test_a_verifier_that_trusts_nothing_loses_nothing(model, judge):
    """Not even one that has gone wrong; and nothing is skipped."""
    engine = engine_for(model, judge, num_blocks=20, block_size=8)
    expected = [reference(model.base, prompt, 40) for prompt in PROMPTS]
    assert [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)] == expected
    assert engine.stats.num_skipped == 0 < engine.stats.levels["target"].num_accepted
    assert_counts(engine.stats)


@pytest.mark.parametrize("num_blocks", [60, 20])
def test_the_target_has_read_all_that_was_skipped(model, num_blocks):
    """Its own tokens are its choice behind what was really committed, in a batch and after preemptions."""
    engine = engine_for(model, verifier(-2.5, 10), num_blocks=num_blocks, block_size=4)
    completions = engine.generate(PROMPTS, PARAMS)
    assert (engine.stats.num_prefills > len(PROMPTS)) == (num_blocks == 20)
    assert_counts(engine.stats)
    assert engine.stats.num_skipped > 20
    differing = 0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        chosen = target_choices(model.base, prompt, completion.token_ids)
        pairs = zip(completion.token_ids, chosen, completion.origins, strict=True)
        assert len(completion.token_ids) == 40
        for token_id, choice, origin in pairs:
            assert origin == "draft" or token_id == choice
            differing += token_id != choice
    assert differing > 5  # lossy it is
    assert_all_is_free(engine)


def test_the_target_is_spared(model):
    """A target call for every nine tokens, and its head for one row a call."""
    engine = engine_for(model, verifier(YES))
    engine.generate(PROMPTS[:1], PARAMS)
    draft, target = engine.stats.levels.values()
    assert target.num_rounds == math.ceil(39 / 9)
    assert target.num_layer_passes == 4 * 39
    assert draft.num_rounds == engine.stats.num_skipped == 39 - target.num_rounds


@pytest.mark.parametrize("place", [5])
def test_a_trusted_end_token_ends_the_text_at_once(lone, place):
    """No target is asked about it, and nothing behind it is drafted; others in the batch go on."""
    engine = engine_for(lone, verifier(YES))
    whole = engine.generate(PROMPTS, PARAMS)
    for row in range(len(PROMPTS)):
        end = whole[row].token_ids[place]
        first = whole[row].token_ids.index(end)
        params = [
            SamplingParams(max_new_tokens=40, ignore_eos=True, stop_token_ids=(end,) if b == row else ())
            for b in range(4)
        ]
        found = engine_for(lone, verifier(YES)).generate(PROMPTS, params)
        assert found[row].token_ids == whole[row].token_ids[: first + 1]
        assert (found[row].finish_reason, found[row].stop_reason) == ("stop", end)
        if 0 < first < 9:
            assert found[row].stats.levels["target"].num_rounds == 0
        assert_counts(found[row].stats)
        assert [c.token_ids for b, c in enumerate(found) if b != row] == [
            c.token_ids for b, c in enumerate(whole) if b != row
        ]


def test_a_stream_and_a_stop_string(lone):
    lone.verifier = verifier(YES)
    engine = Engine(lone, build_tokenizer(), num_blocks=60, **LOSSY)
    (whole,) = engine.generate([PROMPTS[1]], PARAMS)
    stop = " ".join(f"w{token_id}" for token_id in whole.token_ids[3:5])
    deltas = list(engine.stream(PROMPTS[1], SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(stop,))))
    assert "".join(delta.text for delta in deltas) == whole.text[: whole.text.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    deltas = list(engine.stream(PROMPTS[1], PARAMS))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
    assert [origin for delta in deltas for origin in delta.origins] == whole.origins
    assert max(len(delta.token_ids) for delta in deltas) == 9


def test_penalties_and_bans_hold_for_what_is_skipped(model):
    """A token that a ban or a penalty has put there is the target's to judge."""
    banned = tuple(range(20, 50))
    for changes in (
        {"banned_token_ids": banned},
        {"repetition_penalty": 1.8},
        {"min_new_tokens": 16, "ignore_eos": False},
    ):
        params = SamplingParams(**({"max_new_tokens": 16, "ignore_eos": True} | changes))
        engines = engine_for(model, verifier(NO)), Engine(model, method="autoregressive", num_blocks=60)
        texts = [[completion.token_ids for completion in engine.generate(PROMPTS, params)] for engine in engines]
        assert texts[0] == texts[1]
        trusting = engine_for(model, verifier(YES))
        completions = trusting.generate(PROMPTS, params)
        assert all(len(completion.token_ids) == 16 for completion in completions)
        assert trusting.stats.num_skipped
        assert_counts(trusting.stats)
        if "banned_token_ids" in changes:
            assert not {token_id for completion in completions for token_id in completion.token_ids} & set(banned)
            assert trusting.stats.levels["target"].num_drafted


def test_a_doubted_token_without_finite_states_spoils_nothing_before_it(monkeypatch):
    """It stands in the pass in which the target reads skipped tokens, which must then be read again without it."""
    model = build_heads(shallow(build_base("llama"), 3), "adversarial", (2,), committed_context=True)
    places = count()
    judge = lambda self, state, logits: torch.full((len(state),), 0.0 if next(places) % 3 == 2 else 1.0)  # noqa: E731
    monkeypatch.setattr(DraftVerifier, "__call__", judge)
    engine = engine_for(model, verifier())
    request_id = engine.add_request(PROMPTS[1], PARAMS)
    (sequence,) = engine._unfinished[request_id]
    runner, spoilt = engine._runner, []
    advance, judge = runner.advance, runner.judge

    def spoil():
        if sequence.proposed[-1]:
            newest = runner._windows.slots([sequence], [(sequence.num_known - 1, sequence.num_known)])
            runner._windows.tables[0][newest] = math.nan
            spoilt.append(sequence.num_known)

    def spoiling(index, sequences):
        if index == 1:
            spoil()
        advance(index, sequences)

    def spoiling_judge(sequences, starts, **options):
        spoil()
        return judge(sequences, starts, **options)

    monkeypatch.setattr(runner, "advance", spoiling)
    monkeypatch.setattr(runner, "judge", spoiling_judge)
    completions = []
    while not completions:
        completions = engine.step()
    assert completions[0].finish_reason == "length"
    assert len(set(spoilt)) == completions[0].stats.levels["target"].num_drafted > 10
    chosen = target_choices(model.base, PROMPTS[1], completions[0].token_ids)
    for token_id, choice, origin in zip(completions[0].token_ids, chosen, completions[0].origins, strict=True):
        assert origin == "draft" or token_id == choice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sprinter"}, "method 'sprinter' is lossy: .*lossy=True"),
        ({"lossy": True}, "lossy goes with method 'sprinter' alone, not with 'hispec'"),
        ({"lossy": True, "plan": "auto"}, "lossy goes with method 'sprinter' alone"),
        (LOSSY | {"exact": True}, "exact texts are the model's own"),
        (LOSSY | {"draft_policy": "dynamic"}, "draft_policy 'dynamic' does not go with method 'sprinter'"),
        (LOSSY | {"verifier_threshold": 1.5}, "verifier_threshold is 1.5; it must lie between 0 and 1"),
        (LOSSY | {"max_skipped_tokens": 0}, "max_skipped_tokens is 0"),
    ],
)
def test_never_by_accident(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_what_it_refuses(base, model):
    with pytest.raises(ValueError, match="method 'sprinter' needs 1 exit head, but the model has 0"):
        Engine(EarlyExitModel.from_configs(base, []), **LOSSY)
    with pytest.raises(ValueError, match=r"needs a verifier, .*python -m hispec\.train\.sprinter"):
        engine_for(model, None)
    with pytest.raises(ValueError, match=r"fitted to an exit at layer 2 .*, but exit 4 drafts.*--exit-layer 4"):
        engine_for(model, verifier(YES), exit_layers=(4,))
    with pytest.raises(ValueError, match="with 30 features, but exit 2 drafts, with 3 or 35"):
        engine_for(model, DraftVerifier(exit_layer=2, weight=torch.zeros(30), bias=torch.tensor(0.0)))
    engine = engine_for(model, verifier(YES))
    with pytest.raises(ValueError, match=r"temperature is 0\.7, but method 'sprinter' decodes greedily alone"):
        engine.add_request([5], SamplingParams(temperature=0.7, seed=1))
    with pytest.raises(ValueError, match="logprobs are the model's own"):
        engine.add_request([5], SamplingParams(logprobs=2))
