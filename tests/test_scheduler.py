"""Admission, preemption and release, with a model that only counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer import SamplingParams
from hispec.infer.block_manager import BlockManager
from hispec.infer.scheduler import Scheduler
from hispec.infer.sequence import Sequence
from hispec.infer.stats import Stats


def make_sequence(request_id: int, prompt_length: int, max_new_tokens: int) -> Sequence:
    return Sequence(
        request_id=request_id,
        prompt_ids=[1] * prompt_length,
        params=SamplingParams(max_new_tokens=max_new_tokens),
        stop_ids=frozenset(),
        max_length=prompt_length + max_new_tokens,
        stats=Stats.of_levels(("draft", "target")),
        proposed=[[]],
        num_computed=[0, 0],
        num_head_computed=[0],
    )


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10)), min_size=1, max_size=12),
    num_blocks=st.integers(8, 16),
    max_num_seqs=st.integers(1, 5),
    max_proposed=st.integers(1, 6),
    emitted=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_all_finish_in_spite_of_a_small_pool(requests, num_blocks, max_num_seqs, max_proposed, emitted):
    manager = BlockManager(num_blocks, 3)
    scheduler = Scheduler(manager, max_num_seqs, max_prefill_tokens=20, max_proposed=max_proposed)
    arrivals = [(when, make_sequence(i, p, n)) for i, (p, n, when) in enumerate(requests)]
    sequences = [sequence for _, sequence in arrivals]
    first_tokens = []
    for step in range(2000):
        for when, sequence in arrivals:
            if when == step:
                scheduler.add(sequence)
        prefill, decoding = scheduler.schedule()
        assert len(scheduler.running) <= max_num_seqs
        assert len({sequence.window_row for sequence in scheduler.running}) == len(scheduler.running)
        owned = [block for sequence in sequences for block in sequence.block_table]
        assert len(owned) == len(set(owned))
        for sequence in prefill + decoding:
            if sequence in prefill and sequence.request_id not in first_tokens:
                first_tokens.append(sequence.request_id)
            reach = min(len(sequence.token_ids) + max_proposed, sequence.max_length)
            assert len(sequence.block_table) * 3 >= reach
            number = 1 if sequence in prefill else 1 + min(emitted[step % len(emitted)], max_proposed)
            sequence.commit([5] * number)
            if sequence.finish_reason is None:
                scheduler.trim(sequence)
            else:
                scheduler.finish(sequence)
        if all(sequence.finish_reason for sequence in sequences):
            break
    assert all(len(sequence.token_ids) == sequence.max_length for sequence in sequences)
    assert manager.num_free == num_blocks
    same_arrival = {when for when, _ in arrivals}
    if len(same_arrival) == 1:
        assert first_tokens == sorted(first_tokens)


def test_a_request_larger_than_the_pool_is_refused_at_once():
    scheduler = Scheduler(BlockManager(2, 4), 4, 100, 2)
    with pytest.raises(ValueError, match="needs 3 blocks of the KV cache for 9 tokens, but there are only 2"):
        scheduler.check(9)


def test_the_one_that_came_last_gives_way():
    manager = BlockManager(4, 4)
    scheduler = Scheduler(manager, 4, 100, 1)
    first, second = make_sequence(0, 7, 9), make_sequence(1, 7, 9)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule() == ([first, second], [])
    first.commit([5, 5])
    second.commit([5])
    prefill, decoding = scheduler.schedule()
    assert (prefill, decoding) == ([], [first])
    assert list(scheduler.waiting) == [second]
    assert second.num_computed == [0, 0]
    assert second.token_ids == [1] * 7 + [5]
