"""Online states against cached ones: the same batches, the same gradients, the same heads."""

from dataclasses import fields

import pytest
import torch

from hispec.checkpoints import fingerprint
from hispec.heads import EarlyExitModel, ExitHeadConfig
from hispec.train import OnlineStates, Trainer
from hispec.train.cache_writer import extend_cache

from .train_support import random_responses

RESPONSES = random_responses()
TRAINING, HELD_OUT = list(range(16)), [16, 17, 18, 19]


def make_model(base, exit_layers=(0, 3), committed_context=True):
    configs = [
        # Without context an mlp's first product keeps the state itself for its gradient.
        ExitHeadConfig(
            exit_layer=layer,
            kind="block" if committed_context else "mlp",
            committed_context=committed_context,
            draft_vocab_size=48,
        )
        for layer in exit_layers
    ]
    return EarlyExitModel.from_configs(base, configs)


def make_trainer(model, states, folder, **options):
    settings = {"batch_tokens": 64, "num_epochs": 2, "warmup_steps": 0, "eval_interval": 100}
    return Trainer(model, states, TRAINING, HELD_OUT, folder, **(settings | options))


def make_cache(base, folder, **options):
    backbone = EarlyExitModel.from_configs(base, []).backbone
    return extend_cache(
        folder, RESPONSES, backbone, [1, 3], fingerprint=fingerprint(base), show_progress=False, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_read_online_is_the_cached_one_to_the_bit(make_base, tmp_path, dtype):
    """Where the cache was filled by the same batch; elsewhere up to the order of summation, as below."""
    base = make_base("llama").to(dtype)
    cache = make_cache(base, tmp_path, batch_tokens=10_000)
    backbone = EarlyExitModel.from_configs(base, []).backbone
    everything = range(len(RESPONSES))
    online, cached = (states.read(everything, (0, 3), backbone) for states in (OnlineStates(RESPONSES), cache))
    for field in fields(cached):
        first, second = getattr(online, field.name), getattr(cached, field.name)
        if isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype
            assert torch.equal(first, second), field.name
        elif field.name == "hidden":
            assert list(first) == [0, 3]
            assert all(torch.equal(first[layer], second[layer]) for layer in (0, 3))
        else:
            assert first == second


@pytest.mark.parametrize("committed_context", [True, False])
def test_gradients_online_are_those_of_the_cache(base, tmp_path, committed_context):
    cache = make_cache(base, tmp_path / "cache", batch_tokens=40)  # other batches than those of training
    layers = (0, 3) if committed_context else (1, 3)
    models = [make_model(base, layers, committed_context) for _ in range(2)]
    for model, states in zip(models, (OnlineStates(RESPONSES), cache), strict=True):
        trainer = make_trainer(model, states, tmp_path / "run", loss="forward_kl + jsd", against=0.5)
        trainer._backward(trainer.batches[0])
    for online, cached in zip(*(model.heads.parameters() for model in models), strict=True):
        assert online.grad.abs().max() > 0
        torch.testing.assert_close(online.grad, cached.grad, rtol=1e-4, atol=1e-6)


def test_training_online_changes_every_tensor_of_the_heads_and_no_byte_of_the_base(base, tmp_path):
    model = make_model(base)
    model.heads.float()
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in model.heads.named_parameters()}
    make_trainer(model, OnlineStates(RESPONSES), tmp_path, accumulation_steps=2).step()
    assert not [name for name, tensor in model.heads.named_parameters() if torch.equal(tensor, before[name])]
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in base.state_dict().items())
    assert all(parameter.grad is None for parameter in base.parameters())


def test_an_online_run_goes_on_where_it_was(base, tmp_path):
    whole, parts = make_model(base), make_model(base)
    make_trainer(whole, OnlineStates(RESPONSES), tmp_path / "whole").run()
    trainer = make_trainer(parts, OnlineStates(RESPONSES), tmp_path / "parts")
    for _ in range(2):
        trainer.step()
    trainer._save()
    resumed = make_model(base)
    make_trainer(resumed, OnlineStates(RESPONSES), tmp_path / "parts").run()
    for first, second in zip(whole.heads.parameters(), resumed.heads.parameters(), strict=True):
        assert torch.equal(first, second)
