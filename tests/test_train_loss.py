"""Chunked losses against the same losses taken whole."""

from typing import get_args

import pytest
import torch

from hispec.recipes.schema import LossName
from hispec.train.loss import LOSSES, chunked_loss, forward_kl, total_variation

V, V_D, D, N = 40, 24, 16, 37


@pytest.fixture
def rows():
    torch.manual_seed(0)
    lm_head = torch.randn(V, D)
    state = torch.randn(N, D, requires_grad=True)
    final = torch.randn(N, D)
    ids = torch.randperm(V)[:V_D].sort().values
    return lm_head, state, final, ids


def whole_loss(name, lm_head, state, final, ids):
    """The loss by its definition, over whole tensors."""
    log_p = (final @ lm_head.T).log_softmax(-1)[:, ids]
    log_q = (state @ lm_head[ids].T).log_softmax(-1)
    if name == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum()
    return (1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)).sum()


def test_a_recipe_can_name_every_loss():
    assert set(get_args(LossName)) == set(LOSSES)


@pytest.mark.parametrize("rows_per_chunk", [1, 8, N, 100])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_chunked_loss_is_the_whole_one_in_value_and_gradient(rows, name, rows_per_chunk):
    lm_head, state, final, ids = rows
    expected = whole_loss(name, lm_head, state, final, ids)
    (expected_grad,) = torch.autograd.grad(3 * expected, state)
    loss = chunked_loss(
        state,
        final,
        (final @ lm_head.T).logsumexp(-1),
        loss=LOSSES[name],
        to_logits=lambda part: part @ lm_head[ids].T,
        rows_per_chunk=rows_per_chunk,
    )
    (grad,) = torch.autograd.grad(3 * loss, state)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_no_more_than_a_chunk_of_logits_is_alive(rows):
    lm_head, state, final, _ = rows
    widest = 0

    def to_logits(part):
        nonlocal widest
        widest = max(widest, len(part))
        return part @ lm_head.T

    chunked_loss(state, final, torch.zeros(N), loss=forward_kl, to_logits=to_logits, rows_per_chunk=8).backward()
    assert widest == 8


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_is_zero_without_gradient_where_the_head_says_what_the_base_says(rows, name):
    lm_head, _, final, _ = rows
    state = final.clone().requires_grad_()
    loss = chunked_loss(
        state,
        final,
        (final @ lm_head.T).logsumexp(-1),
        loss=LOSSES[name],
        to_logits=lambda part: part @ lm_head.T,
    )
    assert abs(loss.item()) < 1e-4
    if name == "forward_kl":  # total variation has a kink there
        loss.backward()
        assert state.grad.abs().max() < 1e-5


def test_total_variation_counts_the_mass_outside_the_draft_vocabulary():
    base_log_probs = torch.tensor([[0.25, 0.25]]).log()  # half of the mass is outside
    assert total_variation(torch.zeros(1, 2), base_log_probs).item() == pytest.approx(0.5)


def test_no_gradient_is_taken_where_none_is_wanted(rows):
    lm_head, state, final, _ = rows
    with torch.no_grad():
        loss = chunked_loss(state, final, torch.zeros(N), loss=forward_kl, to_logits=lambda part: part @ lm_head.T)
    assert not loss.requires_grad
