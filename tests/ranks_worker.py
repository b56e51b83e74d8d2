"""What the ranks of `test_train_ranks.py` do: `torchrun -m tests.ranks_worker FOLDER STRATEGY...`, or with `kill`.

Each STRATEGY is `ddp`, `zero2`, `zero3` or a DeepSpeed config file. Results go to FOLDER, one file of heads each.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hispec.checkpoints import fingerprint, training_state
from hispec.heads import EarlyExitModel, ExitHeadConfig
from hispec.train import Trainer
from hispec.train.cache_writer import extend_cache
from hispec.train.command import main as train
from hispec.train.ranks import Ranks, is_told, join_ranks

from .models import build_base
from .train_support import random_responses

HEADS = ((0, "mlp", True), (2, "block", True), (4, "shared", False))
"""Exit layer, kind, and whether it takes the committed context."""
HELD_OUT = [16, 17, 18, 19]
OPTIONS = {
    "batch_tokens": 12,
    "num_epochs": 8,
    "max_steps": 8,
    "warmup_steps": 2,
    "learning_rate": 3e-3,
    "max_grad_norm": 2.0,
    "eval_interval": 4,
    "checkpoint_interval": 8,
    "settings": {"a": 1},
}
"""Batches of one or two sequences, so that now and then a rank has none."""


def make_model(base):
    configs = [
        ExitHeadConfig(exit_layer=exit_layer, kind=kind, committed_context=context, draft_vocab_size=48)
        for exit_layer, kind, context in HEADS
    ]
    return EarlyExitModel.from_configs(base, configs)


def make_trainer(model, cache, folder, ranks, **options):
    return Trainer(model, cache, list(range(16)), HELD_OUT, folder, ranks=ranks, **(OPTIONS | options))


def make_cache(base, folder, ranks=None, batch_tokens=40):
    backbone = EarlyExitModel.from_configs(base, []).backbone
    return extend_cache(
        folder,
        random_responses(),
        backbone,
        [2, 4],
        fingerprint=fingerprint(base),
        batch_tokens=batch_tokens,
        show_progress=False,
        ranks=ranks,
    )


def save_heads(model, path, ranks):
    if ranks.is_main:
        save_file({name: tensor.clone() for name, tensor in model.heads.state_dict().items()}, path)


def exercise(folder: Path, names: list[str], ranks: Ranks) -> None:
    base = build_base("llama")
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    cache = make_cache(base, folder / "cache", ranks)
    for name in names:
        deepspeed = None if name == "ddp" else name
        name = Path(name).stem
        model = make_model(base)
        before = {name: tensor.float().clone() for name, tensor in model.heads.state_dict().items()}
        trainer = make_trainer(model, cache, folder / name, ranks, warmup_steps=0, deepspeed=deepspeed)
        trainer.step()
        trainer.strategy.gather()
        for key, tensor in model.heads.state_dict().items():
            assert torch.equal(tensor.float(), before[key]) == key.endswith("draft_vocab_ids"), f"{name}: {key}"

        model = make_model(base)
        make_trainer(model, cache, folder / name / "whole", ranks, deepspeed=deepspeed).run()
        save_heads(model, folder / f"{name}-whole.safetensors", ranks)

        trainer = make_trainer(make_model(base), cache, folder / name / "parts", ranks, deepspeed=deepspeed)
        for _ in range(4):
            trainer.step()
        trainer._save()
        model = make_model(base)
        trainer = make_trainer(model, cache, folder / name / "parts", ranks, deepspeed=deepspeed)
        assert trainer.num_steps == 4
        trainer.run()
        save_heads(model, folder / f"{name}-parts.safetensors", ranks)

        # From the fourth step of one rank.
        model = make_model(base)
        make_trainer(model, cache, folder / f"from-one-{name}", ranks, deepspeed=deepspeed).run()
        save_heads(model, folder / f"{name}-from-one.safetensors", ranks)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in base.state_dict().items())


def of_rank_1(ranks: Ranks, error: Exception) -> None:
    with ranks.together():
        if ranks.rank == 1:
            raise error


def fail(ranks: Ranks) -> None:
    """An error of one rank is every rank's."""
    for error, message in (
        (ValueError("too many"), "rank 1: too many"),
        (OSError(28, "No space left", "/some/file"), r"\[Errno 28\] rank 1: No space left: '/some/file'"),
    ):
        with pytest.raises(type(error), match=message) as caught:
            of_rank_1(ranks, error)
        assert is_told(caught.value)


def killed_in_the_second_save(path: Path) -> None:
    """kill -9 when half of a checkpoint is written."""
    save, calls = training_state.save_file, []

    def killed(tensors, file):
        save(tensors, file)
        calls.append(file)
        if len(calls) == 2:
            os.truncate(file, file.stat().st_size // 2)
            path.write_text(str(file))
            os.kill(os.getpid(), signal.SIGKILL)

    training_state.save_file = killed


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        killed_in_the_second_save(Path(sys.argv[2]))
        raise SystemExit(train(sys.argv[3:]))
    with join_ranks() as ranks:
        fail(ranks)
        exercise(Path(sys.argv[1]), sys.argv[2:], ranks)
