"""What a head meets in inference is what it met in training: the same contexts, the same cache."""

import pytest
import torch

from hispec.heads import DenseAttention, context_positions
from hispec.infer import Engine, SamplingParams

from .models import build_heads, shallow

PROMPT = [3, 9, 4, 11, 5]
NUM_DRAFT_TOKENS = 3


def teacher_forced(model, token_ids, last_known):
    """The first head's states over a whole text, in one pass, as in training."""
    backbone, head = model.backbone, model.heads[0]
    positions, attend = torch.arange(len(token_ids)), DenseAttention([len(token_ids)])
    with torch.inference_mode():
        embedded = backbone.embed(torch.tensor(token_ids), positions)
        hidden = backbone.run_layers(embedded, 0, head.config.exit_layer, positions, attend)
        final = backbone.run_layers(hidden, head.config.exit_layer, backbone.num_layers, positions, attend)
        states = torch.cat([torch.zeros(1, 1, backbone.hidden_size), backbone.final_norm(final)], 1)
        context = states[:, context_positions(positions, torch.tensor(last_known)) + 1]
        return head(hidden, context, positions, attend)[0]


@pytest.mark.parametrize("exit_layer", [0, 2])
@pytest.mark.parametrize("strength", [0.004, 0.3], ids=["mostly accepted", "mostly rejected"])
def test_a_draft_sees_what_training_showed(base, exit_layer, strength):
    """Draft by draft; `test_step_chain` compares with these what is drawn at once."""
    model = build_heads(shallow(base, exit_layer + 1), "good", (exit_layer, 4), head="block", committed_context=True)
    with torch.no_grad():
        model.heads[0].fuse.weight.add_(torch.randn_like(model.heads[0].fuse.weight) * strength)
    calls = []

    def watch(head, arguments, state):
        _, context, positions, _ = arguments
        if context.places is not None:  # not the prefill
            # Of the one sequence, whose window holds so many positions, each in the place of its remainder.
            window = len(context.table) // (engine.config.max_num_seqs + 1)
            slots = zip(positions.tolist(), context.places.tolist(), strict=True)
            known = [position - 1 - (position - 1 - slot) % window for position, slot in slots]
            calls.append([positions.tolist(), known, state])

    hook = model.heads[0].register_forward_hook(watch)
    engine = Engine(model, method="single-layer", num_draft_tokens=NUM_DRAFT_TOKENS, block_size=4, max_prefill_tokens=2)
    completion = engine.generate([PROMPT], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]
    hook.remove()
    rate = engine.stats.levels["target"].acceptance_rate
    assert rate > 0.1 if strength < 0.1 else rate < 0.9

    token_ids = PROMPT + completion.token_ids
    known = {position: position - 1 for position in range(len(PROMPT))}
    num_compared = 0
    for positions, last_known, state in calls:
        known |= dict(zip(positions, last_known, strict=True))
        newest = positions[-1]
        assert all(1 <= p - min(p - 1, k) <= NUM_DRAFT_TOKENS for p, k in zip(positions, last_known, strict=True))
        if last_known[-1] == newest - 1:  # the first draft of a round: all tokens up to it are committed
            text = token_ids[: newest + 1]
            expected = teacher_forced(model, text, [known[position] for position in range(len(text))])
            torch.testing.assert_close(state[0, -1], expected[-1], rtol=1e-4, atol=1e-4)
            num_compared += 1
    assert num_compared >= 5
