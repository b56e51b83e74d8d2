"""AdaDecode: which exit each token leaves at, and that it changes no text."""

import pytest
import torch

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, EngineConfig, SamplingParams
from hispec.infer.adaptive_exits import AdaptiveExits
from hispec.infer.model_runner import ModelRunner

from .models import build_base, build_heads, reference, shallow

PROMPTS = [[5], [7, 8, 9, 10, 11, 12], list(range(3, 33)), [9, 9, 4]]
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
EXITS = (0, 2, 3, 5)
KINDS = ("block", "block", "mlp", "block")


@pytest.fixture(scope="module")
def model():
    """Four exits that are sure, and right, now and then."""
    base = shallow(build_base("llama"), 3)
    return build_heads(base, "random", EXITS, head=KINDS, committed_context=True)


@pytest.fixture(scope="module")
def expected(model):
    return [reference(model.base, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("exit_confidence", [0.0, 0.6, 0.75, 1.0])
@pytest.mark.parametrize("options", [{}, {"draft_policy": "dynamic"}, {"exit_layers": (2, 5)}, {"exit_layers": (3,)}])
def test_no_text_changes_and_counts_add_up(model, expected, exit_confidence, options):
    engine = Engine(
        model, method="adadecode", num_draft_tokens=4, exit_confidence=exit_confidence, num_blocks=60, **options
    )
    completions = engine.generate(PROMPTS, PARAMS)
    assert [completion.token_ids for completion in completions] == expected
    for stats in [engine.stats] + [completion.stats for completion in completions]:
        *exits, target = stats.levels.values()
        assert len(exits) == len(options.get("exit_layers", EXITS))
        assert sum(level.num_rounds for level in exits) == target.num_drafted
        assert (
            stats.num_committed
            == 40 * stats.num_prefills
            == (stats.num_prefills + target.num_accepted + target.num_rounds)
        )
        assert all(level.num_drafted == 0 for level in exits)
    *exits, target = engine.stats.levels.values()
    if exit_confidence == 0:
        assert sum(level.num_rounds for level in exits[1:]) == 0 < exits[0].num_rounds
    if exit_confidence == 1:
        assert target.num_drafted == 0
    if exit_confidence == 0.6:
        assert all(level.num_rounds for level in exits)


def test_a_token_leaves_at_the_first_exit_that_is_sure(monkeypatch):
    """Exits at 3 and 5 are right whenever they are sure, those before now and then."""
    good = build_heads(shallow(build_base("llama"), 3), "good", EXITS, head=KINDS, committed_context=True)
    seen, choose = [], AdaptiveExits._choose

    def watched(self, sequences, rows):
        seen.extend(row.confidence.item() for row in rows)
        return choose(self, sequences, rows)

    monkeypatch.setattr(AdaptiveExits, "_choose", watched)
    engine = Engine(good, method="adadecode", num_draft_tokens=4, exit_confidence=0.6, num_blocks=60)
    completions = engine.generate(PROMPTS, PARAMS)
    assert min(seen) >= 0.6
    assert len(seen) == engine.stats.levels["target"].num_drafted
    names = [origin for completion in completions for origin in completion.origins]
    assert set(names) == {"intermediate", "target"}
    target = engine.stats.levels["target"]
    assert sum(names.count(name) for name in engine.stats.levels if name != "target") == target.num_accepted


def test_later_layers_run_only_where_they_are_asked(model):
    """Where the first exit is sure of all, the others see committed tokens once, in the target's pass."""
    engine = Engine(model, method="adadecode", num_draft_tokens=4, exit_confidence=0.0, num_blocks=60)
    passes = []
    run, judge = ModelRunner.advance, ModelRunner.judge

    def counted(self, index, sequences):
        passes.append(index)
        run(self, index, sequences)

    def judged(self, sequences, starts, *, is_whole, **options):
        passes.extend(range(1, 5) if is_whole else [4])
        return judge(self, sequences, starts, is_whole=is_whole, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "advance", counted)
        patch.setattr(ModelRunner, "judge", judged)
        engine.generate(PROMPTS[:1], PARAMS)
    num_rounds = engine.stats.levels["target"].num_rounds
    assert [passes.count(index) for index in range(1, 5)] == [num_rounds] * 4


def test_heads_that_were_not_asked_see_all_that_was_committed(model):
    """What a deep head keeps of committed positions is whole, however long nothing went there."""
    engine = Engine(model, method="adadecode", num_draft_tokens=3, exit_confidence=0.0, num_blocks=60, block_size=4)
    request_id = engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=99, ignore_eos=True))
    for _ in range(30):
        engine.step()
    (sequence,) = engine._unfinished[request_id]
    num_read = min(sequence.num_head_computed[1], sequence.num_head_computed[3])
    assert num_read >= len(sequence.token_ids) - 6
    fresh = Engine(model, method="adadecode", num_blocks=60, block_size=4)
    (again,) = fresh._unfinished[fresh.add_request(sequence.token_ids, PARAMS)]
    fresh.step()
    for head in (model.heads[1], model.heads[3]):
        kept = []
        for each, owner in ((engine, sequence), (fresh, again)):
            cache = each._hierarchy._runner._kv_cache
            slots = [owner.block_table[p // 4] * 4 + p % 4 for p in range(num_read)]
            kept.append(cache.keys[head.kv_layer][slots])
        torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-4)


def test_sampled_requests_of_every_rule_side_by_side(model):
    params = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=temperature, seed=seed)
        for temperature, seed in ((0, None), (1.0, 5), (1.0, None), (0.5, 6))
    ]
    engine = Engine(model, method="adadecode", num_draft_tokens=3, exit_confidence=0.5, num_blocks=20, block_size=8)
    plain = Engine(model, method="autoregressive", num_blocks=60)
    found, wanted = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    for place in (0, 1, 3):
        assert found[place].token_ids == wanted[place].token_ids
    assert len(found[2].token_ids) == 20


def test_what_it_needs(base):
    with pytest.raises(ValueError, match="method 'adadecode' needs 1 exit head, but the model has 0"):
        Engine(EarlyExitModel.from_configs(base, []), method="adadecode")
    with pytest.raises(ValueError, match="exit_confidence is 2; it must lie between 0 and 1"):
        EngineConfig(exit_confidence=2)
