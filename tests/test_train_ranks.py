"""Two ranks train what one does: launched by torchrun, on a CPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hispec.train.command import main
from hispec.train.curve import read_curve
from hispec.train.ranks import Ranks
from hispec.train.responses import read_responses

from .models import build_base
from .ranks_worker import make_cache, make_model, make_trainer
from .train_support import build_tokenizer, write_prompts

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install hispec[deepspeed]"
)


def launch(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600
    )


def assert_close(heads, expected):
    assert heads.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam divides by the size of a gradient: where that is next to nothing, so is what two sums have in common.
        assert (heads[name] - tensor).abs().max() < 2e-4, name


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one rank makes: its cache, its heads after 8 steps, and its checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("one")
    base = build_base("llama")
    cache = make_cache(base, folder / "cache")
    trainer = make_trainer(make_model(base), cache, folder / "four", Ranks())
    for _ in range(4):
        trainer.step()
    trainer._save()
    model = make_model(base)
    make_trainer(model, cache, folder / "whole", Ranks()).run()
    heads = {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}
    return folder, heads


def run_strategies(one, folder, *names):
    single, expected = one
    for name in names:
        shutil.copytree(single / "four", folder / f"from-one-{Path(name).stem}")
    result = launch("tests.ranks_worker", folder, *names)
    assert result.returncode == 0, result.stderr[-4000:]
    for file in (single / "cache").glob("*.bin"):
        assert (folder / "cache" / file.name).read_bytes() == file.read_bytes()
    for name in (Path(name).stem for name in names):
        whole, parts, from_one = (
            load_file(folder / f"{name}-{part}.safetensors") for part in ("whole", "parts", "from-one")
        )
        assert all(torch.equal(parts[key], tensor) for key, tensor in whole.items()), name
        assert_close(whole, expected)
        assert_close(from_one, expected)
        for ours, theirs in zip(
            *(read_curve(path / "whole" / "metrics.jsonl") for path in (folder / name, single)), strict=True
        ):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        # One rank, without DeepSpeed, goes on from what two have saved.
        base = build_base("llama")
        states = sorted((folder / name / "parts" / "checkpoints").glob("state-*"))
        assert [state.name for state in states] == ["state-000000004", "state-000000008"]
        shutil.rmtree(states[1])
        model = make_model(base)
        trainer = make_trainer(model, make_cache(base, single / "cache"), folder / name / "parts", Ranks())
        assert trainer.num_steps == 4
        trainer.run()
        assert_close(model.heads.state_dict(), expected)


def test_data_parallel_ranks_train_what_one_does(one, tmp_path):
    run_strategies(one, tmp_path, "ddp")


@NEEDS_DEEPSPEED
def test_zero_ranks_train_what_one_does(one, tmp_path):
    """Stage 3 a second time with every tensor partitioned: as shipped it leaves small ones whole."""
    config = json.loads((ROOT / "recipes" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = tmp_path / "partitioned.json"
    path.write_text(json.dumps(config))
    run_strategies(one, tmp_path, "zero2", "zero3", str(path))


def test_killed_in_a_save_the_same_command_goes_on_with_any_number_of_ranks(tmp_path):
    base = build_base("llama")
    base.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl")
    recipe = {
        "model": {"source": str(tmp_path / "model")},
        "heads": {"exit_layers": [0, 2], "draft_vocab_size": 48},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 16, "num_tokens": 200},
        "training": {"batch_tokens": 64, "warmup_steps": 1, "checkpoint_interval": 2},
    }
    recipe["data"] |= {"batch_size": 4, "held_out_fraction": 0.2}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(recipe))

    def flags(name):
        return ["--recipe", str(path), "--output", str(tmp_path / name)]

    assert main(flags("one")) == 0
    result = launch("tests.ranks_worker", "kill", tmp_path / "killed", *flags("two"))
    assert result.returncode != 0
    assert (tmp_path / "killed").exists(), result.stderr[-4000:]
    saved = sorted(state.name for state in (tmp_path / "two" / "checkpoints").glob("state-*"))
    assert saved == ["state-000000002"]
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    # The launchers' own flag, which changes nothing here.
    result = launch("hispec.train", "--local_rank=0", *flags("two"))
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("adapter: ") == 1
    assert main(flags("three")) == 0
    expected = load_file(tmp_path / "one" / "adapter" / "adapter_model.safetensors")
    for name in ("two", "three"):
        assert list(read_responses(tmp_path / name / "cache" / "sequences.jsonl")) == list(
            read_responses(tmp_path / "one" / "cache" / "sequences.jsonl")
        )
        assert_close(load_file(tmp_path / name / "adapter" / "adapter_model.safetensors"), expected)
    assert not list((tmp_path / "two").glob("*.part-*"))

    result = launch("hispec.train", *flags("two"), "--max-steps", "2")
    assert result.returncode != 0
    told = [line for line in result.stderr.splitlines() if line.startswith("hispec-train: error")]
    assert len(told) == 1, result.stderr[-4000:]
    assert "training.max_steps was None, is now 2" in told[0]
