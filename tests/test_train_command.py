"""`hispec-train`, from nothing to an adapter, and what it says to bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from hispec.checkpoints import load_adapter
from hispec.infer import Engine, SamplingParams
from hispec.recipes import list_recipes
from hispec.train import Trainer, cache_writer, pipeline
from hispec.train.command import build_parser, main, resolve_recipe
from hispec.train.responses import read_responses

from .train_support import build_tokenizer, small_disk, write_prompts


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


@pytest.fixture(scope="module")
def whole(recipe_file, tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(recipe_file, folder) == 0
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of that folder, to go on from."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def assert_ends_like(folder, whole):
    weights = "adapter/adapter_model.safetensors"
    assert (folder / weights).read_bytes() == (whole / weights).read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    expected = list(read_responses(whole / "cache" / "sequences.jsonl"))
    assert list(read_responses(folder / "cache" / "sequences.jsonl")) == expected
    assert all(response in list(read_responses(folder / "responses.jsonl")) for response in expected)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def test_online_states_give_the_heads_of_cached_ones_and_leave_no_cache(recipe_file, whole, tmp_path, capsys):
    assert run(recipe_file, tmp_path, "--online", "--dry-run") == 0
    assert "cache      none" in capsys.readouterr().out
    assert run(recipe_file, tmp_path, "--online") == 0
    assert not (tmp_path / "cache").exists()
    online, cached = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (tmp_path, whole))
    assert online.keys() == cached.keys()
    for name, tensor in online.items():
        # AdamW's first steps take the sign of the gradient, and rounding can turn it where it is about 0.
        assert (tensor.float() - cached[name].float()).abs().mean() < 1e-4, name
    assert run(recipe_file, tmp_path / "more", "--online", "--cache-layers", "3") == 2
    assert "leave out --cache-layers or --online" in capsys.readouterr().err


def test_the_same_command_again_does_nothing_twice(recipe_file, finished, capsys):
    files = ("responses.jsonl", "cache/layer_2.bin", "metrics.jsonl", "adapter/adapter_model.safetensors")
    before = {name: ((finished / name).read_bytes(), (finished / name).stat().st_mtime_ns) for name in files}
    assert run(recipe_file, finished) == 0
    for name in files[:2]:
        assert (finished / name).stat().st_mtime_ns == before[name][1]
    for name in files:
        assert (finished / name).read_bytes() == before[name][0]

    assert run(recipe_file, finished, "--max-steps", 2) == 2
    assert "training.max_steps was None, is now 2" in capsys.readouterr().err
    assert run(recipe_file, finished, "--max-steps", 2, "--no-resume") == 0
    assert (finished / "responses.jsonl").read_bytes() == before["responses.jsonl"][0]
    assert run(recipe_file, finished, "--seed", 1) == 2
    assert "was begun with seed 0, now it is 1" in capsys.readouterr().err


def test_fewer_tokens_are_honoured_and_more_go_on(recipe_file, whole, finished):
    before = (finished / "responses.jsonl").read_bytes()
    assert run(recipe_file, finished, "--num-tokens", 100, "--no-resume") == 0
    record = json.loads((finished / "adapter" / "run.json").read_text())
    assert record["num_training_tokens"] <= 116
    assert (finished / "responses.jsonl").read_bytes() == before
    assert run(recipe_file, finished, "--no-resume") == 0
    assert_ends_like(finished, whole)


def test_dry_run_prints_the_plan_and_leaves_nothing(recipe_file, tmp_path, capsys):
    assert run(recipe_file, tmp_path / "run", "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("base ", "head ", "data ", "responses ", "cache ", "train ", "in all ", "tokens/s", "GB"):
        assert word in plan
    assert not (tmp_path / "run").exists()


def test_dry_run_tells_what_a_run_would_find(recipe_file, finished, capsys):
    """What is done already, and the error with which the run would end; nothing is written."""
    before = files_of(finished)

    def plan(*flags):
        capsys.readouterr()
        code = run(recipe_file, finished, *flags, "--dry-run")
        printed = capsys.readouterr()
        return code, {line.split()[0]: line for line in printed.out.splitlines()}, printed.err

    code, lines, _ = plan()
    assert code == 0
    assert all(", 0 done" not in lines[stage] for stage in ("responses", "cache", "train"))
    code, lines, _ = plan("--no-resume")
    assert code == 0
    assert ", 0 done" in lines["train"]
    assert ", 0 done" not in lines["cache"]
    code, lines, _ = plan("--no-resume", "--exit-layers", "1,2")
    assert code == 0
    assert ", 0 done" in lines["cache"]  # layer 1 is not there
    for flags, message in (
        (["--seed", 1], "was begun with seed 0, now it is 1"),
        (["--max-steps", 2], "training.max_steps was None, is now 2"),
        (["--exit-layers", "1,2"], "heads.exit_layers was [0, 2], is now [1, 2]"),
        (["--num-tokens", 300], "num_responses was"),
        (["--num-tokens", 100], "num_responses was"),
        (["--dtype", "bfloat16"], "was begun with dtype torch.float32"),
    ):
        code, lines, error = plan(*flags)
        assert (code, lines) == (2, {})
        assert message in error
    assert files_of(finished) == before
    index = finished / "cache" / "index.json"
    index.write_text(index.read_text().replace('"float32"', '"bfloat16"'))
    assert "was made with dtype bfloat16, now it is float32" in plan()[2]
    one_prompt = write_prompts(finished / "one.jsonl", 1)
    assert run(recipe_file, finished / "new", "--data", one_prompt, "--dry-run") == 2
    assert "holds out 1 of 1 prompts" in capsys.readouterr().err


KILL = """
import os, signal, sys
from hispec.infer import Engine
from hispec.train import Trainer, cache_writer
from hispec.train.command import main

place, name, left = globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3])
function = getattr(place, name)

def killed(*args, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **options)

setattr(place, name, killed)
main(sys.argv[4:])
"""
"""A run that dies when it calls a function once more than so often."""


@pytest.mark.slow
def test_killed_runs_end_like_one_that_was_not(recipe_file, whole, tmp_path):
    """kill -9 in every stage, then the same command to its end."""
    for stage, mark in (
        (("Engine", "step", 40), "responses.jsonl"),
        (("cache_writer", "_write_rows", 2), "cache/final.bin"),
        (("Trainer", "step", 3), "checkpoints/state-000000002"),
    ):
        assert not (tmp_path / mark).exists()
        command = [sys.executable, "-c", KILL, *map(str, stage), "--recipe", recipe_file, "--output", tmp_path]
        process = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert process.returncode == -signal.SIGKILL, process.stderr.decode()
        assert (tmp_path / mark).exists()
    assert not (tmp_path / "adapter").exists()
    assert run(recipe_file, tmp_path) == 0
    assert_ends_like(tmp_path, whole)


@pytest.mark.parametrize(
    ("place", "name", "num_calls", "mark"),
    [
        (Engine, "step", 40, "responses.jsonl"),
        (Trainer, "step", 3, "checkpoints/state-000000003"),
    ],
)
def test_ctrl_c_ends_with_a_sentence_and_the_same_command_goes_on(
    recipe_file, whole, tmp_path, monkeypatch, capsys, place, name, num_calls, mark
):
    function, calls = getattr(place, name), []

    def interrupted(self):
        calls.append(1)
        if len(calls) > num_calls:
            raise KeyboardInterrupt
        return function(self)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, interrupted)
        assert run(recipe_file, tmp_path) == 130
    assert "interrupted; the same command goes on where it was" in capsys.readouterr().err
    assert (tmp_path / mark).exists()
    assert run(recipe_file, tmp_path) == 0
    assert_ends_like(tmp_path, whole)


def test_ctrl_c_with_no_resume_says_to_leave_it_out(recipe_file, tmp_path, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert run(recipe_file, tmp_path, "--no-resume") == 130
    assert "the same command without --no-resume goes on where it was" in capsys.readouterr().err


def test_responses_that_an_earlier_hispec_began_go_on(recipe_file, finished, capsys):
    path = finished / "responses.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: settings[name] for name in settings if name not in ("held_out_fraction", "tokenizer")})
    )
    assert run(recipe_file, finished) == 0
    for changed in ({"held_out_fraction": 0.5}, {"tokenizer": "0"}):
        path.write_text(json.dumps(settings | changed))
        assert run(recipe_file, finished) == 2
        assert f"was begun with {next(iter(changed))}" in capsys.readouterr().err
    for damaged in ("", "[]", "{", "\0"):
        path.write_text(damaged)
        assert run(recipe_file, finished) == 2
        assert f"{path} is damaged; remove it" in capsys.readouterr().err


def test_the_tokenizer_of_a_run_is_known_by_its_template_and_its_tokens(base):
    prompts = [pipeline.Prompt(id="a", kind="k", text="w5 w6")]

    def fingerprint(template=None, vocab_size=64):
        tokenizer = build_tokenizer(vocab_size)
        tokenizer.chat_template = template
        engine = pipeline.make_engine(
            base, tokenizer, resolve_recipe(build_parser().parse_args(["--model", "opt"])).data
        )
        return pipeline.fingerprint_tokenizer(engine, prompts)

    assert fingerprint() == fingerprint()
    dated = "{{ strftime_now('%s%f') }}{{ messages[0]['content'] }}"
    assert fingerprint(dated) == fingerprint(dated)
    assert len({fingerprint(), fingerprint("{{ messages[0]['content'] }}"), fingerprint(vocab_size=6)}) == 3


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
        (["--exit-layers", "6"], "exit layer 6 is out of range: the base has 6 layers"),
        (["--exit-layers", "1/6,1/5"], "exit layers 1/6,1/5 are 1,1 of the base's 6 layers"),
        (["--exit-layers", "1/4,1/6"], "not in rising order"),
        (["--cache-layers", "6"], "exit layer 6 is out of range"),
        (["training.max_step=3"], "training.max_step is unknown; did you mean training.max_steps"),
        (["training.max_steps=three"], "training.max_steps is 'three'; it must be a whole number"),
        (["heads.exit_layers=[2, 9]"], "exit layer 9 is out of range"),
        (["max-steps"], "'max-steps' is no override; write key=value"),
        (["--model", "no-such-model"], "'no-such-model' is unknown"),
        (["--dtype", "int3"], "dtype 'int3' cannot be used; choose one of auto, float32, bfloat16, float16"),
        (["--head", "big"], "heads.kinds[0] is 'big'; choose one of shared, norm, mlp, block"),
        (["--head", "norm,mlp,block"], "3 head kinds (norm,mlp,block) are given for 2 exit layers"),
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


def test_unwritable_output_is_one_sentence(recipe_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(recipe_file, tmp_path / "file" / "run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "Not a directory" in error
    assert "choose another folder with --output" in error


@pytest.mark.parametrize(
    ("num_bytes", "begun", "missing"),
    [(2000, "responses.jsonl", "cache"), (10_000, "cache/index.json", "checkpoints")],
)
def test_full_disk_is_one_sentence_and_the_same_command_goes_on(
    recipe_file, whole, tmp_path, capsys, num_bytes, begun, missing
):
    with small_disk(num_bytes):
        assert run(recipe_file, tmp_path) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot work in {tmp_path} (File too large)" in error
    assert "make room there, or choose another folder with --output" in error
    assert (tmp_path / begun).stat().st_size > 0
    assert not (tmp_path / missing).exists()
    assert run(recipe_file, tmp_path) == 0
    assert_ends_like(tmp_path, whole)


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
    assert (recipe.heads.exit_layers, recipe.heads.kinds) == ((1, 3), ("mlp",))
    assert not recipe.heads.committed_context
    assert recipe.heads.draft_vocab_size is None
    assert (recipe.data.num_tokens, recipe.training.max_steps, recipe.training.seed) == (77, 5, 9)
    assert recipe.training.batch_tokens == 64
    assert recipe.output == "x"
    assert main([]) == 2


def test_overrides_stand_between_the_recipe_and_the_flags(recipe_file):
    recipe = parsed(
        "--recipe", recipe_file, "data.num_tokens=55", "training.seed=4", "--seed", "9", "data.batch_size=2"
    )
    assert (recipe.data.num_tokens, recipe.training.seed, recipe.data.batch_size) == (55, 9, 2)
    assert recipe.data.max_new_tokens == 16
    of_heads = ("heads.exit_layers=[1, 3]", "heads.kinds=[mlp]", "heads.draft_vocab_size=7")
    recipe = parsed("--recipe", recipe_file, "--exit-layers", "2,4,5", *of_heads, "--draft-vocab-size", "5")
    assert recipe.heads.exit_layers == (2, 4, 5)
    assert (recipe.heads.kinds, recipe.heads.draft_vocab_size) == (("mlp",), 5)
    before = parsed("training.learning_rate=3e-4", "--recipe", recipe_file)
    assert before.training.learning_rate == 3e-4


def parsed(*arguments):
    return resolve_recipe(build_parser().parse_intermixed_args([*map(str, arguments)]))


def test_three_exits_as_fractions_train_save_load_and_each_pair_may_serve(recipe_file, base, tmp_path, capsys):
    flags = ["--exit-layers", "1/6,1/3,2/3", "heads.kinds=[block, mlp, norm]", "training.max_steps=3"]
    assert run(recipe_file, tmp_path, *flags) == 0
    printed = capsys.readouterr()
    assert "exit layers 1,2,4 of 6 (1/6,1/3,2/3)" in printed.err
    assert "2->4" in printed.out
    record = json.loads((tmp_path / "adapter" / "run.json").read_text())
    assert record["command"][-4:] == flags
    assert record["recipe"]["heads"]["exit_layers"] == [1, 2, 4]
    assert record["recipe"]["training"]["max_steps"] == 3
    assert set(record["usage"]) == {"responses", "cache", "train", "evaluate"}
    assert all(use["seconds"] > 0 and use["peak_memory"] > 1e7 for use in record["usage"].values())
    for stage in (*record["usage"], "in all"):
        assert any(line.startswith(stage) and " took " in line for line in printed.out.splitlines())
    # The counts that the fractions stand for are the same run.
    assert run(recipe_file, tmp_path, "--exit-layers", "1,2,4", *flags[2:]) == 0

    expected = base.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    for exit_layers in (None, (1, 4), (2, 4), (4,)):
        engine = Engine.from_base(base, adapter=tmp_path / "adapter", exit_layers=exit_layers, num_blocks=40)
        assert engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))[0].token_ids == expected


def test_heads_without_weights_are_measured_and_saved(recipe_file, base, tmp_path, capsys):
    shared = ["heads.kinds=[shared]", "heads.exit_layers=[2, 4]", "heads.draft_vocab_size=null"]
    assert run(recipe_file, tmp_path, *shared, "--dry-run") == 0
    assert "train      nothing, the heads have no weights: 0 s" in capsys.readouterr().out
    assert run(recipe_file, tmp_path, *shared) == 0
    assert not (tmp_path / "checkpoints").exists()
    record = json.loads((tmp_path / "adapter" / "run.json").read_text())
    assert set(record["acceptance"]["hops"]) == {"2->4", "2->target", "4->target"}
    assert "train" not in record["usage"]
    assert load_adapter(tmp_path / "adapter", base=base).exit_layers == (2, 4)


def test_list_recipes_needs_nothing_else(capsys):
    for flag in ("--list-recipes", "--list_recipes"):
        assert main([flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == list_recipes()


def test_a_full_disk_is_told_before_the_cache_is_begun(recipe_file, whole, tmp_path, monkeypatch, capsys):
    usual = shutil.disk_usage

    def full(path):
        return SimpleNamespace(free=1000) if path.is_relative_to(tmp_path) else usual(path)

    with monkeypatch.context() as patched:
        patched.setattr(cache_writer.shutil, "disk_usage", full)
        assert run(recipe_file, tmp_path) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"the cache {tmp_path / 'cache'} needs 0.00 GB of disk for " in error
        assert "are free; make room" in error
        assert not (tmp_path / "cache").exists()
        assert run(recipe_file, tmp_path, "--dry-run") == 0
        assert "which is not enough" in capsys.readouterr().out.splitlines()[-1]
    assert run(recipe_file, tmp_path) == 0
    assert_ends_like(tmp_path, whole)
    # What is there already needs no room.
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", full)
    assert run(recipe_file, tmp_path) == 0


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_an_adapter_of_another_run_is_not_replaced(recipe_file, whole, tmp_path, capsys, flags):
    shutil.copytree(whole / "adapter", tmp_path / "adapter")
    before = files_of(tmp_path)
    assert run(recipe_file, tmp_path, *flags) == 2
    assert "is the adapter of another run" in capsys.readouterr().err
    (tmp_path / "adapter" / "mine.txt").write_text("")
    assert run(recipe_file, tmp_path, *flags) == 2
    assert "holds other files (mine.txt)" in capsys.readouterr().err
    (tmp_path / "adapter" / "mine.txt").unlink()
    assert files_of(tmp_path) == before


def test_a_model_over_a_recipe_has_a_folder_of_its_own():
    def folder(*flags):
        return str(resolve_recipe(build_parser().parse_args(flags)).output_folder())

    assert folder("--recipe", "smollm2", "--model", "org/model") == "runs/org--model"
    assert folder("--recipe", "smollm2", "--model", "smollm2") == folder("--model", "smollm2") == "runs/smollm2"


def test_every_exit_may_have_a_head_of_another_kind(recipe_file, base, tmp_path):
    assert run(recipe_file, tmp_path, "--exit-layers", "2,4", "--head", "shared,block", "--max-steps", 2) == 0
    model = load_adapter(tmp_path / "adapter", base=base)
    assert [head.config.kind for head in model.heads] == ["shared", "block"]


def test_a_folder_belongs_to_one_run_at_a_time(recipe_file, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        assert run(recipe_file, tmp_path) == 2
    assert f"another hispec-train works in {tmp_path}" in capsys.readouterr().err
