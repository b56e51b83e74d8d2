"""Greedy output of every method is the base's own, token for token."""

import itertools

import pytest
import torch

from hispec.infer import Engine, SamplingParams

from .models import ARCHITECTURE_NAMES, build_heads, reference, shallow

GENERATOR = torch.Generator().manual_seed(7)
LENGTHS = (1, 2, 15, 16, 17, 33, 3, 40)
PROMPTS = [torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in LENGTHS]

METHODS = ["autoregressive", "single-layer", "hispec", "adadecode", "ngram", "lookahead"]
FULL_GRID = ["llama", "qwen2", "qwen2-window", "qwen3", "opt", "opt-350m"]


@pytest.mark.parametrize(
    ("any_base", "method", "context"),
    [
        *itertools.product(FULL_GRID, METHODS[:3], (False, True)),
        ("llama", "adadecode", True),
        ("opt-350m", "adadecode", False),
        ("qwen2-window", "ngram", False),
    ],
    indirect=["any_base"],
)
def test_every_method(any_base, method, context):
    model = build_heads(any_base, "random", committed_context=context)
    expected = [reference(any_base, prompt, 16) for prompt in PROMPTS]
    engine = Engine(model, method=method, num_draft_tokens=3, num_blocks=64, block_size=8)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    assert [completion.token_ids for completion in engine.generate(PROMPTS, params)] == expected
    assert engine.generate([PROMPTS[3]], params)[0].token_ids == expected[3]


@pytest.mark.parametrize("any_base", [name for name in ARCHITECTURE_NAMES if name not in FULL_GRID], indirect=True)
@pytest.mark.parametrize(("method", "quality"), [("single-layer", "random"), ("hispec", "good")])
def test_every_architecture(any_base, method, quality):
    base = shallow(any_base, 2) if quality == "good" else any_base
    model = build_heads(base, quality, committed_context=method == "hispec")
    prompts = [PROMPTS[index] for index in (0, 4, 5, 7)]
    expected = [reference(base, prompt, 16) for prompt in prompts]
    engine = Engine(model, method=method, num_draft_tokens=3, num_blocks=64, block_size=8)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
    assert [engine.generate([prompt], params)[0].token_ids for prompt in prompts[-1:]] == expected[-1:]
    rate = engine.stats.levels["target"].acceptance_rate
    assert rate > 0.9 if quality == "good" else rate < 0.9


@pytest.mark.parametrize("quality", ["good", "random", "adversarial"])
@pytest.mark.parametrize("kind", ["shared", "norm", "mlp", "block", "lora"])
@pytest.mark.parametrize("method", ["single-layer", "hispec"])
def test_every_head(base, quality, kind, method):
    if quality == "good":
        base = shallow(base, 2)
    model = build_heads(base, quality, head=kind, committed_context=kind != "shared")
    expected = [reference(base, prompt, 14) for prompt in PROMPTS]
    engine = Engine(model, method=method, num_draft_tokens=2, num_blocks=64)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=14, ignore_eos=True))
    assert [completion.token_ids for completion in completions] == expected
    rate = engine.stats.levels["target"].acceptance_rate
    assert rate > 0.9 if quality == "good" else rate < 0.6


@pytest.mark.parametrize("exit_layers", [(2, 4), (0, 1)])
@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
def test_every_length(base, exit_layers, num_draft_tokens):
    """Each pair of lengths at one of the two choices of exits, as the colours of a chess board."""
    model = build_heads(shallow(base, 4), "random", exit_layers, committed_context=True, draft_vocab_size=48)
    params = SamplingParams(max_new_tokens=13, ignore_eos=True)
    expected = [reference(model.base, prompt, 13) for prompt in PROMPTS[:3]]
    for num_provisional_tokens in range(1 + (num_draft_tokens + exit_layers[0] // 2) % 2, 9, 2):
        engine = Engine(
            model,
            num_draft_tokens=num_draft_tokens,
            num_provisional_tokens=num_provisional_tokens,
            num_blocks=40,
            block_size=4,
        )
        completions = engine.generate(PROMPTS[:3], params)
        assert [completion.token_ids for completion in completions] == expected


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch(base, batch):
    model = build_heads(shallow(base, 3), "random", committed_context=True)
    engine = Engine(model, max_num_seqs=batch, num_blocks=64)
    params = [SamplingParams(max_new_tokens=5 + 3 * index, ignore_eos=True) for index in range(8)]
    expected = [reference(model.base, prompt, p.max_new_tokens) for prompt, p in zip(PROMPTS, params, strict=True)]
    assert [completion.token_ids for completion in engine.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_list_of_end_tokens(base, method):
    base = shallow(base, 2)
    free = [reference(base, prompt, 24) for prompt in PROMPTS]
    common = sorted({token for tokens in free for token in tokens[4:]}, key=lambda t: -sum(t in f for f in free))[:2]
    base.generation_config.eos_token_id = common
    model = build_heads(base, "good", committed_context=True)
    expected = [reference(base, prompt, 24, eos_token_id=common) for prompt in PROMPTS]
    engine = Engine(model, method=method, num_draft_tokens=4, num_blocks=64)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert [completion.token_ids for completion in completions] == expected
    assert any(completion.finish_reason == "stop" for completion in completions)
    for completion in completions:
        assert (completion.token_ids[-1] in common) == (completion.finish_reason == "stop")


@pytest.mark.parametrize("architecture", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_the_context_ends_inside_a_draft(make_base, architecture, method):
    base = shallow(make_base(architecture, max_position_embeddings=48), 2)
    model = build_heads(base, "good", committed_context=True)
    for length in (40, 45, 46, 47):
        prompt = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        engine = Engine(model, method=method, num_draft_tokens=5, num_provisional_tokens=8)
        completion = engine.generate([prompt], SamplingParams(max_new_tokens=99, ignore_eos=True))[0]
        assert completion.token_ids == reference(base, prompt, 48 - length)
        assert completion.finish_reason == "length"


def test_the_context_ends_where_longrope_changes(make_base):
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [5.0, 6.0, 7.0, 8.0]}
    base = make_base("phi3", original_max_position_embeddings=32, partial_rotary_factor=1.0, rope_parameters=rope)
    engine = Engine(build_heads(base, "random"), num_draft_tokens=5)
    prompt = PROMPTS[4]
    completion = engine.generate([prompt], SamplingParams(max_new_tokens=99, ignore_eos=True))[0]
    assert completion.token_ids == reference(base, prompt, 32 - len(prompt))
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_preemption_changes_nothing(base, method):
    model = build_heads(shallow(base, 3), "random", committed_context=True)
    engine = Engine(model, method=method, num_blocks=14, block_size=8, max_num_seqs=8)
    preempted = []
    restart = type(engine._scheduler)._preempt
    engine._scheduler._preempt = lambda sequence: (
        preempted.append(sequence),
        restart(engine._scheduler, sequence),
    )
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = [reference(model.base, prompt, 30) for prompt in PROMPTS]
    assert [completion.token_ids for completion in engine.generate(PROMPTS, params)] == expected
    assert preempted


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_others_is_never_read(base, monkeypatch, method):
    """All of the pool that is nobody's, from the start or given back, is NaN: one read of it would spread."""
    model = build_heads(shallow(base, 3), "random", committed_context=True)
    engine = Engine(model, method=method, num_blocks=16, block_size=8, max_num_seqs=4)
    cache, manager = engine._hierarchy._runner._kv_cache, engine._scheduler._block_manager

    def poison(blocks):
        for pool in itertools.chain(cache.keys, cache.values):
            for block in blocks:
                pool[block * 8 : block * 8 + 8] = torch.nan

    def shrink(block_table, num_tokens):
        before = list(block_table)
        type(manager).shrink(manager, block_table, num_tokens)
        poison(set(before) - set(block_table))

    poison(range(16))
    monkeypatch.setattr(manager, "shrink", shrink)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    aborted = engine.add_request([5] * 9, params)
    engine.step()
    engine.abort(aborted)
    expected = [reference(model.base, prompt, 20) for prompt in PROMPTS]
    assert [completion.token_ids for completion in engine.generate(PROMPTS, params)] == expected
