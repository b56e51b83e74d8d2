"""`hispec-train --data`: from a data set to an adapter, and what it says to bad data."""

import json
import random
import sys

import pytest

from hispec.checkpoints import load_adapter
from hispec.train import data_stage, dataset, sequences
from hispec.train.command import main
from hispec.train.responses import read_responses

from .train_support import build_tokenizer

TEMPLATE = """{% for m in messages %}{{ 'w3' if m.role == 'user' else 'w4' }} {{ m.content }} </s> {% endfor %}
{%- if add_generation_prompt %}w4 {% endif %}"""


def words(rng, longest=6):
    return " ".join(f"w{rng.randrange(5, 64)}" for _ in range(rng.randint(1, longest)))


def conversations(num_rows=40):
    rng = random.Random(0)
    return [
        [{"role": role, "content": words(rng)} for role in ("user", "assistant") * rng.randint(1, 3)]
        for _ in range(num_rows)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """The tiny base with a chat template and without one."""
    made = {}
    for template in (TEMPLATE, None):
        folder = made[template is not None] = tmp_path_factory.mktemp("model")
        request.getfixturevalue("base").save_pretrained(folder)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return made


@pytest.fixture
def run(folders, tmp_path):
    def call(data, *flags, output="run", has_template=True):
        recipe = tmp_path / "tiny.yaml"
        recipe.write_text(
            f"""
            model: {{source: {folders[has_template]}}}
            heads: {{exit_layers: [2], kinds: [norm], draft_vocab_size: 48}}
            data: {{max_new_tokens: 8, num_tokens: 150, batch_size: 4, held_out_fraction: 0.2}}
            training: {{batch_tokens: 64, num_epochs: 1, checkpoint_interval: 2}}
            """
        )
        where = ["--output", str(tmp_path / output)]
        return main(["--recipe", str(recipe), "--data", str(data), *where, *map(str, flags)])

    return call


def test_messages_train_an_adapter_on_their_own_answers(run, base, tmp_path, capsys):
    turns = conversations()
    data = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in turns])
    assert run(data) == 0
    said = capsys.readouterr().err
    assert f"data: {data}: messages (columns messages); its responses are trained on" in said
    assert "sequences of" in said
    assert "[[" in said
    folder = tmp_path / "run"
    made = list(read_responses(folder / "responses.jsonl"))
    assert sum(sequence.num_answer_tokens for sequence in made) >= 150
    tokenizer = build_tokenizer()
    answers = {
        " ".join(f"{turn['content']} </s>" for turn in messages if turn["role"] == "assistant") for messages in turns
    }
    assert all(tokenizer.decode(sequence.answer_ids) in answers for sequence in made)
    load_adapter(folder / "adapter", base=base)
    record = json.loads((folder / "adapter" / "run.json").read_text())
    assert 0 < record["num_training_tokens"] < sum(sequence.num_answer_tokens for sequence in made)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"}
    assert run(data) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert run(data, "--num-tokens", 250, "--no-resume") == 0
    assert list(read_responses(folder / "responses.jsonl"))[: len(made)] == made
    assert len(list(read_responses(folder / "cache" / "sequences.jsonl"))) > len(made)


def test_preprocess_only_ends_before_training_and_the_same_command_goes_on(run, tmp_path, capsys, monkeypatch):
    data = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in conversations()])
    assert run(data, output="whole") == 0
    capsys.readouterr()
    assert run(data, "--preprocess-only") == 0
    printed = capsys.readouterr()
    assert "sequences: " in printed.out
    assert "rows read" in printed.err
    assert not (tmp_path / "run" / "cache").exists()
    with monkeypatch.context() as patched:  # what is read is not read again
        patched.setattr(sequences.SequenceMaker, "make", None)
        assert run(data, "--preprocess-only") == 0
        assert run(data) == 0
    weights = "adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


def test_regenerate_asks_the_base_for_the_last_question(run, tmp_path, capsys, monkeypatch):
    turns = conversations(12)
    data = write(tmp_path / "chat.jsonl", [{"messages": messages, "id": i} for i, messages in enumerate(turns)])
    assert run(data, "--regenerate", "--num-tokens", 60, "--preprocess-only") == 0
    assert "the base makes the responses" in capsys.readouterr().err
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    made = list(read_responses(tmp_path / "run" / "responses.jsonl"))
    for response in made:
        messages = turns[int(response.prompt_id)]
        text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert response.prompt_token_ids == tokenizer(text)["input_ids"]
    with monkeypatch.context() as patched:
        patched.setattr(data_stage, "collect_prompts", None)
        assert run(data, "--regenerate", "--num-tokens", 60) == 0
    assert run(data, "--num-tokens", 60) == 2
    assert "begun with responses of the base" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"text": "w5 w6 w7 w8 w9 w10"},
        {"prompt": "w5", "completion": "w6 w7 w8"},
        {"instruction": "w5", "input": "w9", "output": "w6 w7 w8"},
        {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w6 w7"}]},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]},
    ],
)
def test_every_format_is_read_and_said(run, tmp_path, row, capsys):
    data = write(tmp_path / "d.jsonl", [{**row, "id": number} for number in range(30)])
    assert run(data, "--num-tokens", 1000, "--preprocess-only") == 0
    error = capsys.readouterr().err
    assert "its responses are trained on" in error
    assert "30 rows read, 30 sequences" in error
    assert "dropped: none" in error


def test_long_documents_are_cut_to_max_length(run, tmp_path):
    rng = random.Random(0)
    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(" ".join(words(rng) for _ in range(30)) for _ in range(8)))
    assert run(data, "--max-length", 32, "--num-tokens", 10_000, "--preprocess-only") == 0
    made = list(read_responses(tmp_path / "run" / "responses.jsonl"))
    num_words = len(data.read_text().split())
    assert max(sequence.length for sequence in made) == 32
    assert sum(sequence.length for sequence in made) >= num_words - 8


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([], [], "is empty: it has no rows; give other data"),
        ([{"image": 1, "label": 2}], [], "has the columns image, label, which is no known format: messages"),
        ([{"input_ids": [5, 6], "labels": [-100, -100]}] * 3, [], "no row can be trained on: 3 rows fully masked"),
        ([{"messages": [{"role": "assistant", "content": ""}]}] * 2, [], "has no row that can be asked: 2 empty conv"),
        ([{"text": "w5 w6 w7"}], ["--regenerate"], "is plain text, which asks for no response"),
        ([{"text": "w5 w6 w7"}], [], "of 1 responses"),
        ([{"input_ids": [5, 99, 7]}], [], "token id outside 0 to 63"),
        ([{"text": "w5"}], ["--max-length", 2], "data.max_length is 2"),
        ([{"prompt": "w5", "completion": "w6 w7", "x": 1}, 3], [], "line 2 is a JSON int"),
    ],
)
def test_bad_data_is_one_sentence_and_exit_code_2(run, tmp_path, capsys, rows, flags, message):
    data = write(tmp_path / "d.jsonl", rows)
    assert run(data, *flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hispec-train: error: ")
    assert message in error


def test_conversations_without_a_template_and_unreachable_hubs(run, tmp_path, capsys, monkeypatch):
    data = write(tmp_path / "d.jsonl", [{"messages": messages} for messages in conversations(3)])
    assert run(data, has_template=False) == 2
    assert "holds conversations (messages), and this model has no chat template" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run("nobody/nothing") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hispec-train: error: the data 'nobody/nothing' ")
    assert "the hub cannot be reached" in error


def test_a_run_begun_with_other_settings_is_refused(run, tmp_path, capsys):
    data = write(tmp_path / "d.jsonl", [{"messages": messages} for messages in conversations()])
    assert run(data, "--preprocess-only") == 0
    for flags, message in (
        (["--max-length", 64], "was begun with max_length 256, now it is 64"),
        (["--seed", 3], "was begun with seed 0, now it is 3"),
        (["--regenerate"], "was begun with regenerate False, now it is True"),
    ):
        for more in ([], ["--dry-run"]):
            assert run(data, *flags, *more) == 2
            assert message in capsys.readouterr().err
    write(data, [{"messages": messages} for messages in conversations(41)])
    assert run(data) == 2
    assert "was begun with source" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--regenerate"]])
def test_a_plan_leaves_nothing(run, tmp_path, capsys, flags):
    data = write(tmp_path / "d.jsonl", [{"messages": messages} for messages in conversations()])
    assert run(data, *flags, "--dry-run") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert ("read from the data" in lines["responses"]) == (not flags)
    assert not (tmp_path / "run").exists()
    assert run(data, *flags) == 0
    assert run(data, *flags, "--dry-run") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert all(", 0 done" not in lines[stage] for stage in ("responses", "cache", "train"))


def test_a_hub_set_that_was_read_needs_no_network_again(run, monkeypatch, capsys):
    class Hub:
        def load_dataset(self, *args, **options):
            return {"train": [{"messages": messages} for messages in conversations()]}

    def unreachable(*args, **options):
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "datasets", Hub())
        patched.setattr(dataset, "snapshot_download", lambda *args, **options: None)
        assert run("user/name:config", "--preprocess-only") == 0
    monkeypatch.setattr(dataset, "snapshot_download", unreachable)
    assert run("user/name:config", "--preprocess-only") == 0
    assert run("user/name:config", "--num-tokens", 10**6, "--preprocess-only") == 2
    assert "the hub cannot be reached" in capsys.readouterr().err
