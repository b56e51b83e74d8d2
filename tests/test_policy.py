"""Policies: how far is drafted, and that it changes no text."""

import pytest

from hispec.infer import Engine, EngineConfig, SamplingParams
from hispec.infer.policy import DynamicPolicy, FixedPolicy, updated_share

from .models import build_heads, reference, shallow
from .test_lossless_greedy import PROMPTS
from .test_lossless_sampling import PLAIN, is_lossless, sample
from .test_lossless_sampling import model as sampled_model  # noqa: F401  a fixture

DYNAMIC = {"draft_policy": "dynamic", "num_draft_tokens": 5, "num_provisional_tokens": 8}


def test_a_fixed_policy_never_stops():
    policy = FixedPolicy(max_length=3)
    assert policy.length(0.0) == 3
    assert policy.least_reach == 0.0


def test_a_dynamic_policy_asks_for_as_much_as_is_kept():
    policy = DynamicPolicy(max_length=6, min_confidence=0.3)
    lengths = [policy.length(share) for share in (0.0, 0.2, 0.5, 0.7, 0.9, 1.0)]
    assert lengths == [1, 1, 2, 4, 6, 6]
    assert policy.least_reach == 0.3
    assert DynamicPolicy(max_length=6, min_confidence=0.0).length(0.1) == 6
    assert DynamicPolicy(max_length=6, min_confidence=1.0).length(0.9) == 1


def test_the_share_forgets_slowly_and_counts_only_what_was_judged():
    assert updated_share(0.7, 0, 0) == 0.7
    # One of five was kept, the second was rejected: the other three were never judged.
    assert updated_share(0.5, 5, 1) == pytest.approx(0.5)
    assert updated_share(0.5, 4, 4) > updated_share(0.5, 1, 1) > 0.5
    assert updated_share(0.5, 4, 0) == pytest.approx(0.45)


@pytest.mark.parametrize("quality", ["good", "random", "adversarial"])
@pytest.mark.parametrize("method", ["single-layer", "hispec"])
@pytest.mark.parametrize("min_confidence", [0.0, 0.3, 1.0])
def test_no_text_changes(base, quality, method, min_confidence):
    base = shallow(base, 2 if quality == "good" else 3)
    model = build_heads(base, quality, committed_context=True)
    engine = Engine(model, method=method, min_confidence=min_confidence, **DYNAMIC)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [completion.token_ids for completion in completions] == [reference(base, prompt, 20) for prompt in PROMPTS]
    drafts = engine.stats.levels["intermediate" if method == "hispec" else "target"]
    if min_confidence == 1:
        assert len(drafts.drafted_per_position) == 1
    if min_confidence == 0:
        assert len(drafts.drafted_per_position) == 5


def test_few_kept_tokens_make_short_drafts(base, monkeypatch):
    monkeypatch.setattr(DynamicPolicy, "least_reach", 0.0)
    model = build_heads(shallow(base, 3), "adversarial", head="norm")
    engine = Engine(model, method="single-layer", draft_policy="dynamic", num_draft_tokens=5)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
    counts = engine.stats.levels["target"].drafted_per_position
    assert len(counts) == 4
    assert counts[0] > 2 * sum(counts[2:])


@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
def test_the_distribution_is_that_of_the_base(sampled_model, seeded):  # noqa: F811
    counts, engine = sample(
        sampled_model, PLAIN, seeded=seeded, draft_policy="dynamic", min_confidence=0.3, num_samples=2400
    )
    assert is_lossless(sampled_model, counts, PLAIN)
    lengths = engine.stats.levels["intermediate"].drafted_per_position
    assert lengths[1] < lengths[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_policy": "bold"}, "draft_policy 'bold' is unknown; choose one of fixed, dynamic"),
        ({"min_confidence": 1.5}, "min_confidence is 1.5; it must lie between 0 and 1"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)
