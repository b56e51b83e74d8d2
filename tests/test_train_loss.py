"""Losses against their definitions over the whole vocabulary, and the sums of them in chunks."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.recipes import LossName, parse_loss
from hispec.train.chunks import chunk_rows, chunked_sum
from hispec.train.loss import ADAPTIVE_DECAY, LOSSES, Teacher, make_loss

V, V_D, N = 40, 24, 37
NAMES = sorted(LOSSES)


@pytest.fixture
def rows():
    """Logits of a head on its draft vocabulary, of the base on all tokens, and windows of 1 to 4 rows."""
    torch.manual_seed(0)
    head_logits = (2 * torch.randn(N, V_D)).requires_grad_()
    base_logits = 2 * torch.randn(N, V)
    ids = torch.randperm(V)[:V_D].sort().values
    windows = torch.arange(N).repeat_interleave(torch.randint(1, 5, (N,)))[:N]
    return head_logits, base_logits, ids, windows


def make_teacher(base_logits, ids, windows):
    columns = torch.full((V,), -1)
    columns[ids] = torch.arange(len(ids))
    return Teacher(log_probs=base_logits.log_softmax(-1)[:, ids], top=columns[base_logits.argmax(-1)], windows=windows)


def spread(head_logits, ids):
    """The head's distribution over the whole vocabulary, and 0 outside its own."""
    return torch.zeros(len(head_logits), V).index_copy(1, ids, head_logits.softmax(-1))


def divergence(p, q):
    """`sum p log(p / q)` with `0 log 0 = 0`."""
    return torch.where(p > 0, p * (p / q.clamp_min(1e-30)).log(), 0.0).sum(-1)


def by_definition(name, head_logits, base_logits, ids, windows):
    """The loss of every row from both distributions over the whole vocabulary."""
    p, q = base_logits.softmax(-1), spread(head_logits, ids)
    kept = torch.minimum(p, q).sum(-1)
    kl = (p * (p / q.clamp_min(1e-30)).log())[:, ids].sum(-1)
    if name == "acceptance_length":
        losses, survival = [], torch.ones(())
        for row in range(N):
            starts = row == 0 or windows[row] != windows[row - 1]
            survival = kept[row] if starts else survival * kept[row]
            losses.append(1 - survival)
        return torch.stack(losses)
    if name == "cross_entropy":
        top = base_logits.argmax(-1)
        return torch.where(torch.isin(top, ids), -q[torch.arange(N), top].clamp_min(1e-30).log(), 0.0)
    weight = (-ADAPTIVE_DECAY * kept.detach()).exp()
    return {
        "forward_kl": kl,
        "reverse_kl": divergence(q, p),
        "jsd": (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)) / 2,
        "total_variation": (p - q).abs().sum(-1) / 2,
        "log_acceptance": -kept.log(),
        "adaptive_acceptance": weight * kl + (1 - weight) * (1 - kept),
    }[name]


def test_a_recipe_can_name_every_loss():
    assert set(get_args(LossName)) == set(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_its_definition_in_value_and_gradient(rows, name):
    head_logits, base_logits, ids, windows = rows
    expected = by_definition(name, head_logits, base_logits, ids, windows)
    loss = LOSSES[name](head_logits.log_softmax(-1), make_teacher(base_logits, ids, windows))
    torch.testing.assert_close(loss, expected)
    weights = torch.rand(N)
    grads = [torch.autograd.grad(weights @ value, head_logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_least_where_the_head_says_what_the_base_says(rows, name):
    """Over the base's own vocabulary; for the acceptance it is 0 there, for the base's choice it is not."""
    _, base_logits, _, windows = rows
    teacher = make_teacher(base_logits, torch.arange(V), windows)
    same = LOSSES[name](base_logits.log_softmax(-1), teacher)
    other = LOSSES[name]((base_logits / 2).log_softmax(-1), teacher)
    assert (other > same).all()
    if name != "cross_entropy":
        assert same.abs().max() < 1e-5


def test_a_rejection_early_in_a_draft_costs_all_that_hang_on_it(rows):
    head_logits, base_logits, ids, _ = rows
    teacher = make_teacher(base_logits, ids, torch.arange(N) // 4)
    loss = LOSSES["acceptance_length"](head_logits.log_softmax(-1), teacher)
    kept = torch.minimum(teacher.log_probs.exp(), head_logits.softmax(-1)).sum(-1)
    first = kept[:4]
    expected_length = first[0] + first[:2].prod() + first[:3].prod() + first.prod()
    torch.testing.assert_close(4 - loss[:4].sum(), expected_length)
    # Drafts of one row: nothing hangs on it, and what is left is the total variation.
    alone = make_teacher(base_logits, ids, torch.arange(N))
    log_probs = head_logits.log_softmax(-1)
    torch.testing.assert_close(
        LOSSES["acceptance_length"](log_probs, alone), LOSSES["total_variation"](log_probs, alone)
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_loss_and_no_gradient_is_infinite(name):
    """The base is certain of a token that the head does not score, or that it excludes, or has nothing in common."""
    base_logits = torch.zeros(3, V)
    base_logits[0, 0], base_logits[1, 30], base_logits[2, 30] = 200.0, 200.0, 200.0
    ids = torch.arange(1, 31)
    head_logits = torch.zeros(3, 30)
    head_logits[1, 0], head_logits[2, 29] = 200.0, 200.0
    head_logits.requires_grad_()
    teacher = make_teacher(base_logits, ids, torch.zeros(3, dtype=torch.int64))
    loss = LOSSES[name](head_logits.log_softmax(-1), teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), head_logits)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert LOSSES["cross_entropy"](head_logits.log_softmax(-1), teacher)[0] == 0


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("jsd", {"jsd": 1.0}),
        ("forward_kl + 0.5*total_variation", {"forward_kl": 1.0, "total_variation": 0.5}),
        (" 1e-1 * cross_entropy+reverse_kl ", {"cross_entropy": 0.1, "reverse_kl": 1.0}),
    ],
)
def test_a_mixture_is_the_weighted_sum(rows, text, weights):
    head_logits, base_logits, ids, windows = rows
    assert parse_loss(text) == weights
    teacher = make_teacher(base_logits, ids, windows)
    log_probs = head_logits.log_softmax(-1)
    expected = sum(weight * LOSSES[name](log_probs, teacher) for name, weight in weights.items())
    torch.testing.assert_close(make_loss(text)(log_probs, teacher), expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a term ''"),
        ("mse", "'mse'.*forward_kl.*acceptance_length"),
        ("forward_kl +", "a term ''"),
        ("forward_kl total_variation", "a term 'forward_kl total_variation'"),
        ("forward_kl + jsd + forward_kl", "forward_kl twice"),
        ("x*jsd", "weight 'x'"),
        ("*jsd", "weight ''"),
        ("0*jsd", "weight '0'"),
        ("-1*jsd", "weight '-1'"),
        ("nan*jsd", "weight 'nan'"),
        ("inf*jsd", "weight 'inf'"),
        ("2*3*jsd", r"weight '2\*3'"),
        ("0.5*", "a term '0.5\\*'"),
    ],
)
def test_what_is_no_loss(text, words):
    with pytest.raises(ValueError, match=words):
        make_loss(text)


@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_chunks_take_every_row_once_and_cut_no_window_that_fits(sizes, rows_per_chunk):
    windows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64)) * 7
    chunks = chunk_rows(windows, rows_per_chunk)
    rows = [row for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert rows == list(range(len(windows)))
    assert all(1 <= chunk.stop - chunk.start <= rows_per_chunk for chunk in chunks)
    for chunk in chunks[1:]:
        if windows[chunk.start] == windows[chunk.start - 1]:
            assert sizes[int(windows[chunk.start]) // 7] > rows_per_chunk


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 8, N, 100])
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_in_chunks_is_the_whole_one_in_value_and_gradient(rows, name, rows_per_chunk):
    head_logits, base_logits, ids, windows = rows
    if rows_per_chunk == 1:
        windows = torch.arange(N)
    teacher = make_teacher(base_logits, ids, windows)
    state = head_logits.detach().requires_grad_()
    widest = 0

    def of_rows(part, rows):
        nonlocal widest
        widest = max(widest, len(part))
        return LOSSES[name](
            part.log_softmax(-1), Teacher(**{key: value[rows] for key, value in vars(teacher).items()})
        ).sum()

    total = chunked_sum(state, of_rows, chunk_rows(windows, rows_per_chunk))
    assert widest <= rows_per_chunk
    expected = LOSSES[name](head_logits.log_softmax(-1), teacher).sum()
    torch.testing.assert_close(total, expected)
    (gradient,) = torch.autograd.grad(3 * total, state)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * expected, head_logits)[0])


def test_no_gradient_is_taken_where_none_is_wanted():
    state = torch.ones(3, 2, requires_grad=True)
    with torch.no_grad():
        total = chunked_sum(state, lambda part, rows: part.sum(), [slice(0, 2), slice(2, 3)])
    assert not total.requires_grad
    assert total == 6


def test_jsd_is_at_most_log_2():
    teacher = make_teacher(torch.eye(V)[:1] * 200, torch.arange(1, V), torch.zeros(1, dtype=torch.int64))
    loss = LOSSES["jsd"](torch.zeros(1, V - 1).log_softmax(-1), teacher)
    assert loss.item() == pytest.approx(math.log(2))
