"""`hispec-train`, from nothing to an adapter, and what it says to bad input."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from filelock import FileLock

from hispec.checkpoints import load_adapter
from hispec.infer import Engine, SamplingParams
from hispec.train import cache_writer
from hispec.train.command import build_parser, main, resolve_recipe

from .train_support import build_tokenizer, write_prompts


@pytest.fixture(scope="module")
def model_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    request.getfixturevalue("base").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipe_file(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_prompts(folder / "prompts.jsonl")
    recipe = f"""
        model:
          source: {model_folder}
        heads:
          exit_layers: [0, 2]
          draft_vocab_size: 48
        data:
          prompts: {folder / "prompts.jsonl"}
          max_new_tokens: 16
          num_tokens: 200
          batch_size: 4
          held_out_fraction: 0.2
        training:
          batch_tokens: 64
          warmup_steps: 1
          checkpoint_interval: 2
    """
    path = folder / "tiny.yaml"
    path.write_text(recipe)
    return path


def run(recipe_file, output, *flags):
    return main(["--recipe", str(recipe_file), "--output", str(output), *map(str, flags)])


def test_from_nothing_to_an_adapter_that_generates(recipe_file, base, tmp_path, capsys):
    assert run(recipe_file, tmp_path, "--cache-layers", "3") == 0
    printed = capsys.readouterr().out
    assert "0->2" in printed
    assert f"adapter: {tmp_path / 'adapter'}" in printed
    record = json.loads((tmp_path / "adapter" / "run.json").read_text())
    assert record["command"][0] == "hispec-train"
    assert record["recipe"]["heads"]["exit_layers"] == [0, 2]
    assert set(record["acceptance"]["hops"]) == {"0->2", "0->target", "2->target"}
    assert (tmp_path / "cache" / "layer_3.bin").stat().st_size > 0

    engine = Engine(load_adapter(tmp_path / "adapter", base=base), method="hispec", num_blocks=40)
    ids = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))[0].token_ids
    with torch.no_grad():
        expected = base.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)
    assert ids == expected[0, 3:].tolist()


def test_the_same_command_again_does_nothing_twice(recipe_file, tmp_path, capsys):
    assert run(recipe_file, tmp_path) == 0
    files = ("responses.jsonl", "cache/layer_2.bin", "metrics.jsonl", "adapter/adapter_model.safetensors")
    before = {name: ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) for name in files}
    assert run(recipe_file, tmp_path) == 0
    for name in files[:2]:
        assert (tmp_path / name).stat().st_mtime_ns == before[name][1]
    for name in files:
        assert (tmp_path / name).read_bytes() == before[name][0]

    assert run(recipe_file, tmp_path, "--max-steps", 2) == 2
    assert "training.max_steps was None, is now 2" in capsys.readouterr().err
    assert run(recipe_file, tmp_path, "--max-steps", 2, "--no-resume") == 0
    assert (tmp_path / "responses.jsonl").read_bytes() == before["responses.jsonl"][0]
    assert run(recipe_file, tmp_path, "--seed", 1) == 2
    assert "was begun with seed 0, now it is 1" in capsys.readouterr().err


def test_dry_run_prints_the_plan_and_leaves_nothing(recipe_file, tmp_path, capsys):
    assert run(recipe_file, tmp_path / "run", "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("base ", "head ", "data ", "responses ", "cache ", "train ", "in all ", "tokens/s", "GB"):
        assert word in plan
    assert not (tmp_path / "run").exists()
    assert run(recipe_file, tmp_path / "run") == 0
    capsys.readouterr()
    assert run(recipe_file, tmp_path / "run", "--dry-run") == 0
    assert ", 0 done" not in capsys.readouterr().out


def test_killed_runs_end_like_one_that_was_not(recipe_file, tmp_path):
    """kill -9 at several moments, then the same command to its end."""
    assert run(recipe_file, tmp_path / "whole") == 0
    command = [sys.executable, "-m", "hispec.train", "--recipe", str(recipe_file)]
    command += ["--output", str(tmp_path / "parts")]
    marks = ("responses.jsonl", "cache/index.json", "checkpoints/state-000000002")
    for mark in marks:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (tmp_path / "parts" / mark).exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(recipe_file, tmp_path / "parts") == 0
    for name in ("responses.jsonl", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ctrl_c_ends_with_a_sentence(recipe_file, tmp_path, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert run(recipe_file, tmp_path) == 130
    assert "the same command goes on where it was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--exit-layers", "2,6"], "exit layer 6 is out of range: the base has 6 layers"),
        (["--exit_layers", "4,2"], "exit layers 4,2 are not in rising order"),
        (["--exit-layers", "2,2"], "name a layer twice"),
        (
            ["--exit-layers", "0,2", "--no-committed-context"],
            "exit layer 0 needs a head with committed context",
        ),
        (["--draft-vocab-size", "1000"], "draft_vocab_size is 1000"),
        (["--data", "none.jsonl"], "'none.jsonl' does not exist"),
        (["--num-tokens", "0"], "data.num_tokens is 0"),
        (["--max-steps", "0"], "training.max_steps is 0"),
        (["--model", "no-such-model"], "'no-such-model' is unknown"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(recipe_file, tmp_path, capsys, flags, message):
    assert run(recipe_file, tmp_path / "run", *flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hispec-train: error: ")
    assert message in error
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_bad_prompts_are_named(recipe_file, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl")
    lines = prompts.read_text().splitlines()
    for bad, message in (
        ('{"id": "long", "prompt": "' + "w5 " * 300 + '"}', "prompt 'long': the prompt has 300 tokens"),
        ('{"id": "none", "prompt": ""}', "line 13: the prompt 'none' is empty"),
    ):
        prompts.write_text("\n".join([*lines, bad]))
        assert run(recipe_file, tmp_path / "run", "--data", prompts) == 2
        assert message in capsys.readouterr().err


def test_unwritable_output_and_full_disk_are_one_sentence(recipe_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert run(recipe_file, tmp_path / "file" / "run") == 2
    error = capsys.readouterr().err
    assert "Not a directory" in error
    assert "Traceback" not in error

    def full(*args):
        raise OSError(28, "No space left on device", "layer_2.bin")

    monkeypatch.setattr(cache_writer, "_write_rows", full)
    assert run(recipe_file, tmp_path / "run") == 2
    assert "No space left on device: layer_2.bin" in capsys.readouterr().err


def test_flags_go_over_the_recipe(recipe_file):
    options = build_parser().parse_args(
        [
            *(
                "--recipe",
                str(recipe_file),
                "--exit-layers",
                "1,3",
                "--head",
                "mlp",
                "--no-committed-context",
            ),
            *("--draft-vocab-size", "0", "--num-tokens", "77", "--max-steps", "5", "--seed", "9"),
            *("--output", "x"),
        ]
    )
    recipe = resolve_recipe(options)
    assert (recipe.heads.exit_layers, recipe.heads.kind) == ((1, 3), "mlp")
    assert not recipe.heads.committed_context
    assert recipe.heads.draft_vocab_size is None
    assert (recipe.data.num_tokens, recipe.training.max_steps, recipe.training.seed) == (77, 5, 9)
    assert recipe.training.batch_tokens == 64
    assert recipe.output == "x"
    assert main([]) == 2


def test_a_folder_belongs_to_one_run_at_a_time(recipe_file, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        assert run(recipe_file, tmp_path) == 2
    assert f"another hispec-train works in {tmp_path}" in capsys.readouterr().err
