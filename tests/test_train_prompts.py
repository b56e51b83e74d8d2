"""Reading prompts, and the split by prompt."""

import pytest

from hispec.train.prompts import fingerprint_prompts, is_held_out, read_prompts
from hispec.train.split import plan_batches, split_sequences

from .train_support import random_responses


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_reads_ids_kinds_and_texts(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        '{"id": "a", "kind": "code", "prompt": "one\u2028two"}',  # a line separator to str.splitlines
        "",
        '{"prompt": "three"}',
    )
    prompts = read_prompts(path)
    assert [(p.id, p.kind, p.text) for p in prompts] == [
        ("a", "code", "one\u2028two"),
        ("line-3", "other", "three"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl line 2 is not JSON"),
        ("[1]", r"line 2 has no text under \"prompt\" \(found: list\)"),
        ('{"text": "x"}', r"line 2 has no text under \"prompt\" \(found: text\)"),
        ('{"id": "x", "prompt": "  "}', r"line 2: the prompt 'x' is empty"),
        ('{"id": "a", "prompt": "again"}', r"has the id 'a' twice"),
    ],
)
def test_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", '{"id": "a", "prompt": "fine"}', line)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", ""))


def test_fingerprint_sees_every_field(tmp_path):
    lines = ('{"id": "a", "kind": "k", "prompt": "t"}', '{"id": "b", "kind": "k", "prompt": "t"}')
    lines += ('{"id": "a", "kind": "l", "prompt": "t"}', '{"id": "a", "kind": "k", "prompt": "u"}')
    prints = {fingerprint_prompts(read_prompts(write(tmp_path / "p.jsonl", line))) for line in lines}
    assert len(prints) == 4


def test_split_is_by_prompt_and_near_its_fraction():
    held_out = [is_held_out(f"prompt-{number}", 0.1) for number in range(5000)]
    assert 400 < sum(held_out) < 600
    assert not any(is_held_out(f"prompt-{number}", 0.0) for number in range(100))

    sequences = random_responses(200)
    training, held_out_indices = split_sequences(sequences, 0.2)
    assert sorted(training + held_out_indices) == list(range(200))
    trained_prompts = {sequences[index].prompt_id for index in training}
    assert trained_prompts.isdisjoint(sequences[index].prompt_id for index in held_out_indices)

    fewer, same = split_sequences(sequences, 0.2, num_tokens=300)
    assert same == held_out_indices
    assert fewer == training[: len(fewer)]
    counts = [len(sequences[index].token_ids) for index in fewer]
    assert sum(counts[:-1]) < 300 <= sum(counts)


def test_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing is left to measure on"):
        split_sequences(random_responses(4), 1e-9)


def test_batches_cover_every_epoch_in_new_orders():
    counts = [len(response.token_ids) for response in random_responses(40)]
    batches = plan_batches(counts, batch_tokens=100, num_epochs=3, seed=1)
    read = [place for batch in batches for place in batch]
    epochs = [read[:40], read[40:80], read[80:]]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    for batch in batches[:-1]:
        assert sum(counts[place] for place in batch[:-1]) < 100 <= sum(counts[place] for place in batch)
    assert plan_batches(counts, 100, 3, seed=1) == batches
    assert plan_batches(counts, 100, 3, seed=2) != batches
