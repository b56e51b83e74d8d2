"""Formats are found from the columns, and every one becomes the same examples."""

import json

import pytest

from hispec.train.formats import UnusableRowError, find_format, question_of, read_example

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}


def read(row):
    return read_example(row, find_format([row]))


@pytest.mark.parametrize(
    ("row", "name", "turns"),
    [
        ({"messages": CHAT}, "messages", CHAT),
        ({"conversations": CHAT}, "messages", CHAT),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "messages", CHAT),
        ({"prompt": CHAT[:1]}, "messages", CHAT[:1]),
        ({"messages": [CHAT[1], SYSTEM, *CHAT]}, "messages", [SYSTEM, *CHAT]),
        ({"messages": [{**turn, "tool_calls": None} for turn in CHAT]}, "messages", CHAT),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, CHAT[1]]},
            "messages",
            CHAT,
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "ShareGPT", CHAT),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
                "source": "x",
            },
            "ShareGPT",
            [SYSTEM, *CHAT],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "Alpaca", CHAT),
        ({"instruction": "q", "output": "a"}, "Alpaca", CHAT),
        ({"instruction": "q", "context": "c", "response": "a"}, "Alpaca", [{**CHAT[0], "content": "q\n\nc"}, CHAT[1]]),
        ({"instruction": "q", "input": "", "output": ""}, "Alpaca", CHAT[:1]),
        ({"prompt": "q", "completion": "a"}, "prompt/completion", CHAT),
        ({"question": "q", "answer": "a"}, "prompt/completion", CHAT),
        ({"prompt": "q", "id": "x", "kind": "y"}, "prompt/completion", CHAT[:1]),
    ],
)
def test_conversations(row, name, turns):
    assert find_format([row]).name == name
    example = read(json.loads(json.dumps(row)))
    assert example.turns == turns
    assert example.has_response == (len(turns) > 1)


def test_texts_and_token_ids():
    assert read({"text": "t"}).text == "t"
    for row, mask in (
        ({}, None),
        ({"labels": [-100, 7, 8]}, [False, True, True]),
        ({"loss_mask": [0, 1, 0]}, [False, True, False]),
    ):
        example = read({"input_ids": [6, 7, 8], **row})
        assert (example.token_ids, example.mask) == ([6, 7, 8], mask)
    padded = read({"input_ids": [0, 6, 7], "labels": [-100, -100, 7], "attention_mask": [0, 1, 1]})
    assert (padded.token_ids, padded.mask) == ([6, 7], [False, True])
    own = read({"prompt_token_ids": [5, 6], "token_ids": [7, 8, 9], "answers": [[0, 1], [2, 3]]})
    assert (own.token_ids, own.mask) == ([5, 6, 7, 8, 9], [False, False, True, False, True])


def test_a_format_may_be_found_in_a_later_row():
    assert find_format([{"messages": []}, {"messages": CHAT}]).name == "messages"


def test_wrong_columns_name_what_was_found_and_what_is_known():
    with pytest.raises(ValueError, match=r"has the columns label, image, which is no known format: .*ShareGPT"):
        find_format([{"label": 1, "image": "x"}])
    with pytest.raises(ValueError, match=r"has the columns \(none\)"):
        find_format([{}])


@pytest.mark.parametrize(
    ("first", "row", "reason"),
    [
        ({"messages": CHAT}, {"messages": None}, "rows without messages"),
        ({"messages": CHAT}, {}, "rows without messages"),
        ({"messages": CHAT}, {"messages": CHAT[1:]}, "empty conversations"),
        ({"messages": CHAT}, {"messages": "text"}, "no list of turns"),
        ({"messages": CHAT}, {"messages": [{"content": "q"}]}, "nobody known"),
        ({"messages": CHAT}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "more than text"),
        ({"conversations": [{"from": "human", "value": "q"}]}, {"conversations": [{"from": "?"}]}, "nobody known"),
        ({"text": "t"}, {"text": " "}, "rows whose text is empty"),
        ({"prompt": "q"}, {"prompt": ""}, "rows whose prompt is empty"),
        ({"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}, "do not fit"),
        ({"input_ids": [1]}, {"input_ids": []}, "rows without tokens"),
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(first, row, reason):
    with pytest.raises(UnusableRowError, match=reason):
        read_example(row, find_format([first]))


def test_a_row_without_an_id_has_one_that_follows_its_question():
    def prompt_id(answer="a", question="q", **more):
        return read({"prompt": question, "completion": answer, **more}).id

    assert prompt_id("a") == prompt_id("b") == prompt_id("a", kind="k")
    assert prompt_id() != prompt_id(question="r")
    assert prompt_id(id=0) == "0"
    assert prompt_id(id="x") == "x"
    assert (
        read({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}).id
        == read({"input_ids": [1, 5, 3], "labels": [-100, 5, 3]}).id
    )


def test_the_question_of_a_conversation_is_its_last_user_turn_with_all_before():
    assert question_of([*CHAT, *CHAT]) == [*CHAT, CHAT[0]]
    with pytest.raises(UnusableRowError, match="no user speaks"):
        question_of([SYSTEM])
