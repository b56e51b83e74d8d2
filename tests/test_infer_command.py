"""`hispec-infer`: what it prints, and what it says to bad input."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from hispec.checkpoints import save_adapter
from hispec.infer.command import main

from .models import build_heads, reference, shallow
from .train_support import build_tokenizer


@pytest.fixture(scope="module")
def places(base, tmp_path_factory):
    """A folder with a base, and one with its heads."""
    base = shallow(base, 2)
    folder = tmp_path_factory.mktemp("infer")
    base.save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    save_adapter(build_heads(base, "good", committed_context=True), folder / "adapter")
    return base, ["--model", str(folder / "base"), "--adapter", str(folder / "adapter"), "--dtype", "float32"]


def answer(base, words, number=8):
    ids = reference(base, [int(word[1:]) for word in words.split()], number, eos_token_id=2)
    return " ".join(f"w{token}" for token in ids if token > 2)


def test_a_prompt_is_answered_in_the_terminal(places, capsys):
    base, flags = places
    assert main([*flags, "--prompt", "w3 w4 w5", "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.out == answer(base, "w3 w4 w5") + "\n"
    summary = printed.err.strip().splitlines()[-1]
    assert "8 tokens in" in summary
    assert "tokens/s" in summary
    assert "target keeps 100% of its drafts" in summary
    assert "layers computed per token (the model has 6)" in summary


@pytest.mark.parametrize("method", ["autoregressive", "single-layer", "hispec"])
@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_json_is_one_object_a_result_and_nothing_else(places, capfd, method, batch_size):
    base, flags = places
    prompts = ["w3 w4 w5", "w9", "w8 w7 w6 w5"]
    chosen = [part for prompt in prompts for part in ("--prompt", prompt)]
    code = main([*flags, *chosen, "--json", "--method", method, "--batch-size", batch_size, "--max-new-tokens", "8"])
    assert code == 0
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [record["text"] for record in records] == [answer(base, prompt) for prompt in prompts]
    assert [record["id"] for record in records] == ["prompt-1", "prompt-2", "prompt-3"]
    assert all(record["stats"]["num_committed"] == len(record["token_ids"]) for record in records)


def test_a_file_of_prompts_goes_to_a_file_of_results(places, tmp_path, capfd):
    base, flags = places
    (tmp_path / "in.jsonl").write_text('{"prompt": "w3", "id": "a"}\n\n{"prompt": "w4 w5"}\n')
    output = tmp_path / "out.jsonl"
    assert main([*flags, "--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--max-new-tokens", "8"]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["id"], record["text"]) for record in records] == [
        ("a", answer(base, "w3")),
        (3, answer(base, "w4 w5")),
    ]
    assert capfd.readouterr().out == ""


BAD_LINES = [
    ("nonsense", "this is not JSON"),
    ('{"text": "w3"}', 'there is no "prompt"'),
    ('{"prompt": 5}', '"prompt" must be a text or a list'),
    ('{"prompt": []}', '"prompt" must be a text or a list'),
    ('{"prompt": ""}', "the prompt is empty"),
    ('{"prompt": "w3", "temprature": 1}', 'the field "temprature" is unknown'),
    ('{"prompt": "w3", "temperature": -1}', "temperature is -1"),
    ('{"prompt": "w3", "n": 2}', "n is 2 at temperature 0"),
    ('{"prompt": "w3", "stop_token_ids": [64]}', "stop_token_ids holds 64"),
    ('{"prompt": "w3", "stop": ""}', "stop holds ''"),
    ('{"prompt": "w3", "logit_bias": {"w3": 1}}', "logit_bias holds 'w3'"),
    (json.dumps({"prompt": "w3 " * 256}), "256 tokens, but the model's context holds 256"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_the_others_run_if_asked(places, tmp_path, capfd, line, message):
    base, flags = places
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "w3"}}\n{line}\n{{"prompt": "w4"}}\n')
    command = [*flags, "--input", str(path), "--json", "--max-new-tokens", "8"]
    assert main(command) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    error = printed.err.strip().splitlines()[-1]
    assert error.startswith(f"hispec-infer: error: {path} line 2: ")
    assert message in error
    assert main([*command, "--skip-bad"]) == 0
    printed = capfd.readouterr()
    assert [json.loads(text)["text"] for text in printed.out.splitlines()] == [
        answer(base, "w3"),
        answer(base, "w4"),
    ]
    assert f"skipped: {path} line 2: " in printed.err


def test_lines_have_sampling_parameters_of_their_own(places, tmp_path, capfd):
    base, flags = places
    path = tmp_path / "in.jsonl"
    first = answer(base, "w3").split()[0]
    lines = [
        {"prompt": "w3", "max_new_tokens": 4, "turns": 1},
        {"prompt": "w3", "banned_token_ids": [int(first[1:])]},
        {"prompt": "w3", "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1},
        {"prompt": "w3", "logit_bias": {"7": 50.0}, "max_new_tokens": 2},
        {"prompt": "w3", "stop": first},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*flags, "--input", str(path), "--json", "--max-new-tokens", "8", "--ignore-fields", "--batch-size", "4"]
    assert main(command) == 0
    short, banned, one, two, biased, stopped = map(json.loads, capfd.readouterr().out.splitlines())
    assert short["text"] == answer(base, "w3", 4)
    assert first not in banned["text"].split()
    assert (one["index"], two["index"], len(one["logprobs"])) == (0, 1, len(one["token_ids"]))
    assert one["token_ids"] != two["token_ids"]
    assert biased["text"] == "w7 w7"
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", first)


def test_flags_reach_the_request_and_the_engine(places, capfd):
    base, flags = places
    words = answer(base, "w3").split()
    command = [
        *flags,
        "--prompt",
        "w3",
        "--max-new-tokens",
        "8",
        "--draft-policy",
        "dynamic",
        "--min-confidence",
        "0.5",
    ]
    assert main([*command, "--stop", words[2], "--include-stop"]) == 0
    assert capfd.readouterr().out == " ".join(words[:3]) + "\n"
    assert main([*command, "--n", "2", "--temperature", "1", "--ignore-eos"]) == 0
    assert capfd.readouterr().out.count("--- prompt-1\n") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--n", "2"], "n is 2 at temperature 0"),
        (["--min-new-tokens", "9", "--max-new-tokens", "8"], "min_new_tokens is 9"),
        (["--stop", ""], "stop holds ''"),
        (["--min-confidence", "2"], "min_confidence is 2.0"),
        (["--model", "nonsense"], "the model 'nonsense' is unknown"),
        (["--adapter", "/nowhere/adapter"], "/nowhere/adapter"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "w3 " * 300], "300 tokens, but the model's context holds 256; shorten it"),
        (["--input", "/nowhere/prompts.jsonl"], "the prompt file /nowhere/prompts.jsonl cannot be read"),
        (["--output", "/nowhere/out.jsonl"], "the output /nowhere/out.jsonl cannot be written"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--dtype", "int8"], "'int8'"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(places, capfd, change, message):
    _, flags = places
    assert main([*flags, "--prompt", "w3", *change]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("hispec-infer: error: ")
    assert message in last
    assert "Traceback" not in printed.err


def test_no_prompt_at_all(places, capsys):
    assert main(places[1]) == 2
    assert "there is no prompt; give --prompt TEXT, --input FILE or --chat" in capsys.readouterr().err


def test_it_runs_as_a_module(places):
    base, flags = places
    command = [sys.executable, "-m", "hispec.infer", *flags, "--prompt", "w3", "--max_new_tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer(base, "w3", 4) + "\n"


TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def chat_flags(places, tmp_path_factory):
    """The same base with a chat template that says nothing of its own."""
    base, flags = places
    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(flags[1], folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return base, ["--model", str(folder), *flags[2:]]


def test_a_chat_from_piped_lines(chat_flags, monkeypatch, capsys):
    base, flags = chat_flags
    monkeypatch.setattr("sys.stdin", io.StringIO("w3 w4\n/undo\nw5\n"))
    assert main([*flags, "--chat", "--system", "w9", "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{answer(base, 'w9 w3 w4', 6)}\n{answer(base, 'w9 w5', 6)}\n"
    assert "took back: w3 w4" in printed.err


def test_a_system_message_goes_before_each_text(chat_flags, tmp_path, capfd):
    base, flags = chat_flags
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "w4"}\n{"prompt": [{"role": "user", "content": "w5"}]}\n')
    command = ["--prompt", "w3", "--input", str(path), "--system", "w9 w8", "--json", "--max-new-tokens", "6"]
    assert main([*flags, *command]) == 0
    texts = [json.loads(line)["text"] for line in capfd.readouterr().out.splitlines()]
    # Messages are taken as they are.
    assert texts == [answer(base, words, 6) for words in ("w9 w8 w3", "w9 w8 w4", "w5")]


@pytest.mark.parametrize("color", ["always", "never", "auto"])
def test_colours_of_a_streamed_answer(places, capsys, color):
    base, flags = places
    assert main([*flags, "--prompt", "w3 w4 w5", "--max-new-tokens", "8", "--color", color]) == 0
    printed = capsys.readouterr()
    assert ("\033[32m" in printed.out) == (color == "always")
    assert ("colour of the level" in printed.err) == (color == "always")
    assert re.sub("\033\\[\\d+m", "", printed.out) == answer(base, "w3 w4 w5") + "\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--chat"], "no chat template, so it cannot chat; give it --prompt TEXT instead"),
        (["--chat", "--json"], "--json does not go with --chat"),
        (["--chat", "--prompt", "w3"], "--prompt does not go with --chat"),
        (["--chat", "--raw"], "--raw does not go with --chat"),
        (["--chat", "--batch-size", "2"], "--batch-size does not go with --chat"),
        (["--prompt", "w3", "--system", "w4"], "no chat template, so a system message has no place; leave it out"),
        (["--prompt", "w3", "--system", "w4", "--raw"], "--system needs the chat template, which --raw leaves out"),
    ],
)
def test_flags_that_do_not_go_together(places, capfd, change, message):
    assert main([*places[1], *change]) == 2
    assert message in capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]])
def test_each_text_is_read_again_by_the_model(places, capfd, sampling):
    _, flags = places
    command = [*flags, *sampling, "--prompt", "w3 w4", "--prompt", "w9", "--max-new-tokens", "8", "--check-lossless"]
    assert main([*command, "--json", "--batch-size", "2", "--exact"]) == 0
    printed = capfd.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    numbers = [len(record["token_ids"]) for record in records]
    expected = [{"num_tokens": number, "num_not_chosen": 0, "largest_gap": 0.0} for number in numbers]
    assert [record["recheck"] for record in records] == expected
    line = f"checked by the model's own forward: {sum(numbers)} of {sum(numbers)} tokens are its first choice"
    assert printed.err.splitlines()[-1] == line
    assert main(command) == 0
    assert capfd.readouterr().err.splitlines()[-1] == line


def test_what_cannot_be_checked_is_refused_before_the_model_is_loaded(capfd):
    assert main(["--model", "/nowhere", "--prompt", "a", "--temperature", "1", "--check-lossless"]) == 2
    assert "temperature is 1.0 without a seed" in capfd.readouterr().err
