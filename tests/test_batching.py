"""Requests that come, wait, are read in pieces, give way and go: each gets what it would get alone."""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.infer.block_manager import BlockManager
from hispec.infer.scheduler import Scheduler

from .models import build_base, build_heads, reference, shallow

MAX_NEW_TOKENS = 12
GENERATOR = torch.Generator().manual_seed(17)
PROMPTS = [torch.randint(3, 64, (n,), generator=GENERATOR).tolist() for n in (1, 2, 7, 8, 9, 16, 25, 40)]


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Block heads with committed context that are right now and then."""
    base = shallow(build_base("llama", num_hidden_layers=4), 3)
    return build_heads(base, "random", (0, 2), head="block", committed_context=True)


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """What the base itself answers to each prompt."""
    return [reference(model.base, prompt, MAX_NEW_TOKENS) for prompt in PROMPTS]


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def fill_with_nan_what_is_free(engine: Engine) -> None:
    """From now on all memory that is nobody's is NaN: one read of it would spread."""
    runner, scheduler = engine._hierarchy._runner, engine._scheduler
    manager, cache, window = scheduler._block_manager, runner._kv_cache, runner._windows.size

    def spoil(pools, places, size):
        for pool in pools:
            for place in places:
                pool[place * size : (place + 1) * size] = torch.nan

    def shrink(block_table, num_tokens):
        before = list(block_table)
        BlockManager.shrink(manager, block_table, num_tokens)
        spoil(cache.keys + cache.values, set(before) - set(block_table), manager.block_size)

    def release(sequence):
        Scheduler._release(scheduler, sequence)
        spoil(runner._windows.tables, [sequence.window_row], window)

    spoil(cache.keys + cache.values, range(manager.num_blocks), manager.block_size)
    spoil(runner._windows.tables, range(engine.config.max_num_seqs), window)
    manager.shrink, scheduler._release = shrink, release


def assert_all_is_free(engine: Engine) -> None:
    manager = engine._scheduler._block_manager
    assert sorted(manager._free) == list(range(manager.num_blocks))
    assert sorted(engine._scheduler._free_rows) == list(range(engine.config.max_num_seqs))
    assert not engine._scheduler.running
    assert not engine._scheduler.waiting


def cached(engine: Engine, sequence, num_tokens: int, num_layers: int) -> torch.Tensor:
    """Keys and values of the sequence's first tokens in the first layers."""
    cache = engine._hierarchy._runner._kv_cache
    size = cache.block_size
    slots = [sequence.block_table[position // size] * size + position % size for position in range(num_tokens)]
    return torch.stack([pool[slots] for pool in cache.keys[:num_layers] + cache.values[:num_layers]])


@pytest.mark.parametrize("size", [1, 3, 16])
def test_pieces_leave_what_whole_reading_leaves(model, alone, size):
    """The cache of every layer and head, and the final states, while another sequence decodes in every step."""
    long, mate = PROMPTS[-1], PROMPTS[2]
    found = []
    for max_prefill_tokens in (size, 64):
        engine = Engine(model, block_size=4, num_blocks=80, max_prefill_tokens=max_prefill_tokens)
        mate_id = engine.add_request(mate, params_of(150))
        while not engine._unfinished[mate_id][0].is_read:
            engine.step()
        (decoding,) = engine._unfinished[mate_id]
        (sequence,) = engine._unfinished[engine.add_request(long, params_of(MAX_NEW_TOKENS))]
        num_steps = 0
        while not sequence.is_read:
            before = len(decoding.token_ids)
            assert not engine.step()
            assert len(decoding.token_ids) > before
            num_steps += 1
        assert num_steps == -(-len(long) // max_prefill_tokens)
        runner = engine._hierarchy._runner
        window = range(len(long) - runner._windows.size, len(long))
        slots = runner._windows.slots([sequence], [(window.start, window.stop)])
        found.append((cached(engine, sequence, len(long), 6), runner._windows.final[slots].clone()))
        mate_ids = decoding.output_ids
        engine.abort(mate_id)
        while engine.has_unfinished:
            finished = engine.step()
        assert finished[0].token_ids == alone[-1]
        assert mate_ids[:MAX_NEW_TOKENS] == alone[2][: len(mate_ids)]
        assert finished[0].stats.num_prefill_layer_passes == len(long) * 4
        assert finished[0].stats.num_prefills == 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1),
            st.integers(1, MAX_NEW_TOKENS),
            st.integers(0, 8),
            st.none() | st.integers(1, 12),
        ),
        min_size=2,
        max_size=8,
    ),
    method=st.sampled_from(["single-layer", "hispec", "hispec", "adadecode", "ngram", "lookahead"]),
    ngram_drafts=st.booleans(),
    max_prefill_tokens=st.sampled_from([1, 3, 16, 64]),
    max_num_seqs=st.integers(1, 4),
)
def test_each_gets_what_it_would_get_alone(
    model, alone, requests, method, ngram_drafts, max_prefill_tokens, max_num_seqs
):
    engine = Engine(
        model,
        method=method,
        num_blocks=8,
        block_size=7,
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill_tokens,
        exit_confidence=0.4,
        ngram_drafts=ngram_drafts and method in ("single-layer", "hispec"),
    )
    fill_with_nan_what_is_free(engine)
    ids, aborted, finished = {}, set(), {}
    for step in range(1000):
        for number, (place, num_tokens, arrives, _) in enumerate(requests):
            if arrives == step:
                ids[number] = engine.add_request(PROMPTS[place], params_of(num_tokens))
        for number, (_, _, arrives, stays) in enumerate(requests):
            if stays is not None and step == arrives + stays and ids[number] in engine._unfinished:
                engine.abort(ids[number])
                aborted.add(number)
        finished |= {completion.request_id: completion.token_ids for completion in engine.step()}
        if len(ids) == len(requests) and not engine.has_unfinished:
            break
    for number, (place, num_tokens, _, _) in enumerate(requests):
        if number not in aborted:
            assert finished[ids[number]] == alone[place][:num_tokens]
    assert len(finished) == len(requests) - len(aborted)
    assert_all_is_free(engine)


@settings(max_examples=8, deadline=None)
@given(
    num_draft_tokens=st.integers(1, 4),
    num_provisional_tokens=st.integers(1, 6),
    num_steps=st.integers(1, 8),
    method=st.sampled_from(["single-layer", "hispec", "adadecode"]),
)
def test_what_stands_after_a_rollback_is_what_reading_gives(
    model, num_draft_tokens, num_provisional_tokens, num_steps, method
):
    engine = Engine(
        model,
        method=method,
        num_draft_tokens=num_draft_tokens,
        num_provisional_tokens=num_provisional_tokens,
        num_blocks=64,
        block_size=4,
    )
    ids = [engine.add_request(prompt, params_of(99)) for prompt in PROMPTS[1:4]]
    for _ in range(num_steps):
        engine.step()
    for request_id in ids:
        (sequence,) = engine._unfinished[request_id]
        num_computed = len(sequence.token_ids) - 1
        assert sequence.num_computed[-1] == num_computed >= max(sequence.num_computed)
        assert not any(sequence.proposed)
        fresh = Engine(model, method="autoregressive", block_size=4, num_blocks=64)
        (again,) = fresh._unfinished[fresh.add_request(sequence.token_ids, params_of(9))]
        fresh.step()
        torch.testing.assert_close(
            cached(engine, sequence, num_computed, 4), cached(fresh, again, num_computed, 4), rtol=1e-4, atol=1e-4
        )


def test_two_hundred_requests_through_a_pool_for_ten(model, alone):
    rng = random.Random(5)
    engine = Engine(model, num_blocks=70, block_size=4, max_num_seqs=16, max_prefill_tokens=32)
    requests = [(rng.randrange(len(PROMPTS)), rng.randint(1, MAX_NEW_TOKENS)) for _ in range(200)]
    ids = [engine.add_request(PROMPTS[place], params_of(num_tokens)) for place, num_tokens in requests]
    sequences = [weakref.ref(engine._unfinished[request_id][0]) for request_id in ids]
    finished, most_running, num_bytes = {}, 0, []
    while engine.has_unfinished:
        finished |= {completion.request_id: completion.token_ids for completion in engine.step()}
        most_running = max(most_running, len(engine._scheduler.running))
        if len(finished) // 50 > len(num_bytes):
            engine._runner.forget_chains()  # which are few
            gc.collect()
            num_bytes.append(sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor))
    assert [finished[request_id] for request_id in ids] == [alone[place][:number] for place, number in requests]
    assert 6 <= most_running <= 16
    assert max(num_bytes) - min(num_bytes) < 10_000
    gc.collect()
    assert not any(sequence() for sequence in sequences)
    assert_all_is_free(engine)
    # Nobody is done long before or after its turn: the numbers of those that run, and of those that may overtake.
    late = [place - ids.index(request_id) for place, request_id in enumerate(finished)]
    assert max(map(abs, late)) <= 40


def test_a_refused_prompt_in_a_list_harms_nobody(model, alone):
    engine = Engine(model, num_blocks=8, block_size=8)
    request_id = engine.add_request(PROMPTS[3], params_of(MAX_NEW_TOKENS))
    engine.step()
    with pytest.raises(ValueError, match=r"prompt 1 of 3 .*needs 9 blocks of the KV cache for 70 tokens"):
        engine.generate([PROMPTS[0], PROMPTS[-1], []], [params_of(1), params_of(30), params_of(1)])
    assert [c.token_ids for c in engine.generate(PROMPTS[:2], params_of(5))] == [alone[0][:5], alone[1][:5]]
    finished = []
    while engine.has_unfinished:
        finished += engine.step()
    assert [(completion.request_id, completion.token_ids) for completion in finished] == [(request_id, alone[3])]
    assert_all_is_free(engine)
