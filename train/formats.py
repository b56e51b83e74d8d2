"""Formats: what a row of a data set holds, found from its columns, and the row as an example in one form for all.

Pure functions over rows, which are mappings of JSON values.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

FormatName = Literal["messages", "ShareGPT", "Alpaca", "prompt/completion", "plain text", "pre-tokenised"]
Row = Mapping[str, Any]

KNOWN_FORMATS = (
    'messages (messages: a list of {"role", "content"}), ShareGPT (conversations: a list of {"from", "value"}), '
    "Alpaca (instruction, input, output), prompt/completion (prompt, completion), plain text (text), "
    "pre-tokenised (input_ids, labels)"
)

ID_COLUMNS = ("id", "prompt_id", "conversation_id", "uuid")
KIND_COLUMNS = ("kind", "category")
CHAT_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")
QUESTION_COLUMNS = ("prompt", "question", "query")
ANSWER_COLUMNS = ("completion", "response", "answer", "output")
INPUT_COLUMNS = ("input", "context")
TEXT_COLUMNS = ("text", "content", "document")
MASK_COLUMNS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}


class UnusableRowError(ValueError):
    """A row that cannot be used, while others can; its text is a reason to count by, a plural."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of a data set are read."""

    name: FormatName
    """Which of `KNOWN_FORMATS`."""
    columns: tuple[str, ...]
    """The columns that hold it, in the order in which they are read."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row: chat turns, a plain text or token ids."""

    id: str
    """The row's own, or a digest of what comes before the first answer: the same wherever the row stands."""
    kind: str
    """`Prompt.kind`."""
    turns: list[dict[str, Any]] | None = None
    """Chat messages (`{"role", "content"}`), the first not the assistant's."""
    glue: str | None = None
    """What stands between question and answer where the model has no chat template; None needs a template."""
    tools: list[Any] | None = None
    """Tools that the chat template is told of."""
    text: str | None = None
    """A document."""
    token_ids: list[int] | None = None
    """A sequence."""
    mask: list[bool] | None = None
    """Which of `token_ids` are an answer's; None is every one."""

    @property
    def has_response(self) -> bool:
        """Whether it has a place for what is trained on, be it empty."""
        return self.turns is None or any(turn["role"] == "assistant" for turn in self.turns)


def find_format(rows: Iterable[Row]) -> Format:
    """The format of the first row that has one; ValueError names the columns found and the known formats."""
    columns: dict[str, None] = {}
    for row in rows:
        if found := _match(row):
            return found
        columns |= dict.fromkeys(row)
    raise ValueError(f"has the columns {', '.join(columns) or '(none)'}, which is no known format: {KNOWN_FORMATS}")


def read_example(row: Row, found: Format) -> Example:
    """The row as an example; raises UnusableRowError for a row that is empty or not in the format."""
    missing = [name for name in found.columns if row.get(name) is None]
    if missing and found.name != "Alpaca":
        raise UnusableRowError(f"rows without {missing[0]}")
    example = _read_fields(row, found)
    kind = next((row[name] for name in KIND_COLUMNS if isinstance(row.get(name), str)), "other")
    row_id = next((str(row[name]) for name in ID_COLUMNS if isinstance(row.get(name), str | int)), None)
    return replace(example, id=row_id or _digest(example), kind=kind)


def is_answer(turn: Mapping[str, Any]) -> bool:
    """Whether the assistant says something in this turn."""
    return turn["role"] == "assistant" and bool(str(turn.get("content") or "").strip() or turn.get("tool_calls"))


def question_of(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last user's turn with all before it; raises UnusableRowError where there is none."""
    for place in range(len(turns) - 1, -1, -1):
        if turns[place]["role"] == "user":
            return list(turns[: place + 1])
    raise UnusableRowError("conversations in which no user speaks")


def _match(row: Row) -> Format | None:
    def first(names: Iterable[str], kind: type = str) -> list[str]:
        return [name for name in names if isinstance(row.get(name), kind)][:1]

    if first(["input_ids"], list):
        masks = [name for name in ("labels", *MASK_COLUMNS) if isinstance(row.get(name), list)][:1]
        return Format(name="pre-tokenised", columns=("input_ids", *masks))
    if first(["prompt_token_ids"], list) and first(["token_ids"], list):
        return Format(name="pre-tokenised", columns=("prompt_token_ids", "token_ids"))
    for column in (*CHAT_COLUMNS, "prompt"):
        if {"role", "content"} <= (keys := _turn_keys(row.get(column))):
            answer = [name for name in ANSWER_COLUMNS if column == "prompt" and _turn_keys(row.get(name))][:1]
            return Format(name="messages", columns=(column, *answer))
        if {"from", "value"} <= keys:
            return Format(name="ShareGPT", columns=(column,))
    if first(["instruction"]):
        return Format(name="Alpaca", columns=("instruction", *first(INPUT_COLUMNS), *first(ANSWER_COLUMNS)))
    if question := first(QUESTION_COLUMNS):
        return Format(name="prompt/completion", columns=(*question, *first(ANSWER_COLUMNS)))
    if text := first(TEXT_COLUMNS):
        return Format(name="plain text", columns=tuple(text))
    return None


def _turn_keys(value: object) -> set[str]:
    return set(value[0]) if isinstance(value, list) and value and isinstance(value[0], Mapping) else set()


def _read_fields(row: Row, found: Format) -> Example:
    if found.name == "plain text":
        return Example(id="", kind="", text=_text(row, found.columns[0]))
    if found.name == "pre-tokenised":
        return _read_tokens(row, found)
    system = row.get("system")
    turns = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    if found.name in ("messages", "ShareGPT"):
        for column in found.columns:
            turns += _read_turns(row[column], found.name)
        while turns and turns[0]["role"] == "assistant":
            turns.pop(0)
        if not turns:
            raise UnusableRowError("empty conversations")
        tools = row.get("tools")
        return Example(id="", kind="", turns=turns, tools=tools if isinstance(tools, list) and tools else None)
    question, answer = _text(row, found.columns[0]), None
    for column in found.columns[1:]:
        if column in INPUT_COLUMNS and found.name == "Alpaca":
            more = row.get(column)
            question += f"\n\n{more}" if isinstance(more, str) and more.strip() else ""
        else:
            answer = row.get(column)
    turns.append({"role": "user", "content": question})
    if isinstance(answer, str) and answer.strip():
        turns.append({"role": "assistant", "content": answer})
    return Example(id="", kind="", turns=turns, glue="\n\n" if found.name == "Alpaca" else "")


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise UnusableRowError(f"rows whose {column} is empty")
    return text


def _read_turns(value: object, name: FormatName) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise UnusableRowError("rows whose conversation is no list of turns")
    turns = []
    for turn in value:
        if name == "ShareGPT":
            role, content = SHAREGPT_ROLES.get(str(turn.get("from")).lower()), turn.get("value")
            turn = {"role": role, "content": content}
        if not isinstance(turn.get("role"), str):
            raise UnusableRowError("conversations with a turn of nobody known")
        # Parquet gives every turn every key; a template asks which ones are there.
        turn = {key: item for key, item in turn.items() if item is not None}
        turns.append(turn | {"content": _plain(turn.get("content", ""))})
    return turns


def _plain(content: object) -> str:
    """The content of a turn as text, also where it comes in parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UnusableRowError("conversations that hold more than text")
    return content


def _read_tokens(row: Row, found: Format) -> Example:
    token_ids, *masks = (list(row[name]) for name in found.columns)
    if found.columns[0] == "prompt_token_ids":
        mask = [False] * len(token_ids) + [False] * len(masks[0])
        for start, stop in row.get("answers") or [[0, len(masks[0])]]:
            mask[len(token_ids) + start : len(token_ids) + stop] = [True] * (stop - start)
        token_ids += masks[0]
    elif masks:
        mask = [label != -100 if found.columns[1] == "labels" else bool(label) for label in masks[0]]
    else:
        mask = [True] * len(token_ids)
    if len(mask) != len(token_ids) or not all(type(token_id) is int for token_id in token_ids):
        raise UnusableRowError("rows whose token ids and mask do not fit")
    if isinstance(padding := row.get("attention_mask"), list) and len(padding) == len(mask):
        kept = [place for place, real in enumerate(padding) if real]
        token_ids, mask = [token_ids[place] for place in kept], [mask[place] for place in kept]
    if not token_ids:
        raise UnusableRowError("rows without tokens")
    return Example(id="", kind="", token_ids=token_ids, mask=mask if masks else None)


def _digest(example: Example) -> str:
    """Of what comes before the first answer, so that one question with several answers is one prompt."""
    if example.turns is not None:
        answers = [place for place, turn in enumerate(example.turns) if turn["role"] == "assistant"]
        opening: object = example.turns[: answers[0]] if answers else example.turns
    elif example.token_ids is not None and example.mask is not None and any(example.mask):
        opening = example.token_ids[: max(1, example.mask.index(True))]
    else:
        opening = example.text or example.token_ids
    return hashlib.sha256(json.dumps(opening, sort_keys=True, default=str).encode()).hexdigest()[:16]
