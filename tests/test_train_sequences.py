"""Rows become sequences: cut without losing an answer, counted, and read on after an interruption."""

import io
import json
import random

import pytest
import torch

from hispec.heads import Backbone
from hispec.train import sequences as sequences_module
from hispec.train.cache_writer import extend_cache
from hispec.train.chat_spans import Tokens
from hispec.train.formats import UnusableRowError, find_format, read_example
from hispec.train.pieces import cut_text, fit_answers
from hispec.train.preview import paint, show_sample
from hispec.train.responses import Response, read_responses, write_responses
from hispec.train.sequences import SequenceMaker, describe_progress, extend_sequences, read_record
from hispec.train.vocabulary import frequent_tokens
from hispec.train.windows import fixed_distance, random_windows

from .chat_templates import CHATML, chat_tokenizer
from .train_support import build_tokenizer

SEVERAL = Response(
    prompt_id="p",
    kind="k",
    sample=0,
    prompt_token_ids=[3, 4, 5],
    token_ids=[6, 7, 8, 9, 10, 11, 12, 13],
    answers=[[0, 3], [5, 8]],
)
"""Two answers, of rows 3 to 5 and 8 to 10."""


def random_tokens(rng):
    length = rng.randint(2, 60)
    spans, place = [], rng.randint(1, length - 1)
    while place < length:
        stop = rng.randint(place + 1, length)
        spans.append((place, stop))
        place = stop + rng.randint(1, 9)
    return Tokens(token_ids=list(range(100, 100 + length)), spans=spans)


def test_fitting_keeps_every_answer_token_once_and_drops_from_the_front():
    rng = random.Random(0)
    for _ in range(400):
        tokens, max_length, num_lead = random_tokens(rng), rng.randint(8, 40), rng.randint(0, 1)
        if tokens.spans[0][0] <= num_lead:
            continue
        pieces = fit_answers(tokens, max_length, num_lead)
        answered = [i for piece in pieces for start, stop in piece.spans for i in piece.token_ids[start:stop]]
        assert answered == [i for start, stop in tokens.spans for i in tokens.token_ids[start:stop]]
        for piece in pieces:
            assert len(piece.token_ids) <= max_length
            assert piece.spans[0][0] > num_lead  # something stands before
            assert piece.token_ids[:num_lead] == tokens.token_ids[:num_lead]
            rest = piece.token_ids[num_lead:]
            assert rest == list(range(rest[0], rest[0] + len(rest)))
        room = max_length - num_lead - 1
        if len(tokens.token_ids) > max_length and tokens.spans[-1][1] - tokens.spans[0][0] <= room:
            assert len(pieces) == 1
            assert len(pieces[0].token_ids) == min(max_length, tokens.spans[-1][1])


def test_text_is_cut_into_pieces_side_by_side():
    tokens = Tokens(token_ids=[1, *range(10, 30)], spans=[(1, 21)])
    pieces = cut_text(tokens, 9, 1)
    assert [i for piece in pieces for i in piece.token_ids[1:]] == list(range(10, 30))
    assert all(piece.token_ids[0] == 1 and len(piece.token_ids) <= 9 for piece in pieces)
    assert [piece.spans for piece in pieces] == [[(1, len(piece.token_ids))] for piece in pieces]


def make(row, tokenizer=None, max_length=1000, vocab_size=1000):
    maker = SequenceMaker(tokenizer or chat_tokenizer(CHATML), vocab_size, max_length)
    return maker.make(read_example(row, find_format([row])))


def test_every_format_becomes_sequences():
    tokenizer = chat_tokenizer(CHATML)

    def said(row, **options):
        sequences, is_cut = make(row, tokenizer, **options)
        assert not is_cut
        return [tokenizer.decode(sequence.answer_ids) for sequence in sequences]

    chat = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "yes")) * 2]
    assert said({"messages": chat}) == ["yes<|im_end|>yes<|im_end|>"]
    assert said({"prompt": "q", "completion": "yes"}) == ["yes<|im_end|>"]
    assert said({"instruction": "q", "input": "i", "output": "yes"}) == ["yes<|im_end|>"]
    (text,), _ = make({"text": "some text"}, tokenizer)
    assert tokenizer.decode([*text.prompt_token_ids, *text.token_ids]) == "some text</s>"
    assert len(text.prompt_token_ids) == 1
    (ids,), _ = make({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100]})
    assert (ids.prompt_token_ids, ids.token_ids, ids.answers) == ([5], [6, 7], None)
    (ids,), _ = make({"input_ids": [5, 6, 7, 8]})
    assert (ids.prompt_token_ids, ids.token_ids) == ([5], [6, 7, 8])


def test_without_a_template_a_pair_is_one_text():
    tokenizer = chat_tokenizer(None)
    for row, question in (
        ({"prompt": "q:", "completion": " yes"}, "q:"),
        ({"instruction": "q", "output": " yes"}, "q\n\n"),
    ):
        (sequence,), _ = make(row, tokenizer)
        assert tokenizer.decode(sequence.prompt_token_ids) == question
        assert tokenizer.decode(sequence.token_ids) == " yes</s>"


def test_what_is_too_long_is_cut_and_said():
    (sequence,), is_cut = make({"prompt": "x" * 100, "completion": "yes"}, max_length=50)
    assert is_cut
    assert sequence.length == 50
    assert sequence.prompt_token_ids[:1] == chat_tokenizer(CHATML)("x")["input_ids"]
    pieces, is_cut = make({"text": "y" * 100}, max_length=50)
    assert is_cut
    assert [piece.length for piece in pieces] == [50, 50]  # of 101: one token alone teaches nothing
    assert [piece.sample for piece in pieces] == [0, 1]
    assert len({piece.prompt_id for piece in pieces}) == 1


def test_masked_rows_and_foreign_ids_are_refused():
    for labels in ([-100] * 3, [-100, -100, 7], [5, -100, -100]):
        with pytest.raises(UnusableRowError, match="rows fully masked"):
            make({"input_ids": [5, 6, 7], "labels": labels})
    with pytest.raises(ValueError, match="token id outside 0 to 6: it was made for another model"):
        make({"input_ids": [5, 6, 7]}, vocab_size=7)


def test_several_answers_are_kept_in_the_file_and_old_files_are_read(tmp_path):
    path = tmp_path / "r.jsonl"
    write_responses(path, [SEVERAL])
    assert list(read_responses(path)) == [SEVERAL]
    path.write_text('{"prompt_id": "a", "kind": "k", "sample": 0, "prompt_token_ids": [1, 2], "token_ids": [3, 4]}\n')
    (old,) = read_responses(path)
    assert (old.answers, old.spans, old.answer_ids, old.num_answer_tokens) == (None, [(2, 4)], [3, 4], 2)
    assert "answers" not in old.to_json()
    assert (SEVERAL.spans, SEVERAL.answer_ids) == ([(3, 6), (8, 11)], [6, 7, 8, 11, 12, 13])


def test_only_answers_are_learnt(base, tmp_path):
    backbone = Backbone(base)
    cache = extend_cache(tmp_path, [SEVERAL, SEVERAL], backbone, [2], fingerprint={})
    batch = cache.read([0, 1], [2], backbone)
    assert batch.loss_rows.tolist() == [3, 4, 8, 9, 14, 15, 19, 20]
    assert batch.num_loss_rows == [4, 4]
    logits = base(torch.tensor([[*SEVERAL.prompt_token_ids, *SEVERAL.token_ids]])).logits[0]
    torch.testing.assert_close(batch.log_normaliser[[3, 4, 8, 9]], logits[[3, 4, 8, 9]].logsumexp(-1))
    assert frequent_tokens([SEVERAL], 6, 64).tolist() == SEVERAL.answer_ids


def test_windows_lie_within_answers():
    for seed in range(30):
        known = random_windows([11], [SEVERAL.spans], 4, seed).tolist()
        for row in (0, 1, 2, 6, 7):
            assert known[row] == row - 1
        for start, stop in SEVERAL.spans:
            assert all(start - 1 <= known[row] < row for row in range(start, stop))
            assert known[start] == start - 1
    assert fixed_distance([11], [SEVERAL.spans], 2).tolist() == [-1, 0, 1, 2, 2, 3, 5, 6, 7, 7, 8]


ROWS = [{"prompt": f"q{number}", "completion": "x" * (number % 5)} for number in range(150)]


def extend(folder, num_tokens, rows=ROWS, fail_at=None):
    tokenizer = chat_tokenizer(CHATML)
    maker = SequenceMaker(tokenizer, 1000, 1000)
    calls = []

    def make_row(row):
        calls.append(row)
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return maker.make(read_example(row, find_format(ROWS[1:])))

    try:
        return *extend_sequences(folder, iter(rows), make_row, {"source": "s"}, num_tokens=num_tokens), len(calls)
    except KeyboardInterrupt:
        return None


def test_sequences_end_at_the_wanted_tokens_and_go_on(tmp_path):
    sequences, progress, num_made = extend(tmp_path, 100)
    counts = [sequence.num_answer_tokens for sequence in sequences]
    assert sum(counts[:-1]) < 100 <= sum(counts) == progress.num_answer_tokens
    assert progress.num_rows == num_made == progress.num_sequences + progress.dropped.get(next(iter(progress.dropped)))
    assert extend(tmp_path, 100)[0::2] == (sequences, 0)
    assert extend(tmp_path, 50)[0] == sequences[: len(extend(tmp_path, 50)[0])]
    more, progress, num_more = extend(tmp_path, 10**6)
    assert more[: len(sequences)] == sequences
    assert num_made + num_more == len(ROWS) == progress.num_rows
    assert progress.is_whole
    assert extend(tmp_path, 10**7)[2] == 0
    assert "150 rows read, 120 sequences" in describe_progress(progress, 1000)
    assert "dropped: 30 conversations without an answer" in describe_progress(progress, 1000)
    assert read_record(tmp_path)["source"] == "s"


@pytest.mark.parametrize("fail_at", [1, 70, 140])
def test_an_interruption_loses_and_doubles_nothing(tmp_path, fail_at, monkeypatch):
    monkeypatch.setattr(sequences_module, "SAVE_INTERVAL", 50)
    (tmp_path / "whole").mkdir()
    expected, progress, _ = extend(tmp_path / "whole", 10**6)
    assert extend(tmp_path, 10**6, fail_at=fail_at) is None
    with (tmp_path / "responses.jsonl").open("a") as file:  # what a kill left behind the last note
        file.write(expected[5].to_json() + "\n" + '{"prompt_id": "p1", "kin')
    again = extend(tmp_path, 10**6)
    assert again == (expected, progress, len(ROWS) - fail_at + 1)
    assert list(read_responses(tmp_path / "responses.jsonl")) == expected


def test_a_set_without_a_usable_row_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"no row can be trained on: 2 conversations without an answer"):
        extend(tmp_path, 10, rows=[ROWS[0], ROWS[5]])
    assert not list(tmp_path.iterdir())


def test_the_sample_shows_what_is_trained_on(monkeypatch):
    tokenizer = build_tokenizer()
    assert paint(SEVERAL, tokenizer, "[", "]") == "w3 w4 w5[w6 w7 w8]w9 w10[w11 w12 w13]"
    long = Response(prompt_id="p", kind="k", sample=0, prompt_token_ids=[3] * 900, token_ids=[4] * 900)
    shown = paint(long, tokenizer, "[", "]")
    assert shown == "... " + " ".join(["w3"] * 200) + "[" + " ".join(["w4"] * 200) + "] ..."

    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for no_colour, mark in (("", "\033[32mw6 w7 w8\033[0m"), ("1", "[[w6 w7 w8]]")):
        monkeypatch.setenv("NO_COLOR", no_colour)
        output = Terminal()
        show_sample(SEVERAL, tokenizer, output)
        assert mark in output.getvalue()
        assert "6 tokens" in output.getvalue()
        assert "5 are only read" in output.getvalue()


def test_the_record_is_json(tmp_path):
    extend(tmp_path, 10)
    assert json.loads((tmp_path / "data.json").read_text())["progress"]["num_rows"] > 0
    for damaged in ("", "[]", "{"):
        (tmp_path / "data.json").write_text(damaged)
        assert read_record(tmp_path) == {}
