"""The losses of all exits, in chunks, against those taken from whole distributions over the whole vocabulary."""

from dataclasses import replace

import pytest
import torch

from hispec.checkpoints import fingerprint
from hispec.heads import EarlyExitModel, ExitHeadConfig
from hispec.train import StateCache
from hispec.train.cache_writer import extend_cache
from hispec.train.exit_losses import ExitLosses
from hispec.train.exit_states import batch_context, exit_state
from hispec.train.loss import make_loss
from hispec.train.windows import random_windows

from .train_support import random_responses

VOCABULARIES = {
    "whole": (None, None),
    "same": (range(10, 50), range(10, 50)),
    "differ": ((5, 3, *range(20, 60)), range(30, 64)),
    "draft-whole": (None, range(10, 50)),
    "deeper-whole": (range(10, 50), None),
}


@pytest.fixture(scope="module")
def cache(request, tmp_path_factory):
    base = request.getfixturevalue("base")
    backbone = EarlyExitModel.from_configs(base, []).backbone
    folder = tmp_path_factory.mktemp("cache")
    return extend_cache(folder, random_responses(6), backbone, [2, 4], fingerprint=fingerprint(base))


def make_model(base, vocabularies):
    configs = [
        ExitHeadConfig(exit_layer=layer, kind="mlp", draft_vocab_size=None if ids is None else len(ids))
        for layer, ids in zip((2, 4), vocabularies, strict=True)
    ]
    model = EarlyExitModel.from_configs(base, configs)
    for head, ids in zip(model.exit_heads, vocabularies, strict=True):
        if ids is not None:
            head.draft_vocab_ids.copy_(torch.tensor(list(ids)))
    model.refresh_draft_vocab()
    torch.manual_seed(0)
    for parameter in model.heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def read(model, cache):
    batch = cache.read(range(6), model.exit_layers, model.backbone)
    return batch, random_windows(batch.lengths, batch.spans, 4, 0)


def gradients(model, losses):
    return torch.autograd.grad(sum(losses), list(model.heads.parameters()))


def whole_probs(model, batch, windows, index):
    """A head's distribution over the whole vocabulary on the loss rows; 0 where it does not score."""
    state = exit_state(model, index, batch, batch_context(batch, windows))
    probs = model.exit_logits(index, state).softmax(-1)
    ids = model.exit_heads[index].draft_vocab_ids
    return probs if ids is None else torch.zeros(len(probs), 64).index_copy(1, ids, probs)


def whole_losses(model, batch, windows, name, against):
    """By exit: total variation or cross entropy, from whole distributions."""
    levels = [whole_probs(model, batch, windows, index) for index in range(2)]
    levels.append(model.backbone.logits(batch.final[batch.loss_rows]).softmax(-1))

    def between(q, p):
        if name == "total_variation":
            return (q - p).abs().sum() / 2
        of_top = q[torch.arange(len(q)), p.argmax(-1)]
        return torch.where(of_top > 0, -of_top.clamp_min(1e-30).log(), 0.0).sum()

    return [
        between(levels[0], levels[2]) + against * between(levels[0], levels[1].detach()),
        between(levels[1], levels[2]),
    ]


@pytest.mark.parametrize("vocabularies", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("name", ["total_variation", "cross_entropy"])
def test_losses_are_those_of_whole_distributions(base, cache, name, vocabularies):
    model = make_model(base, vocabularies)
    batch, windows = read(model, cache)
    for against in (None, 0.7):
        losses = ExitLosses(model, make_loss(name), against=against, rows_per_chunk=5)(batch, windows)
        expected = whole_losses(model, batch, windows, name, against or 0.0)
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(gradients(model, losses), gradients(model, expected))


def test_no_more_rows_of_logits_are_alive_than_a_chunk_has(base, cache, monkeypatch):
    model = make_model(base, VOCABULARIES["differ"])
    batch, windows = read(model, cache)
    exit_logits, num_rows = model.exit_logits, []

    def recorded(index, state):
        num_rows.append(len(state))
        return exit_logits(index, state)

    monkeypatch.setattr(model, "exit_logits", recorded)
    losses = ExitLosses(model, make_loss("jsd"), against=1.0, rows_per_chunk=7)(batch, windows)
    gradients(model, losses)
    assert max(num_rows) <= 7 < len(batch.loss_rows)


def test_no_loss_is_infinite_where_the_deeper_exit_scores_other_tokens(base, cache):
    model = make_model(base, (range(32), range(32, 64)))
    batch, windows = read(model, cache)
    text = "reverse_kl + forward_kl + jsd + log_acceptance + adaptive_acceptance + acceptance_length"
    losses = ExitLosses(model, make_loss(text), against=1.0)(batch, windows)
    assert all(loss.isfinite() for loss in losses)
    assert all(gradient.isfinite().all() for gradient in gradients(model, losses))


def test_drafts_are_the_windows_of_the_batch(base, cache):
    model = make_model(base, VOCABULARIES["same"])
    batch, windows = read(model, cache)
    probs = [whole_probs(model, batch, windows, index) for index in range(2)]
    target = model.backbone.logits(batch.final[batch.loss_rows]).softmax(-1)
    for index, loss in enumerate(ExitLosses(model, make_loss("acceptance_length"), rows_per_chunk=6)(batch, windows)):
        kept = dict(zip(batch.loss_rows.tolist(), torch.minimum(probs[index], target).sum(-1), strict=True))
        expected = torch.zeros(())
        for row in kept:
            start = row - int(batch.positions[row]) + int(windows[row]) + 1  # the row behind the newest known one
            expected = expected + 1 - torch.stack([kept[other] for other in range(start, row + 1)]).prod()
        torch.testing.assert_close(loss, expected)


def test_weights_of_exits_scale_their_losses(base, cache):
    model = make_model(base, VOCABULARIES["same"])
    batch, windows = read(model, cache)
    plain = ExitLosses(model, make_loss("forward_kl"))(batch, windows)
    weighted = ExitLosses(model, make_loss("forward_kl"), exit_weights=(2.0, 0.25))(batch, windows)
    torch.testing.assert_close(weighted, [2.0 * plain[0], 0.25 * plain[1]])


def test_the_last_steps_may_have_a_loss_of_their_own(base, cache):
    model = make_model(base, VOCABULARIES["differ"])
    batch, windows = read(model, cache)
    options = {"exit_weights": (2.0, 0.25), "against": 0.7}
    first, last = (ExitLosses(model, make_loss(name), **options) for name in ("forward_kl", "total_variation"))
    both = ExitLosses(model, make_loss("forward_kl"), final_loss=make_loss("total_variation"), **options)
    for losses in (both, both.on(model)):
        assert losses(batch, windows, False) == first(batch, windows)
        assert losses(batch, windows, True) == last(batch, windows)
    assert first(batch, windows, True) == first(batch, windows)


def test_a_batch_without_loss_rows_has_a_loss_and_a_gradient_of_nothing(base, tmp_path):
    responses = [replace(response, token_ids=response.token_ids[:1]) for response in random_responses(3)]
    model = make_model(base, VOCABULARIES["same"])
    backbone = model.backbone
    extend_cache(tmp_path, responses, backbone, [2, 4], fingerprint=fingerprint(base), show_progress=False)
    batch = StateCache(tmp_path).read(range(3), (2, 4), backbone)
    assert len(batch.loss_rows) == 0
    windows = random_windows(batch.lengths, batch.spans, 4, 0)
    losses = ExitLosses(model, make_loss("forward_kl + acceptance_length"), against=1.0)(batch, windows)
    assert [loss.item() for loss in losses] == [0.0, 0.0]
    assert all(not gradient.any() for gradient in gradients(model, losses))
