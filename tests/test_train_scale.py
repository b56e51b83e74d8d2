"""The knobs of large runs on one rank: schedules, precisions, checkpoints, best heads, trackers, shares, refusals."""

import json
import re
import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch

from hispec.checkpoints import fingerprint, save_adapter
from hispec.heads import EarlyExitModel, ExitHeadConfig
from hispec.recipes import deepspeed_config, load_recipe, override
from hispec.train import Trainer, pipeline, trainer, zero
from hispec.train.cache_writer import extend_cache
from hispec.train.exit_losses import ExitLosses
from hispec.train.loss import forward_kl
from hispec.train.optimizer import Muon
from hispec.train.ranks import Ranks
from hispec.train.responses import describe_responses, merge_responses, next_items, part_path, regenerate
from hispec.train.schedule import learning_rate_at
from hispec.train.share import share_out
from hispec.train.shared_responses import regenerate_over
from hispec.train.windows import random_windows

from .deepspeed_stand_in import modules
from .train_support import build_tokenizer, random_responses, small_disk

HELD_OUT = [16, 17, 18, 19]


@pytest.fixture(scope="module")
def cache(request, tmp_path_factory):
    base = request.getfixturevalue("base")
    backbone = EarlyExitModel.from_configs(base, []).backbone
    folder = tmp_path_factory.mktemp("cache")
    return extend_cache(folder, random_responses(), backbone, [2, 4], fingerprint=fingerprint(base))


def make_model(base):
    configs = [
        ExitHeadConfig(exit_layer=layer, kind=kind, committed_context=True, draft_vocab_size=48)
        for layer, kind in ((0, "mlp"), (2, "block"))
    ]
    return EarlyExitModel.from_configs(base, configs)


def make_trainer(model, cache, folder, **options):
    defaults = {"batch_tokens": 64, "num_epochs": 8, "max_steps": 8, "warmup_steps": 0, "learning_rate": 3e-3}
    defaults |= {"eval_interval": 4, "checkpoint_interval": 3, "settings": {"a": 1}}
    return Trainer(model, cache, list(range(16)), HELD_OUT, folder, **(defaults | options))


def heads_of(model):
    return {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_schedules_end_at_nothing_or_stay():
    linear = [learning_rate_at(step, 100, 2.0, 10, "linear") for step in range(100)]
    assert linear[9] == linear[10] == 2.0
    assert linear[55] == pytest.approx(1.0)
    assert linear[99] == pytest.approx(2.0 / 90)
    assert [learning_rate_at(step, 100, 2.0, 10, "constant") for step in (9, 10, 99)] == [2.0] * 3


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_shares_hold_everything_once_and_are_about_as_long(num_shares):
    num_tokens = [5, 1, 9, 9, 2, 30, 4]
    shares = share_out(num_tokens, num_shares)
    assert sorted(place for share in shares for place in share) == list(range(7))
    totals = [sum(num_tokens[place] for place in share) for share in shares]
    assert max(totals) - min(totals) <= 30
    assert max(totals) < sum(num_tokens) / num_shares + 30


@pytest.mark.parametrize("precision", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_checkpointed_activations_give_the_same_gradients(make_base, tmp_path, name, precision):
    base = make_base("llama").to(getattr(torch, name))
    backbone = EarlyExitModel.from_configs(base, []).backbone
    cache = extend_cache(tmp_path, random_responses(4), backbone, [2], fingerprint=fingerprint(base))
    batch = cache.read([0, 1, 2], (0, 2), backbone)
    windows = random_windows(batch.lengths, batch.spans, 8, 0)
    model = make_model(base)
    model.heads.float().requires_grad_(True)
    gradients = []
    for is_checkpointed in (False, True):
        losses = ExitLosses(model, forward_kl, precision=precision, activation_checkpointing=is_checkpointed)
        sum(losses(batch, windows)).backward()
        gradients.append([parameter.grad for parameter in model.heads.parameters()])
        model.heads.zero_grad()
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.abs().sum() > 0
        assert torch.equal(plain, checkpointed)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns_near_float32_and_goes_on_bit_for_bit(base, cache, tmp_path, precision):
    exact, model = make_model(base), make_model(base)
    reference = make_trainer(exact, cache, tmp_path / "exact").step()
    losses = make_trainer(make_model(base), cache, tmp_path / "one", precision=precision).step()
    for name, loss in losses.items():
        assert loss == pytest.approx(reference[name], rel=0.03)
        assert (loss == reference[name]) == (precision == "fp32")
    make_trainer(model, cache, tmp_path / "whole", precision=precision).run()
    parts = make_trainer(make_model(base), cache, tmp_path / "parts", precision=precision)
    for _ in range(4):
        parts.step()
    parts._save()
    resumed = make_model(base)
    make_trainer(resumed, cache, tmp_path / "parts", precision=precision).run()
    assert equal(heads_of(resumed), heads_of(model))


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_muon_learns_and_goes_on_bit_for_bit(base, cache, tmp_path, precision):
    options = {"optimizer": "muon", "precision": precision, "weight_decay": 0.1}
    model = make_model(base)
    before = heads_of(model)
    make_trainer(model, cache, tmp_path / "whole", **options).run()
    assert all(
        not torch.equal(tensor, before[name]) for name, tensor in heads_of(model).items() if tensor.is_floating_point()
    )
    losses = [json.loads(line)["loss"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(losses[-1][name] < losses[1][name] for name in losses[1])
    parts = make_trainer(make_model(base), cache, tmp_path / "parts", **options)
    for _ in range(4):
        parts.step()
    parts._save()
    resumed = make_model(base)
    make_trainer(resumed, cache, tmp_path / "parts", **options).run()
    assert equal(heads_of(resumed), heads_of(model))


def test_muon_moves_every_matrix_by_its_rate(base, cache, tmp_path):
    model = make_model(base)
    before = heads_of(model)
    make_trainer(model, cache, tmp_path, optimizer="muon", weight_decay=0, learning_rate=1e-3).step()
    for name, tensor in heads_of(model).items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            change = (tensor - before[name]).double()
            assert change.square().mean().sqrt() == pytest.approx(0.2e-3, rel=0.35), name


def test_muon_leaves_stacks_of_matrices_to_adamw_with_their_decay(make_base):
    model = EarlyExitModel.from_configs(make_base("mixtral"), [ExitHeadConfig(exit_layer=2, kind="block")])
    groups = Muon(model, 0.1).param_groups
    of_rank = {p.ndim: ("momentum" in group, group["weight_decay"]) for group in groups for p in group["params"]}
    assert of_rank == {1: (False, 0.0), 2: (True, 0.1), 3: (False, 0.1)}


def test_too_large_a_scale_skips_the_update_and_shrinks_and_is_saved(base, cache, tmp_path):
    model = make_model(base)
    run = make_trainer(model, cache, tmp_path, precision="fp16")

    def scale(run, value=None):
        state = run.strategy.optimizer_state()["scaler"]
        if value is not None:
            run.strategy._scaler.load_state_dict({**state, "scale": value})
        return state["scale"]

    scale(run, 1e38)
    before = heads_of(model)
    run.step()
    assert equal(heads_of(model), before)
    assert scale(run) == pytest.approx(0.5e38)
    scale(run, 1024.0)
    run.step()
    assert not equal(heads_of(model), before)
    run._save()
    assert scale(make_trainer(make_model(base), cache, tmp_path, precision="fp16")) == 1024.0


def test_a_loss_that_is_no_number_names_the_batch_and_keeps_the_last_checkpoint(base, cache, tmp_path):
    model = make_model(base)
    run = make_trainer(model, cache, tmp_path, checkpoint_interval=1)
    bad = run.batches[2]

    class Damaged:
        def __getattr__(self, name):
            return getattr(cache, name)

        def read(self, indices, *args):
            batch = cache.read(indices, *args)
            return replace(batch, final=batch.final * float("nan")) if indices == bad else batch

    run.cache = Damaged()
    ids = describe_responses([cache.sequences[index] for index in bad])
    with pytest.raises(ValueError, match=rf"at step 3 the loss of exit 0 is nan .* on the responses {re.escape(ids)}"):
        run.run()
    kept = make_model(base)
    assert make_trainer(kept, cache, tmp_path).num_steps == 2
    assert all(torch.isfinite(tensor).all() for tensor in heads_of(kept).values())


def test_full_disk_in_a_save_keeps_the_last_checkpoint(base, cache, tmp_path):
    run = make_trainer(make_model(base), cache, tmp_path)
    run.step()
    run._save()
    run.step()
    with small_disk(5000), pytest.raises(ValueError, match="nothing there has changed; make room"):
        run._save()
    assert make_trainer(make_model(base), cache, tmp_path).num_steps == 1


def test_as_many_checkpoints_stay_as_the_limit_says(base, cache, tmp_path):
    make_trainer(make_model(base), cache, tmp_path, checkpoint_interval=1, save_total_limit=3).run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"state-{step:09d}" for step in (6, 7, 8)]


def scripted(monkeypatch, acceptances):
    """Evaluations that find these acceptances, one after the other; returns the heads they saw."""
    values, seen = iter(acceptances), []

    def evaluate(model, *args, **options):
        seen.append(heads_of(model))
        value = next(values)
        return {"hops": {"0->target": {"agreement": 0.0, "acceptance": value}}}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    return seen


def test_best_heads_are_those_of_the_best_evaluation_also_after_an_interruption(base, cache, tmp_path, monkeypatch):
    options = {"eval_interval": 2, "checkpoint_interval": 1, "save_best": True}
    acceptances = [0.1, 0.3, 0.7, 0.7, 0.2]
    seen = scripted(monkeypatch, acceptances)
    model = make_model(base)
    make_trainer(model, cache, tmp_path / "whole", **options).run()
    assert len(seen) == 5
    assert equal(heads_of(model), seen[2])

    scripted(monkeypatch, acceptances[:4])
    with pytest.raises((StopIteration, RuntimeError)):
        make_trainer(make_model(base), cache, tmp_path / "parts", **options).run()
    scripted(monkeypatch, acceptances[4:])
    resumed = make_model(base)
    make_trainer(resumed, cache, tmp_path / "parts", **options).run()
    assert equal(heads_of(resumed), seen[2])
    again = make_model(base)
    make_trainer(again, cache, tmp_path / "parts", **options).run()
    assert equal(heads_of(again), seen[2])


def test_training_ends_where_evaluations_get_no_better_and_stays_ended(base, cache, tmp_path, monkeypatch):
    options = {"eval_interval": 1, "early_stop": 2}
    seen = scripted(monkeypatch, [0.1, 0.3, 0.2, 0.3, 0.9])
    run = make_trainer(make_model(base), cache, tmp_path, **options)
    run.run()
    assert (run.num_steps, len(seen)) == (3, 4)
    again = make_trainer(make_model(base), cache, tmp_path, **options)
    again.run()
    assert (again.num_steps, len(seen)) == (3, 4)


class FakeWriter:
    def __init__(self, folder, purge_step):
        self.purge_step, self.scalars, self.is_closed = purge_step, [], False
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.is_closed = True


def test_trackers_by_name_see_every_step_and_evaluation(base, cache, tmp_path, monkeypatch):
    writers, runs = [], []
    board = types.SimpleNamespace(SummaryWriter=type("Writer", (FakeWriter,), {"made": writers}))

    def init(**options):
        logged = []
        run = types.SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: None)
        runs.append((options, logged))
        return run

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    options = {"trackers": ("tensorboard", "wandb")}
    make_trainer(make_model(base), cache, tmp_path, **options).run()
    make_trainer(make_model(base), cache, tmp_path, **options).run()
    assert [writer.purge_step for writer in writers] == [1, 9]
    assert all(writer.is_closed for writer in writers)
    steps = {step for name, _, step in writers[0].scalars if name == "loss/2"}
    assert steps == set(range(1, 9))
    assert {step for name, _, step in writers[0].scalars if name == "acceptance/0->target"} == {0, 4, 8}
    assert {name for values, _ in runs[0][1] for name in values} == {name for name, _, _ in writers[0].scalars}
    assert runs[0][0]["id"] == runs[1][0]["id"]


def resolve(base, **training):
    recipe = override(load_recipe("smollm2"), ["heads.exit_layers=[1, 2]"])
    return pipeline.resolve(replace(recipe, training=replace(recipe.training, **training)), base)


@pytest.mark.parametrize(
    ("module", "training", "message"),
    [
        ("wandb", {"trackers": ("wandb",)}, "the tracker wandb needs a package that is not here"),
        ("torch.utils.tensorboard", {"trackers": ("tensorboard",)}, "pip install tensorboard"),
        ("deepspeed", {"deepspeed": "zero2", "optimizer": "adamw"}, r"pip install hispec\[deepspeed\]"),
        (
            "deepspeed",
            {"deepspeed": "zero2", "optimizer": "muon"},
            "use adamw, with a training.learning_rate below 0.006, or",
        ),
        (
            "deepspeed",
            {"deepspeed": "zero2", "optimizer": "adamw", "precision": "fp16"},
            "use bf16, or leave --deepspeed out",
        ),
        (
            "deepspeed",
            {"deepspeed": "zero3", "optimizer": "adamw", "activation_checkpointing": True},
            "use --deepspeed zero2",
        ),
    ],
)
def test_what_is_missing_is_said_before_the_run(base, monkeypatch, module, training, message):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(pipeline.EarlyExitModel, "from_configs", lambda base, configs: EarlyExitModel(base, []))
    with pytest.raises(ValueError, match=message):
        resolve(base, **training)


@pytest.fixture
def stand_in(monkeypatch):
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(zero, "_join_alone", lambda device: None)


def test_our_side_of_zero_trains_saves_and_goes_on_like_plain_training(base, cache, tmp_path, stand_in):
    """With a stand-in for DeepSpeed: an engine over flat copies, whose state is tied at the first update."""
    plain = make_model(base)
    make_trainer(plain, cache, tmp_path / "plain", max_grad_norm=0.5).run()
    whole = make_model(base)
    make_trainer(whole, cache, tmp_path / "zero", max_grad_norm=0.5, deepspeed="zero2").run()
    for name, tensor in heads_of(plain).items():
        assert (tensor - heads_of(whole)[name]).abs().max() < 1e-4, name
    curves = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("plain", "zero")]
    assert curves == [3, 3]
    # Four steps by one strategy, the rest by either; with the same one to the bit.
    for first, then in ((None, "zero2"), ("zero2", None), ("zero2", "zero2")):
        folder = tmp_path / f"{first}-{then}"
        run = make_trainer(make_model(base), cache, folder, max_grad_norm=0.5, deepspeed=first)
        for _ in range(4):
            run.step()
        run._save()
        resumed = make_model(base)
        make_trainer(resumed, cache, folder, max_grad_norm=0.5, deepspeed=then).run()
        for name, tensor in heads_of(whole).items():
            assert (tensor - heads_of(resumed)[name]).abs().max() < (1e-4 if None in (first, then) else 1e-30), name


def test_our_side_of_zero_can_save_before_its_first_step(base, cache, tmp_path, stand_in):
    run = make_trainer(make_model(base), cache, tmp_path, deepspeed="zero2")
    run.step()
    run._save()
    again = make_trainer(make_model(base), cache, tmp_path, deepspeed="zero2")
    states = sorted((tmp_path / "checkpoints").iterdir())
    before = (states[0] / "tensors.safetensors").read_bytes()
    again._save()
    assert (states[0] / "tensors.safetensors").read_bytes() == before


def test_shipped_configs_partition_and_leave_the_rest_to_the_recipe():
    assert [deepspeed_config(name)["zero_optimization"]["stage"] for name in ("zero2", "zero3")] == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no zero_optimization.stage of 2 or 3"),
        ('{"zero_optimization": {"stage": 1}}', "no zero_optimization.stage of 2 or 3"),
        ('{"zero_optimization": {"stage": 2}, "bf16": {}}', "sets bf16, which training.precision of the recipe"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "sets zero_optimization.off"),
        (None, "zero2, zero3 or the path of a JSON file"),
    ],
)
def test_other_deepspeed_configs_are_refused(tmp_path, text, message):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        deepspeed_config(str(path))


def test_answers_of_several_ranks_are_those_of_one(base, tmp_path):
    recipe = load_recipe("smollm2")
    prompts = [pipeline.Prompt(id=f"p{number}", kind="k", text=f"w{number + 3} w9") for number in range(10)]
    engine = pipeline.make_engine(base, build_tokenizer(), replace(recipe.data, batch_size=4))
    order = pipeline.order_responses(prompts, recipe.data, seed=0)
    options = {"max_new_tokens": 12, "temperature": 0.8, "max_num_seqs": 4, "seed": 0}
    one = regenerate(engine, order, tmp_path / "one.jsonl", num_tokens=120, **options)

    path, num_laps = tmp_path / "three.jsonl", 0
    while items := next_items(path, order, 120, 12):
        num_laps += 1
        for rank in range(2 if num_laps == 1 else 3):  # the third was killed at first
            regenerate(engine, items[rank::3], part_path(path, rank), num_tokens=None, **options)
        if num_laps == 1:
            shutil.copytree(tmp_path, tmp_path / "killed")
        merge_responses(path, order)
    assert num_laps > 1
    assert regenerate(engine, order, path, num_tokens=120, **options) == one
    assert not list(tmp_path.glob("*.part-*"))

    # Killed before the answers were merged, and the last of them torn: one rank goes on from them.
    part = part_path(tmp_path / "killed" / "three.jsonl", 1)
    part.write_bytes(part.read_bytes()[:-3])
    path = tmp_path / "killed" / "three.jsonl"
    calls = len(part.read_text().splitlines())
    assert calls > 0
    assert regenerate_over(Ranks(), engine, order, path, num_tokens=120, **options) == one
    assert not part.exists()


def test_checkpoints_and_adapters_of_another_run_are_refused(base, make_base, tmp_path):
    recipe = load_recipe("smollm2")
    ours = pipeline.training_settings(recipe, base, random_responses(seed=1))
    others = pipeline.training_settings(recipe, base, random_responses(seed=2))
    assert {name for name in ours if ours[name] != others[name]} == {"responses"}
    assert pipeline.training_settings(recipe, make_base("opt"), random_responses(seed=1))["base"] != ours["base"]
    harmless = replace(recipe, training=replace(recipe.training, deepspeed="zero2", save_best=True, early_stop=3))
    assert pipeline.training_settings(harmless, base, random_responses(seed=1)) == ours

    save_adapter(make_model(base), tmp_path / "adapter", run={})
    with pytest.raises(ValueError, match="is the adapter of another run, whose responses are not there"):
        pipeline.check_adapter_folder(tmp_path, base)
    (tmp_path / "responses.json").write_text("{}")
    pipeline.check_adapter_folder(tmp_path, base)
    with pytest.raises(ValueError, match="is an adapter for another base model; choose another --output"):
        pipeline.check_adapter_folder(tmp_path, make_base("opt"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
