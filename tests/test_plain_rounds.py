"""Rounds of any length, none included: that they cost what they must, change no text, and leave heads as they were."""

import math
import random

import pytest
import torch

from hispec.infer import Engine, SamplingParams, levels
from hispec.infer import engine as engine_module
from hispec.infer.drafter import Drafter
from hispec.infer.hierarchy import Hierarchy
from hispec.infer.model_runner import ModelRunner

from .models import build_heads, reference, shallow
from .test_lossless_greedy import PROMPTS
from .test_lossless_sampling import PLAIN, deviations, is_lossless, sample
from .test_lossless_sampling import model as sampled_model  # noqa: F401  a fixture

RAGGED = [PROMPTS[index] for index in (1, 4, 2, 6)]
SPARSE = {"num_draft_tokens": 3, "num_provisional_tokens": 4, "block_size": 4}


class Script:
    """A policy that does as it is told: `ask(round, sequence)` is the number of tokens for each level."""

    def __init__(self, ask, num_levels, *, by_confidence=False):
        self._ask, self._num_levels, self.num_rounds = ask, num_levels, 0
        self.by_confidence = by_confidence
        self.num_going_on = []

    def first_shares(self):
        return [0.5] * self._num_levels

    def observe(self, num_tokens, seconds, *, has_copies):
        assert has_copies in (False, True)
        assert num_tokens > 0
        assert seconds > 0

    def choose(self, kept_shares, context):
        assert context > 0
        asked = [self._ask(self.num_rounds, place) for place in range(len(kept_shares))]
        self.num_rounds += 1
        return [(number,) * self._num_levels for number in asked]

    def going_on(self, chances, num_drafted):
        """Chances decide, and chance: whoever is sure goes on more often."""
        assert num_drafted >= len(chances) > 0
        # Nobody is sure, and half of all is kept.
        assert all(0 < each < 0.5 for each in chances)
        draws = random.Random(f"{self.num_rounds} {num_drafted}")
        going = [place for place, each in enumerate(chances) if draws.random() < 0.3 + each]
        self.num_going_on.append(len(going))
        return going

    def least_chances(self, length):
        """By chance as well."""
        draws = random.Random(f"{self.num_rounds} alone")
        self.num_going_on.append(length)
        return [0.2 * draws.random() for _ in range(length - 1)]

    def updated_share(self, level, kept_share, num_drafted, num_accepted, num_plain_rounds):
        assert num_plain_rounds >= 0
        return kept_share


def randomly(seed, most=3):
    """Any length in any round, with long stretches of none."""

    def ask(number, place):
        is_quiet = random.Random(f"{seed} {number // 9}").random() < 0.5
        return 0 if is_quiet else random.Random(f"{seed} {number} {place}").randint(0, most)

    return ask


def follow_script(patch, ask, method, *, by_confidence=False):
    """Let plans be what a script says."""
    script = Script(ask, {"single-layer": 1, "hispec": 2}[method], by_confidence=by_confidence)
    patch.setattr(engine_module, "make_plan", lambda model, options, build: (None, options, script, None))


@pytest.fixture
def scripted(monkeypatch):
    """Make engines whose rounds a script decides; short windows wrap soon."""
    monkeypatch.setattr(levels, "MAX_LAG", 5)

    def make(model, ask, *, method="single-layer", by_confidence=False, **options):
        with monkeypatch.context() as patch:
            follow_script(patch, ask, method, by_confidence=by_confidence)
            return Engine(model, plan="auto", method=method, **({"num_blocks": 200} | SPARSE | options))

    return make


def params_of(max_new_tokens):
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)


def run(engine, prompts, num_rounds):
    """So many rounds in which all prompts decode; their sequences."""
    for prompt in prompts:
        engine.add_request(prompt, params_of(100))
    sequences = [sequence for texts in engine._unfinished.values() for sequence in texts]
    while not all(sequence.is_read for sequence in sequences):
        engine.advance()
    for _ in range(num_rounds):
        engine.advance()
    return sequences


def head_cache(engine, sequence, level):
    """Keys and values of a level's head, as far as it has come."""
    cache, head = engine._runner._kv_cache, engine._runner.parts.head(level)
    slots = [
        sequence.block_table[position // cache.block_size] * cache.block_size + position % cache.block_size
        for position in range(sequence.num_head_computed[level])
    ]
    return cache.keys[head.kv_layer][slots], cache.values[head.kv_layer][slots]


def same_caches(engine, sequences, other, others, level):
    """How many positions both have, by sequence; raises where they differ."""
    numbers = []
    for sequence, twin in zip(sequences, others, strict=True):
        number = min(sequence.num_head_computed[level], twin.num_head_computed[level])
        assert sequence.token_ids[:number] == twin.token_ids[:number]
        for mine, its in zip(head_cache(engine, sequence, level), head_cache(other, twin, level), strict=True):
            torch.testing.assert_close(mine[:number], its[:number], rtol=1e-4, atol=1e-4)
        numbers.append(number)
    return numbers


@pytest.mark.parametrize(
    ("num_plain", "head"),
    [(0, "block"), (1, "block"), (4, "lora"), (5, "block"), (6, "block"), (7, "block"), (40, "lora")],
)
def test_heads_that_paused_are_as_if_they_had_always_drafted(base, scripted, num_plain, head):
    options = {"lora_rank": 4} if head == "lora" else {}
    model = build_heads(shallow(base, 4), "random", (2,), head=head, committed_context=True, **options)
    paused = scripted(model, lambda number, place: int(number >= num_plain))
    always = scripted(model, lambda number, place: 1)
    sequences, others = run(paused, RAGGED, num_plain + 1), run(always, RAGGED, num_plain + 1)
    numbers = same_caches(paused, sequences, always, others, 0)
    # The head has seen the newest token of its last round.
    assert [n - len(prompt) for n, prompt in zip(numbers, RAGGED, strict=True)] == [num_plain + 1] * len(RAGGED)


@pytest.mark.parametrize("num_plain", [3, 30])
def test_both_heads_of_hispec_catch_up(base, scripted, num_plain):
    model = build_heads(shallow(base, 4), "random")
    paused = scripted(model, lambda number, place: 2 * int(number >= num_plain), method="hispec")
    always = scripted(model, lambda number, place: 1, method="hispec")
    sequences, others = run(paused, RAGGED, num_plain + 1), run(always, RAGGED, num_plain + 1)
    for level in (0, 1):
        numbers = same_caches(paused, sequences, always, others, level)
        assert all(n >= len(prompt) + num_plain + 1 for n, prompt in zip(numbers, RAGGED, strict=True))


def test_drafts_after_a_pause_are_those_of_an_engine_that_always_drafted(base, scripted, monkeypatch):
    """What it drafted before was never kept, so that both are at the same token in every round."""
    model = build_heads(shallow(base, 4), "random", (0,), committed_context=True, draft_vocab_size=48)
    pause, draft = 29, Drafter.draft
    texts = Engine(model, method="autoregressive", num_blocks=200).generate(RAGGED, params_of(pause + 9))
    (never_said, *_) = set(range(48)) - {token_id for completion in texts for token_id in completion.token_ids}
    drafts = []

    def watched(self, sequences, counts, *rest):
        found, _ = draft(self, sequences, counts)
        drafts.append(
            [(len(s.token_ids), [p.token_id for p in each]) for s, each in zip(sequences, found, strict=True)]
        )
        is_last = counts == [3] * len(counts)
        return (found if is_last else [[p._replace(token_id=never_said) for p in each] for each in found]), None

    monkeypatch.setattr(Drafter, "draft", watched)
    run(scripted(model, lambda number, place: 3 if number == pause else 0), RAGGED, pause + 1)
    (quiet,) = drafts
    run(scripted(model, lambda number, place: 3 if number == pause else 1), RAGGED, pause + 1)
    assert len(drafts) == 1 + pause + 1
    assert drafts[-1] == quiet
    assert len({tuple(token_ids) for _, token_ids in quiet}) > 1


def test_a_draft_after_a_long_pause_does_not_run_the_head_over_it(base, scripted, monkeypatch):
    monkeypatch.setattr(levels, "MAX_LAG", 40)
    model = build_heads(shallow(base, 4), "random", (2,), committed_context=True)
    paused = scripted(model, lambda number, place: int(number >= 30))
    always = scripted(model, lambda number, place: 1)
    rows = []
    sequences = run(paused, RAGGED, 30)
    assert all(len(s.token_ids) - s.num_head_computed[0] == 31 for s in sequences)
    hook = model.heads[0].register_forward_hook(lambda module, arguments, state: rows.append(state.shape[1]))
    paused.advance()
    hook.remove()
    assert rows == [len(RAGGED)]
    same_caches(paused, sequences, always, run(always, RAGGED, 31), 0)


@pytest.mark.slow
def test_heads_of_every_architecture_catch_up(any_base, scripted):
    model = build_heads(shallow(any_base, 4), "random", (2,), committed_context=True)
    paused = scripted(model, lambda number, place: int(number >= 8))
    always = scripted(model, lambda number, place: 1)
    same_caches(paused, run(paused, RAGGED[:2], 9), always, run(always, RAGGED[:2], 9), 0)


def test_a_head_that_does_not_catch_up_is_seen(base, scripted, monkeypatch):
    model = build_heads(shallow(base, 4), "random", (2,), committed_context=True)
    monkeypatch.setattr(ModelRunner, "behind", lambda self, index, sequences: [])
    paused = scripted(model, lambda number, place: int(number >= 30))
    always = scripted(model, lambda number, place: 1)
    sequences, others = run(paused, RAGGED, 31), run(always, RAGGED, 31)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        same_caches(paused, sequences, always, others, 0)


@pytest.mark.parametrize("method", ["single-layer", "hispec"])
def test_a_plain_round_is_one_pass_and_no_head(base, scripted, method):
    model = build_heads(shallow(base, 4), "random", (2, 4), committed_context=True)
    engine = scripted(model, lambda number, place: 0, method=method)
    passes, calls, completed = [], [], []
    call, complete = engine._runner._run.__class__.__call__, ModelRunner.complete_head
    judge_at_once = ModelRunner._judge_at_once

    def counted(self, part, rows):
        passes.append(part.name)
        return call(self, part, rows)

    def counted_at_once(self, levels, rows):
        found = judge_at_once(self, levels, rows)
        if found is not None:
            passes.append("layers of all levels" if len(levels) == len(self.levels) else "others")
        return found

    def counted_heads(self, index, sequences):
        completed.append(len(sequences))
        complete(self, index, sequences)

    hooks = [head.register_forward_hook(lambda *arguments: calls.append(1)) for head in model.heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner._run.__class__, "__call__", counted)
        patch.setattr(ModelRunner, "complete_head", counted_heads)
        patch.setattr(ModelRunner, "_judge_at_once", counted_at_once)
        sequences = run(engine, RAGGED, 0)
        passes.clear()
        calls.clear()
        for _ in range(24):
            engine.advance()
        assert passes == ["layers of all levels"] * 24
    for hook in hooks:
        hook.remove()
    heads = 2 if method == "hispec" else 1
    # After each five positions all sequences at once; no head is run beyond its keys and values.
    assert completed == [len(RAGGED)] * (4 * heads)
    assert not calls
    stats = [sequence.stats for sequence in sequences]
    assert all(each.levels["target"].num_drafted == 0 for each in stats)
    assert {each.num_committed for each in stats} == {25}


@pytest.mark.parametrize("quality", ["good", "random"])
def test_texts_do_not_depend_on_lengths(base, scripted, quality):
    base = shallow(base, 2 if quality == "good" else 4)
    expected = [reference(base, prompt, 30) for prompt in RAGGED]
    for method, kind, blocks in (
        ("single-layer", "block", 200),
        ("single-layer", "norm", 28),
        ("hispec", "block", 28),
        ("hispec", "mlp", 200),
    ):
        model = build_heads(base, quality, head=kind, committed_context=True)
        engine = scripted(model, randomly(kind), method=method, num_blocks=blocks, max_prefill_tokens=9)
        completions = engine.generate(RAGGED, params_of(30))
        assert [completion.token_ids for completion in completions] == expected
        assert (engine.stats.num_prefills > len(RAGGED)) == (blocks == 28)
        target = engine.stats.levels["target"]
        assert 0 < target.drafted_per_position[0] < target.num_rounds


@pytest.mark.parametrize("quality", ["good", "random"])
def test_texts_do_not_depend_on_confidence(base, scripted, quality):
    base = shallow(base, 2 if quality == "good" else 4)
    expected = [reference(base, prompt, 30) for prompt in RAGGED]
    for method, blocks in (("single-layer", 200), ("single-layer", 28), ("hispec", 200)):
        model = build_heads(base, quality, head="block", committed_context=True)
        engine = scripted(
            model, randomly("confident"), method=method, by_confidence=True, num_draft_tokens=4, num_blocks=blocks
        )
        completions = engine.generate(RAGGED, params_of(30))
        assert [completion.token_ids for completion in completions] == expected
        assert (engine.stats.num_prefills > len(RAGGED)) == (blocks == 28)
        # Some went on without others, and some rounds drafted nothing.
        assert len(set(engine._hierarchy._round_policy.num_going_on)) > 2
        target = engine.stats.levels["target"]
        assert 0 < target.drafted_per_position[1] < target.drafted_per_position[0] < target.num_rounds


@pytest.mark.parametrize(
    "architecture",
    ["qwen2-window", pytest.param("gemma2", marks=pytest.mark.slow), pytest.param("opt", marks=pytest.mark.slow)],
)
def test_every_kind_of_attention(make_base, scripted, architecture):
    base = shallow(make_base(architecture), 4)
    model = build_heads(base, "random", (0, 3), committed_context=True)
    engine = scripted(model, randomly(architecture), method="hispec")
    completions = engine.generate(RAGGED, params_of(30))
    assert [completion.token_ids for completion in completions] == [reference(base, p, 30) for p in RAGGED]


def test_heads_are_right_whatever_happens_to_their_mates(base, scripted):
    """Some are aborted, some preempted, some come later: each head is as if its text alone had always been drafted."""
    model = build_heads(shallow(base, 4), "random", (2,), committed_context=True)
    busy = scripted(model, randomly("mates", 1), num_blocks=40)
    first = run(busy, RAGGED, 7)
    busy.abort(first[0].request_id)
    busy.abort(first[2].request_id)
    *_, mate, last = run(busy, [PROMPTS[3], PROMPTS[5]], 16)
    assert not last.is_read  # it gave its blocks back
    busy.abort(mate.request_id)
    busy.abort(first[3].request_id)
    for _ in range(10):
        busy.advance()
    assert last.stats.num_prefills == 2
    busy._hierarchy._round_policy._ask = lambda number, place: 1
    busy.advance()
    remaining = [first[1], last]
    always = scripted(model, lambda number, place: 1)
    others = run(always, [sequence.prompt_ids for sequence in remaining], 35)
    numbers = same_caches(busy, remaining, always, others, 0)
    # A draft that was kept, and the target's own token behind it, the head has still to see.
    assert all(n >= len(sequence.token_ids) - 2 for n, sequence in zip(numbers, remaining, strict=True))


@pytest.mark.parametrize(
    ("method", "seeded"),
    [
        ("hispec", False),
        pytest.param("single-layer", False, marks=pytest.mark.slow),
        pytest.param("hispec", True, marks=pytest.mark.slow),
    ],
)
def test_the_distribution_does_not_depend_on_lengths(sampled_model, monkeypatch, method, seeded):  # noqa: F811
    follow_script(monkeypatch, randomly("sampled", 2), method)
    counts, engine = sample(sampled_model, PLAIN, seeded=seeded, method=method, num_samples=1500, plan="auto")
    assert is_lossless(sampled_model, counts, PLAIN), deviations(sampled_model, counts, PLAIN)
    target = engine.stats.levels["target"]
    assert 0.1 < target.drafted_per_position[0] / target.num_rounds < 0.95


def test_zeros_bind_and_other_lengths_do_not(base, scripted):
    model = build_heads(shallow(base, 4), "random", committed_context=True)
    engine = scripted(model, lambda number, place: place, by_confidence=True, num_draft_tokens=5)
    quiet, *others = run(engine, RAGGED, 12)
    assert quiet.stats.levels["target"].num_drafted == 0
    assert all(max(s.stats.levels["target"].drafted_per_position) > 0 for s in others)
    assert max(len(s.stats.levels["target"].drafted_per_position) for s in others[:1]) > 1  # and one was asked for


def test_chances_are_those_of_what_was_drafted(base, scripted, monkeypatch):
    model = build_heads(shallow(base, 4), "random", committed_context=True)
    engine = scripted(model, lambda number, place: 1 + place % 2, by_confidence=True, num_draft_tokens=4)
    policy, going_on = engine._hierarchy._round_policy, Hierarchy._going_on
    expected, seen = [], []

    def watched(self, level, sequences):
        partial = [s for s in sequences if 0 < len(s.proposed[level]) < s.wanted[level]]
        confidences = [[proposal.confidence for proposal in s.proposed[level]] for s in partial]
        chances = [math.prod(each) * s.kept_shares[level] for each, s in zip(confidences, partial, strict=True)]
        expected[:] = [chances, sum(len(s.proposed[level]) for s in sequences)]
        return going_on(self, level, sequences)

    def checked(chances, num_drafted):
        assert [chances, num_drafted] == expected
        seen.append(len(set(chances)))
        return range(0, len(chances), 2)

    monkeypatch.setattr(Hierarchy, "_going_on", watched)
    policy.going_on = checked
    run(engine, RAGGED, 8)
    assert max(seen) == len(RAGGED)


def test_mates_of_all_kinds_go_on_by_confidence(base, scripted):
    """Greedy, seeded, with penalties, and copied from the text: each text is that of plain decoding."""
    model = build_heads(shallow(base, 4), "random", committed_context=True)
    kinds = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"repetition_penalty": 1.3},
        {"temperature": 1.2, "seed": 4, "top_k": 9},
    ]
    params = [SamplingParams(max_new_tokens=30, ignore_eos=True, **kind) for kind in kinds]
    prompts = [RAGGED[0] * 4, *RAGGED[1:3], RAGGED[3] * 3]
    options = {"by_confidence": True, "num_draft_tokens": 4, "ngram_drafts": True}
    engine = scripted(model, lambda number, place: 1 + place % 2, **options)
    plain = Engine(model, method="autoregressive", num_blocks=200)
    texts, expected = (
        [completion.token_ids for completion in each.generate(prompts, params)] for each in (engine, plain)
    )
    assert texts == expected
    stats = engine.stats.levels
    assert stats["ngram"].num_rounds > 0
    assert stats["target"].drafted_per_position[1] > 0


def sample_by_confidence(model, monkeypatch, method):
    follow_script(monkeypatch, lambda number, place: 1, method, by_confidence=True)
    # Longer than two: what is drawn second has the first for its past.
    return sample(model, PLAIN, seeded=False, method=method, num_samples=3000, plan="auto", num_draft_tokens=4)


@pytest.mark.parametrize("method", ["single-layer", pytest.param("hispec", marks=pytest.mark.slow)])
def test_the_distribution_does_not_depend_on_confidence(sampled_model, monkeypatch, method):  # noqa: F811
    counts, engine = sample_by_confidence(sampled_model, monkeypatch, method)
    assert is_lossless(sampled_model, counts, PLAIN), deviations(sampled_model, counts, PLAIN)
    drafted = engine.stats.levels["target"].drafted_per_position
    assert 0.2 < drafted[1] / drafted[0] < 0.9
    assert drafted[2] > 0


def test_a_drawn_token_that_is_not_verified_is_seen(sampled_model, monkeypatch):  # noqa: F811
    """Whether another token is drawn may depend on confidence; whether one that was drawn counts may not."""
    draft = Drafter.draft

    def fickle(self, sequences, counts, *rest):
        drafts, _ = draft(self, sequences, counts)
        for sequence, each in zip(sequences, drafts, strict=True):
            if sequence.proposed[0] and each[0].token_id % 2:
                each.clear()
                sequence.wanted[0] = 0
        return drafts, None

    monkeypatch.setattr(Drafter, "draft", fickle)
    counts, _ = sample_by_confidence(sampled_model, monkeypatch, "single-layer")
    assert not is_lossless(sampled_model, counts, PLAIN)


def test_windows_are_long_where_rounds_may_be_plain(base):
    model = build_heads(base, "random")
    config = Engine(model, method="hispec", num_blocks=8).config
    assert levels.window_size(config, 2) == 2 + 4 + 3
    assert levels.max_lag(config) == 2
