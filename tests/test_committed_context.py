"""What a head meets in inference is what it met in training: the same contexts, the same cache."""

import pytest
import torch

from hispec.heads import DenseAttention, context_positions
from hispec.infer import Engine, SamplingParams

from .models import build_heads, shallow

PROMPT = [3, 9, 4, 11, 5]


def teacher_forced(model, token_ids, last_known):
    """The head's states over a whole text, in one pass."""
    backbone, head = model.backbone, model.heads[0]
    positions, attend = torch.arange(len(token_ids)), DenseAttention([len(token_ids)])
    with torch.inference_mode():
        embedded = backbone.embed(torch.tensor(token_ids), positions)
        hidden = backbone.run_layers(embedded, 0, head.config.exit_layer, positions, attend)
        final = backbone.run_layers(hidden, head.config.exit_layer, backbone.num_layers, positions, attend)
        states = torch.cat([torch.zeros(1, 1, backbone.hidden_size), backbone.final_norm(final)], 1)
        context = states[:, context_positions(positions, last_known) + 1]
        return head(hidden, context, positions, attend)[0]


def drafted_states(model, number):
    """Greedy text of two-token drafts, and the head's state of every row that a token was drafted from."""
    seen = []
    forward = model.heads[0].forward

    def watch(hidden, context, positions, attend):
        state = forward(hidden, context, positions, attend)
        if len(positions) <= 2:
            seen.append((int(positions[-1]), state[0, -1].clone()))
        return state

    model.heads[0].forward = watch
    engine = Engine(model, method="single-layer", num_draft_tokens=2, block_size=4)
    completion = engine.generate([PROMPT], SamplingParams(max_new_tokens=number, ignore_eos=True))[0]
    model.heads[0].forward = forward
    return PROMPT + completion.token_ids, seen, engine.stats.levels["target"].acceptance_rate


@pytest.mark.parametrize("exit_layer", [0, 2])
def test_rejected_drafts_leave_nothing_behind(base, exit_layer):
    model = build_heads(base, "adversarial", (exit_layer, 4), committed_context=True)
    with torch.no_grad():
        model.heads[0].fuse.weight.normal_(std=0.2)
    token_ids, seen, rate = drafted_states(model, 12)
    assert rate < 0.2
    expected = teacher_forced(model, token_ids, torch.arange(len(token_ids)) - 1)
    firsts = {position: state for position, state in reversed(seen)}
    compared = 0
    for position in range(len(PROMPT), len(token_ids) - 1):
        # A position's first row after a rejection is the newest committed token.
        rows = [state for place, state in seen if place == position]
        if any(torch.allclose(row, expected[position], rtol=1e-4, atol=1e-4) for row in rows):
            compared += 1
    assert firsts
    assert compared == len(token_ids) - 1 - len(PROMPT)


def test_accepted_drafts_leave_what_training_showed(base):
    base = shallow(base, 2)
    model = build_heads(base, "good", (2, 4), committed_context=True, head="block")
    token_ids, seen, rate = drafted_states(model, 16)
    assert rate == 1
    # Rounds of two drafted tokens and a bonus: the second draft is two away from what is known, all else one.
    last_known = torch.arange(len(token_ids)) - 1
    for position, _ in seen:
        if (position - len(PROMPT)) % 3 == 1:
            last_known[position] -= 1
    with torch.no_grad():
        model.heads[0].fuse.weight[:, 32:].normal_(std=0.05)
    expected_plain = teacher_forced(model, token_ids, torch.arange(len(token_ids)) - 1)
    token_ids, seen, rate = drafted_states(model, 16)
    if rate == 1:
        expected = teacher_forced(model, token_ids, last_known)
        for position, state in seen:
            torch.testing.assert_close(state, expected[position], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(expected, expected_plain, rtol=1e-3, atol=1e-3)
