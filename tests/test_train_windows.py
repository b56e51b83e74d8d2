"""Which final state a row sees as its committed context."""

import torch

from hispec.train.windows import fixed_distance, gather_context, random_windows, window_starts

LENGTHS, NUM_PROMPTS = [30, 5, 1, 9], [4, 5, 1, 1]
SPANS = [[(4, 30)], [(5, 5)], [(1, 1)], [(1, 9)]]


def split(known):
    return [part.tolist() for part in known.split(LENGTHS)]


def test_random_windows_are_runs_of_at_most_max_window_rows():
    sizes = set()
    for seed in range(20):
        for known, length, num_prompt in zip(
            split(random_windows(LENGTHS, SPANS, 8, seed)), LENGTHS, NUM_PROMPTS, strict=True
        ):
            assert known[:num_prompt] == list(range(-1, num_prompt - 1))
            start = num_prompt
            for row in range(num_prompt, length):
                if known[row] != start - 1:  # a new window begins, and knows all before it
                    sizes.add(row - start)
                    start = row
                assert known[row] == start - 1 <= row - 1
                assert row - start < 8
    assert sizes == set(range(1, 9))


def test_random_windows_follow_their_seed():
    same = [random_windows(LENGTHS, SPANS, 8, seed) for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_window_of_one_row_knows_the_row_before():
    expected = [row - 1 for length in LENGTHS for row in range(length)]
    assert random_windows(LENGTHS, SPANS, 1, 0).tolist() == expected
    assert fixed_distance(LENGTHS, SPANS, 1).tolist() == expected


def test_fixed_distance_never_forgets_the_prompt():
    known = split(fixed_distance(LENGTHS, SPANS, 4))[0]
    assert known[:4] == [-1, 0, 1, 2]
    assert known[4:9] == [3, 3, 3, 3, 4]
    assert known[9:] == list(range(5, 26))


def test_context_is_gathered_within_each_sequence():
    final = torch.arange(1.0, 46.0).unsqueeze(-1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    known = torch.full((45,), 2)
    context = gather_context(final, LENGTHS, positions, known)[0, :, 0]
    start = 0
    for length in LENGTHS:
        rows = [final[start + min(row - 1, 2), 0].item() if row else 0.0 for row in range(length)]
        assert context[start : start + length].tolist() == rows
        start += length


def test_a_window_starts_behind_the_newest_known_row_of_its_sequence():
    known = random_windows(LENGTHS, SPANS, 3, 0)
    starts = window_starts(torch.cat([torch.arange(length) for length in LENGTHS]), known)
    before = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    assert torch.equal(starts, before.repeat_interleave(torch.tensor(LENGTHS)) + known + 1)
    assert all(starts[start] == start for start in starts.tolist())
