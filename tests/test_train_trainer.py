"""Training heads from the cache: it learns, it resumes bit for bit, it leaves the base alone."""

import json
from dataclasses import replace

import pytest
import torch

from hispec.checkpoints import fingerprint
from hispec.heads import DenseAttention, EarlyExitModel, ExitHeadConfig
from hispec.train import OnlineStates, StateCache, Trainer, evaluate, frequent_tokens, share
from hispec.train.cache import num_loss_rows
from hispec.train.cache_writer import extend_cache
from hispec.train.curve import Curve
from hispec.train.evaluate import hop_scores
from hispec.train.schedule import learning_rate_at
from hispec.train.windows import fixed_distance, random_windows

from .train_support import random_responses

HELD_OUT = [16, 17, 18, 19]
TRAINING = list(range(16))


@pytest.fixture(scope="module")
def cache(request, tmp_path_factory):
    base = request.getfixturevalue("base")
    backbone = EarlyExitModel.from_configs(base, []).backbone
    folder = tmp_path_factory.mktemp("cache")
    return extend_cache(folder, random_responses(), backbone, [2, 4], fingerprint=fingerprint(base))


def make_model(base, kind="block", committed_context=True, exit_layers=(0, 2), draft_vocab_size=48):
    configs = [
        ExitHeadConfig(
            exit_layer=exit_layer,
            kind=kind,
            committed_context=committed_context,
            draft_vocab_size=draft_vocab_size,
        )
        for exit_layer in exit_layers
    ]
    return EarlyExitModel.from_configs(base, configs)


def make_trainer(model, cache, folder, **options):
    defaults = {"batch_tokens": 64, "num_epochs": 8, "max_steps": 8, "warmup_steps": 2, "learning_rate": 3e-3}
    defaults |= {"eval_interval": 4, "checkpoint_interval": 3, "settings": {"a": 1}}
    return Trainer(model, cache, TRAINING, HELD_OUT, folder, **(defaults | options))


def head_bytes(model):
    return {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Interrupting:
    """A cache at whose `num_reads`th batch of training Ctrl-C is pressed."""

    def __init__(self, cache, num_reads):
        self.cache, self.num_reads = cache, num_reads

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def read(self, indices, *args):
        if not set(indices) & set(HELD_OUT):
            if self.num_reads == 0:
                raise KeyboardInterrupt
            self.num_reads -= 1
        return self.cache.read(indices, *args)


def test_training_lowers_the_loss_and_raises_the_acceptance(base, cache, tmp_path):
    model = make_model(base)
    before = evaluate(model, cache, TRAINING, max_window=8)
    make_trainer(model, cache, tmp_path, max_steps=60, num_epochs=60, eval_interval=20).run()
    after = evaluate(model, cache, TRAINING, max_window=8)
    for hop in ("0->target", "2->target"):
        assert after["hops"][hop]["acceptance"] > before["hops"][hop]["acceptance"] + 0.1
    curve = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in curve] == [0, 20, 40, 60]
    assert curve[-1]["loss"]["0"] < 0.7 * curve[1]["loss"]["0"]
    assert curve[-1]["loss"]["2"] < 0.7 * curve[1]["loss"]["2"]


@pytest.mark.parametrize(
    ("kind", "committed_context"), [("norm", False), ("mlp", True), ("block", False), ("block", True), ("lora", True)]
)
def test_one_step_changes_every_tensor_of_the_heads_and_no_byte_of_the_base(
    base, cache, tmp_path, kind, committed_context
):
    exit_layers = (0, 2) if committed_context else (2, 4)
    model = make_model(base, kind, committed_context, exit_layers)
    model.heads.float()
    heads, frozen = head_bytes(model), {name: t.clone() for name, t in base.state_dict().items()}
    make_trainer(model, cache, tmp_path, warmup_steps=0).step()
    for name, tensor in model.heads.state_dict().items():
        assert torch.equal(tensor, heads[name]) == name.endswith("draft_vocab_ids"), name
    assert equal(frozen, base.state_dict())
    assert all(parameter.grad is None for parameter in base.parameters())


@pytest.mark.parametrize("num_reads", [2, 4, 7])
def test_interrupted_run_ends_bit_for_bit_like_one_that_was_not(base, cache, tmp_path, num_reads):
    options = {"final_loss": "total_variation", "final_share": 0.5}
    whole = make_model(base)
    make_trainer(whole, cache, tmp_path / "whole", **options).run()

    with pytest.raises(KeyboardInterrupt):
        make_trainer(make_model(base), Interrupting(cache, num_reads), tmp_path / "parts", **options).run()
    resumed = make_model(base)
    trainer = make_trainer(resumed, cache, tmp_path / "parts", **options)
    assert trainer.num_steps == num_reads
    trainer.run()
    assert equal(head_bytes(resumed), head_bytes(whole))
    curves = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("final_share", "num_first"), [(0.25, 6), (1.0, 0), (0.01, 8)])
def test_the_last_share_of_the_steps_has_the_final_loss(base, cache, tmp_path, final_share, num_first):
    options = {"final_loss": "total_variation", "final_share": final_share}
    plain = make_trainer(make_model(base), cache, tmp_path / "plain")
    other = make_trainer(make_model(base), cache, tmp_path / "other", **options)
    pairs = [(plain.step(), other.step()) for _ in range(8)]
    assert [first == second for first, second in pairs] == [True] * num_first + [False] * (8 - num_first)


def test_killed_run_goes_on_from_its_last_checkpoint(base, cache, tmp_path):
    whole = make_model(base)
    make_trainer(whole, cache, tmp_path / "whole").run()
    trainer = make_trainer(make_model(base), cache, tmp_path / "parts")
    for _ in range(5):  # a kill leaves what is on the disk: the checkpoint of step 3
        trainer.step()
        if trainer.num_steps == 3:
            trainer._save()
    resumed = make_model(base)
    trainer = make_trainer(resumed, cache, tmp_path / "parts")
    assert trainer.num_steps == 3
    trainer.run()
    assert equal(head_bytes(resumed), head_bytes(whole))


def test_other_settings_do_not_go_on_from_a_checkpoint_unless_told_to_start_anew(base, cache, tmp_path):
    make_trainer(make_model(base), cache, tmp_path).run()
    with pytest.raises(ValueError, match="a was 1, is now 2"):
        make_trainer(make_model(base), cache, tmp_path, settings={"a": 2})
    assert make_trainer(make_model(base), cache, tmp_path, settings={"a": 2}, resume=False).num_steps == 0


def test_loss_that_is_not_finite_stops_and_names_the_step(base, cache, tmp_path):
    model = make_model(base)
    trainer = make_trainer(model, cache, tmp_path)
    trainer.step()
    with torch.no_grad():
        model.heads[1].norm.weight.fill_(float("nan"))
    named = ", ".join(f"{cache.sequences[i].prompt_id}/{cache.sequences[i].sample}" for i in trainer.batches[1])
    with pytest.raises(ValueError, match=rf"at step 2 the loss of exit 2 is nan .* on the responses {named} \("):
        trainer.step()


def test_last_good_checkpoint_outlives_a_loss_that_is_not_finite(base, cache, tmp_path):
    model = make_model(base)
    trainer = make_trainer(model, cache, tmp_path, checkpoint_interval=1)
    before = []

    def poisoned(step=trainer.step):
        if trainer.num_steps == 2:
            before.append(head_bytes(model))
            model.heads[0].norm.weight.data.fill_(float("nan"))
        return step()

    trainer.step = poisoned
    with pytest.raises(ValueError, match="at step 3"):
        trainer.run()
    resumed = make_model(base)
    assert make_trainer(resumed, cache, tmp_path).num_steps == 2
    assert equal(head_bytes(resumed), before[0])


@pytest.mark.parametrize("num_parts", [2, 3, 50])
def test_accumulated_gradient_is_that_of_the_whole_batch(base, tmp_path, num_parts):
    """Parts of unequal numbers of tokens; the one of a single token has nothing to learn from."""
    responses = random_responses()
    responses[4] = replace(responses[4], token_ids=responses[4].token_ids[:1])
    whole, parts = make_model(base), make_model(base)
    losses = []
    for model, num in ((whole, 1), (parts, num_parts)):
        options = {"loss": "forward_kl + acceptance_length", "accumulation_steps": num}
        trainer = make_trainer(model, OnlineStates(responses), tmp_path, **options)
        trainer.batches = [list(range(9))]
        losses.append(trainer._backward())
    assert losses[0] == pytest.approx(losses[1])
    for first, second in zip(whole.heads.parameters(), parts.heads.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 9])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1, 1], [100, 1, 1, 1], [1, 1, 1, 100], [3, 9, 2, 7, 5, 5, 8]])
def test_parts_are_about_equal_and_hold_every_sequence_once(lengths, num_parts):
    parts = share.share_out(lengths, num_parts)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert len(parts) == num_parts
    assert max(sum(lengths[place] for place in part) for part in parts) < sum(lengths) / num_parts + max(lengths)


def test_batches_without_a_token_to_learn_from_are_left_out_and_counted(base, tmp_path, capsys):
    responses = [replace(r, token_ids=r.token_ids[: 1 if i % 4 else 24]) for i, r in enumerate(random_responses())]
    backbone = EarlyExitModel.from_configs(base, []).backbone
    cache = extend_cache(tmp_path / "cache", responses, backbone, [2], fingerprint=fingerprint(base))
    model = make_model(base)
    empty = [index for index in TRAINING if num_loss_rows(responses[index]) == 0]
    trainer = make_trainer(model, cache, tmp_path, batch_tokens=1, num_epochs=1, max_steps=None)
    assert sorted(index for batch in trainer.batches for index in batch) == sorted(set(TRAINING) - set(empty))
    assert f"{len(empty)} of 16 batches have no token to learn from" in capsys.readouterr().err
    trainer.run()
    assert all(tensor.isfinite().all() for tensor in head_bytes(model).values())
    with pytest.raises(ValueError, match="no training response has a token to learn from"):
        Trainer(model, cache, empty, HELD_OUT, tmp_path)


def test_a_head_learns_the_same_alone_and_beside_another(base, cache, tmp_path):
    together, alone = make_model(base, exit_layers=(0, 2)), make_model(base, exit_layers=(2,))
    make_trainer(together, cache, tmp_path / "a", max_steps=3).run()
    make_trainer(alone, cache, tmp_path / "b", max_steps=3).run()
    assert equal(together.heads[1].state_dict(), alone.heads[0].state_dict())


def test_evaluation_is_the_definition(base, cache):
    """One row at a time, from whole distributions over the whole vocabulary."""
    model = make_model(base, committed_context=False, exit_layers=(2, 4), draft_vocab_size=40)
    ids = torch.arange(10, 50)
    model.heads[0].draft_vocab_ids.copy_(ids)
    model.refresh_draft_vocab()
    batch = cache.read([3, 8], (2, 4), model.backbone)
    scores = hop_scores(model, batch, random_windows(batch.lengths, batch.spans, 8, 0), rows_per_chunk=5)
    vocab_size = model.backbone.vocab_size
    for column, row in enumerate(batch.loss_rows.tolist()):
        probs = {"target": model.backbone.logits(batch.final[row]).softmax(-1)}
        for index, level in enumerate(("2", "4")):
            start = 0 if row < batch.lengths[0] else batch.lengths[0]
            length = row - start + 1
            hidden = batch.hidden[int(level)][:, start : row + 1]
            state = model.heads[index](hidden, None, torch.arange(length), DenseAttention([length]))
            full = torch.zeros(vocab_size)
            full[model.heads[index].draft_vocab_ids] = model.exit_logits(index, state[0, -1]).softmax(-1)
            probs[level] = full
        for hop, score in scores.items():
            a, b = (probs[level] for level in hop.split("->"))
            assert score[0, column] == (a.argmax() == b.argmax())
            torch.testing.assert_close(score[1, column], torch.minimum(a, b).sum())


def test_distances_matter_only_to_heads_with_committed_context(base, cache, tmp_path):
    with_context = make_model(base)
    make_trainer(with_context, cache, tmp_path).run()
    batch = cache.read(HELD_OUT, (0, 2), with_context.backbone)
    scores = [
        hop_scores(with_context, batch, fixed_distance(batch.lengths, batch.spans, distance)) for distance in (1, 4)
    ]
    assert not torch.equal(scores[0]["0->target"], scores[1]["0->target"])
    report = evaluate(with_context, cache, HELD_OUT, max_window=8)
    assert list(report["by_distance"]) == list("12345678")
    assert set(report["by_kind"]) == {"even", "odd"}
    report = evaluate(make_model(base, "norm", False, (2,)), cache, HELD_OUT, max_window=8)
    assert all(hops == report["hops"] for hops in report["by_distance"].values())
    assert "by_distance" not in evaluate(with_context, cache, HELD_OUT, max_window=8, distances=())


@pytest.mark.parametrize("kinds", [("shared", "block"), ("mlp", "shared"), ("norm", "block")])
def test_kinds_may_differ_by_exit_and_one_may_have_nothing_to_train(base, cache, tmp_path, kinds):
    configs = [ExitHeadConfig(exit_layer=layer, kind=kind) for layer, kind in zip((2, 4), kinds, strict=True)]
    model = EarlyExitModel.from_configs(base, configs)
    before = head_bytes(model)
    make_trainer(model, cache, tmp_path).run()
    trained = {name[0] for name, tensor in head_bytes(model).items() if not torch.equal(tensor, before[name])}
    assert trained == {str(index) for index, kind in enumerate(kinds) if kind != "shared"}
    curve = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert set(curve[-1]["loss"]) == {"2", "4"}
    assert set(curve[-1]) >= {"2->4", "2->target", "4->target"}


def test_damaged_curve_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ("{", "[]", '{"loss": 1}', "\0"):
        path.write_text(f'{{"step": 1}}\n{damaged}\n{{"st')
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is damaged; delete the line"):
            Curve(path, 1)


def test_every_step_has_windows_of_its_own(base, cache, tmp_path, monkeypatch):
    seeds = []

    def recorded(lengths, spans, max_window, seed):
        seeds.append(seed)
        return random_windows(lengths, spans, max_window, seed)

    monkeypatch.setattr(share, "random_windows", recorded)
    trainer = make_trainer(make_model(base), cache, tmp_path)
    for _ in range(3):
        trainer.step()
    assert len(set(seeds)) == 3


def test_learning_rate_rises_then_falls_to_nothing():
    rates = [learning_rate_at(step, 100, 2.0, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == pytest.approx(2.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01
    assert learning_rate_at(0, 1, 2.0, 10) == 2.0


def test_draft_vocabulary_is_the_most_frequent_tokens_then_the_lowest_ids():
    response = random_responses(1)[0]
    response = type(response)(**{**vars(response), "token_ids": [9, 9, 9, 7, 7, 30]})
    assert frequent_tokens([response], 2, 40).tolist() == [7, 9]
    assert frequent_tokens([response], 5, 40).tolist() == [0, 1, 7, 9, 30]
    with pytest.raises(ValueError, match="draft vocabulary size is 41"):
        frequent_tokens([response], 41, 40)


def test_bfloat16_base_trains_float32_heads(make_base, tmp_path):
    base = make_base("llama").bfloat16()
    backbone = EarlyExitModel.from_configs(base, []).backbone
    cache = extend_cache(tmp_path / "cache", random_responses(), backbone, [2], fingerprint=fingerprint(base))
    model = make_model(base, exit_layers=(0, 2))
    trainer = make_trainer(model, StateCache(cache.folder), tmp_path, max_steps=40, num_epochs=40)
    first = trainer.step()
    assert all(parameter.dtype == torch.float32 for parameter in model.heads.parameters())
    while trainer.num_steps < 40:
        last = trainer.step()
    assert last["0"] < 0.8 * first["0"]
