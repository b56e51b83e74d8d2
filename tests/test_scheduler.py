"""Admission, preemption and release, with a model that only counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer import SamplingParams
from hispec.infer.block_manager import BlockManager
from hispec.infer.scheduler import Scheduler
from hispec.infer.sequence import MAX_OVERTAKEN, Sequence
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


def read(chunks):
    """What a prefill does with the chunks, as far as integers tell."""
    for sequence, start, stop in chunks:
        assert start == sequence.num_computed[-1] < stop <= len(sequence.token_ids)
        sequence.num_computed, sequence.num_head_computed = [stop, stop], [stop]
        if stop == len(sequence.token_ids):
            sequence.is_read = True
            sequence.commit([5])


@settings(deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10), st.none() | st.integers(0, 25)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(8, 16),
    max_num_seqs=st.integers(1, 5),
    max_proposed=st.integers(1, 6),
    max_prefill_tokens=st.integers(1, 20),
    more_undisturbed=st.integers(0, 20),
    emitted=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_all_finish_in_spite_of_a_small_pool(
    requests, num_blocks, max_num_seqs, max_proposed, max_prefill_tokens, more_undisturbed, emitted
):
    manager = BlockManager(num_blocks, 3)
    most_undisturbed = max_prefill_tokens + more_undisturbed
    scheduler = Scheduler(manager, max_num_seqs, max_prefill_tokens, max_proposed, max_undisturbed=most_undisturbed)
    arrivals = [(when, make_sequence(i, p, n)) for i, (p, n, when, _) in enumerate(requests)]
    sequences = [sequence for _, sequence in arrivals]
    aborts = {i: aborted - when for i, (_, _, when, aborted) in enumerate(requests) if aborted is not None}
    aborted = set()
    for step in range(2000):
        for when, sequence in arrivals:
            if when == step:
                scheduler.add(sequence)
            elif when + aborts.get(sequence.request_id, -1) == step > when and sequence.finish_reason is None:
                scheduler.finish(sequence)
                sequence.finish_reason = "stop"
                aborted.add(sequence)
        chunks, decoding = scheduler.schedule()
        assert len(scheduler.running) <= max_num_seqs
        assert len({sequence.window_row for sequence in scheduler.running}) == len(scheduler.running)
        ages = [sequence.arrival for sequence in scheduler.running]
        assert ages == sorted(ages)
        owned = [block for sequence in sequences for block in sequence.block_table]
        assert len(owned) == len(set(owned)) == num_blocks - manager.num_free
        # Every step gets on with something, and all that are read get their round.
        assert chunks or decoding or not (scheduler.waiting or scheduler.running)
        assert decoding == [sequence for sequence in scheduler.running if sequence.is_read]
        unread = [sequence for sequence in scheduler.running if not sequence.is_read]
        num_read = sum(stop - start for _, start, stop in chunks)
        most = max_prefill_tokens if decoding else most_undisturbed
        assert num_read == min(most, sum(sequence.num_unread for sequence in unread))
        for sequence, _, stop in chunks:
            assert len(sequence.block_table) * 3 >= stop
        if unread:
            start, stop = next((start, stop) for sequence, start, stop in chunks if sequence is unread[0])
            assert stop - start >= min(unread[0].num_unread, most / 2)
        for sequence in decoding:
            reach = min(len(sequence.token_ids) + max_proposed, sequence.max_length)
            assert len(sequence.block_table) * 3 >= reach
            sequence.commit([5] * (1 + min(emitted[step % len(emitted)], max_proposed)))
            sequence.num_computed = [len(sequence.token_ids) - 1] * 2
        read(chunks)
        for sequence in [chunk.sequence for chunk in chunks] + decoding:
            if sequence.finish_reason is None:
                scheduler.trim(sequence)
            else:
                scheduler.finish(sequence)
        if all(sequence.finish_reason for sequence in sequences):
            break
    assert all(len(sequence.token_ids) == sequence.max_length for sequence in sequences if sequence not in aborted)
    assert manager.num_free == num_blocks
    assert sorted(scheduler._free_rows) == list(range(max_num_seqs))


def run_to_the_end(scheduler, sequences):
    """The order in which these start, one token a round."""
    started = []
    while any(sequence.finish_reason is None for sequence in sequences):
        chunks, decoding = scheduler.schedule()
        started += [chunk.sequence.request_id for chunk in chunks if chunk.start == 0]
        for sequence in decoding:
            sequence.commit([5])
        read(chunks)
        for sequence in [chunk.sequence for chunk in chunks] + decoding:
            if sequence.finish_reason is not None:
                scheduler.finish(sequence)
    return started


def test_a_large_request_is_overtaken_but_not_for_ever():
    scheduler = Scheduler(BlockManager(8, 4), 4, 100, 1)
    small = [make_sequence(number, 8, 5 + number % 4) for number in range(30)]
    large = make_sequence(99, 24, 8)
    for sequence in [small[0], large, *small[1:]]:
        scheduler.add(sequence)
    started = run_to_the_end(scheduler, [large, *small])
    # Small ones use the room that is too little for it, then it gets what becomes free; all others keep their order.
    assert started.index(99) == 1 + MAX_OVERTAKEN
    assert [number for number in started if number != 99] == list(range(30))


def test_who_fits_is_never_overtaken():
    scheduler = Scheduler(BlockManager(9, 4), 3, 7, 1)
    sequences = [make_sequence(number, 1 + 5 * number % 9, 3) for number in range(20)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert run_to_the_end(scheduler, sequences) == list(range(20))


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_long_one_for_ever():
    scheduler = Scheduler(BlockManager(100, 4), 8, 16, 1)
    long = make_sequence(0, 40, 9)
    scheduler.add(long)
    for number in range(1, 20):
        scheduler.add(make_sequence(number, 6, 9))
        chunks, _ = scheduler.schedule()
        shares = {sequence.request_id: stop - start for sequence, start, stop in chunks}
        if long.is_read:
            break
        assert shares[0] >= 8
        assert shares[number] == 6
        read(chunks)
    # 8 tokens a step at least, and what the short ones left over.
    assert number == 5


def test_prompts_of_one_length_are_read_one_after_the_other():
    scheduler = Scheduler(BlockManager(100, 4), 8, 10, 1)
    for number in range(3):
        scheduler.add(make_sequence(number, 10, 9))
    for number in range(3):
        chunks, _ = scheduler.schedule()
        assert [(sequence.request_id, start, stop) for sequence, start, stop in chunks] == [(number, 0, 10)]
        read(chunks)


def test_a_newcomer_leaves_room_to_those_that_run():
    scheduler = Scheduler(BlockManager(6, 4), 4, 100, 1)
    first, second = make_sequence(0, 7, 20), make_sequence(1, 13, 9)
    scheduler.add(first)
    scheduler.add(second)
    assert [chunk.sequence for chunk in scheduler.schedule()[0]] == [first]


def test_a_request_larger_than_the_pool_is_refused_at_once():
    scheduler = Scheduler(BlockManager(2, 4), 4, 100, 2)
    with pytest.raises(ValueError, match="needs 3 blocks of the KV cache for 9 tokens, but there are only 2"):
        scheduler.check(9)


def test_the_one_that_came_last_gives_way():
    manager = BlockManager(5, 4)
    scheduler = Scheduler(manager, 4, 100, 1)
    first, second = make_sequence(0, 7, 9), make_sequence(1, 7, 9)
    scheduler.add(first)
    scheduler.add(second)
    third = make_sequence(2, 1, 1)
    scheduler.add(third)
    chunks, _ = scheduler.schedule()
    assert [chunk.sequence for chunk in chunks] == [first, second]
    read(chunks)
    first.commit([5])
    chunks, decoding = scheduler.schedule()
    assert (chunks, decoding) == ([], [first])
    # It is first in line again, and nobody passes it.
    assert list(scheduler.waiting) == [second, third]
    assert second.num_computed == [0, 0]
    assert second.token_ids == [1] * 7 + [5]
