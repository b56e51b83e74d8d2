"""The acceptance rule, by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer.sampling import draw, gumbel_noise, gumbel_noises, to_probs
from hispec.infer.verify import verify_by_equality, verify_by_rejection


def simulate(draft, target, num_samples=200_000, seed=0):
    """Draw from `draft`, verify against `target`; the first emitted token's empirical distribution."""
    generator = torch.Generator().manual_seed(seed)
    drafted = draw(draft.expand(num_samples, -1), torch.rand(num_samples, generator=generator))
    accepted, following = verify_by_rejection(
        drafted[:, None],
        draft.expand(num_samples, 1, -1),
        target.expand(num_samples, 2, -1),
        torch.ones(num_samples, dtype=torch.int64),
        torch.rand(num_samples, 2, generator=generator),
    )
    emitted = torch.where(accepted > 0, drafted, following)
    return torch.bincount(emitted, minlength=len(target)) / num_samples, accepted.float().mean()


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ([0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]),
        ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]),
        ([0.999, 0.001, 0.0, 0.0], [0.001, 0.999, 0.0, 0.0]),
    ],
)
def test_what_leaves_is_the_target(draft, target):
    draft, target = torch.tensor(draft), torch.tensor(target)
    frequencies, rate = simulate(draft, target)
    torch.testing.assert_close(frequencies, target, atol=0.006, rtol=0)
    torch.testing.assert_close(rate, torch.minimum(draft, target).sum(), atol=0.006, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_greedy_is_the_one_hot_case(data):
    num_seqs, num_drafted, vocab_size = 3, data.draw(st.integers(0, 4)), 5
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=num_drafted, max_size=num_drafted)
    draft_ids = torch.tensor([data.draw(ids) for _ in range(num_seqs)], dtype=torch.int64).view(num_seqs, -1)
    more = st.lists(st.integers(0, vocab_size - 1), min_size=num_drafted + 1, max_size=num_drafted + 1)
    target_ids = torch.tensor([data.draw(more) for _ in range(num_seqs)])
    counts = torch.tensor([data.draw(st.integers(0, num_drafted)) for _ in range(num_seqs)])
    one_hot = torch.eye(vocab_size)
    by_equality = [
        verify_by_equality(draft[:count], target)
        for draft, target, count in zip(draft_ids.tolist(), target_ids.tolist(), counts.tolist(), strict=True)
    ]
    by_rejection = verify_by_rejection(
        draft_ids, one_hot[draft_ids], one_hot[target_ids], counts, torch.rand(num_seqs, num_drafted + 1)
    )
    assert by_equality == list(zip(*(each.tolist() for each in by_rejection), strict=True))


def test_padding_behind_a_short_draft_is_not_accepted():
    one_hot = torch.eye(4)
    ids, target_ids, counts = torch.tensor([[1, 0, 0]]), torch.tensor([[1, 0, 0, 3]]), torch.tensor([1])
    accepted, following = verify_by_rejection(ids, one_hot[ids], one_hot[target_ids], counts, torch.rand(1, 4))
    assert (accepted.item(), following.item()) == (1, 0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.2, 0, 1.0, 0), (1.0, 3, 1.0, 0), (2.0, 0, 0.5, 0), (1.0, 4, 0.7, 0), (1.5, 0, 1.0, 0.1), (1.2, 9, 0.8, 0.3)],
)
def test_probs_are_those_of_transformers(temperature, top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    probs = to_probs(
        logits, *(torch.full((len(logits),), value) for value in (temperature, top_k, top_p, float(min_p)))
    )
    torch.testing.assert_close(probs, expected.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-4, 1.0), (1.0, 0.0), (1.0, 1e-4), (1e-30, 1e-4), (1e-300, 1.0)])
def test_limits_leave_the_likeliest_token(temperature, top_p):
    logits = torch.tensor([[1.0, 3.0, 2.0, -50.0]])
    probs = to_probs(logits, torch.tensor([temperature]), torch.tensor([0]), torch.tensor([top_p]), torch.zeros(1))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_of_equal_logits_the_lowest_id_is_kept():
    probs = to_probs(torch.zeros(1, 4), torch.ones(1), torch.tensor([2]), torch.ones(1), torch.zeros(1))
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_a_token_of_probability_zero_is_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(3, -1)
    assert draw(probs, torch.tensor([0.0, 0.5, 0.99999994])).tolist() == [1, 3, 3]


def test_shared_noise_draws_from_the_distribution():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = [int((probs.log() + gumbel_noise(seed, 0, 5, 4)).argmax()) for seed in range(20_000)]
    torch.testing.assert_close(torch.bincount(torch.tensor(drawn)) / 20_000, probs, atol=0.012, rtol=0)
    assert torch.equal(gumbel_noise(3, 0, 8, 9), gumbel_noise(3, 0, 8, 9))
    assert not torch.equal(gumbel_noise(3, 0, 8, 9), gumbel_noise(3, 0, 9, 9))
    assert not torch.equal(gumbel_noise(3, 0, 8, 9), gumbel_noise(3, 1, 8, 9))


@pytest.mark.parametrize("num_places", [0, 1, 2, 18])
def test_noise_drawn_in_threads_is_that_of_each_place(num_places, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    places = [(seed, seed % 2, position) for seed in (3, 4) for position in range(9)][:num_places]
    for place, noise in zip(places, gumbel_noises(places, 40_000), strict=True):
        assert torch.equal(noise, gumbel_noise(*place, 40_000))


def test_noise_is_finite_everywhere():
    # A draw of exactly 0 would force its token; in float32 there is one at position 145.
    assert all(gumbel_noise(1, 0, position, 49152).isfinite().all() for position in range(140, 150))
