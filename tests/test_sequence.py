"""Commit and rollback."""

from hypothesis import given
from hypothesis import strategies as st

from hispec.infer.sequence import Proposal

from .test_scheduler import make_sequence


@given(prompt=st.integers(1, 5), proposed=st.integers(0, 6), start=st.integers(0, 12))
def test_known_ids_run_from_the_prompt_into_the_proposals(prompt, proposed, start):
    sequence = make_sequence(0, prompt, 20)
    sequence.proposed[0] = [Proposal(10 + place, None, 1.0, 0) for place in range(proposed)]
    everything = [1] * prompt + [10 + place for place in range(proposed)]
    assert sequence.num_known == len(everything)
    assert sequence.known_ids(min(start, len(everything))) == everything[start:]


@given(
    computed=st.lists(st.integers(0, 30), min_size=2, max_size=2),
    head=st.integers(0, 30),
    num_valid=st.integers(0, 30),
    level=st.integers(0, 1),
)
def test_rollback_keeps_what_stands_and_nothing_more(computed, head, num_valid, level):
    sequence = make_sequence(0, 3, 20)
    sequence.num_computed, sequence.num_head_computed = list(computed), [head]
    sequence.rollback(num_valid, level)
    expected = [min(value, num_valid) if index <= level else value for index, value in enumerate(computed)]
    assert sequence.num_computed == expected
    assert sequence.num_head_computed == [min(head, num_valid)]


def test_commit_cuts_behind_the_first_end_token():
    sequence = make_sequence(0, 2, 20)
    sequence.stop_ids = frozenset({7, 9})
    assert sequence.commit([5, 9, 7, 5]) == [5, 9]
    assert sequence.finish_reason == "stop"
    assert sequence.output_ids == [5, 9]
    assert sequence.stats.num_committed == 2


def test_commit_cuts_at_the_length_limit():
    sequence = make_sequence(0, 2, 3)
    assert sequence.commit([5, 5, 5, 5]) == [5, 5, 5]
    assert sequence.finish_reason == "length"
