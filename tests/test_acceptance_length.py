"""The predicted acceptance length against enumeration of everything that can happen."""

from itertools import product

import pytest

from hispec.infer.acceptance_length import hispec_length, provisional_lengths, single_layer_length

KEPT = [0.7, 0.8, 0.65, 0.9, 0.3, 0.55]
OTHERS = [0.45, 0.6, 0.95, 0.1]


def share(kept, place):
    return kept[min(place, len(kept) - 1)]


def accepted(coins):
    """Kept tokens of a draft: those before the first that falls."""
    return next((place for place, coin in enumerate(coins) if not coin), len(coins))


def weight(coins, kept):
    """How likely these falls are, each place by itself."""
    total = 1.0
    for place, coin in enumerate(coins):
        total *= share(kept, place) if coin else 1 - share(kept, place)
    return total


def all_coins(number):
    return list(product((True, False), repeat=number))


def enumerate_waiting(kept_drafts, num_draft, num_provisional, waiting=0):
    """Every course of the drafts until the target verifies: (tokens that wait, probability)."""
    if waiting >= num_provisional:
        yield waiting, 1.0
        return
    for coins in all_coins(num_draft):
        for reached, chance in enumerate_waiting(
            kept_drafts, num_draft, num_provisional, waiting + accepted(coins) + 1
        ):
            yield reached, weight(coins, kept_drafts) * chance


@pytest.mark.parametrize("num_draft", [1, 2, 3, 8])
@pytest.mark.parametrize("kept", [KEPT, OTHERS, [0.0], [1.0], [0.5, 0.0, 0.9]])
def test_single_layer_is_the_mean_over_all_courses(kept, num_draft):
    expected = sum(weight(coins, kept) * (accepted(coins) + 1) for coins in all_coins(num_draft))
    assert single_layer_length(kept, num_draft) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_draft", "num_provisional"), [(1, 1), (1, 3), (2, 2), (2, 4), (3, 4), (4, 2)])
@pytest.mark.parametrize(("drafts", "provisional"), [(KEPT, OTHERS), (OTHERS, KEPT), ([1.0], [0.5]), ([0.0], [0.9])])
def test_hispec_is_the_mean_over_all_courses(drafts, provisional, num_draft, num_provisional):
    expected, chances = 0.0, [0.0] * (num_provisional + num_draft + 1)
    for waiting, chance in enumerate_waiting(drafts, num_draft, num_provisional):
        chances[waiting] += chance
        for coins in all_coins(waiting):
            expected += chance * weight(coins, provisional) * (accepted(coins) + 1)
    assert provisional_lengths(drafts, num_draft, num_provisional) == pytest.approx(chances, abs=1e-12)
    assert hispec_length(drafts, provisional, num_draft, num_provisional) == pytest.approx(expected, abs=1e-12)


def test_nothing_measured_is_nothing_kept():
    assert single_layer_length([], 4) == 1.0
    assert hispec_length([], [], 2, 4) == 1.0


def test_a_middle_level_that_is_always_kept_commits_all_that_waits():
    assert single_layer_length([1.0], 3) == 4.0
    assert hispec_length([1.0], [1.0], 3, 4) == 5.0
    assert hispec_length([1.0], [1.0], 3, 5) == 9.0  # two drafts of three, each with one more token
    assert hispec_length([0.0], [1.0], 3, 4) == 5.0
